"""The tool-use task measured: a policy that seldom calls its calculator learns to.

    python benchmarks/tool_use.py                     # 3 seeds, a few minutes each on 2 cores
    python benchmarks/tool_use.py --seeds 1 --recipe recipes/agent.yaml --out benchmarks/results/agent.md

Runs `asyncrl-train recipes/tool_use.yaml` as a user does and reads what it leaves behind. Writes
benchmarks/results/tool_use.md and tool_use.png.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from asyncrl.checkpoint.run_directory import git_commit, package_versions

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Outcome:
    seed: int
    total_s: float
    evaluated: list[tuple[int, float]]
    rewards: list[float]
    calling: list[tuple[int, float]]
    lag_max: float

    def first_step(self, reward: float) -> int | None:
        return next((step for step, r in enumerate(self.rewards, 1) if r >= reward), None)


def run(recipe: str, seed: int, overrides: list[str], directory: Path) -> Outcome:
    started = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "asyncrl.commands.train",
        recipe,
        f"run.seed={seed}",
        f"run.dir={directory}",
        *overrides,
    ]
    with directory.with_suffix(".out").open("w") as output:
        done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=3600, check=False)
    if done.returncode:
        raise SystemExit(directory.with_suffix(".out").read_text()[-3000:])
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    evaluated = [(0, metrics[0]["eval/initial_accuracy"])]
    evaluated += [(r["step"], r["eval/accuracy"]) for r in metrics if "eval/accuracy" in r]
    calls: dict[int, list[bool]] = {}
    for sample in samples:
        calls.setdefault(max(s[2] for s in sample["segments"]), []).append("<calculator>" in sample["response"])
    return Outcome(
        seed=seed,
        total_s=time.monotonic() - started,
        evaluated=evaluated,
        rewards=[r["reward/mean"] for r in metrics],
        calling=[(version, sum(c) / len(c)) for version, c in sorted(calls.items())],
        lag_max=max(r["staleness/lag_max"] for r in metrics),
    )


def report(outcomes: list[Outcome], recipe: str) -> str:
    lines = [
        f"# {recipe}, measured",
        "",
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; "
        + ", ".join(f"{k} {v}" for k, v in package_versions().items())
        + f"; commit {git_commit()}",
        "",
        "Written by `python benchmarks/tool_use.py`. Accuracy on 128 held-out sums, sampled at temperature 1, before",
        "the first step and after the last. Calling: share of the trajectories in `samples.jsonl` that call, over the",
        "first and the last three policy versions in it. The model cannot do these sums without a call.",
        "",
        "| seed | accuracy before | after | calling before | after | first step with reward 0.8 | steps | lag max "
        "| total s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for o in outcomes:
        first, last = (_mean([share for _, share in part]) for part in (o.calling[:3], o.calling[-3:]))
        lines.append(
            f"| {o.seed} | {o.evaluated[0][1]:.3f} | {o.evaluated[-1][1]:.3f} | {first:.2f} | {last:.2f} "
            f"| {o.first_step(0.8) or '-'} | {len(o.rewards)} | {o.lag_max:.0f} | {o.total_s:.0f} |"
        )
    return "\n".join(lines) + "\n"


def plot(outcomes: list[Outcome], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    for o in outcomes:
        axes.plot(range(1, len(o.rewards) + 1), o.rewards, label=f"reward, seed {o.seed}")
        axes.plot(*zip(*o.evaluated, strict=True), "o", color=axes.lines[-1].get_color())
    axes.set(xlabel="step", ylabel="reward (lines), held-out accuracy (dots)", ylim=(0, 1.02))
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--recipe", default="recipes/tool_use.yaml")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--override", action="append", default=[], help="key=value for every run")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "tool_use.md")
    arguments = parser.parse_args()
    subprocess.run([sys.executable, "tools/make_tool_task.py"], cwd=ROOT, check=True, timeout=1200)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as temporary:
        for seed in range(arguments.seeds):
            place = Path(temporary) / f"run-{seed}"
            outcomes.append(run(arguments.recipe, seed, arguments.override, place))
            arguments.out.write_text(report(outcomes, arguments.recipe))
            print(arguments.out.read_text().splitlines()[-1], flush=True)
    plot(outcomes, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
