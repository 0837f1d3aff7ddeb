"""What the digests of checkpoints cost: made by the driver or by the trainer ranks; and what a resume reads.

    python benchmarks/checkpoint.py [--gigabytes 2] [--ranks 2] [--rounds 5] [--runs 3] [--directory DIR] [--write]

`sealing`: the driver's work when a checkpoint is complete, where the ranks made the digests of their files, against
the driver's own reading of everything. The ranks' part is done by as many processes. `resuming`: what stands between
`resume=auto` and the first start of a process: one reading, and three, as in asyncrl's first version. Variants
alternate within a round; ratios are within a round. The page cache is warm in all of them. `the whole command`: from
`asyncrl-train` to the event `resume`, when everything is up and restored, of a model of 176M parameters, whose
checkpoint has 2.1 GB: from the files of the model, and from the checkpoint (`--runs 0` leaves it out). Writes
benchmarks/results/checkpoint.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from asyncrl.checkpoint.digests import FILES, FileDigest, seal, verify
from asyncrl.checkpoint.run_directory import git_commit
from asyncrl.checkpoint.store import CheckpointStore
from benchmarks.delta_publish import LARGE_RUN
from tools.make_tiny_model import Settings, build_model, build_tokenizer

ROOT = Path(__file__).resolve().parents[1]
LARGE = Settings(hidden_size=1152, num_layers=14)
RESULT = Path(__file__).resolve().parent / "results" / "checkpoint.md"
FORMER_READINGS = 3
BLOCK = 64 << 20


def make(directory: Path, nbytes: int, ranks: int) -> list[Path]:
    """A checkpoint of one file for each rank."""
    (directory / "trainer").mkdir(parents=True)
    (directory / "state.json").write_text("{}")
    files = [directory / "trainer" / f"__{rank}_0.distcp" for rank in range(ranks)]
    for path in files:
        with path.open("wb") as file:
            for _ in range(nbytes // ranks // BLOCK):
                file.write(os.urandom(BLOCK))
    return files


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(directory: Path, nbytes: int, ranks: int, rounds: int) -> dict[str, list[float]]:
    checkpoint = directory / "step_1"
    files = make(checkpoint, nbytes, ranks)
    store = CheckpointStore(directory, keep=1)
    found: dict[str, list[float]] = {"driver alone": [], "ranks": [], "driver after ranks": [], "former": [], "now": []}
    with ProcessPoolExecutor(ranks) as pool:
        list(pool.map(FileDigest.of, files))  # every process has started, every page is in memory

        def former() -> None:
            for _ in range(FORMER_READINGS):
                assert verify(checkpoint) is None

        def now() -> None:
            latest = store.latest()
            assert latest is not None
            assert store.set_aside_corrupt(latest) == []

        for number in range(rounds):
            (checkpoint / FILES).unlink(missing_ok=True)
            found["driver alone"].append(timed(lambda: seal(checkpoint)))
            (checkpoint / FILES).unlink()
            began = time.perf_counter()
            of_ranks = dict(zip((f"trainer/{f.name}" for f in files), pool.map(FileDigest.of, files), strict=True))
            found["ranks"].append(time.perf_counter() - began)
            found["driver after ranks"].append(timed(lambda of=of_ranks: seal(checkpoint, of)))  # type: ignore[misc]
            turns = [("former", former), ("now", now)]
            for name, work in turns if number % 2 == 0 else reversed(turns):
                found[name].append(timed(work))
    return found


def starts(directory: Path, runs: int) -> tuple[list[float], list[float], int]:
    """Seconds from the command to the event `resume`: of new runs, and of runs that resume; bytes of a checkpoint."""
    model, tokenizer = directory / "model", build_tokenizer()
    build_model(LARGE, tokenizer).save_pretrained(model)
    tokenizer.save_pretrained(model)
    fresh, resumed, size = [], [], 0
    for number in range(runs):
        place = directory / f"run{number}"
        for steps, found in ((1, fresh), (2, resumed)):
            words = [
                *LARGE_RUN,
                "eval.every_steps=0",
                f"model.path={model}",
                f"run.dir={place}",
                f"run.max_steps={steps}",
            ]
            command = [sys.executable, "-m", "asyncrl.commands.train", "recipes/quickstart.yaml", *words]
            began = time.time()
            done = subprocess.run(
                [*command, *(["resume=auto"] if steps > 1 else [])],
                cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False,
            )  # fmt: skip
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
            events = [json.loads(line) for line in (place / "events.jsonl").read_text().splitlines()]
            found.append(next(e["time_s"] for e in reversed(events) if e["event"] == "resume") - began)
        latest = CheckpointStore(place / "checkpoints", keep=2).latest()
        assert latest is not None
        size = sum(path.stat().st_size for path in latest.rglob("*") if path.is_file())
        shutil.rmtree(place)
    return fresh, resumed, size


def report(
    found: dict[str, list[float]],
    found_starts: tuple[list[float], list[float], int],
    options: argparse.Namespace,
) -> str:
    median = {name: statistics.median(values) for name, values in found.items()}
    whole = [r + d for r, d in zip(found["ranks"], found["driver after ranks"], strict=True)]
    rows = [
        ("sealing", "the driver reads everything", median["driver alone"], found["driver alone"]),
        ("", f"{options.ranks} ranks read their files, then the driver", statistics.median(whole), whole),
        ("", "of which the driver", median["driver after ranks"], found["driver after ranks"]),
        ("resuming", f"{FORMER_READINGS} readings, as in the first version", median["former"], found["former"]),
        ("", "one reading", median["now"], found["now"]),
    ]
    lines = [
        "# Digests of checkpoints",
        "",
        f"`python benchmarks/checkpoint.py --gigabytes {options.gigabytes:g} --ranks {options.ranks} "
        f"--rounds {options.rounds} --runs {options.runs}`",
        "",
        f"{os.cpu_count()} cores; commit {git_commit()}; medians. Ratios to the first row "
        "of each part, within a round.",
        "",
        "| | | seconds | ratio |",
        "|---|---|---|---|",
    ]
    base: list[float] = []
    for part, name, value, values in rows:
        base = values if part else base
        ratio = statistics.median(b / a for a, b in zip(base, values, strict=True))
        lines.append(f"| {part} | {name} | {value:.3f} | {ratio:.3f} |")
    if options.runs:
        fresh, resumed, size = found_starts
        ratio = statistics.median(b / a for a, b in zip(fresh, resumed, strict=True))
        lines.append(f"| the whole command, {size / 1e9:.1f} GB | a new run | {statistics.median(fresh):.1f} | 1.000 |")
        lines.append(f"|  | resume=auto | {statistics.median(resumed):.1f} | {ratio:.3f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=3, help="new and resumed runs of a model of 176M parameters")
    parser.add_argument("--directory", type=Path, help="where the checkpoint is made; a temporary one when left out")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        found = measure(Path(scratch), int(options.gigabytes * 1e9), options.ranks, options.rounds)
        whole = starts(Path(scratch), options.runs)
    text = report(found, whole, options)
    print(text)
    if options.write:
        RESULT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
