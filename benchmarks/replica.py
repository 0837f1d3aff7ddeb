"""What a replica costs beside its bare engine, what a routing decision costs, and what routing saves.

    OMP_NUM_THREADS=1 python benchmarks/replica.py [--engine vllm|sglang] [--quick] [--write]

Overhead: tokens per second through a replica (a Ray actor) and the generation client, against the engine in a process
of its own whose outputs are counted and dropped. Both start with the same engine arguments, get the same prompts and
sampling parameters at once, stream deltas with log-probabilities, and take turns in one run.

Router: one decision among 1,000 replicas; the time to hash a prompt apart. Prefix cache: conversations whose prompts
grow by their answers, on two replicas, routed in four ways.

`--write` keeps the tables in benchmarks/results/replica.md (replica_sglang.md); `--quick` leaves the larger model out
and repeats less.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import multiprocessing
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import psutil
import ray
from bare_engines import BARE_ENGINES, BareEngine, model_config

from asyncrl.checkpoint.run_directory import git_commit, package_versions
from asyncrl.config.load import environment_defaults
from asyncrl.config.rollout import RolloutConfig
from asyncrl.driver.fleet.actor_channels import ReplicaActorChannel
from asyncrl.inference.engines import ENGINES
from asyncrl.inference.replica import Replica
from asyncrl.inference.replica_actor import ReplicaControl, spawn_replica
from asyncrl.remote.reply import reply
from asyncrl.remote.waits import replica as replica_process
from asyncrl.rollout.generation import GenerationClient
from asyncrl.rollout.router import Affinity, Router, prefix_blocks
from asyncrl.types import GenerationRequest, SamplingParams
from asyncrl_testing.local import Rows
from asyncrl_testing.random_model import write_random_qwen3

RESULTS = Path(__file__).parent / "results"
START_S, RUN_S = 240.0, 180.0
NICENESS = 15
"""Of Ray's workers; this process takes the same and the bare engine inherits it: none of them goes first."""
PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Size:
    """A model and the load it gets: `tokens` sampled per request by the number of requests at once."""

    name: str
    shape: dict[str, int]
    tokens: dict[int, int]
    vocab_size: int


