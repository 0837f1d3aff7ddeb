"""A short run of a recipe to measure its costs: `asyncrl-train` in mode sync, interrupted after some steps."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from asyncrl.checkpoint.run_directory import RunDirectory
from asyncrl.errors import ConfigError, RunFailed, explain

PROBE_S = 105.0
"""Time until the run is asked to end."""
END_S = 15.0
"""Longest time from there until it is killed. The files written by then are used."""
PROBE_STEPS = 16
LOOK_S = 0.2
EXIT_BAD_INPUT = 2
OVERRIDES = (
    "mode=sync",  # generation and training take turns: each is measured without the other
    "staleness.publish_every_steps=1",
    "eval.every_steps=0",
    "checkpoint.every_steps=0",
    "observability.trace_every_groups=1",
    "observability.progress=false",
    "observability.sinks=[]",
    "resume=never",
)


def probe(
    recipe: Path,
    overrides: Sequence[str],
    directory: Path,
    console: Console,
    program: Sequence[str] = (sys.executable, "-m", "asyncrl.commands.train"),
) -> None:
    """Trains some steps in `directory`, which must not exist. `run.max_steps` and settings derived from it keep the
    recipe's values.

    Args:
        program: command that takes a recipe and overrides.

    Raises:
        ConfigError: the recipe cannot run.
        RunFailed: the run failed, or trained nothing in time.
    """
    words = [*overrides, *OVERRIDES, f"run.dir={directory}"]
    command = [*program, str(recipe), *words]
    console.print(f"probe: {PROBE_STEPS} steps, at most {PROBE_S + END_S:.0f} s", highlight=False)
    directory.parent.mkdir(parents=True, exist_ok=True)
    said = directory.parent / f"{directory.name}.out"
    with said.open("w", encoding="utf-8") as output:
        run = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait(run, RunDirectory(directory).metrics)
        finally:
            ended = _end(run)
    steps = _lines(RunDirectory(directory).metrics)
    if run.returncode in (0, 128 + signal.SIGINT) or (steps and not ended):
        return
    asked, found = f"the costs of {recipe} by a short run", _tail(said)
    do = "correct what it says, or give the costs with --costs FILE or --from-run RUN_DIR"
    if run.returncode == EXIT_BAD_INPUT:
        raise ConfigError(explain(asked, found, do))
    raise RunFailed(explain(asked, f"asyncrl-train ended with {run.returncode} after {steps} steps:\n{found}", do))


def _wait(run: subprocess.Popen[bytes], metrics: Path) -> None:
    """Returns when the run has ended, has enough steps, or has spent its time."""
    until = time.monotonic() + PROBE_S
    while run.poll() is None and time.monotonic() < until and _lines(metrics) < PROBE_STEPS:
        time.sleep(LOOK_S)


def _end(run: subprocess.Popen[bytes]) -> bool:
    """Ends the run after the step in progress; False if it had to be killed."""
    if run.poll() is None:
        run.send_signal(signal.SIGINT)
        try:
            run.wait(END_S)
        except subprocess.TimeoutExpired:
            run.kill()
            run.wait()
            return False
    return True


def _lines(metrics: Path) -> int:
    return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0


def _tail(said: Path) -> str:
    return said.read_text(encoding="utf-8", errors="replace").strip()[-2000:]
