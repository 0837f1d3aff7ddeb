"""What publishes cost generation: abort_resume, keep and drain, at once or rolling, against the same load without any.

    OMP_NUM_THREADS=1 python benchmarks/interruption.py [--engine torch|vllm] [--rounds 4] [--write]

Two replicas (Ray actors) decode responses of given lengths, lognormal with a long tail, from the same prompts and seeds
in each mode. A trainer (a Ray actor that takes no step) publishes its weights through the checkpoint engine each time
so many tokens have been sampled, as optimizer steps that consume them would. All modes take turns in one run; ratios
are to the run without publishes of the same round.

`--write` keeps the table in benchmarks/results/interruption.md, beside what it has of the other engine.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import ray

from asyncrl.checkpoint.run_directory import git_commit, package_versions
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.load import environment_defaults
from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import RolloutConfig, SamplingConfig, TorchEngineConfig, VllmEngineConfig
from asyncrl.config.trainer import TrainerConfig
from asyncrl.config.weights import WeightsConfig
from asyncrl.driver.fleet.actor_channels import ReplicaActorChannel
from asyncrl.driver.fleet.trainer_pool import TrainerPool
from asyncrl.driver.publish.checkpoint_engine import CheckpointEngine
from asyncrl.inference.engines import ENGINES
from asyncrl.inference.replica import Replica
from asyncrl.inference.replica_actor import spawn_replica
from asyncrl.rollout.generation import GenerationClient
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl.types import Generation, GenerationRequest, PublishReport, ReplicaState, SamplingParams, TokenChunk
from asyncrl_testing.local import Rows
from asyncrl_testing.random_model import write_random_qwen3

RESULTS = Path(__file__).parent / "results" / "interruption.md"
MODES = ("none", "abort_resume", "keep", "drain", "rolling abort_resume", "rolling drain")
START_S, RUN_S = 240.0, 240.0
REPLICAS = 2
MAX_LEN = 640
MEDIAN_TOKENS, SPREAD, LONGEST = 64, 0.962, 600
"""Of the lognormal lengths: a median of 64 and, but for the cut, a 99th percentile of 600."""
LAST_TOKENS = 64
"""No longer responses among the last ones to start, so that a run does not end with one straggler in the fleet."""
PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Size:
    """`in_flight` responses at once; a publish each `publish_tokens` sampled tokens."""

    requests: int
    in_flight: int
    publish_tokens: int


SIZES = {"torch": Size(512, 64, 6400), "vllm": Size(256, 48, 3200)}


@dataclass(frozen=True)
class Load:
    prompts: np.ndarray
    lengths: np.ndarray

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


def make_load(size: Size) -> Load:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(MEDIAN_TOKENS), SPREAD, size.requests), 4, LONGEST).astype(int)
    short = np.flatnonzero(lengths <= LAST_TOKENS)[: 2 * size.in_flight]
    lengths = np.concatenate([np.delete(lengths, short), lengths[short]])
    return Load(rng.integers(0, 128, (size.requests, PROMPT_TOKENS)).astype(np.int32), lengths)


class CountingChannel(ReplicaActorChannel):
    """Counts the tokens of prompts and responses that are sent again."""

    def __init__(self, replica_id: int, handle: Any, client_id: str) -> None:
        super().__init__(replica_id, handle, client_id)
        self.resent = self.resumed = 0

    async def submit(self, requests: list[GenerationRequest]) -> None:
        again = [r for r in requests if r.first_position > 0]
        self.resumed += len(again)
        self.resent += sum(len(r.prompt_ids) for r in again)
        await super().submit(requests)


class Fleet:
    """Replicas that do not fail: what the checkpoint engine asks of a `ReplicaPool`."""

    def __init__(self, controls: Mapping[int, Any]) -> None:
        self.members = dict(controls)
        self.newcomers = dict(controls)
        self.client: GenerationClient | None = None
        self.rows: Rows | None = None

    def fail(self, replica_id: int, control: Any, why: BaseException | str) -> None:
        raise SystemExit(f"replica {replica_id} failed: {why}")

    async def wait_member(self, timeout_s: float) -> None:
        raise SystemExit("there is no replica")

    async def committed(self, controls: Mapping[int, Any], version: int | None = None) -> int:
        self.newcomers = {}
        self._route("serving", controls, version)
        return len(controls)

    async def hold(self, controls: Collection[int]) -> None:
        self._route("held", controls)

    def _route(self, state: ReplicaState, controls: Collection[int], version: int | None = None) -> None:
        if self.client is not None and self.rows is not None:
            for replica_id in controls:
                self.rows.put(replica_id, state=state, version=version)
            self.client.set_replicas(self.rows.table)

    async def stats(self) -> None: ...

    def publishing(self) -> nullcontext[None]:
        return nullcontext()


@dataclass(frozen=True)
class Run:
    """`cpu_s`: of the replicas. `lag_*`: of tokens when their response is complete, in publishes. `stale`: tokens of
    responses after a first change of the weights that did not abort them: their KV cache is partly of older weights.
    `meanwhile`: tokens that arrived while a publish was under way; `publishing_s`: how long one was."""

    wall_s: float
    cpu_s: float
    tokens: int
    publishes: tuple[PublishReport, ...]
    resent: int
    resumed: int
    stale: int
    interrupted: int
    lag_max: int
    lag_mean: float
    meanwhile: int
    publishing_s: float


class Bench:
    """The fleet and its trainer."""

    def __init__(self, size: Size, controls: Mapping[int, Any], trainer: TrainerPool, poll_interval_s: float) -> None:
        self._size = size
        self._load = make_load(size)
        self._fleet = Fleet(controls)
        self._trainer = trainer
        self._poll_interval_s = poll_interval_s
        self._version = -1
        self._clients = 0

    async def run(self, mode: str, num_requests: int | None = None) -> Run:
        rolling, interrupt = mode.startswith("rolling"), mode.split()[-1].replace("none", "abort_resume")
        self._fleet.client = None
        publisher = CheckpointEngine(
            WeightsConfig(),
            self._trainer,
            self._fleet,
            interrupt=interrupt,  # type: ignore[arg-type]
            rolling=rolling,
        )
        await self._publish(publisher)  # joins sender and receivers, outside of what is measured
        self._clients += 1
        name = f"bench-{self._clients}"
        channels = {i: CountingChannel(i, c.handle, name) for i, c in self._fleet.members.items()}
        self._fleet.rows = Rows(channels)
        table = self._fleet.rows.table
        client = GenerationClient(name, table, request_timeout_s=RUN_S, poll_interval_s=self._poll_interval_s)
        self._fleet.client = client
        try:
            return await self._measure(mode, client, list(channels.values()), publisher, num_requests)
        finally:
            await client.close()

    async def _publish(self, publisher: CheckpointEngine) -> PublishReport:
        report = await publisher.publish(self._version + 1)
        assert report is not None
        self._version += 1
        return report

    async def _cpu_s(self) -> float:
        return sum(stats.cpu_s for stats in [await c.stats(RUN_S) for c in self._fleet.members.values()])

    async def _measure(
        self,
        mode: str,
        client: GenerationClient,
        channels: list[CountingChannel],
        publisher: CheckpointEngine,
        num_requests: int | None,
    ) -> Run:
        sampled, done, due = 0, False, asyncio.Event()
        next_publish = self._size.publish_tokens
        reports: list[PublishReport] = []
        meanwhile, publishing_s = 0, 0.0
        slots = asyncio.Semaphore(self._size.in_flight)

        def count(chunk: TokenChunk, replica_id: int) -> None:
            nonlocal sampled
            sampled += len(chunk.token_ids)
            if sampled >= next_publish:
                due.set()

        async def train() -> None:
            nonlocal next_publish, meanwhile, publishing_s
            while await due.wait() and not done:
                due.clear()
                next_publish += self._size.publish_tokens
                if sampled >= next_publish:
                    due.set()
                before, began = sampled, time.perf_counter()
                reports.append(await self._publish(publisher))
                meanwhile += sampled - before
                publishing_s += time.perf_counter() - began

        async def respond(number: int) -> tuple[Generation, int]:
            length = int(self._load.lengths[number])
            sampling = SamplingParams(max_tokens=length, min_tokens=length)
            async with slots:
                prompt = self._load.prompts[number]
                generation = await client.generate(prompt, sampling, seed=number, on_chunk=count)
                return generation, self._version

        total = num_requests or self._size.requests
        training = asyncio.create_task(train()) if mode != "none" else None
        cpu_s, started = await self._cpu_s(), time.perf_counter()
        answers = await asyncio.gather(*(respond(i) for i in range(total)))
        wall_s = time.perf_counter() - started
        done = True
        due.set()
        if training is not None:
            await training  # not cancelled: that would leave replicas behind a closed gate
        assert sum(len(g.token_ids) for g, _ in answers) == int(self._load.lengths[:total].sum())
        lags = [(version - s.version, s.stop - s.start) for g, version in answers for s in g.segments]
        tokens = sum(n for _, n in lags)
        changed = [g for g, _ in answers if len({s.version for s in g.segments}) > 1]
        stale = sum(len(g.token_ids) - first_change(g) for g in changed) if mode == "keep" else 0
        return Run(
            wall_s=wall_s,
            cpu_s=await self._cpu_s() - cpu_s,
            tokens=tokens,
            publishes=tuple(reports),
            resent=sum(c.resent for c in channels),
            resumed=sum(c.resumed for c in channels),
            stale=stale,
            interrupted=len(changed),
            lag_max=max(lag for lag, _ in lags),
            lag_mean=sum(lag * n for lag, n in lags) / tokens,
            meanwhile=meanwhile,
            publishing_s=publishing_s,
        )


def first_change(generation: Generation) -> int:
    """Position of the first token by other weights than the first."""
    first = generation.segments[0].version
    return next(s.start for s in generation.segments if s.version != first)


# -- the table ---------------------------------------------------------------------------------------------------------

HEAD = [
    "| publishes | wall time, of none (rounds) | CPU of the replicas, of none | tokens/s | publishes | seconds apart "
    "| fleet paused, ms each | publish, ms each | responses with several versions | sent again "
    "| tokens sent again | tokens on stale KV | lag max | lag mean | time in publishes | tokens in publishes |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
]


def line(mode: str, runs: list[Run], base: list[Run], requests: int) -> str:
    ratios = [run.wall_s / none.wall_s for run, none in zip(runs, base, strict=True)]
    speed = statistics.median(run.tokens / run.wall_s for run in runs)
    name = mode if mode != "none" else "none (baseline)"
    if mode == "none":
        walls = [run.wall_s for run in runs]
        cpu_s = statistics.median(run.cpu_s for run in runs)
        return (
            f"| {name} | 1 ({min(walls):.1f} to {max(walls):.1f} s) | 1 ({cpu_s:.1f} s) | {speed:.0f} | 0 |"
            + "  |" * 11
        )
    wall = sum(run.wall_s for run in runs) / sum(run.wall_s for run in base)
    cpu = sum(run.cpu_s for run in runs) / sum(run.cpu_s for run in base)
    middle = runs[ratios.index(sorted(ratios)[len(ratios) // 2])]
    reports = [report for run in runs for report in run.publishes]
    apart = sum(run.wall_s for run in runs) / len(reports)
    return (
        f"| {name} | {wall:.2f} ({', '.join(f'{r:.2f}' for r in ratios)}) | {cpu:.2f} "
        f"| {speed:.0f} | {len(reports) / len(runs):.0f} | {apart:.2f} "
        f"| {1e3 * statistics.median(r.pause_s for r in reports):.0f} "
        f"| {1e3 * statistics.median(r.publish_s for r in reports):.0f} "
        f"| {middle.interrupted / requests:.0%} | {middle.resumed} "
        f"| {middle.resent} ({middle.resent / middle.tokens:.0%} of sampled) | {middle.stale / middle.tokens:.0%} "
        f"| {max(run.lag_max for run in runs)} | {middle.lag_mean:.2f} "
        f"| {middle.publishing_s / middle.wall_s:.0%} | {middle.meanwhile / middle.tokens:.0%} |"
    )


async def measure(engine: str, path: Path, rounds: int) -> list[str]:
    size, runs = SIZES[engine], {mode: [] for mode in MODES}
    rollout = RolloutConfig(
        engine=engine,  # type: ignore[arg-type]
        num_replicas=REPLICAS,
        sampling=SamplingConfig(max_response_tokens=LONGEST),
        torch=TorchEngineConfig(num_slots=size.in_flight // REPLICAS + 8, max_model_len=MAX_LEN, device="cpu"),
        vllm=VllmEngineConfig(
            max_model_len=MAX_LEN, max_num_seqs=64, enforce_eager=True, kv_cache_memory_bytes=256 << 20
        ),
    )
    model = ModelConfig(path=str(path), inference_dtype="float32")
    environment = ENGINES[engine].environment
    controls = {i: spawn_replica(rollout, model, i, num_gpus=0, environment=environment) for i in range(REPLICAS)}
    spec = TrainerSpec(model=model, trainer=TrainerConfig(num_ranks=1), algorithm=AlgorithmConfig())
    trainer = None
    try:
        trainer, *_ = await asyncio.gather(
            TrainerPool.start(spec, None, 0, START_S),
            *(control.call(START_S, Replica.start) for control in controls.values()),
        )
        bench = Bench(size, controls, trainer, rollout.poll_every_s)
        for mode in MODES:
            await bench.run(mode, size.in_flight)  # warms up
        for number in range(rounds):
            for mode in MODES[number % len(MODES) :] + MODES[: number % len(MODES)]:
                runs[mode].append(await bench.run(mode))
                print(f"round {number} {mode}: {runs[mode][-1].wall_s:.1f} s", flush=True)
    finally:
        for control in controls.values():
            control.kill()
        if trainer is not None:
            await trainer.stop()
    load = make_load(size)
    lengths = load.lengths
    about = (
        f"{size.requests} responses of {lengths.min()} to {lengths.max()} tokens (median {np.median(lengths):.0f}, "
        f"mean {lengths.mean():.0f}, 99th percentile {np.percentile(lengths, 99):.0f}), {load.tokens} in all, "
        f"after prompts of {PROMPT_TOKENS}; {size.in_flight} at once on {REPLICAS} replicas; a publish "
        f"each {size.publish_tokens} sampled tokens. {rounds} rounds: ratios are of sums, counts "
        "those of the round in the middle."
    )
    return [about, "", *HEAD, *(line(mode, runs[mode], runs["none"], size.requests) for mode in MODES)]


def hardware() -> str:
    info = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), platform.machine())
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    return f"{cpu}, {os.cpu_count()} cores; Python {platform.python_version()}, {versions}; commit {git_commit()}"


def sections(text: str) -> dict[str, str]:
    """Engine to what stands below its heading in a results file."""
    parts = text.split("\n## ")[1:]
    return {part.partition("\n")[0]: part.partition("\n")[2].strip() for part in parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS}")
    arguments = parser.parse_args()
    about, load, started = hardware(), os.getloadavg()[0], time.monotonic()
    environment = {"env_vars": environment_defaults()}
    ray.init(
        "local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env=environment,
        _system_config={"worker_niceness": 0},  # Ray's 15 would let whatever else runs go first
    )
    try:
        with tempfile.TemporaryDirectory() as directory:
            path = write_random_qwen3(Path(directory), max_position_embeddings=MAX_LEN)
            lines = asyncio.run(measure(arguments.engine, path, arguments.rounds))
    finally:
        ray.shutdown()
    command = f"python benchmarks/interruption.py --engine {arguments.engine} --rounds {arguments.rounds} --write"
    ran = f"`{command}`, {time.monotonic() - started:.0f} s. {about}. Load average {load:.1f} at the start, "
    ran += f"{os.getloadavg()[0]:.1f} at the end (this benchmark makes about 2 by itself)."
    section = "\n".join([ran, "", *lines])
    print(section)
    if arguments.write:
        kept = sections(RESULTS.read_text()) if RESULTS.exists() else {}
        kept[f"Engine {arguments.engine}"] = section
        RESULTS.parent.mkdir(exist_ok=True)
        body = "\n".join(f"\n## {name}\n\n{kept[name]}" for name in sorted(kept))
        RESULTS.write_text(f"{TITLE}{body}\n")


TITLE = """# What publishes cost generation

Random Qwen3 of 0.8M parameters in float32. Wall time is that of the whole load, of the same round's run without
publishes. "Fleet paused" is the time from pause to commit when nothing generates; in `drain` the publish lasts longer,
since no response begins while those in flight end. "On stale KV": tokens that `keep` sampled after a change of weights
in the middle of their response. Lags are in publishes, of tokens when their response was complete.
"Tokens in publishes": share of all tokens that arrived while a publish was under way; beside it the share of the time.
A rolling publish reaches one replica after the other. Ratios that differ by less than single rounds do are noise.
"""


if __name__ == "__main__":
    main()
