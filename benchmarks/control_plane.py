"""What the control plane carries: real rollouters and a real message queue over replicas that write by the clock.

    python benchmarks/control_plane.py [--replicas 8 32 64] [--rollouters 1 2] [--seconds 20] [--write]

All replicas are synthetic and live in one process: every request gets 50 tokens a second until its length, 256 to 512
tokens, is reached, and its tokens are collected as those of a replica's outbox are. Groups of 16 responses; a driver
leases, commits and publishes as fast as groups are ready. The figures are of the time after the first 10 seconds:

- CPU time of the rollouters per token and of the queue per group, as the processes count it;
- the delay of a call to the first rollouter that does nothing, which is how late its event loop is;
- how many replicas of 64 requests one core of rollouter carries, from the CPU time at this load.

Writes benchmarks/results/control_plane.md with --write.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

import numpy as np
import ray

from asyncrl.checkpoint.run_directory import git_commit, package_versions
from asyncrl.config.load import load_recipe
from asyncrl.driver.actors import untraced
from asyncrl.driver.cluster.ray_session import ray_cluster
from asyncrl.driver.preflight import check_recipe
from asyncrl.queue.message_queue import MessageQueue, QueueSpec
from asyncrl.remote.actor_client import CALL_TIMEOUT_S, ActorClient
from asyncrl.remote.connection import HasConnections
from asyncrl.remote.waits import MESSAGE_QUEUE, replica
from asyncrl.rollout.rollouter import Rollouter, RolloutSpec
from asyncrl.types import GenerationRequest, LeaseManifest, ReplicaRow, ReplicaTable, TokenChunk

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "control_plane.md"
TOKENS_PER_S, SHORTEST, LONGEST = 50.0, 256, 512
REQUESTS, GROUP, MAX_LAG, WARM_S = 64, 16, 3, 10.0
LOOK_S = 0.02
"""Shortest time between two looks of a collection that finds nothing."""
PROBE_S = 0.1
"""Time between two calls that measure how late the rollouter is. They go through Ray, and each costs the rollouter as
much as some hundred tokens."""


@dataclass
class Writing:
    """A request under way."""

    length: int
    began: float
    sent: int = 0


@dataclass
class Written:
    """The requests of one client at one replica."""

    requests: dict[str, Writing] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    gathered: float = field(default_factory=time.monotonic)
    """When all tokens were last collected."""


class SyntheticReplicas(HasConnections):
    """All replicas: a Ray actor with the calls of `Replica`, each with the id of the replica."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, str], Written] = {}
        self._tokens = self._submits = self._collects = 0

    async def submit(self, replica_id: int, client_id: str, requests: list[GenerationRequest]) -> None:
        self._submits += 1
        written = self._of.setdefault((replica_id, client_id), Written())
        now = time.monotonic()
        for request in requests:
            length = SHORTEST + request.seed % (LONGEST - SHORTEST + 1)
            written.requests[request.request_id] = Writing(min(length, request.sampling.max_tokens), now)

    async def collect(self, replica_id: int, client_id: str, wait_s: float, gather_s: float) -> list[TokenChunk]:
        """As an outbox hands tokens out. Between two looks it sleeps until the clock ends a request, at least
        `LOOK_S`."""
        self._collects += 1
        written, deadline = self._of.setdefault((replica_id, client_id), Written()), time.monotonic() + wait_s
        while True:
            now = time.monotonic()
            gathers = now >= written.gathered + gather_s
            if gathers:
                written.gathered = now
            chunks = list(self._take(written, now, gathers))
            if chunks or now > deadline:
                return chunks
            ends = min((w.began + w.length / TOKENS_PER_S for w in written.requests.values()), default=deadline)
            await asyncio.sleep(max(LOOK_S, min(ends, deadline, written.gathered + gather_s) - now))

    async def abort(self, replica_id: int, request_ids: list[str]) -> None:
        for (where, _), written in self._of.items():
            if where == replica_id:
                written.aborted += [i for i in request_ids if i in written.requests]

    async def counts(self) -> tuple[int, int, int]:
        """Tokens, submits and collects so far."""
        return self._tokens, self._submits, self._collects

    def _take(self, written: Written, now: float, gathers: bool):
        for request_id in written.aborted:
            if written.requests.pop(request_id, None) is not None:
                yield TokenChunk(request_id, np.zeros(0, np.int32), np.zeros(0, np.float32), 0, "abort")
        written.aborted = []
        for request_id, writing in list(written.requests.items()):
            ready = min(writing.length, int((now - writing.began) * TOKENS_PER_S + 1e-6))
            if (count := ready - writing.sent) and (gathers or ready == writing.length):
                writing.sent = ready
                self._tokens += count
                reason = "length" if ready == writing.length else None
                if reason:
                    del written.requests[request_id]
                yield TokenChunk(request_id, np.full(count, 5, np.int32), np.zeros(count, np.float32), 0, reason)


