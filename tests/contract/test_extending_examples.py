"""The examples of docs/extending.md run as they are written."""

import os
import re

import pytest

from tests.processes import ROOT, ran

EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)

CHOSEN = {
    "EngineConformance": "abort_one or pause_keep",
    "StampingSuite": "sampled_logprobs or drained",
    "TransportSuite": "publishes_in_a_row",
    "TrainBackendSuite": "test",
}
"""Suite -> the tests of it that are enough to see that the example is right."""


def test_there_is_one_example_for_each_suite():
    assert [sum(f"({suite})" in example for example in EXAMPLES) for suite in CHOSEN] == [1] * len(CHOSEN)


@pytest.mark.slow
def test_the_examples_run_as_they_are_written(tmp_path):
    """All in one process: their imports take longer than they do."""
    for suite in CHOSEN:
        (example,) = (e for e in EXAMPLES if f"({suite})" in e)
        (tmp_path / f"test_{suite}.py").write_text(example)
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    chosen = " or ".join(
        f"(test_{suite} and ({names}))" if names else f"test_{suite}" for suite, names in CHOSEN.items()
    )
    command = "-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", chosen, tmp_path
    done = ran(*command, timeout_s=280, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    for suite in CHOSEN:
        assert re.search(rf"test_{suite}\.py::.* PASSED", done.stdout), done.stdout[-3000:]
