"""Seconds from the command to the end of the first step, with and without the fork server.

    make quickstart                             # once: the model and the data; with vLLM, make install-vllm
    python benchmarks/first_step.py             # 3 rounds, about 3 minutes on 2 cores
    python benchmarks/first_step.py --recipes quickstart --rounds 5 --write

The variants of a round follow each other, so that a disturbance meets all of them. Each run is the recipe as it is, for
one step and without evaluations. `--write` keeps the table in benchmarks/results/first_step.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from asyncrl.checkpoint.run_directory import git_commit, package_versions

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "first_step.md"
FORKS = {"fork server": "1", "without": "0"}


def first_step(recipe: str, forks: str) -> tuple[float, float]:
    """Seconds from the command to the end of the step, and to the end of the command. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as scratch:
        began = time.time()
        subprocess.run(
            [
                *(sys.executable, "-m", "asyncrl.commands.train", f"recipes/{recipe}.yaml"),
                *(f"run.dir={scratch}/run", "run.max_steps=1", "eval.every_steps=0"),
            ],
            cwd=ROOT,
            env={**os.environ, "ASYNCRL_FORK": forks},
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=300,
        )
        whole = time.time() - began
        events = map(json.loads, (Path(scratch) / "run" / "events.jsonl").read_text().splitlines())
        return next(event["time_s"] for event in events if event["event"] == "step") - began, whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["quickstart", "quickstart_vllm"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"keep the table in {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number in range(arguments.rounds):
        for recipe in arguments.recipes:
            for name, forks in FORKS.items():
                found.setdefault((recipe, name), []).append(first_step(recipe, forks))
        print(f"round {number + 1}: { {key: times[-1] for key, times in found.items()} }", flush=True)
    lines = [
        "# From the command to the end of the first step",
        "",
        f"Seconds: median (lowest to highest) of {arguments.rounds} rounds. The quickstarts as they are, for one step.",
        "",
        "| recipe | processes | first step | end of the command | first step without / with |",
        "|---|---|---|---|---|",
    ]
    for (recipe, name), times in found.items():
        without = statistics.median(step for step, _ in found[recipe, "without"])
        cells = [spread(values) for values in zip(*times, strict=True)]
        ratio = without / statistics.median(step for step, _ in times)
        lines.append(f"| {recipe} | {name} | {' | '.join(cells)} | {ratio:.2f} |")
    versions = ", ".join(f"{package} {version}" for package, version in package_versions().items())
    where = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; {versions}; commit {git_commit()}"
    text = "\n".join([*lines, "", where, ""])
    print(text)
    if arguments.write:
        RESULTS.write_text(text)


def spread(values: tuple[float, ...]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    main()
