"""What the off-policy guard saves, and what it costs: each job with staleness.guard=off and =act, in alternation.

    python benchmarks/guard.py                               # all jobs, five seeds: 30 runs, one at a time
    python benchmarks/guard.py --jobs collapsing --seeds 1   # one pair of runs
    python benchmarks/guard.py --steps 4 --jobs healthy --seeds 1 --records /tmp/guard.jsonl     # does it run?
    python benchmarks/guard.py report                        # tables of what is there

Every run is `asyncrl-train` on the quickstart (`make quickstart` makes its model and data), with 8 groups of 8 a step.
It adds one line to benchmarks/results/guard.jsonl when it ends; what stands there is not run again, so the benchmark
goes on where it stopped. The severity of each step is computed from its metrics by the guard's own rules, also where
the guard is off.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from learning_tables import RESULTS, cell, interval, records

from asyncrl.checkpoint.run_directory import git_commit, package_versions
from asyncrl.config.load import load_recipe
from asyncrl.errors import RunFailed
from asyncrl.queue.guard import OffPolicyGuard
from asyncrl.types.events import GuardChanged, SetEvaluated
from asyncrl.types.metrics import Metric

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "quickstart.yaml"
RECORDS = RESULTS / "guard.jsonl"
GUARDS = ("off", "act")
STEPS, EVAL_EVERY, SEEDS = 60, 5, 5
TIMEOUT_S = 3600
COLLAPSED = 0.1
"""A run whose last accuracy is this much below its best one has collapsed."""
COMMON = ["batch.groups_per_step=8", "batch.group_size=8", "checkpoint.every_steps=0", "observability.progress=false"]
COMMON += ["staleness.pacing=eager"]  # as much lag as the limit allows
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    meaning: str
    overrides: tuple[str, ...]


JOBS = {
    "collapsing": Job(
        "lag up to 16 without any correction", ("staleness.max_lag=16", "algorithm.ratio=proximal", "trainer.lr=5e-4")
    ),
    "too_fast": Job(
        "twice the learning rate, lag up to 8, GRPO's clip",
        ("staleness.max_lag=8", "algorithm.preset=grpo", "algorithm.kl.coefficient=0", "trainer.lr=1e-3"),
    ),
    "healthy": Job("the quickstart's algorithm, lag and learning rate", ("staleness.max_lag=2",)),
}
"""`collapsing`: accuracy 0.32 +- 0.26 after 50 steps at an exact lag of 16, below the 0.355 that the model began with
(results/learning_under_lag.md); 0.96 at lag 2."""


def one_run(job: str, guard: str, seed: int, steps: int) -> Record:
    """One run to its end, or to the stop of the guard. Ends the benchmark where a run fails otherwise."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "run"
        overrides = [*COMMON, *JOBS[job].overrides, f"staleness.guard={guard}", f"run.seed={seed}"]
        overrides += [f"run.max_steps={steps}", f"eval.every_steps={min(EVAL_EVERY, steps)}"]
        command = [sys.executable, "-m", "asyncrl.commands.train", str(RECIPE), f"run.dir={directory}", *overrides]
        started = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        took_s = time.monotonic() - started
        metrics, events = (lines_of(directory / f"{name}.jsonl") for name in ("metrics", "events"))
        changes = [event for event in events if event["event"] == GuardChanged.kind]
        stopped = any(change["action"] == "stopped" and change["acted"] for change in changes)
        if done.returncode not in ((0, RunFailed.exit_code) if stopped else (0,)):
            raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    rules = OffPolicyGuard.of(load_recipe(RECIPE, overrides))
    curve = [(event["step"], event["accuracy"]) for event in events if event["event"] == SetEvaluated.kind]
    last, trained_s = metrics[-1], metrics[-1][Metric.TIME] - metrics[0][Metric.TIME]
    return {
        "job": job,
        "guard": guard,
        "seed": seed,
        "steps": steps,
        "curve": curve,
        "reward": [line[Metric.REWARD_MEAN] for line in metrics],
        "severity": [round(rules.read(line).severity, 3) for line in metrics],
        "lag_mean": [round(line[Metric.LAG_MEAN], 2) for line in metrics],
        "changes": [{name: change[name] for name in ("step", "action", "limit", "reason")} for change in changes],
        "stopped": stopped,
        "expired": last[Metric.QUEUE_EXPIRED],
        "samples_per_s": last[Metric.QUEUE_TRAINED] * 8 / trained_s if trained_s else 0.0,
        "seconds": took_s,
        "commit": git_commit(),
    }


