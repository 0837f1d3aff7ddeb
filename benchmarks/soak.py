"""What grows in a long run: memory and open files of every process, and the files of the run directory, by the minute.

    python benchmarks/soak.py [--minutes 120] [--mode fully_async] [--recipe recipes/quickstart.yaml] [--write]

Runs a recipe with more steps than it can take and ends it by SIGINT after the given time. Every 15 seconds it notes the
memory and the open files of each process, and the size of each file of the run. Memory is what a process has made
itself or shares in memory (RssAnon, RssShmem and what is swapped out): pages of files that it maps come and go with the
kernel's need. The slope is that of a line through all samples after the first fifth of the time (imports, caches and
first checkpoints belong to the start).
Growth of less than 0.5 MB a minute is what an allocator does by itself. Writes benchmarks/results/soak.md with --write.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

import numpy as np
import psutil

from asyncrl.checkpoint.run_directory import git_commit, package_versions

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "soak.md"
LOOK_S, START_SHARE = 15.0, 0.2
QUIET = ("observability.progress=false", "checkpoint.every_steps=50", "eval.every_steps=50", "run.max_steps=1000000")


@dataclass
class Series:
    """Samples of one process or file: minutes since the start, bytes, open files."""

    minutes: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    files: list[float] = field(default_factory=list)

    def slope(self, values: list[float], since: float) -> float:
        """Per minute, after `since` minutes; 0 where there are too few samples."""
        chosen = [i for i, minute in enumerate(self.minutes) if minute >= since]
        if len(chosen) < 3:
            return 0.0
        return float(np.polyfit([self.minutes[i] for i in chosen], [values[i] for i in chosen], 1)[0])


def name_of(process: psutil.Process, driver: int) -> str:
    """A name for people; processes of the same name and role are told apart by their id."""
    words = process.cmdline()
    first = Path(words[0]).name if words else process.name()
    if process.pid == driver:
        return "driver"
    if first.startswith(("ray::", "VLLM", "sglang")):
        return f"{first.split('.')[0]} ({process.pid})"
    named = next((Path(word).name for word in words[1:4] if "/" in word or word.startswith("asyncrl")), "")
    return f"{first} {named} ({process.pid})".replace("python ", "")


def own_memory(pid: int) -> int:
    """Bytes of a process that are no pages of files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    named = ("RssAnon:", "RssShmem:", "VmSwap:")
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(named))


def watch(run: subprocess.Popen[bytes], directory: Path, minutes: float) -> tuple[dict[str, Series], dict[str, Series]]:
    processes: dict[str, Series] = defaultdict(Series)
    files: dict[str, Series] = defaultdict(Series)
    began = time.monotonic()
    while (now := (time.monotonic() - began) / 60) < minutes:
        if run.poll() is not None:
            raise SystemExit(f"the run ended by itself with {run.returncode}; see {directory.parent}")
        driver = psutil.Process(run.pid)
        for process in (driver, *driver.children(recursive=True)):
            try:
                name, memory, opened = name_of(process, run.pid), own_memory(process.pid), process.num_fds()
            except (psutil.Error, OSError):
                continue
            series = processes[name]
            series.minutes.append(now)
            series.sizes.append(memory)
            series.files.append(opened)
        for path in directory.rglob("*"):
            if path.is_file() and "step_" not in str(path):
                files[str(path.relative_to(directory))].minutes.append(now)
                files[str(path.relative_to(directory))].sizes.append(path.stat().st_size)
        time.sleep(LOOK_S)
    return dict(processes), dict(files)


def report(title: str, processes: dict[str, Series], files: dict[str, Series], minutes: float, steps: int) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in package_versions().items())
    since = START_SHARE * minutes
    lasting = {n: s for n, s in processes.items() if s.minutes[-1] - s.minutes[0] > 0.7 * minutes}
    lines = [
        "# A long run",
        "",
        f"`python benchmarks/soak.py --minutes {minutes:g}`: {title}, {steps} steps. {os.cpu_count()} cores; "
        f"commit {git_commit()}; {versions}.",
        "",
        "| process | memory at first, MB | at last, MB | MB a minute | open files at last | a minute |",
        "|---|---|---|---|---|---|",
    ]
    slopes = {name: series.slope(series.sizes, since) / 1e6 for name, series in lasting.items()}
    for name, series in sorted(lasting.items(), key=lambda item: -slopes[item[0]]):
        lines.append(
            f"| {name.rsplit(' (', 1)[0]} | {series.sizes[0] / 1e6:.0f} | {series.sizes[-1] / 1e6:.0f} | "
            f"{slopes[name]:.2f} | {series.files[-1]:.0f} | {series.slope(series.files, since):.2f} |"
        )
    lines += ["", "| file of the run | at last, MB | MB a minute |", "|---|---|---|"]
    growing = {name: series.slope(series.sizes, since) / 1e6 for name, series in files.items()}
    for name, slope in sorted(growing.items(), key=lambda item: -item[1]):
        if slope > 0.001:
            lines.append(f"| {name} | {files[name].sizes[-1] / 1e6:.1f} | {slope:.3f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--mode", default="fully_async")
    parser.add_argument("--recipe", default="recipes/quickstart.yaml")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "run"
        words = [options.recipe, f"mode={options.mode}", f"run.dir={directory}", *QUIET]
        with (Path(scratch) / "out").open("w") as output:
            command = [sys.executable, "-m", "asyncrl.commands.train", *words]
            run = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
            try:
                processes, files = watch(run, directory, options.minutes)
            finally:
                run.send_signal(signal.SIGINT)
                run.wait(timeout=300)
        steps = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        text = report(f"{options.recipe}, {options.mode}", processes, files, options.minutes, steps)
    print(text)
    if options.write:
        RESULT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