class SyntheticChannel:
    """A `ReplicaChannel` to one of the replicas."""

    def __init__(self, replica_id: int, handle, client_id: str) -> None:
        self._id, self._client_id = replica_id, client_id
        self._actor = ActorClient(handle, replica(replica_id), is_direct=True)

    async def submit(self, requests: list[GenerationRequest]) -> None:
        await self._actor.call(CALL_TIMEOUT_S, SyntheticReplicas.submit, self._id, self._client_id, requests)

    async def collect(self, wait_s: float, gather_s: float) -> list[TokenChunk]:
        timeout_s = wait_s + CALL_TIMEOUT_S
        return await self._actor.call(timeout_s, SyntheticReplicas.collect, self._id, self._client_id, wait_s, gather_s)

    async def abort(self, request_ids: list[str]) -> None:
        await self._actor.call(CALL_TIMEOUT_S, SyntheticReplicas.abort, self._id, request_ids)


@dataclass(frozen=True)
class Figures:
    replicas: int
    rollouters: int
    in_flight: float
    tokens_per_s: float
    cores: float
    us_per_token: float
    late_p99_ms: float
    late_max_ms: float
    queue_us_per_group: float
    submits_per_s: float
    collects_per_s: float

    @property
    def replicas_per_core(self) -> float:
        """Replicas with all their requests under way: here groups that wait for their step keep some of the places."""
        return self.in_flight / REQUESTS / self.cores


async def measure(num_replicas: int, num_rollouters: int, seconds: float, directory: Path) -> Figures:
    words = [
        f"run.dir={directory / 'run'}",
        "mode=fully_async",
        f"staleness.max_lag={MAX_LAG}",
        f"batch.groups_per_step={max(1, num_replicas * REQUESTS // GROUP // (MAX_LAG + 1))}",
        f"batch.group_size={GROUP}",
        f"rollout.num_rollouters={num_rollouters}",
        f"rollout.sampling.max_response_tokens={LONGEST}",
        "run.max_steps=1000000",
        "observability.samples_per_step=0",
        "observability.trace_every_groups=0",
    ]
    recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml", words)
    train = check_recipe(recipe, use_hub=False, trains=True).train
    actor = {"num_cpus": 0, "max_concurrency": 1000}
    synthetic = ray.remote(SyntheticReplicas).options(**actor).remote()
    spec = QueueSpec(recipe, directory / "events.jsonl")
    made = ray.remote(untraced(MessageQueue)).options(**actor).remote(spec)
    queue: ActorClient[MessageQueue] = ActorClient(made, MESSAGE_QUEUE, is_direct=True)
    rollouters = [
        ray.remote(untraced(Rollouter)).options(**actor).remote(RolloutSpec(recipe, train, {}), queue, name)
        for name in (f"rollouter-{i}" for i in range(num_rollouters))
    ]
    await asyncio.gather(*(r.start.remote() for r in rollouters))
    rows = {i: ReplicaRow(None, "serving", 0) for i in range(num_replicas)}
    for index, rollouter in enumerate(rollouters):
        of_client = {i: ReplicaRow(SyntheticChannel(i, synthetic, f"rollouter-{index}"), "serving", 0) for i in rows}
        table = ReplicaTable(1, of_client)
        await rollouter.set_replicas.remote(table, table.part(index, num_rollouters))
    running = [asyncio.wrap_future(r.run.remote().future()) for r in rollouters]
    training = asyncio.create_task(train_at_once(queue))
    try:
        await asyncio.sleep(WARM_S)
        late = asyncio.create_task(lateness(rollouters[0]))
        before = await look(synthetic, rollouters, queue)
        began = time.monotonic()
        in_flight = []
        while (wall_s := time.monotonic() - began) < seconds:
            await asyncio.sleep(1.0)
            in_flight.append(sum(s.requests for s in await asyncio.gather(*(r.stats.remote() for r in rollouters))))
        after = await look(synthetic, rollouters, queue)
        late.cancel()
        delays = await late
    finally:
        training.cancel()
        for actor_handle in (*rollouters, queue.handle, synthetic):
            ray.kill(actor_handle)
        await asyncio.gather(training, *running, return_exceptions=True)
    tokens, submits, collects, cpu_s, queue_s, groups = (b - a for a, b in zip(before, after, strict=True))
    return Figures(
        num_replicas,
        num_rollouters,
        statistics.fmean(in_flight),
        tokens / wall_s,
        cpu_s / wall_s,
        1e6 * cpu_s / tokens,
        1e3 * float(np.quantile(delays, 0.99)),
        1e3 * max(delays),
        1e6 * queue_s / groups,
        submits / wall_s,
        collects / wall_s,
    )


