"""What one GPU can show in twelve minutes, in the order of its value: each step with its mark, in a process of its own.

    python benchmarks/gpu.py                     # on a machine with one GPU and torch, six minutes
    python benchmarks/gpu.py                     # once more: it goes on
    python benchmarks/gpu.py --size tiny         # every step on small inputs, also without a GPU
    python benchmarks/gpu.py --only pair_ipc fault_kill --again
    python benchmarks/gpu.py --wheels            # what to carry to a machine that has torch and transformers alone

Figures go to OUT/figures.jsonl, a JSON object a line. A step that has passed or was left out is not done again
(`--again` does); one that missed its mark or was interrupted is, and where there is a GPU now, what was left out or not
judged for want of one. So a machine that is lent for a while can go on where another stopped. It ends after --minutes
(6), and the next call goes on. Steps that need Ray are left out, with the
reason, where it is absent; what needs a GPU or the full size is not judged without, and the outcome says so. `--write`
writes benchmarks/results/gpu.md. Exit code 1: a mark was missed. 3: none was, and steps are left for the next call.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_lane import steps  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "gpu.md"
MIB = 1 << 20
SHORTEST_S = 60.0
"""No step begins where less time is left, unless it needs less."""
MISSED, INTERRUPTED, PASSED = "missed", "interrupted", "passed"
"""What outcomes begin with."""


@dataclass(frozen=True, slots=True)
class Step:
    """`mark`: what passes. `needs`: packages without which it is left out."""

    name: str
    mark: str
    do: Callable[..., None]
    limit_s: float = 240.0
    needs: tuple[str, ...] = ()


STEPS = (
    # The first six minutes.
    Step("probe", "none: it describes the machine", steps.probe),
    Step("communicator", "abort ends the creation of a communicator", steps.lonely_communicator, limit_s=90.0),
    Step("fault_kill", "the sender ends in time, lives and opens again", partial(steps.fault, "kill"), limit_s=120.0),
    Step(
        "pair_collective",
        "digests equal, stamps exact, mismatch < 0.01 nats and alike, over NCCL",
        partial(steps.pair, "collective"),
    ),
    Step(
        "step_4b",
        "1 and 8 sequences, optimizer on the GPU and in host memory: a fused attention kernel; memory as --dry-run "
        "announces it, 0.8 to 1.1 times",
        partial(steps.step, "4b", sequences=(1, 8), offload=(False, True)),
    ),
    Step(
        "moe",
        "a step, the same, with grouped experts; microseconds per expert tensor of a publish",
        partial(steps.step, "moe", offload=(True,), buckets=(512 * MIB,)),
    ),
    # The second.
    Step(
        "tests_gpu",
        "all pass",
        partial(
            steps.own_tests,
            "tests/contract/test_transports.py",
            "tests/numerics/test_training_state.py",
            "tests/numerics/test_packed_attention.py",
            "tests/numerics/test_loss_token_logprobs.py",
            marked="gpu",
        ),
    ),
    Step(
        "pair_ipc",
        "as pair_collective, and >= 20 GB/s; GB/s by bucket, and through host memory",
        partial(steps.pair, "ipc", size="1.7b", buckets=(4 * MIB, 64 * MIB, 512 * MIB)),
    ),
    Step("fault_stop", "as fault_kill", partial(steps.fault, "stop"), limit_s=120.0),
    Step("step_0.6b", "as step_4b", partial(steps.step, "0.6b"), limit_s=120.0),
    Step("step_compiled", "none: next to step_0.6b", partial(steps.step, "0.6b", compiles=True), limit_s=180.0),
    # With more time, or with Ray and vLLM.
    Step(
        "tests_engine",
        "all pass",
        partial(steps.own_tests, "tests/contract/test_engines.py", "tests/numerics/test_torch_engine_numerics.py"),
        limit_s=400.0,
    ),
    Step("quickstart", "ends well, with a replica killed in the middle", steps.run_of_the_quickstart, 560.0, ("ray",)),
    Step(
        "colocated",
        "a rank and a replica take turns on one GPU; a replica is killed in the middle",
        partial(steps.run_of_the_quickstart, "placement=colocated", "mode=sync", "trainer.num_ranks=1"),
        limit_s=560.0,
        needs=("ray",),
    ),
    Step(
        "colocated_vllm",
        "the same with vLLM, which sleeps and wakes",
        partial(
            steps.run_of_the_quickstart,
            *("placement=colocated", "mode=sync", "trainer.num_ranks=1"),
            *("rollout.engine=vllm", "rollout.vllm.gpu_memory_utilization=0.5"),
            needs_cuda=True,
        ),
        limit_s=560.0,
        needs=("ray", "vllm"),
    ),
)
WHEELS = (
    *("pyzmq", "annotated-types", "omegaconf", "antlr4-python3-runtime", "psutil", "xxhash", "httpx"),
    *("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis"),
)
"""What the lane imports and a machine with torch and transformers may lack. Its tests take omegaconf and pytest."""


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu")
    parser.add_argument("--only", nargs="+", metavar="STEP", choices=[s.name for s in STEPS], help="these steps alone")
    parser.add_argument("--again", action="store_true", help="also steps that have passed")
    parser.add_argument("--minutes", type=float, default=6.0, help="it ends after so many")
    parser.add_argument("--wheels", action="store_true", help="print what to carry to the machine, and end")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    options = parser.parse_args()
    tiny = options.size == "tiny"
    if options.wheels:
        print("\n".join(f"{name}=={metadata.version(name)}" for name in WHEELS))
        return 0
    if options.step:
        next(s for s in STEPS if s.name == options.step).do(tiny=tiny)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "figures.jsonl"
    until, left = time.monotonic() + 60 * options.minutes, 0
    for one in STEPS:
        if options.only and one.name not in options.only:
            continue
        before = _ended(file, options.size).get(one.name, MISSED)
        if not options.again and not _is_open(before, options.size):
            print(f"{one.name}: done before")
            continue
        if (room_s := until - time.monotonic()) < min(SHORTEST_S, one.limit_s):
            print(f"{one.name}: left for the next call, {options.minutes:g} minutes are over")
            left += 1
            continue
        outcome = _outcome(one, options.size, file, room_s)
        left += outcome.startswith(INTERRUPTED)
        print(f"{one.name}: {outcome}", flush=True)
    found = _ended(file, options.size)
    text = _table(found, file, options.size)
    print(text)
    if options.write:
        RESULTS.write_text(text)
    if any(outcome.startswith(MISSED) for outcome in found.values()):
        return 1
    return 3 if left else 0


def _outcome(one: Step, size: str, file: Path, room_s: float) -> str:
    """Does a step in a process of its own, within `room_s` seconds, and appends its figures to the file."""
    absent = [package for package in one.needs if importlib.util.find_spec(package) is None]
    if absent:
        outcome = f"left out: {', '.join(absent)} is not installed"
        _append(file, {"step": one.name, "size": size, "outcome": outcome})
        return outcome
    command = [sys.executable, __file__, "--size", size, "--step", one.name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=min(one.limit_s, room_s))
        outcome = PASSED if process.returncode == 0 else f"{MISSED}: exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        said, _ = process.communicate()
        outcome = f"{MISSED}: it took over {one.limit_s:g} s"
        if room_s < one.limit_s:
            outcome = f"{INTERRUPTED} after {room_s:.0f} s"
    figures = [json.loads(line.removeprefix("figure ")) for line in said.splitlines() if line.startswith("figure ")]
    for figure in figures:
        _append(file, {"step": one.name, "size": size, **figure})
    if outcome != PASSED:
        tail = said.strip().splitlines()
        outcome += f": {tail[-1][:300]}" if tail else ""
        (file.parent / f"{one.name}.log").write_text(said)
    elif figures and "skipped" in figures[-1]:
        outcome = f"left out: {figures[-1]['skipped']}"
    elif unjudged := [figure["unjudged"] for figure in figures if "unjudged" in figure]:
        outcome = f"passed; not judged: {', '.join(unjudged)}"
    _append(file, {"step": one.name, "size": size, "outcome": outcome, "took_s": round(time.monotonic() - began, 1)})
    return outcome


def _is_open(outcome: str, size: str) -> bool:
    """True for a step that the next call does again: also one that found no GPU before, where there is one now."""
    if outcome.startswith((MISSED, INTERRUPTED)):
        return True
    return (
        outcome != PASSED
        and any(Path("/dev").glob("nvidia[0-9]*"))
        and not (size == "tiny" and outcome.startswith(PASSED))
    )


def _append(file: Path, line: dict[str, Any]) -> None:
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")


def _lines(file: Path, size: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in lines if line["size"] == size]


def _ended(file: Path, size: str) -> dict[str, str]:
    """Step -> its newest outcome."""
    return {line["step"]: line["outcome"] for line in _lines(file, size) if "outcome" in line}


def _table(found: dict[str, str], file: Path, size: str) -> str:
    from asyncrl.checkpoint.run_directory import git_commit

    lines = _lines(file, size)
    machine = next((line for line in reversed(lines) if "gpus" in line), {})
    versions = ", ".join(f"{key} {machine[key]}" for key in ("torch", "cuda", "nccl") if machine.get(key))
    gpus = ", ".join(machine.get("gpus", ())) or "no GPU"
    head = [
        "# On a GPU",
        "",
        f"`python benchmarks/gpu.py{'' if size == 'full' else f' --size {size}'}`, {datetime.date.today()}: {gpus}; "
        f"{versions}; commit {git_commit()}.",
        "",
        "| step | passes when | outcome |",
        "|---|---|---|",
    ]
    rows = [f"| {s.name} | {s.mark} | {found.get(s.name, 'not done yet')} |" for s in STEPS]
    told = ["", "## Figures", ""]
    for one in STEPS:
        figures = [line for line in lines if line["step"] == one.name and "outcome" not in line]
        told += [f"* **{one.name}** {_told(figure)}" for figure in figures]
    return "\n".join([*head, *rows, *told]) + "\n"


def _told(figure: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in figure.items() if key not in ("step", "size"))


if __name__ == "__main__":
    sys.exit(main())
