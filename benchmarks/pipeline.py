"""How near a step comes to the slower of its two halves, on responses with a long tail.

    python benchmarks/pipeline.py [--rounds 5] [--steps 24] [--interrupt abort_resume keep] [--write]

The job: the random Qwen3 of 0.8M parameters of `benchmarks/peers`, 32 groups of 8 a step, responses of 8 to 47 tokens
of which every twentieth has 256, mode fully_async, `max_lag=4`, one trainer rank and one replica with a core each; the
control plane runs beside the replica (`beside`), or wherever the system puts it (`floating`). A publish after each step
has the requests in flight computed again (`rollout.interrupt=abort_resume`), or not (`keep`). Three measurements:

- generation alone: the groups of nine steps are admitted at once while the trainer is stopped (SIGSTOP) and nothing
  is trained or published: the seconds in which the groups of a step become ready, between the first tenth and 80 %;
- training alone: `train/step_s` of the last three steps of a run, when nothing is generated any more;
- the step: from the end of one to the next, without the first fifth of them and the last `max_lag` + 1.

Writes benchmarks/results/pipeline.md with --write.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

import numpy as np
import psutil

from asyncrl.checkpoint.run_directory import git_commit, package_versions
from asyncrl.environments import Session, Task
from asyncrl.environments.environment import SingleTurn
from asyncrl.types import Generation, Trajectory
from asyncrl.types.metrics import Metric

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "pipeline.md"
GROUPS, GROUP, MAX_LAG, TRAINED_ALONE = 32, 8, 4, 3
SHORTEST, LONGEST, TAIL, TAIL_SHARE = 8, 47, 256, 0.05
ALONE_LAG = 8
"""Of the measurement of generation alone: the groups of one step more are admitted. They take less than the 20 s in
which a trainer has to answer."""
TRAINER_CORE, REPLICA_CORE = 0, 1
PLACES = ("beside", "floating")
INTERRUPTS = ("abort_resume", "keep")
TIMEOUT_S = 900


class LongTail(SingleTurn):
    """Asks for responses whose lengths depend on the prompt's number and the sample alone."""

    async def run(self, task: Task, session: Session) -> Trajectory:
        draw = np.random.default_rng([task.ordinal, task.index])
        tokens = TAIL if draw.random() < TAIL_SHARE else int(draw.integers(SHORTEST, LONGEST + 1))
        return await super().run(task, _Limited(session, tokens))