def lines_of(path: Path) -> list[dict[str, Any]]:
    """A figure that was not finite is None in the file, and NaN here."""
    texts = path.read_text().splitlines() if path.exists() else []
    return [{name: math.nan if v is None else v for name, v in json.loads(text).items()} for text in texts]


def last_accuracy(record: Record) -> float:
    return record["curve"][-1][1]


def lost(record: Record) -> float:
    """What its last accuracy is below its best."""
    return max(accuracy for _, accuracy in record["curve"]) - last_accuracy(record)


FIGURES: tuple[tuple[str, Callable[[Record], float]], ...] = (
    ("last accuracy", last_accuracy),
    ("best minus last accuracy", lost),
    ("mean reward of the last ten steps", lambda r: float(np.mean(r["reward"][-10:]))),
    ("steps trained", lambda r: float(len(r["reward"]))),
    ("sick steps", lambda r: float(sum(s >= 1 for s in r["severity"]))),
    ("median severity", lambda r: float(np.median(r["severity"]))),
    ("mean lag of the last ten steps", lambda r: float(np.mean(r["lag_mean"][-10:]))),
    ("actions of the guard", lambda r: float(len(r["changes"]))),
    ("groups expired", lambda r: float(r["expired"])),
    ("samples/s", lambda r: float(r["samples_per_s"])),
)


def report(found: list[Record]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    commits = ", ".join(sorted({r["commit"][:7] for r in found if r["commit"]}))
    lines = [
        "# The off-policy guard",
        "",
        f"{platform.machine()}, {os.cpu_count()} cores; {versions}; at {commits}",
        "",
    ]
    lines += [
        "Written by `python benchmarks/guard.py`. Mean and 95 % interval (Student's t) over seeds; the last column"
    ]
    lines += ["is the difference by seed. The lag is what the machine makes of its limit.", ""]
    for name, job in JOBS.items():
        of = {guard: {r["seed"]: r for r in found if (r["job"], r["guard"]) == (name, guard)} for guard in GUARDS}
        if not all(of.values()):
            continue
        pairs = sorted(of["off"].keys() & of["act"].keys())
        lines += [f"## {name}: {job.meaning}", "", f"`{' '.join(job.overrides)}`, {len(pairs)} pairs of runs", ""]
        lines += ["| | off | act | act minus off |", "|---|---|---|---|"]
        for figure, value in FIGURES:
            cells = [cell([value(of[guard][seed]) for seed in pairs]) for guard in GUARDS]
            mean, half = interval([value(of["act"][seed]) - value(of["off"][seed]) for seed in pairs])
            lines.append(f"| {figure} | {cells[0]} | {cells[1]} | {mean:+.3f} ± {half:.3f} |")
        counts = [
            (sum(lost(of[g][s]) > COLLAPSED for s in pairs), sum(of[g][s]["stopped"] for s in pairs)) for g in GUARDS
        ]
        lines += [
            "",
            *(f"{g}: {c} of {len(pairs)} collapsed, {s} stopped." for g, (c, s) in zip(GUARDS, counts, strict=True)),
        ]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("what", nargs="?", choices=("run", "report"), default="run")
    parser.add_argument("--jobs", nargs="+", choices=tuple(JOBS), default=tuple(JOBS))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=STEPS, help="others than the default are not kept apart")
    parser.add_argument("--records", type=Path, default=RECORDS)
    arguments = parser.parse_args()
    if arguments.what == "run":
        known = {(r["job"], r["guard"], r["seed"]) for r in records(arguments.records)}
        asked = [(j, g, s) for s, j, g in itertools.product(range(arguments.seeds), arguments.jobs, GUARDS)]
        arguments.records.parent.mkdir(exist_ok=True)
        for each in [each for each in asked if each not in known]:
            record = one_run(*each, arguments.steps)
            with arguments.records.open("a") as lines:
                lines.write(json.dumps(record) + "\n")
            print(*each, f"accuracy {last_accuracy(record):.3f}, lost {lost(record):.3f}", flush=True)
    text = report(records(arguments.records))
    arguments.records.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
