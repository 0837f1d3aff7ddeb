"""The generation client: one response from any number of interrupted attempts, on any replicas.

Consumes: `generate` calls of environments.   Produces: `Generation`s whose segments carry the replica's versions.
Waits for: tokens streamed by replicas (long polls of bounded length), each response at most `request_timeout_s`.
Stops when: `close` is called; every pending response then ends with GenerationError.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from asyncrl.errors import AsyncRLError, GenerationError, ProcessDied
from asyncrl.rollout.router import Router
from asyncrl.types import FinishReason, GenerationRequest, SamplingParams, Segment, TokenChunk

logger = logging.getLogger(__name__)


class ReplicaChannel(Protocol):
    """How the client reaches one replica. Raises ProcessDied when the replica is gone."""

    async def submit(self, requests: list[GenerationRequest]) -> None: ...

    async def collect(self, wait_s: float) -> list[TokenChunk]:
        """Chunks streamed since the last call; waits at most `wait_s` for the first one."""
        ...

    async def abort(self, request_ids: list[str]) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """One response. `token_ids` [T] int32, `logprobs` [T] float32, `segments` tile `[0, T)`; `interruptions` counts
    the times it was aborted by a publish or lost its replica, and resumed."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    interruptions: int


@dataclass(slots=True)
class _Pending:
    """A request in flight and what has been streamed of it."""

    replica_id: int
    chunks: list[TokenChunk] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    failure: Exception | None = None


class GenerationClient:
    """Sends requests to replicas in batches and demultiplexes what they stream.

    Args:
        name: unique among the clients of these replicas; prefix of every request id.
        replicas: the channel of every replica.
        request_timeout_s: longest that one response may take over all its attempts.
        poll_interval_s: shortest time between two collections from one replica.
    """

    def __init__(
        self, name: str, replicas: Mapping[int, ReplicaChannel], *, request_timeout_s: float, poll_interval_s: float
    ) -> None:
        self._name = name
        self._replicas = dict(replicas)
        self._router = Router()
        for replica_id in self._replicas:
            self._router.add(replica_id)
        self._request_timeout_s = request_timeout_s
        self._poll_interval_s = poll_interval_s
        self._pending: dict[str, _Pending] = {}
        self._outgoing: dict[int, list[GenerationRequest]] = {}
        self._busy: dict[int, asyncio.Event] = {r: asyncio.Event() for r in self._replicas}
        self._numbers = itertools.count()
        self._flushes: set[asyncio.Task[None]] = set()
        self._collectors = [
            asyncio.create_task(self._collect(r), name=f"collect from replica {r}") for r in self._replicas
        ]

    async def generate(
        self, prompt_ids: np.ndarray, sampling: SamplingParams, *, session_id: str = "", seed: int = 0
    ) -> Generation:
        """Returns the whole response, resumed as often as it was interrupted.

        Raises GenerationError: refused by the replica, no replica left, or not finished in time.
        """
        chunks: list[tuple[TokenChunk, int]] = []
        interruptions = 0
        try:
            async with asyncio.timeout(self._request_timeout_s):
                while True:
                    num_tokens = sum(len(chunk.token_ids) for chunk, _ in chunks)
                    request = GenerationRequest(
                        request_id=f"{self._name}-{next(self._numbers):012d}",
                        prompt_ids=np.concatenate([prompt_ids, *(chunk.token_ids for chunk, _ in chunks)]),
                        sampling=replace(sampling, max_tokens=sampling.max_tokens - num_tokens),
                        seed=seed,
                        first_position=num_tokens,
                        session_id=session_id,
                    )
                    attempt = await self._attempt(request)
                    chunks += [(chunk, attempt.replica_id) for chunk in attempt.chunks]
                    reason = attempt.chunks[-1].finish_reason if attempt.chunks else "abort"
                    complete = _complete(chunks, sampling, reason)
                    if complete is not None:
                        return _assemble(chunks, complete, interruptions)
                    interruptions += 1
        except AsyncRLError:
            raise
        except TimeoutError as e:
            raise GenerationError(f"a response was not finished within {self._request_timeout_s} s") from e

    @property
    def in_flight(self) -> int:
        return len(self._pending)

    async def watch(self) -> None:
        """Runs as long as the client works; raises what ended the collection from a replica unexpectedly, and
        GenerationError when every replica is lost."""
        await asyncio.gather(*self._collectors)
        raise GenerationError("no replica is left: all of them have stopped")

    async def close(self) -> None:
        for task in self._collectors:
            task.cancel()
        await asyncio.gather(*self._collectors, return_exceptions=True)
        for pending in self._pending.values():
            pending.failure = GenerationError("the generation client was closed")
            pending.done.set()

    async def _attempt(self, request: GenerationRequest) -> _Pending:
        replica_id = self._router.pick(request.session_id)
        pending = self._pending[request.request_id] = _Pending(replica_id)
        self._enqueue(replica_id, request)
        try:
            await pending.done.wait()
        except asyncio.CancelledError:
            await self._abandon(replica_id, request.request_id)
            raise
        finally:
            del self._pending[request.request_id]
            self._router.done(replica_id)
        if pending.failure is not None:
            raise pending.failure
        return pending

    async def _abandon(self, replica_id: int, request_id: str) -> None:
        """Tells the replica to stop working on a request that nobody waits for any more."""
        if replica_id in self._replicas:
            try:
                await self._replicas[replica_id].abort([request_id])
            except ProcessDied as e:
                self._lose(replica_id, e)

    def _enqueue(self, replica_id: int, request: GenerationRequest) -> None:
        """Collects the requests of one turn of the event loop into a single call."""
        batch = self._outgoing.setdefault(replica_id, [])
        batch.append(request)
        if len(batch) == 1:
            task = asyncio.create_task(self._flush(replica_id), name=f"submit to replica {replica_id}")
            self._flushes.add(task)
            task.add_done_callback(self._flushes.discard)

    async def _flush(self, replica_id: int) -> None:
        batch = self._outgoing.pop(replica_id)
        channel = self._replicas.get(replica_id)
        try:
            if channel is None:
                raise ProcessDied(f"replica {replica_id} has stopped")
            await channel.submit(batch)
            self._busy[replica_id].set()
        except ProcessDied as e:
            self._lose(replica_id, e)
        except Exception as e:  # noqa: BLE001 - task boundary: it becomes the failure of the requests it was sending
            for request in batch:
                self._fail(request.request_id, e)

    async def _collect(self, replica_id: int) -> None:
        """Consumes chunks of one replica until it dies; idle while it has no request of ours."""
        channel, busy = self._replicas[replica_id], self._busy[replica_id]
        loop = asyncio.get_running_loop()
        while True:
            await busy.wait()
            if not any(p.replica_id == replica_id for p in self._pending.values()):
                busy.clear()
                continue
            started = loop.time()
            try:
                chunks = await channel.collect(wait_s=1.0)
            except ProcessDied as e:
                self._lose(replica_id, e)
                return
            for chunk in chunks:
                self._deliver(chunk)
            await asyncio.sleep(max(0.0, self._poll_interval_s - (loop.time() - started)))

    def _deliver(self, chunk: TokenChunk) -> None:
        pending = self._pending.get(chunk.request_id)
        if pending is None:
            return  # abandoned meanwhile
        if chunk.error is not None:
            self._fail(chunk.request_id, GenerationError(chunk.error))
            return
        pending.chunks.append(chunk)
        if chunk.finish_reason is not None:
            pending.done.set()

    def _fail(self, request_id: str, failure: Exception) -> None:
        if (pending := self._pending.get(request_id)) is not None:
            pending.failure = failure
            pending.done.set()

    def _lose(self, replica_id: int, error: ProcessDied) -> None:
        """Ends the attempts on a dead replica with the tokens that had been streamed; they resume elsewhere."""
        if self._replicas.pop(replica_id, None) is None:
            return
        logger.error("replica %d is lost: %s", replica_id, error)
        self._router.remove(replica_id)
        for pending in self._pending.values():
            if pending.replica_id == replica_id:
                pending.done.set()