class _Limited:
    """A session whose responses have so many tokens."""

    def __init__(self, session: Session, tokens: int) -> None:
        self._session, self._tokens = session, tokens

    async def generate(self, prompt_ids: np.ndarray, max_tokens: int | None = None) -> Generation:
        return await self._session.generate(prompt_ids, self._tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


@dataclass(frozen=True)
class Measured:
    """Seconds of a step, median and mean; of its parts, medians."""

    step_s: float
    mean_s: float
    trained_s: float
    alone_s: float
    waited_s: float

    @property
    def rest_s(self) -> float:
        return self.step_s - self.trained_s - self.waited_s


@contextmanager
def pinned(driver: int, place: str) -> Iterator[None]:
    """Keeps the threads of the run's processes on their cores, those that appear later too."""
    stop = threading.Event()

    def keep() -> None:
        while not stop.wait(0.3):
            for process in processes_of(driver):
                try:
                    title = title_of(process)
                    if "TrainerWorker" in title:
                        cores = {TRAINER_CORE}
                    elif "ReplicaActor" in title or place == "beside":
                        cores = {REPLICA_CORE}
                    else:
                        continue
                    for thread in process.threads():
                        os.sched_setaffinity(thread.id, cores)
                except (psutil.Error, OSError):
                    continue

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def processes_of(driver: int) -> list[psutil.Process]:
    try:
        return psutil.Process(driver).children(recursive=True)
    except psutil.Error:
        return []


def title_of(process: psutil.Process) -> str:
    """What an actor of Ray calls itself, and the command of another process."""
    try:
        return process.name() + " ".join(process.cmdline()[:1])
    except psutil.Error:
        return ""


@contextmanager
def training_run(
    job: tuple[Path, Path], directory: Path, place: str, steps: int, max_lag: int, interrupt: str = INTERRUPTS[0]
) -> Iterator[subprocess.Popen[bytes]]:
    """`asyncrl-train`, pinned; ended as by Ctrl-C where it still runs."""
    model, prompts = job
    words = [
        f"model.path={model}",
        f"data.train={prompts}",
        "data.eval={}",
        "mode=fully_async",
        f"batch.groups_per_step={GROUPS}",
        f"batch.group_size={GROUP}",
        "rollout.environment=benchmarks.pipeline:LongTail",
        "rollout.num_replicas=1",
        f"rollout.interrupt={interrupt}",
        f"rollout.sampling.max_response_tokens={TAIL}",
        "trainer.lr=1.0e-9",
        f"staleness.max_lag={max_lag}",
        "staleness.pacing=eager",  # each half alone needs a full queue
        "eval.every_steps=0",
        f"ray.health_timeout_s={TIMEOUT_S:g}",  # the trainer is stopped for as long as generation alone takes
        "checkpoint.every_steps=0",
        "observability.progress=false",
        f"run.max_steps={steps}",
        f"run.dir={directory}",
    ]
    command = [sys.executable, "-m", "asyncrl.commands.train", "recipes/quickstart.yaml", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with directory.with_suffix(".log").open("w") as output:
        run = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        with pinned(run.pid, place):
            yield run
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGINT)
        run.wait(timeout=TIMEOUT_S)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may still be written."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def ready_at(directory: Path) -> list[float]:
    """When groups became ready, in seconds since the epoch."""
    events = lines_of(directory / "events.jsonl")
    return [e["time_s"] for e in events if e["event"] == "group" and e["transition"] == "ready"]


def until(run: subprocess.Popen[bytes], directory: Path, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not done():
        if run.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(directory.with_suffix(".log").read_text()[-3000:])
        time.sleep(0.2)


def generation_alone(job: tuple[Path, Path], directory: Path, place: str) -> float:
    """Seconds in which the groups of one step become ready."""
    whole = GROUPS * (ALONE_LAG + 1)
    with training_run(job, directory, place, steps=1000, max_lag=ALONE_LAG) as run:
        until(run, directory, lambda: bool(ready_at(directory)))
        trainers = [process for process in processes_of(run.pid) if "TrainerWorker" in title_of(process)]
        for trainer in trainers:
            trainer.suspend()
        try:
            until(run, directory, lambda: len(ready_at(directory)) >= 0.9 * whole)
        finally:
            for trainer in trainers:
                trainer.resume()
        times = sorted(ready_at(directory))
    first, last = int(0.1 * whole), int(0.8 * whole)
    return (times[last] - times[first]) / (last - first) * GROUPS


def training(job: tuple[Path, Path], directory: Path, place: str, steps: int, interrupt: str) -> Measured:
    with training_run(job, directory, place, steps, MAX_LAG, interrupt) as run:
        code = run.wait(timeout=TIMEOUT_S)
    if code:
        raise SystemExit(directory.with_suffix(".log").read_text()[-3000:])
    lines = lines_of(directory / "metrics.jsonl")
    kept = lines[steps // 5 : -MAX_LAG - 1]
    gaps = np.diff([line[Metric.TIME] for line in kept])
    waits = [gap * line[Metric.IDLE_TRAINER] for gap, line in zip(gaps, kept[1:], strict=True)]
    return Measured(
        step_s=float(np.median(gaps)),
        mean_s=float(np.mean(gaps)),
        trained_s=statistics.median(line[Metric.TRAIN_TIME] for line in kept[1:]),
        alone_s=statistics.median(line[Metric.TRAIN_TIME] for line in lines[-TRAINED_ALONE:]),
        waited_s=statistics.median(waits),
    )


def report(found: dict[tuple[str, str], list[tuple[float, Measured]]], options: argparse.Namespace) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in package_versions().items())
    lines = [
        "# A step, and its two halves alone",
        "",
        f"`python benchmarks/pipeline.py --rounds {options.rounds} --steps {options.steps}`",
        "",
        f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the end; commit {git_commit()}; {versions}.",
        f"Medians over {options.rounds} rounds, seconds; the ratios with their range. Trainer and replica have a core",
        "each; `beside`: the control plane shares the replica's core.",
        "",
        "| control plane | interrupt | step, median | mean | generation alone | training alone | trains in the run "
        "| waits | rest of the loop | step over the slower half | mean over it |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (place, interrupt), rounds in found.items():
        ratios = [m.step_s / max(alone, m.alone_s) for alone, m in rounds]
        means = [m.mean_s / max(alone, m.alone_s) for alone, m in rounds]
        seconds = [
            statistics.median(values)
            for values in zip(
                *((m.step_s, m.mean_s, alone, m.alone_s, m.trained_s, m.waited_s, m.rest_s) for alone, m in rounds),
                strict=True,
            )
        ]
        cells = [f"{value:.3f}" for value in seconds]
        cells += [f"{statistics.median(r):.3f} ({min(r):.3f} to {max(r):.3f})" for r in (ratios, means)]
        lines.append(f"| {place} | {interrupt} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--interrupt", nargs="+", choices=INTERRUPTS, default=INTERRUPTS)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("the trainer and the replica want a core each, and there is one; run it on a larger machine")
    from benchmarks.peers.compare import make_job

    found: dict[tuple[str, str], list[tuple[float, Measured]]]
    found = {(place, interrupt): [] for place in PLACES for interrupt in options.interrupt}
    with tempfile.TemporaryDirectory() as scratch:
        job = make_job(Path(scratch))
        for number in range(options.rounds):
            for place in PLACES if number % 2 == 0 else reversed(PLACES):
                alone = generation_alone(job, Path(scratch) / f"alone-{number}-{place}", place)
                for interrupt in options.interrupt:
                    directory = Path(scratch) / f"run-{number}-{place}-{interrupt}"
                    measured = training(job, directory, place, options.steps, interrupt)
                    found[place, interrupt].append((alone, measured))
                    print(f"round {number} {place} {interrupt}: alone {alone:.3f} s; {measured}", flush=True)
    text = report(found, options)
    print(text)
    if options.write:
        RESULT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