SIZES = (
    Size("0.8M", {"max_position_embeddings": 4096}, {64: 128, 256: 64}, 128),
    Size(
        "54M",
        {
            "max_position_embeddings": 4096, "vocab_size": 32000, "hidden_size": 512, "num_hidden_layers": 12,
            "num_attention_heads": 8, "head_dim": 64, "num_key_value_heads": 4, "intermediate_size": 1536,
        },
        {64: 48, 256: 16},
        32000,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Load:
    """`seed` differs from run to run, so that no prompt is in a cache."""

    requests: int
    tokens: int
    vocab_size: int
    seed: int

    def prompts(self) -> np.ndarray:
        """[requests, PROMPT_TOKENS] int32."""
        shape = (self.requests, PROMPT_TOKENS)
        return np.random.default_rng(self.seed).integers(0, self.vocab_size, shape).astype(np.int32)

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.tokens)


@dataclass(frozen=True)
class Run:
    """`wall_s` from the first request to the last token; CPU seconds of the processes below the engine's owner, of that
    process itself, and of the client in this process."""

    wall_s: float
    core_s: float
    front_s: float
    client_s: float = 0.0


def cpu_of(pid: int) -> tuple[float, float]:
    """CPU seconds of the processes below `pid`, and of `pid` itself."""
    process = psutil.Process(pid)

    def seconds(p: psutil.Process) -> float:
        times = p.cpu_times()
        return times.user + times.system

    return sum(seconds(child) for child in process.children(recursive=True)), seconds(process)


async def check_equal(bare: dict[str, object], control: ReplicaControl, engine: BareEngine) -> None:
    """Raises SystemExit: the two run under different conditions, and no ratio of them means anything."""
    call = control.handle.__ray_call__.remote(lambda replica: engine.conditions_of_adapter(replica._engine))
    replica = await reply(call, timeout_s=30.0, call="conditions", process=replica_process(0))
    if bare != replica or os.nice(0) != NICENESS:
        raise SystemExit(f"the bare engine runs as {bare}, the replica as {replica}, the client with {os.nice(0)}")


# -- the bare engine ---------------------------------------------------------------------------------------------------


def bare_process(pipe: Connection, engine: BareEngine, path: Path) -> None:
    """Answers every Load with a Run until it gets None."""
    engine.start(path)
    asyncio.run(answer_loads(pipe, engine))
    engine.stop()


async def answer_loads(pipe: Connection, engine: BareEngine) -> None:
    pipe.send((engine.conditions(engine.inner), engine.block_tokens))
    for number in itertools.count():
        load = await asyncio.to_thread(pipe.recv)
        if load is None:
            return
        pipe.send(await bare_run(engine, load, f"bare-{number}"))


async def bare_run(engine: BareEngine, load: Load, tag: str) -> Run:
    prompts = load.prompts()
    requests = [GenerationRequest(f"{tag}-{i}", prompt, load.sampling, i) for i, prompt in enumerate(prompts)]
    core, front = cpu_of(os.getpid())
    started = time.perf_counter()
    counts = await asyncio.gather(*(engine.generate(request, load.vocab_size) for request in requests))
    wall_s = time.perf_counter() - started
    assert sum(counts) == load.requests * load.tokens
    core_end, front_end = cpu_of(os.getpid())
    return Run(wall_s, core_end - core, front_end - front)


class Bare:
    """An engine without a replica, in a process of its own."""

    def __init__(self, engine: BareEngine, path: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=bare_process, args=(theirs, engine, path))
        self._process.start()

    async def answer(self, timeout_s: float):
        if not await asyncio.to_thread(self._pipe.poll, timeout_s):
            raise SystemExit(f"the bare engine did not answer within {timeout_s} s")
        return self._pipe.recv()

    async def run(self, load: Load) -> Run:
        self._pipe.send(load)
        return await self.answer(RUN_S)

    def close(self) -> None:
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(40.0)
        if self._process.is_alive():
            self._process.kill()


# -- replicas ----------------------------------------------------------------------------------------------------------


def spawn(engine: BareEngine, path: Path, replica_id: int) -> ReplicaControl:
    environment = ENGINES[engine.name].environment
    return spawn_replica(
        engine.rollout, model_config(path), replica_id, num_gpus=0, environment=environment, load_real_weights=True
    )


def client_of(name: str, replicas: Mapping[int, ReplicaControl]) -> GenerationClient:
    channels = {i: ReplicaActorChannel(i, control.handle, name) for i, control in replicas.items()}
    return GenerationClient(
        name,
        Rows(channels).table,
        request_timeout_s=RUN_S,
        poll_interval_s=RolloutConfig().poll_every_s,
    )


async def replica_run(client: GenerationClient, pid: int, load: Load) -> Run:
    prompts = load.prompts()
    core, front = cpu_of(pid)
    client_s, started = time.process_time(), time.perf_counter()
    answers = await asyncio.gather(
        *(client.generate(prompt, load.sampling, seed=number) for number, prompt in enumerate(prompts))
    )
    wall_s, client_s = time.perf_counter() - started, time.process_time() - client_s
    assert sum(len(answer.token_ids) for answer in answers) == load.requests * load.tokens
    core_end, front_end = cpu_of(pid)
    return Run(wall_s, core_end - core, front_end - front, client_s)


@dataclass(frozen=True)
class Compared:
    """Runs in pairs that took turns."""

    model: str
    requests: int
    tokens: int
    bare: list[Run]
    replica: list[Run]

    def speeds(self, runs: list[Run]) -> list[float]:
        return [self.requests * self.tokens / run.wall_s for run in runs]

    @property
    def ratio(self) -> float:
        return statistics.median(self.speeds(self.replica)) / statistics.median(self.speeds(self.bare))

    @property
    def pairs(self) -> list[float]:
        return [b / a for a, b in zip(self.speeds(self.bare), self.speeds(self.replica), strict=True)]

    def cpu_us(self, runs: list[Run]) -> list[float]:
        """Per token: below the owner of the engine, of the owner, of the client."""
        columns = zip(*((run.core_s, run.front_s, run.client_s) for run in runs), strict=True)
        return [statistics.median(column) / (self.requests * self.tokens) * 1e6 for column in columns]

    def lines(self) -> list[str]:
        pairs, lines = self.pairs, []
        for name, runs in (("bare", self.bare), ("replica", self.replica)):
            speeds, cpu = self.speeds(runs), self.cpu_us(runs)
            ratio = "" if name == "bare" else f"{self.ratio:.2f} ({min(pairs):.2f} to {max(pairs):.2f})"
            lines.append(
                f"| {self.model} | {self.requests} x {self.tokens} | {name} | {statistics.median(speeds):.0f} "
                f"({min(speeds):.0f} to {max(speeds):.0f}) | {ratio} | "
                + " | ".join(f"{us:.0f}" for us in (*cpu, sum(cpu)))
                + " |"
            )
        return lines


async def compare(size: Size, bare: Bare, control: ReplicaControl, pid: int, repeats: int) -> list[Compared]:
    """One model under every load."""
    client, found, seeds = client_of(f"bench-{size.name}", {0: control}), [], itertools.count()
    try:
        for requests, tokens in size.tokens.items():
            runs: dict[str, list[Run]] = {"bare": [], "replica": []}
            for repeat in range(1 if found else 0, repeats + 1):
                load = Load(requests, tokens if repeat else 8, size.vocab_size, next(seeds))
                pair = {"bare": lambda load=load: bare.run(load)}
                pair["replica"] = lambda load=load: replica_run(client, pid, load)
                for name in sorted(pair, reverse=repeat % 2 == 0):
                    run = await pair[name]()
                    if repeat:  # the first of all does not count: it warms up
                        runs[name].append(run)
            found.append(Compared(size.name, requests, tokens, **runs))
            print("\n".join(found[-1].lines()), flush=True)
    finally:
        await client.close()
    return found


OVERHEAD_HEAD = [
    "| model | requests x tokens | engine | tokens/s (spread) | of bare (pairs) | processes below | owner "
    "| client | all |",
    "|---|---|---|---|---|---|---|---|---|",
]


# -- the router --------------------------------------------------------------------------------------------------------


def decision_us(arguments: list[tuple]) -> tuple[float, float]:
    """Median and 99th percentile of a pick among 1,000 replicas with about 3,000 requests in flight."""
    router, chance = Router(), random.Random(0)
    for replica_id in range(1000):
        router.put(replica_id)
    in_flight, times = [], []
    for words in arguments:
        started = time.perf_counter_ns()
        chosen = router.pick(*words)
        times.append((time.perf_counter_ns() - started) / 1e3)
        in_flight.append(chosen)
        if len(in_flight) > 3000:
            router.done(in_flight.pop(chance.randrange(len(in_flight))))
    settled = times[len(times) // 5 :]
    return statistics.median(settled), statistics.quantiles(settled, n=100)[98]


@dataclass(frozen=True)
class Decision:
    name: str
    median_us: float
    late_us: float
    hash_us: float | None = None


def decisions() -> list[Decision]:
    rng, count = np.random.default_rng(0), 5000
    sessions = [(f"session {i % 500}",) for i in range(count)]
    found = [
        Decision("least loaded", *decision_us([()] * count)),
        Decision("session, 500 of them", *decision_us(sessions)),
    ]
    for tokens in (2048, 8192):
        prompts = rng.integers(0, 32000, (300, tokens)).astype(np.int32)
        times, hashed = [], []
        for prompt in prompts:
            started = time.perf_counter()
            hashed.append(prefix_blocks(prompt))
            times.append((time.perf_counter() - started) * 1e6)
        hash_us = statistics.median(times)
        known = [("", hashed[i % 300]) for i in range(count)]
        unknown = [("", [hash((i, j)) for j in range(len(hashed[0]))]) for i in range(4000)]
        found.append(Decision(f"prefix of {tokens} tokens, known", *decision_us(known), hash_us))
        found.append(Decision(f"prefix of {tokens} tokens, unknown", *decision_us(unknown), hash_us))
    return found


def decision_lines(found: list[Decision]) -> list[str]:
    lines = ["| decision | median, us | 99th percentile, us | hash of the prompt, us |", "|---|---|---|---|"]
    for d in found:
        hash_us = "" if d.hash_us is None else f"{d.hash_us:.0f}"
        lines.append(f"| {d.name} | {d.median_us:.1f} | {d.late_us:.1f} | {hash_us} |")
    return lines


# -- the prefix cache --------------------------------------------------------------------------------------------------

USERS, TURNS, FIRST_TOKENS, NEW_TOKENS = 8, 4, 384, 256
ANSWER_TOKENS = (16, 96)
"""Drawn evenly for each turn, so that users overtake each other."""
ROUTINGS = ("session id", "prefix", "least loaded", "random")


@dataclass
class Cached:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    possible_tokens: int = 0
    moved: int = 0
    later_turns: int = 0
    wall_s: float = 0.0


async def converse(
    routing: str, seed: int, together: GenerationClient, alone: list[GenerationClient], block_tokens: int
) -> Cached:
    """All users at once, each turn as soon as the one before is answered."""
    rng, chance, found = np.random.default_rng(seed), random.Random(seed), Cached()
    texts = rng.integers(0, SIZES[0].vocab_size, (USERS, FIRST_TOKENS + NEW_TOKENS * TURNS)).astype(np.int32)
    lengths = rng.integers(*ANSWER_TOKENS, (USERS, TURNS))

    async def user(number: int) -> None:
        prompt, text = np.zeros(0, np.int32), texts[number]
        before, at, home = 0, 0, None
        for turn in range(TURNS):
            new = FIRST_TOKENS if turn == 0 else NEW_TOKENS
            prompt, at = np.concatenate([prompt, text[at : at + new]]), at + new
            client = chance.choice(alone) if routing == "random" else together
            session = f"{seed}-{number}" if routing == "session id" else ""
            prefix = prefix_blocks(prompt) if routing == "prefix" else ()
            sampling = SamplingParams(max_tokens=int(lengths[number, turn]))
            answer = await client.generate(prompt, sampling, session_id=session, affinity=Affinity(prefix), seed=number)
            found.prompt_tokens += len(prompt)
            found.cached_tokens += answer.cached_tokens
            found.possible_tokens += before // block_tokens * block_tokens
            found.later_turns += home is not None
            found.moved += home is not None and answer.segments[0].replica_id != home
            home = answer.segments[0].replica_id
            prompt = np.concatenate([prompt, answer.token_ids])
            before = len(prompt) - 1  # nobody computed the KV of the last token

    started = time.perf_counter()
    await asyncio.gather(*(user(i) for i in range(USERS)))
    found.wall_s = time.perf_counter() - started
    return found


async def route(replicas: Mapping[int, ReplicaControl], block_tokens: int, rounds: int) -> dict[str, Cached]:
    """The sums over all rounds, by routing."""
    together = client_of("together", replicas)
    alone = [client_of(f"alone-{i}", {i: control}) for i, control in replicas.items()]
    found, seeds = {routing: Cached() for routing in ROUTINGS}, itertools.count(1000)
    try:
        for _ in range(rounds):
            for routing, total in found.items():
                once = await converse(routing, next(seeds), together, alone, block_tokens)
                for field in fields(Cached):
                    setattr(total, field.name, getattr(total, field.name) + getattr(once, field.name))
    finally:
        for client in (together, *alone):
            await client.close()
    return found


def cache_lines(found: dict[str, Cached]) -> list[str]:
    lines = [
        "| routing | cached of prompt tokens | possible | of the possible | turns on another replica | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for routing, c in found.items():
        lines.append(
            f"| {routing} | {c.cached_tokens} / {c.prompt_tokens} = {c.cached_tokens / c.prompt_tokens:.1%} "
            f"| {c.possible_tokens / c.prompt_tokens:.1%} | {c.cached_tokens / c.possible_tokens:.0%} "
            f"| {c.moved} of {c.later_turns} | {c.wall_s:.1f} |"
        )
    return lines


# -- the whole ---------------------------------------------------------------------------------------------------------


async def measure_size(
    engine: BareEngine, size: Size, path: Path, repeats: int, cache_rounds: int
) -> tuple[list[Compared], dict[str, Cached], int]:
    """The overhead; with `cache_rounds` the effect of routing; tokens of a block of the cache."""
    bare = Bare(engine, path)
    replicas = {i: spawn(engine, path, i) for i in range(2 if cache_rounds else 1)}
    try:
        started = await asyncio.gather(*(control.call(START_S, Replica.start) for control in replicas.values()))
        of_bare, block_tokens = await bare.answer(START_S)
        await check_equal(of_bare, replicas[0], engine)
        compared = await compare(size, bare, replicas[0], started[0].pid, repeats)
        bare.close()
        routed = await route(replicas, block_tokens, cache_rounds) if cache_rounds else {}
        return compared, routed, block_tokens
    finally:
        bare.close()
        await asyncio.gather(
            *(control.call(30.0, Replica.stop) for control in replicas.values()), return_exceptions=True
        )
        for control in replicas.values():
            control.kill()


async def measure(engine: BareEngine, directory: Path, *, quick: bool) -> list[str]:
    compared: list[Compared] = []
    routed, block_tokens = {}, 0
    for size in SIZES[: 1 if quick else None]:
        path = write_random_qwen3(directory / size.name, **size.shape)
        small = size is SIZES[0]
        rounds = (1 if quick else 2) if small else 0
        found, by_routing, tokens = await measure_size(engine, size, path, 3 if quick or not small else 5, rounds)
        compared += found
        if small:
            routed, block_tokens = by_routing, tokens
    decided = decisions()
    return [
        f"## A replica beside bare {engine.title}\n",
        f"Random Qwen3 in float32, {PROMPT_TOKENS} prompt tokens, all requests at once, medians of runs that take",
        f"turns. The right-hand columns are CPU microseconds per sampled token: {engine.processes}.\n",
        *OVERHEAD_HEAD,
        *(line for c in compared for line in c.lines()),
        "\n## One decision among 1,000 replicas\n",
        *decision_lines(decided),
        "\n## Prefix cache, two replicas\n",
        f"{USERS} users at once, {TURNS} turns each: {FIRST_TOKENS} tokens, then per turn the answer of "
        f"{ANSWER_TOKENS[0]} to {ANSWER_TOKENS[1]} and {NEW_TOKENS} new ones.",
        f"Possible: every whole block of {block_tokens} tokens of the turn before.\n",
        *cache_lines(routed),
        "\n## What this says\n",
        *conclusions(engine, compared, decided, routed),
    ]


def conclusions(
    engine: BareEngine, compared: list[Compared], decided: list[Decision], routed: dict[str, Cached]
) -> list[str]:
    worst = min(compared, key=lambda c: c.ratio)
    ratios = ", ".join(f"{c.ratio:.2f} ({c.model}, {c.requests})" for c in compared)
    pairs = [pair for c in compared for pair in c.pairs]
    own = sum(worst.cpu_us(worst.bare))
    slowest = max(decided, key=lambda d: d.median_us)
    hits = ", ".join(f"{c.cached_tokens / c.prompt_tokens:.0%} by {name}" for name, c in routed.items())
    return [
        f"A replica and its client reach these shares of bare {engine.title}'s tokens per second: {ratios}; single "
        f"pairs range from {min(pairs):.2f} to {max(pairs):.2f}, and what lies above 1 is the error of this "
        f"measurement, not a gain; where the share is least, a token costs "
        f"{sum(worst.cpu_us(worst.replica)) - own:.0f} us of CPU "
        f"on top of the engine's {own:.0f}.",
        f"The slowest decision ({slowest.name}) takes {slowest.median_us:.0f} us; a session or the least loaded one "
        f"{max(d.median_us for d in decided[:2]):.1f} us.",
        f"Of the prompt tokens, {hits} were in the cache.",
    ]


def hardware() -> str:
    info = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), platform.machine())
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    load = f"load average {os.getloadavg()[0]:.1f} at the start"
    return (
        f"{cpu}, {os.cpu_count()} cores, {load}; Python {platform.python_version()}, {versions}; commit {git_commit()}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small model only, fewer repetitions")
    parser.add_argument("--write", action="store_true", help=f"write into {RESULTS}")
    parser.add_argument("--engine", choices=list(BARE_ENGINES), default="vllm")
    arguments = parser.parse_args()
    about, started = hardware(), time.monotonic()
    engine = BARE_ENGINES[arguments.engine]()
    os.environ.update(ENGINES[engine.name].environment)  # of the bare engine; a replica gets it from `spawn_replica`
    environment = {"env_vars": environment_defaults()}
    ray.init(
        "local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, runtime_env=environment
    )
    os.nice(NICENESS)
    try:
        with tempfile.TemporaryDirectory() as directory:
            lines = asyncio.run(measure(engine, Path(directory), quick=arguments.quick))
    finally:
        ray.shutdown()
    flags = f"{' --quick' * arguments.quick}{' --write' * arguments.write}"
    command = f"python benchmarks/replica.py --engine {engine.name}{flags}"
    head = f"# Replicas of {engine.title} and routing\n\n`{command}`, {time.monotonic() - started:.0f} s.\n\n{about}\n"
    text = "\n".join([head, *lines]) + "\n"
    print(text)
    if arguments.write:
        (RESULTS / engine.results).write_text(text)


if __name__ == "__main__":
    main()
