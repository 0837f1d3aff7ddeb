"""What could run the code of others stands in one place each, where its checks are."""

import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest

from asyncrl.checkpoint import trust
from asyncrl.config.load import types_and_defaults
from asyncrl.ranges import Whole

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


def test_every_key_says_whether_it_is_taken_from_somebody_elses_run():
    """A new key is classified in checkpoint/trust.py, unless it is a number or a choice from a list."""
    open_to_all = {key for key, (kind, _) in types_and_defaults().items() if not trust.is_number_or_choice(kind)}
    own = {key for key in open_to_all if not key.startswith(tuple(f"{pool}." for pool in trust.POOLS))}
    groups = [trust.TAKEN, trust.NAMES.keys(), set(trust.MODEL_KEYS), trust.ASKED.keys()]
    assert Counter(key for group in groups for key in group) == Counter(own)
    pools = {key.partition(".")[2] for key in open_to_all - own}
    assert {f"{'rollout' if '.' in key else 'model'}.{key}" for key in pools} <= own


def test_a_number_or_a_choice_names_nothing_else():
    plain = (int, float, Literal["a"], Whole, int | None, Literal["a", "b"] | None)
    assert [kind for kind in plain if not trust.is_number_or_choice(kind)] == []
    others = (str, bool, str | None, bool | None, list[int], dict[str, float], list[str], Any, Literal["a"] | str)
    assert [kind for kind in others if trust.is_number_or_choice(kind)] == []


def _code(path):
    """Without docstrings and comments, which may speak of it."""
    return re.sub(r'""".*?"""|#[^\n]*', "", path.read_text(), flags=re.S)
