"""docs/your_own_task.md, followed as it is written: its files, its commands, and that it learns."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TEXT = (ROOT / "docs" / "your_own_task.md").read_text()
FILES = {m[1]: m[2] for m in re.finditer(r"```(?:python|yaml)\n# (mytask/\S+)\n(.*?)```", TEXT, re.DOTALL)}
COMMANDS = [line[2:] for block in re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]


def test_the_page_leads_to_a_model_that_does_the_task(inputs, tmp_path):
    assert sorted(FILES) == [f"mytask/{n}" for n in ("make_data.py", "recipe.yaml", "reward.py", "try_reward.py")]
    for name in ("configs", "tools", "runs"):
        (tmp_path / name).mkdir()
    (tmp_path / "tools").rmdir()
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    (tmp_path / "configs").rmdir()
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "runs" / "tiny-qwen3").symlink_to(ROOT / "runs" / "tiny-qwen3")
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    done = [follow(command, tmp_path) for command in COMMANDS if not command.startswith(("make ", ". "))]
    assert len(done) == 8
    metrics = [json.loads(line) for line in (tmp_path / "runs/recipe/metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["step"] == 40
    assert metrics[0]["eval/initial_accuracy"] < 0.5
    assert metrics[-1]["eval/accuracy"] > 0.8
    assert {"reward/part/right", "reward/part/worked"} <= set(metrics[-1])
    assert (tmp_path / "runs/recipe-hf/model.safetensors").exists()


def follow(command: str, directory: Path) -> str:
    """Runs one command of the page in `directory`, with this environment's programs."""
    words = shlex.split(command)
    program = Path(sys.executable).parent / words[0]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    found = subprocess.run(
        [str(program), *words[1:]], cwd=directory, env=environment, capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, f"{command}\n{found.stdout[-3000:]}\n{found.stderr[-3000:]}"
    return found.stdout
