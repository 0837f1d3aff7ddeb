"""What could run the code of others stands in one place each, where its checks are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "asyncrl"

ALLOWED = {
    r"\bdcp\.load\(|FileSystemReader|torch\.load\(": {"trainer/fsdp/stored_state.py"},
    r"\bpickle\.(?:Unp|loads?\()": {  # but for the first two: pipes between a process and its own children
        "trainer/fsdp/stored_state.py",
        "remote/connection.py",  # from an end that has proven that it has the secret of the connection
        "workers/worker_process.py",
        "workers/worker_loop.py",
        "inference/vllm/weight_transfer.py",
        "inference/sglang/host_main.py",
        "inference/sglang/host_process.py",
        "inference/sglang/weight_channel.py",
    },
    r"allow_pickle=True|weights_only=False": set(),
}


@pytest.mark.parametrize("pattern", ALLOWED)
def test_what_unpickles_stands_where_it_is_known(pattern):
    found = {str(f.relative_to(PACKAGE)) for f in PACKAGE.rglob("*.py") if re.search(pattern, _code(f))}
    assert found <= ALLOWED[pattern]


def _code(path):
    """Without docstrings and comments, which may speak of it."""
    return re.sub(r'""".*?"""|#[^\n]*', "", path.read_text(), flags=re.S)