def _complete(
    chunks: list[tuple[TokenChunk, int]], sampling: SamplingParams, reason: FinishReason | None
) -> FinishReason | None:
    """The finish reason of the whole response, or None while it must be resumed.

    An attempt can be aborted after its last token was sampled but before its end was seen.
    """
    if reason not in (None, "abort"):
        return reason
    tokens = [chunk.token_ids for chunk, _ in chunks if len(chunk.token_ids)]
    if tokens and int(tokens[-1][-1]) in sampling.stop_token_ids:
        return "stop"
    return "length" if sum(map(len, tokens)) >= sampling.max_tokens else None


def _assemble(chunks: list[tuple[TokenChunk, int]], reason: FinishReason, interruptions: int) -> Generation:
    segments: list[Segment] = []
    at = 0
    for chunk, replica_id in chunks:
        stop = at + len(chunk.token_ids)
        if stop == at:
            continue
        last = segments[-1] if segments else None
        if last is not None and (last.version, last.replica_id) == (chunk.version, replica_id):
            segments[-1] = replace(last, stop=stop)
        else:
            segments.append(Segment(at, stop, chunk.version, replica_id))
        at = stop
    empty_ids, empty_logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Generation(
        token_ids=np.concatenate([empty_ids, *(chunk.token_ids for chunk, _ in chunks)]),
        logprobs=np.concatenate([empty_logprobs, *(chunk.logprobs for chunk, _ in chunks)]),
        segments=tuple(segments),
        finish_reason=reason,
        interruptions=interruptions,
    )
