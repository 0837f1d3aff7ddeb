"""The examples of docs/extending.md run as they are written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.contract

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)

CHOSEN = {
    "EngineConformance": "abort_one or pause_keep",
    "StampingSuite": "sampled_logprobs or drained",
    "TransportSuite": "publishes_in_a_row",
    "TrainBackendSuite": "",
}
"""Suite -> the tests of it that are enough to see that the example is right; nothing chooses all."""


def test_there_is_one_example_for_each_suite():
    assert [sum(f"({suite})" in example for example in EXAMPLES) for suite in CHOSEN] == [1] * len(CHOSEN)


@pytest.mark.parametrize("suite", CHOSEN)
def test_an_example_runs_as_it_is_written(suite, tmp_path):
    (example,) = (e for e in EXAMPLES if f"({suite})" in e)
    (tmp_path / "test_example.py").write_text(example)
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", CHOSEN[suite], str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, cwd=tmp_path, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\d+ passed", done.stdout)
