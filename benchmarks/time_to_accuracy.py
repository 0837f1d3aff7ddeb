"""Seconds until the quickstart's held-out accuracy reaches 0.95: fully_async over sync, seed by seed.

    python benchmarks/time_to_accuracy.py [--seeds 10] [--write]

Two jobs. `quickstart`: recipes/quickstart.yaml; two cores make both modes as fast as the cores are. `waits`: the same,
and each response also waits for something outside of the machine, as a tool, a sandbox or a judge does: a lognormal
time, median 0.2 s, one of a hundred over 1.3 s, drawn from the prompt's number. A step of sync waits for the longest of
256 of them, so that generation is the slower side there. Held-out responses do not wait.

Seconds count from the first admission to the evaluation (every 5 steps of sync, 256 prompts) that reaches 0.95, and
between two evaluations by a straight line; evaluations and publishes are in them, the start of the processes is not.
Modes alternate. Means with 95 % intervals (Student's t) over seeds. Writes benchmarks/results/time_to_accuracy.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from asyncrl.checkpoint.run_directory import git_commit, package_versions
from asyncrl.environments.environment import Session, SingleTurn, Task
from asyncrl.types import Trajectory
from benchmarks.learning_tables import interval
from benchmarks.quickstart import run

RESULTS = Path(__file__).resolve().parent / "results" / "time_to_accuracy.md"
TARGET, STEPS = 0.95, 25
MEDIAN_S, SIGMA = 0.2, 0.8
JOBS = {"quickstart": (), "waits": ("rollout.environment=benchmarks.time_to_accuracy:Waits",)}
MODES = {
    "sync": ("mode=sync",),
    "fully_async, max_lag 1": ("mode=fully_async", "staleness.max_lag=1"),
    "fully_async, max_lag 2": ("mode=fully_async", "staleness.max_lag=2"),
}
COMMON = ("eval.every_steps=5", "checkpoint.every_steps=0", "observability.progress=false")


class Waits(SingleTurn):
    """A response whose check takes time elsewhere."""

    async def run(self, task: Task, session: Session) -> Trajectory:
        trajectory = await super().run(task, session)
        if ("split", "test") in task.row.extra:
            return trajectory
        draw = np.random.default_rng([task.ordinal, task.index]).normal()
        await asyncio.sleep(MEDIAN_S * math.exp(SIGMA * draw))
        return trajectory


def seconds_to(target: float, directory: Path) -> float | None:
    """None: the run never reached it."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    began = next(e["time_s"] for e in events if e.get("transition") == "admitted")
    start = next(e["time_s"] for e in events if e["event"] == "start")
    before, was = 0.0, lines[0]["eval/initial_accuracy"]
    for line in lines:
        if (accuracy := line.get("eval/accuracy")) is None:
            continue
        at = start + line["time_s"] - began
        if accuracy >= target:
            return before + (at - before) * (target - was) / (accuracy - was)
        before, was = at, accuracy
    return None


def report(found: dict[str, dict[str, list[float | None]]], seeds: int) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in package_versions().items())
    lines = [
        "# Time to accuracy",
        "",
        f"`python benchmarks/time_to_accuracy.py --seeds {seeds}`",
        "",
        f"{os.cpu_count()} cores; commit {git_commit()}; {versions}.",
        "",
        f"Seconds to a held-out accuracy of {TARGET}, {seeds} seeds, mean and 95 % interval; ratios are those of each",
        "seed. `waits`: each response waits besides, as for a tool or a judge: lognormal, median "
        f"{MEDIAN_S:g} s, sigma {SIGMA:g}.",
        "",
        "| job | mode | seconds | each seed | sync's seconds over its own |",
        "|---|---|---|---|---|",
    ]
    for job, modes in found.items():
        for mode, seconds in modes.items():
            there = [s for s in seconds if s is not None]
            pairs = zip(modes["sync"], seconds, strict=True)
            ratios = [ours / theirs for ours, theirs in pairs if ours is not None and theirs is not None]
            each = ", ".join("never" if s is None else f"{s:.1f}" for s in seconds)
            mean = "never" if not there else "{:.2f} ± {:.2f}".format(*interval(there))
            ratio = "-" if not ratios else "{:.2f} ± {:.2f}".format(*interval(ratios))
            lines.append(f"| {job} | {mode} | {mean} | {each} | {ratio} |")
    return "\n".join(lines) + "\n"


def measure(jobs: Sequence[str], seeds: int) -> dict[str, dict[str, list[float | None]]]:
    found: dict[str, dict[str, list[float | None]]] = {job: {mode: [] for mode in MODES} for job in jobs}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(seeds):
            for job in jobs:
                names = list(MODES)
                for mode in names[seed % len(names) :] + names[: seed % len(names)]:
                    directory = Path(scratch) / f"{job}-{seed}-{names.index(mode)}"
                    words, *more = MODES[mode]
                    overrides = [*COMMON, *JOBS[job], *more]
                    run("torch", words.removeprefix("mode="), seed, STEPS, overrides, directory)
                    found[job][mode].append(seconds_to(TARGET, directory))
                    print(job, seed, mode, found[job][mode][-1], flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    text = report(measure(args.jobs, args.seeds), args.seeds)
    print(text)
    if args.write:
        RESULTS.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
