"""The trainer ranks as one object for the coordinator; every wait has a deadline."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import numpy as np
import ray

from asyncrl.checkpoint.digests import FileDigest
from asyncrl.config.weights import WeightsConfig
from asyncrl.errors import AsyncRLError, DeadlineExceeded, ProcessDied, WeightTransferError, cause, explain
from asyncrl.queue.message_queue import MessageQueue
from asyncrl.remote.actor_client import ActorClient, ActorHandle
from asyncrl.remote.reply import reply_now
from asyncrl.remote.tasks import cancel
from asyncrl.remote.waits import MESSAGE_QUEUE, trainer_rank
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl.trainer.trainer_worker import TrainerWorker
from asyncrl.types import (
    Digest,
    EncodedWeights,
    Manifest,
    PartsSource,
    RankPlan,
    SendingRank,
    TensorSpec,
    TrainMetrics,
    Trajectory,
    TrajectoryKey,
    TransferSource,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

FETCH_TIMEOUT_S = 120.0
BLAME_S = 5.0
"""When one rank fails, the others fail with it. Time to find the rank that died, and then again to find a rank that
does not answer a ping."""
STOP_TIMEOUT_S = 3.0


def _fetched(queue: ActorHandle, method: Callable[..., Awaitable[T]], keys: Sequence[TrajectoryKey]) -> T:
    """Calls the queue actor directly, in a rank; see `TrainerWorker`."""
    answer = getattr(queue, method.__name__).remote(list(keys))
    call = f"fetch({len(keys)} sequences)"
    return reply_now(answer, timeout_s=FETCH_TIMEOUT_S, call=call, process=MESSAGE_QUEUE)


class TrainerPool:
    """Owns the rank actors; built by `start`, and belongs to that event loop. Calls are sequential, except:

    * `ping`, `fetch_ahead`, `interrupt_weights` and `save` may run concurrently with any call;
    * if snapshots are sent, `open_weights` and `send_weights` too, except with `snapshot_weights`.

    The error of a failed call names the rank to blame in `.process`: the rank that died, else a rank that does not
    answer a ping (its process is stopped, or its machine is lost). If all ranks answer, it is the error that a rank
    raised itself.

    The ranks remain usable after RunFailed from `train_step`, StorageError from `save`, and WeightTransferError and
    DeadlineExceeded from `send_weights`. After any other error they may be in different collectives: stop the pool and
    start a new one.
    """

    def __init__(self, spec: TrainerSpec, actors: Sequence[ActorHandle]) -> None:
        self._spec = spec
        self._actors = [ActorClient(actor, trainer_rank(rank), is_direct=True) for rank, actor in enumerate(actors)]
        self._killed: list[ActorClient] = []
        self._parts: tuple[SendingRank, ...] = ()
        """The backend's sending ranks."""
        self._senders: tuple[SendingRank, ...] = ()
        """The ranks whose sending ends were opened last."""

    @classmethod
    async def start(
        cls,
        spec: TrainerSpec,
        queue_handle: ActorHandle,
        num_gpus_per_rank: float,
        timeout_s: float,
        *,
        strategies: Sequence[Any] | None = None,
    ) -> TrainerPool:
        """Starts `spec.trainer.num_ranks` actors and loads the model.

        Args:
            queue_handle: actor handle of the MessageQueue.
            num_gpus_per_rank: 0 trains on the CPU.
            timeout_s: for the whole start.
            strategies: Ray's scheduling strategy of each rank; None leaves all of them to Ray.

        Raises:
            ConfigError: the model cannot be read or trained.
            DeadlineExceeded, ProcessDied: naming the rank. Nothing is left running.
        """
        # No CPUs: the run places the ranks, not Ray's count of cores.
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": num_gpus_per_rank}
        if num_gpus_per_rank == 0:
            options["runtime_env"] = {"env_vars": spec.environment}
        elif (
            spec.trainer.backend == "megatron"
        ):  # its transfers overlap with arithmetic in the order of their launch only
            options["runtime_env"] = {"env_vars": {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **spec.environment}}
        if spec.trainer.device == "auto":  # where a GPU is reserved, no rank may silently train on a CPU
            device = "cuda" if num_gpus_per_rank else "cpu"
            spec = replace(spec, trainer=replace(spec.trainer, device=device))
        actor_class: Any = ray.remote(**options)(TrainerWorker)
        chosen = ["DEFAULT"] * spec.trainer.num_ranks if strategies is None else strategies
        actors = [actor_class.options(scheduling_strategy=strategy) for strategy in chosen]
        node = ray.util.get_node_ip_address
        fetches = [partial(_fetched, queue_handle, method) for method in (MessageQueue.fetch, MessageQueue.fetch_ahead)]
        pool = cls(spec, [actor.remote(spec, rank, *fetches, node) for rank, actor in enumerate(actors)])
        deadline = time.monotonic() + timeout_s
        # Rank 0 opens the rendezvous, and all ranks meet there. One deadline covers both.
        try:
            host, port = await pool._actors[0].call(timeout_s, TrainerWorker.open_rendezvous)
            left_s = max(deadline - time.monotonic(), 0)
            await pool._on_all(left_s, TrainerWorker.start, host, port, left_s)
        except BaseException:  # also a cancelled start must leave no actor behind
            pool.kill()
            raise
        return pool

    async def train_step(self, plans: Sequence[RankPlan]) -> TrainMetrics:
        """One optimizer step; one plan per data-parallel index. Raises RunFailed (not finite; nothing changed),
        DeadlineExceeded, ProcessDied, and the queue's error for groups that are not leased."""
        return (await self._with_plans(TrainerWorker.train_step, plans))[0]

    async def reference_kl(self, plans: Sequence[RankPlan]) -> dict[TrajectoryKey, float]:
        """Divergence from the reference model of every trajectory in the plans, over all ranks; see
        `TrainBackend.reference_kl`. Raises like `train_step`."""
        found = await self._with_plans(TrainerWorker.reference_kl, plans)
        return {key: nats for part in found for key, nats in part.items()}

    async def fetch_ahead(self, plans: Sequence[RankPlan]) -> None:
        """Every rank prefetches its trajectories of the next step's plans, from the groups that the queue foresaw last.
        Raises DeadlineExceeded, ProcessDied."""
        await self._with_plans(TrainerWorker.fetch_ahead, plans, FETCH_TIMEOUT_S + BLAME_S)

    async def _with_plans(
        self,
        method: Callable[[TrainerWorker, RankPlan], Awaitable[T]],
        plans: Sequence[RankPlan],
        timeout_s: float | None = None,
    ) -> list[T]:
        """`timeout_s` None: the timeout of a step."""
        limit_s = self._spec.trainer.step_timeout_s if timeout_s is None else timeout_s
        by_rank = zip(self._actors, self._spec.trainer.layout.by_rank(plans), strict=True)
        return await self._together([actor.call(limit_s, method, plan) for actor, plan in by_rank], method.__name__)

    async def logprobs(self, sequences: Sequence[Trajectory]) -> list[np.ndarray]:
        """The policy's log-probabilities, [T] float32 for each sequence, at temperature 1. Raises DeadlineExceeded,
        ProcessDied."""
        limit_s = self._spec.trainer.step_timeout_s
        return (await self._on_all(limit_s, TrainerWorker.logprobs, tuple(sequences)))[0]

    async def weight_specs(self, timeout_s: float) -> tuple[TensorSpec, ...]:
        return await self._actors[0].call(timeout_s, TrainerWorker.weight_specs)

    async def open_weights(
        self, config: WeightsConfig, num_receivers: Mapping[int | None, int], timeout_s: float
    ) -> dict[int | None, TransferSource]:
        """Opens the sending ends. `num_receivers`: by the rank that sends them all tensors; None: every sending rank of
        the backend sends its part to all. The sources have the same keys."""
        copies, before = None not in num_receivers, self._senders
        if copies:
            self._senders = tuple(SendingRank(rank, 0) for rank in num_receivers if rank is not None)
        else:
            self._senders = await self._sending_ranks(timeout_s)
        # Every rank has to know that it sends no copy, or no longer one.
        told = range(len(self._actors)) if copies or before != self._senders else [s.rank for s in self._senders]
        senders = {sender.rank for sender in self._senders}
        counts = {rank: num_receivers.get(rank if copies else None, 0) if rank in senders else 0 for rank in told}
        calls = [
            self._actors[rank].call(timeout_s, TrainerWorker.open_weights, config, count, copies=copies)
            for rank, count in counts.items()
        ]
        found = zip(counts, await asyncio.gather(*calls), strict=True)
        sources: dict[int | None, TransferSource] = {rank: source for rank, source in found if source is not None}
        if copies:
            return sources
        parts = list(sources.values())
        firsts = [sender.first_tensor for sender in self._senders]
        return {None: parts[0] if len(parts) == 1 else PartsSource.of(parts, firsts)}

    async def _sending_ranks(self, timeout_s: float) -> tuple[SendingRank, ...]:
        if not self._parts:  # asked once: later the rank may be busy with a step
            self._parts = await self._actors[0].call(timeout_s, TrainerWorker.sending_ranks)
        return self._parts

    async def interrupt_weights(self, timeout_s: float) -> None:
        """Closes the sending ends and thereby ends a send in progress; `open_weights` reopens them. Does not raise."""
        actors = [self._actors[sender.rank] for sender in self._senders] if self._actors else []
        calls = [actor.call(timeout_s, TrainerWorker.close_weights) for actor in actors]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, DeadlineExceeded | ProcessDied):
                logger.warning("a send in progress was not ended: %s", outcome)
            elif isinstance(outcome, BaseException):
                raise outcome

    async def encode_weights(self, timeout_s: float) -> EncodedWeights:
        """Every sending rank encodes its part of the current weights as differences to the previous ones. Raises like
        `send_weights`."""
        senders = await self._sending_ranks(timeout_s)
        found = await self._on_all(timeout_s, TrainerWorker.encode_weights)
        parts = [found[sender.rank] for sender in senders]
        return EncodedWeights.joined([part for part in parts if part is not None])

    async def send_weights(self, manifest: Manifest, timeout_s: float) -> Digest | None:
        """The digest of all parts. If one of several senders fails, all are closed: the others would wait for receivers
        that will not come.

        Raises:
            WeightTransferError, DeadlineExceeded (naming the receiver), ProcessDied (naming the rank).
        """
        # The sender's own deadline comes first: its error names the receiver.
        limit_s, failed = timeout_s + BLAME_S, False

        async def send(actor: ActorClient) -> Digest | None:
            nonlocal failed
            try:
                return await actor.call(limit_s, TrainerWorker.send_weights, manifest, timeout_s)
            except AsyncRLError:
                if len(self._senders) > 1 and not failed:
                    failed = True
                    await self.interrupt_weights(BLAME_S)
                raise

        found = await self._together([send(actor) for actor in self._actors], TrainerWorker.send_weights.__name__)
        if not manifest.verify:
            return None
        digests = [found[sender.rank] or () for sender in self._senders]
        if len({sender.first_tensor for sender in self._senders}) == 1:  # copies
            if any(digest != digests[0] for digest in digests):
                asked, do = "ranks of several nodes to send the same weights", "report it: ranks gather them together"
                raise WeightTransferError(explain(asked, "their digests differ", do))
            return digests[0]
        return tuple(itertools.chain(*digests))

    async def snapshot_weights(self) -> None:
        """The sending ranks copy their part of the current weights; `send_weights` sends this copy until the next."""
        await self._on_all(self._spec.trainer.step_timeout_s, TrainerWorker.snapshot_weights)

    async def capture(self) -> None:
        """Every rank copies its state into host memory."""
        await self._on_all(self._spec.trainer.step_timeout_s, TrainerWorker.capture)

    async def save(self, path: Path, timeout_s: float) -> dict[str, FileDigest]:
        """Every rank writes its part of the last capture below `path`, a directory that all ranks reach. Steps and
        publishes may run concurrently. Returns the digest of each file by its name below `path`, computed by the rank
        that wrote it.

        Raises:
            StorageError: a rank could not write. The ranks remain usable.
            ProcessDied, DeadlineExceeded: naming the rank.
        """
        written = await self._on_all(timeout_s, TrainerWorker.save, path)
        return {name: digest for files in written for name, digest in files.items()}

    async def load(self, path: Path) -> None:
        await self._on_all(self._spec.trainer.step_timeout_s, TrainerWorker.load, path)

    async def ping(self, timeout_s: float) -> float:
        """CPU seconds of all ranks; works during a step. Raises ProcessDied, DeadlineExceeded naming the rank."""
        return sum(await asyncio.gather(*(actor.call(timeout_s, TrainerWorker.ping) for actor in self._actors)))

    async def stop(self) -> None:
        """Stops every rank, and kills it after a few seconds. Idempotent; does not raise for dead ranks."""
        await self.interrupt_weights(STOP_TIMEOUT_S)
        waits = [actor.call(STOP_TIMEOUT_S, TrainerWorker.stop) for actor in self._actors]
        for rank, outcome in enumerate(await asyncio.gather(*waits, return_exceptions=True)):
            if isinstance(outcome, BaseException):
                logger.warning("trainer rank %d did not stop by itself: %s", rank, outcome)
        self.kill()

    def kill(self) -> None:
        """Kills every rank immediately. Idempotent."""
        for actor in self._actors:
            actor.kill()
        self._killed += self._actors
        self._actors = []

    async def ended(self, timeout_s: float) -> None:
        """Returns when the killed ranks have exited and their memory is free. Raises DeadlineExceeded."""
        await asyncio.gather(*(actor.ended(timeout_s, TrainerWorker.ping) for actor in self._killed))

    async def _on_all(
        self, timeout_s: float, method: Callable[[TrainerWorker, *Ts], Awaitable[T]], *args: *Ts
    ) -> list[T]:
        calls = [actor.call(timeout_s, method, *args) for actor in self._actors]
        return await self._together(calls, method.__name__)

    async def _together(self, calls: Sequence[Coroutine[Any, Any, T]], method: str) -> list[T]:
        """The answers of all ranks. Raises the root error: a failing rank makes its peers wait or fail, so the first
        error is seldom the cause."""
        actors = self._actors  # `kill` may clear the list during the wait
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            # After the first error the others get BLAME_S: the rank that died may report later than its peers.
            _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                await asyncio.wait(pending, timeout=BLAME_S)
            found = {rank: task.exception() for rank, task in enumerate(tasks) if task.done()}
            errors = {rank: error for rank, error in found.items() if error is not None}
            if errors:
                late = [rank not in found or _is_late(errors.get(rank), rank) for rank in range(len(actors))]
                unanswered = itertools.compress(actors, late)
                raise await self._to_blame(method, errors, unanswered)
            return [task.result() for task in tasks]
        finally:
            await cancel(*tasks)

    async def _to_blame(
        self, method: str, errors: dict[int, BaseException], unanswered: Iterable[ActorClient]
    ) -> BaseException:
        """The error to raise. `errors`: errors and missed deadlines by rank; `unanswered`: actors of the ranks that
        gave no answer."""
        first = cause(errors.values())
        if isinstance(first, ProcessDied):
            return first
        pings = (actor.call(BLAME_S, TrainerWorker.ping) for actor in unanswered)
        silent = await asyncio.gather(*pings, return_exceptions=True)
        # A dead rank explains more than a silent one.
        for kind in (ProcessDied, DeadlineExceeded):
            for lost in silent:
                if isinstance(lost, kind):
                    return _blamed(lost, method, first)
        return first


def _blamed(lost: ProcessDied | DeadlineExceeded, method: str, first: BaseException) -> AsyncRLError:
    """The error about `method` for a rank whose ping raised `lost`."""
    assert lost.process is not None, "pings name the rank"
    gone = isinstance(lost, ProcessDied)
    found = "the process is gone" if gone else f"it does not answer a ping within {BLAME_S:g} s either"
    if getattr(first, "process", None) != lost.process:
        found += f"; a peer found: {type(first).__name__}: {first}"
    do = "see its log, or whether it is stopped or its machine unreachable; a run restarts from its last checkpoint"
    error = type(lost)(explain(f"{method} of {lost.process}", found, do)).of(lost.process)
    error.__cause__ = first
    return error


def _is_late(error: BaseException | None, rank: int) -> bool:
    """True if this rank did not answer in time. A deadline that the rank itself missed names another process."""
    return isinstance(error, DeadlineExceeded) and error.process == trainer_rank(rank)
