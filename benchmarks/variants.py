"""Two variants of the same run in alternation: what a setting costs, and what it gives.

    python benchmarks/variants.py pacing [--rounds 5] [--write]
    python benchmarks/variants.py pacing_balanced [--rounds 5] [--write]
    python benchmarks/variants.py telemetry [--rounds 5] [--write]
    python benchmarks/variants.py files [--rounds 5] [--write]
    python benchmarks/variants.py overlap [--rounds 5] [--write]

pacing: `staleness.pacing=just_in_time` against eager, on the quickstart with three epochs a step, where training is the
slower side. pacing_balanced: the same on the quickstart as it is, where neither side is. telemetry: everything that a
run records (samples, spans of every 16th group, W&B offline) against nothing but metrics and events; files: the same
without W&B, as runs have it by default. overlap: `weights.overlap` against publishes that training waits for.
Each round runs both, in turns the one or the other first. The figures are medians over the rounds, ratios are medians
of the ratios within a round, with the range of all rounds. Memory is the largest proportional set size (PSS) of all
processes of a run together, sampled every second. Writes benchmarks/results/<name>.md with --write.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from asyncrl.checkpoint.run_directory import git_commit, package_versions
from benchmarks.quickstart import Outcome, run

RESULTS = Path(__file__).resolve().parent / "results"
QUIET = ("eval.every_steps=0", "checkpoint.every_steps=0", "observability.progress=false")


@dataclass(frozen=True)
class Comparison:
    """The second variant is compared with the first. `figures`: heading -> figure of an outcome and its peak memory."""

    title: str
    variants: dict[str, tuple[str, ...]]
    common: tuple[str, ...]
    figures: dict[str, Callable[[Outcome, float], float]]


COMPARISONS = {
    "pacing": Comparison(
        "Pacing of admissions",
        {"eager": ("staleness.pacing=eager",), "just_in_time": ("staleness.pacing=just_in_time",)},
        (*QUIET, "batch.num_epochs=3", "trainer.lr=1.0e-4"),
        {
            "samples/s": lambda o, _: o.samples_per_s,
            "mean lag": lambda o, _: o.lag_mean,
            "trainer waits, %": lambda o, _: 100 * o.idle_trainer,
            "replicas idle, %": lambda o, _: 100 * o.idle_rollout,
        },
    ),
    "telemetry": Comparison(
        "What the recording costs",
        {
            "off": ("observability.samples_per_step=0", "observability.trace_every_groups=0"),
            "on": ("observability.sinks=[wandb]",),
        },
        QUIET,
        {
            "training, s": lambda o, _: o.training_s,
            "samples/s": lambda o, _: o.samples_per_s,
            "memory of all processes, MB": lambda _, peak: peak / 1e6,
        },
    ),
}


COMPARISONS["pacing_balanced"] = replace(
    COMPARISONS["pacing"], title="Pacing of admissions where neither side is slower", common=QUIET
)
COMPARISONS["files"] = replace(
    COMPARISONS["telemetry"],
    title="What the recording costs without a sink",
    variants={**COMPARISONS["telemetry"].variants, "on": ()},
)
COMPARISONS["overlap"] = Comparison(
    "Publishes beside training",
    {"waits": ("weights.overlap=false",), "overlap": ("weights.overlap=true",)},
    QUIET,
    {
        "training, s": lambda o, _: o.training_s,
        "samples/s": lambda o, _: o.samples_per_s,
        "mean lag": lambda o, _: o.lag_mean,
        "memory of all processes, MB": lambda _, peak: peak / 1e6,
    },
)


class PeakMemory:
    """Samples the proportional set size of this process's children while it is entered."""

    def __init__(self) -> None:
        self.peak = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(1.0):
            total = 0
            for process in psutil.Process().children(recursive=True):
                try:
                    total += process.memory_full_info().pss
                except (psutil.Error, OSError):
                    continue
            self.peak = max(self.peak, total)


def measure(comparison: Comparison, rounds: int, steps: int | None) -> dict[str, list[tuple[Outcome, float]]]:
    found: dict[str, list[tuple[Outcome, float]]] = {name: [] for name in comparison.variants}
    os.environ["WANDB_MODE"] = "offline"
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(rounds):
            names = list(comparison.variants)
            for name in names if number % 2 == 0 else reversed(names):
                overrides = [*comparison.common, *comparison.variants[name]]
                with PeakMemory() as memory:
                    outcome = run("torch", "fully_async", number, steps, overrides, Path(scratch) / f"{name}-{number}")
                found[name].append((outcome, memory.peak))
                values = ", ".join(f"{head} {of(outcome, memory.peak):.3g}" for head, of in comparison.figures.items())
                print(f"round {number} {name}: {values}", flush=True)
    return found


def report(name: str, comparison: Comparison, found: dict[str, list[tuple[Outcome, float]]], rounds: int) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in package_versions().items())
    lines = [
        f"# {comparison.title}",
        "",
        f"`python benchmarks/variants.py {name} --rounds {rounds}`",
        "",
        f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the end; commit {git_commit()}; {versions}.",
        "",
        f"| | {' | '.join(comparison.variants)} | ratio | range of the ratio |",
        "|---|" + "---|" * (len(comparison.variants) + 2),
    ]
    (first, second) = found.values()
    for head, of in comparison.figures.items():
        before, after = ([of(*one) for one in outcomes] for outcomes in (first, second))
        ratios = [b / a for a, b in zip(before, after, strict=True) if a]
        middle = [f"{statistics.median(values):.4g}" for values in (before, after)]
        ratio = f"{statistics.median(ratios):.3f} | {min(ratios):.3f} to {max(ratios):.3f}" if ratios else "- | -"
        lines.append(f"| {head} | {' | '.join(middle)} | {ratio} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("name", choices=COMPARISONS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="of each run; those of the recipe when left out")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    comparison = COMPARISONS[options.name]
    subprocess.run(["sync"], check=True)
    text = report(options.name, comparison, measure(comparison, options.rounds, options.steps), options.rounds)
    print(text)
    if options.write:
        (RESULTS / f"{options.name}.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