async def look(synthetic, rollouters, queue: ActorClient[MessageQueue]) -> tuple[float, ...]:
    """Tokens, submits, collects, CPU seconds of the rollouters and of the queue, and groups trained so far."""
    stats = await asyncio.gather(*(r.stats.remote() for r in rollouters))
    counts = await queue.call(CALL_TIMEOUT_S, MessageQueue.counts)
    calls = await synthetic.counts.remote()
    return *calls, sum(s.cpu_s for s in stats), await queue.call(10, MessageQueue.ping), counts.trained


async def lateness(rollouter) -> list[float]:
    """Seconds that calls to the rollouter took, until this task is cancelled."""
    found: list[float] = []
    try:
        while True:
            began = time.monotonic()
            await rollouter.stats.remote()
            found.append(time.monotonic() - began)
            await asyncio.sleep(PROBE_S)
    except asyncio.CancelledError:
        return found


async def train_at_once(queue: ActorClient[MessageQueue]) -> None:
    step = 0
    while True:
        if isinstance(await queue.call(1.0 + CALL_TIMEOUT_S, MessageQueue.lease, step, 1.0), LeaseManifest):
            await queue.call(CALL_TIMEOUT_S, MessageQueue.commit, step)
            step += 1
            await queue.call(CALL_TIMEOUT_S, MessageQueue.published, step)


def report(found: list[Figures], seconds: float) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in package_versions().items())
    lines = [
        "# The control plane",
        "",
        f"`python benchmarks/control_plane.py --seconds {seconds:g}`: synthetic replicas of {REQUESTS} requests, 50",
        f"tokens a second each, {SHORTEST} to {LONGEST} tokens, groups of {GROUP}; all on {os.cpu_count()} cores.",
        "",
        f"Commit {git_commit()}; {versions}.",
        "",
        "| replicas | rollouters | in flight | tokens/s | rollouter cores | us CPU per token | "
        "call late p99 / max, ms | queue us per group | submits/s | collects/s | "
        f"replicas of {REQUESTS} requests per core of rollouter |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for f in found:
        lines.append(
            f"| {f.replicas} | {f.rollouters} | {f.in_flight:.0f} | {f.tokens_per_s / 1e3:.1f}k | {f.cores:.2f} | "
            f"{f.us_per_token:.2f} | {f.late_p99_ms:.0f} / {f.late_max_ms:.0f} | {f.queue_us_per_group:.0f} | "
            f"{f.submits_per_s:.0f} | {f.collects_per_s:.0f} | "
            f"{f.replicas_per_core:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--rollouters", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    for script in ("make_tiny_model.py", "make_arithmetic_dataset.py"):
        subprocess.run([sys.executable, str(ROOT / "tools" / script)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    found = []
    for num_rollouters in options.rollouters:
        for num_replicas in options.replicas:
            with tempfile.TemporaryDirectory() as scratch, ray_cluster(None, Path(scratch) / "log"):
                figures = asyncio.run(measure(num_replicas, num_rollouters, options.seconds, Path(scratch)))
            print(figures, flush=True)
            found.append(figures)
    text = report(found, options.seconds)
    print(text)
    if options.write:
        RESULT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
