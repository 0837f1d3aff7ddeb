"""The planner against real runs: the costs come from one of them, every other one is predicted.

    python benchmarks/plan.py                       # 15 runs of 40 steps: about 15 minutes on two quiet cores
    python benchmarks/plan.py --steps 8 --only 2    # the first two configurations, to see that it works
    python benchmarks/plan.py --keep runs/plan --write

Runs `asyncrl-train recipes/quickstart.yaml` (`make quickstart` makes its model and data) in each configuration, one run
at a time. The policy is held still by a tiny learning rate, so that responses are equally long in all of them. The
first configuration, mode sync with two replicas, gives the costs, as `asyncrl-plan --probe` does. With --keep the runs
stay, and those that are there already are not run again. --write writes benchmarks/results/plan.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from asyncrl.checkpoint.run_directory import git_commit, package_versions
from asyncrl.config.load import load_recipe
from asyncrl.config.recipe import Recipe
from asyncrl.plan import CostModel, Forecast, predict, write_costs
from asyncrl.plan.fit import Traced, costs_of_run, measured
from asyncrl.report.run_files import RunFiles, read_run, read_spans
from benchmarks.quickstart import RECIPES, ROOT, run

RESULTS = ROOT / "benchmarks" / "results" / "plan.md"
STILL = (
    "trainer.lr=1e-12",
    "eval.every_steps=0",
    "checkpoint.every_steps=0",
    "observability.progress=false",
    "observability.trace_every_groups=1",
)


@dataclass(frozen=True)
class Configuration:
    mode: str
    replicas: int
    group_size: int
    max_lag: int = 2
    pacing: str = "eager"

    @property
    def name(self) -> str:
        lag = f"-lag{self.max_lag}-{self.pacing}" if self.mode == "fully_async" else ""
        return f"{self.mode}-r{self.replicas}-g{self.group_size}{lag}"

    @property
    def overrides(self) -> list[str]:
        return [
            *STILL,
            f"rollout.num_replicas={self.replicas}",
            f"batch.group_size={self.group_size}",
            f"staleness.max_lag={self.max_lag}",
            f"staleness.pacing={self.pacing}",
        ]


CONFIGURATIONS = (
    Configuration("sync", 2, 16),
    Configuration("fully_async", 2, 16),
    Configuration("sync", 1, 16),
    Configuration("sync", 2, 8),
    Configuration("sync", 1, 8),
    Configuration("one_step_off", 2, 16),
    Configuration("one_step_off", 1, 16),
    Configuration("one_step_off", 2, 8),
    Configuration("one_step_off", 1, 8),
    Configuration("fully_async", 1, 16),
    Configuration("fully_async", 2, 16, max_lag=1),
    Configuration("fully_async", 2, 16, max_lag=4),
    Configuration("fully_async", 2, 16, max_lag=4, pacing="just_in_time"),
    Configuration("fully_async", 2, 8),
    Configuration("fully_async", 1, 8, max_lag=4),
)
"""The first gives the costs."""


def train(configuration: Configuration, steps: int, directory: Path) -> RunFiles:
    """The files of its run, which is trained unless it lies there complete."""
    place = directory / configuration.name
    metrics = place / "metrics.jsonl"
    if not metrics.is_file() or len(metrics.read_text().splitlines()) < steps:
        run("torch", configuration.mode, 0, steps, configuration.overrides, place)
    return read_run(place)


def recipe_of(configuration: Configuration) -> Recipe:
    words = [f"mode={configuration.mode}", *configuration.overrides]
    return load_recipe(ROOT / RECIPES["torch"], words)


def line(configuration: Configuration, real: Forecast, found: Forecast) -> str:
    error = found.step_s / real.step_s - 1
    lag, pacing = configuration.max_lag, configuration.pacing
    asked = f"{lag} {pacing}" if configuration.mode == "fully_async" else "-"
    return (
        f"| {configuration.mode} | {configuration.replicas} | {configuration.group_size} | {asked} | "
        f"{1000 * real.step_s:.0f} | {1000 * found.step_s:.0f} | {error:+.1%} | "
        f"{real.trainer_idle:.0%} / {found.trainer_idle:.0%} | {real.replica_idle:.0%} / {found.replica_idle:.0%} | "
        f"{real.lag_mean:.2f} / {found.lag_mean:.2f} | {1000 * real.publish_s:.0f} / {1000 * found.publish_s:.0f} |"
    )


def report(rows: list[tuple[Configuration, Forecast, Forecast]], costs: CostModel, steps: int) -> str:
    errors = [abs(found.step_s / real.step_s - 1) for _, real, found in rows[1:]]
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    machine = f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the end; commit {git_commit()}"
    summary = (
        f"Mean error of the predicted step {fmean(errors):.1%}, largest {max(errors):.1%}, over {len(errors)} "
        "configurations that gave no costs."
        if errors
        else "Only the run that gave the costs."
    )
    return "\n".join(
        [
            "# The planner against real runs",
            "",
            f"`python benchmarks/plan.py --steps {steps}`",
            "",
            f"{machine}; {versions}.",
            "",
            f"{summary} The costs come from the first row. Pairs are measured / predicted.",
            "",
            "| mode | replicas | group size | max_lag, pacing | step ms | predicted | error | trainer idle "
            "| replicas idle | mean lag | publish ms |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
            *(line(*row) for row in rows),
            "",
            "```yaml",
            write_costs(costs).rstrip(),
            "```",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", type=int, default=len(CONFIGURATIONS), metavar="N", help="the first N configurations")
    parser.add_argument("--cores", type=float, default=float(len(os.sched_getaffinity(0))), help="0: not shared")
    parser.add_argument("--keep", type=Path, help="keep the run directories here, and use those that are there")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/plan.md")
    options = parser.parse_args()
    costs, rows, cores = None, [], options.cores or None
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        for configuration in CONFIGURATIONS[: options.only]:
            done = train(configuration, options.steps, directory)
            if costs is None:
                costs = costs_of_run(done, Traced.of(read_spans(done)), recipe_of(configuration), cores)
                costs = replace(costs, source=costs.source.replace(f"{directory}{os.sep}", ""))
            rows.append((configuration, measured(done), predict(recipe_of(configuration), costs)))
            print(line(*rows[-1]), flush=True)
    assert costs is not None, "there is a first configuration"
    text = report(rows, costs, options.steps)
    print(text)
    if options.write:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
