"""Replica: one inference engine behind a gate. Runs as a Ray actor.

The gate is closed until the first committed version and during every publish; requests wait at the gate. When the
engine dies, clients get the tokens sampled so far, then `ProcessDied`, and resume at another replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from asyncrl.errors import (
    AsyncRLError,
    BadRequest,
    DeadlineExceeded,
    GenerationError,
    ProcessDied,
    WeightTransferError,
    explain,
)
from asyncrl.inference.cpu_time import CpuTime
from asyncrl.inference.engine import InferenceEngine, StagingEngine
from asyncrl.inference.external_places import ExternalLimits, ExternalPlaces
from asyncrl.inference.shared.streams import empty_chunk
from asyncrl.inference.sleep import EngineSleep
from asyncrl.remote.connection import HasConnections
from asyncrl.remote.tasks import cancel, wait_event
from asyncrl.remote.waits import deadline
from asyncrl.types import (
    Digest,
    GenerationRequest,
    Manifest,
    PauseMode,
    ReplicaStats,
    TokenChunk,
    TransferSource,
)

logger = logging.getLogger(__name__)

GRACE_S = 5.0
"""Extra time of calls whose deadline the replica enforces itself (`receive_weights`, `adopt`, `reset`), so that the
replica's error arrives first."""


class Outbox:
    """The chunks that one client has not collected yet. Consecutive tokens of one request and version are merged into
    one chunk."""

    def __init__(self) -> None:
        self._runs: dict[str, list[list[TokenChunk]]] = {}
        """Per request: runs of chunks to merge."""
        self._ended: list[str] = []
        """Requests whose last chunk has arrived."""
        self._since = 0.0
        """Upper bound on the arrival time of the oldest chunk."""
        self._at_once = False
        self._news = asyncio.Event()

    def add(self, chunk: TokenChunk) -> None:
        if not self._runs:
            self._since = time.monotonic()
            self._news.set()
        runs = self._runs.setdefault(chunk.request_id, [])
        if runs and _continues(runs[-1][-1], chunk):
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
        if chunk.finish_reason is not None or chunk.error is not None:
            self._ended.append(chunk.request_id)
            self._news.set()

    def release(self) -> None:
        """From now on `take` returns immediately."""
        self._at_once = True
        self._news.set()

    async def take(self, wait_s: float, gather_s: float = 0.0) -> list[TokenChunk]:
        """Returns the chunks of ended requests as soon as a request ends, or all chunks once the oldest is `gather_s`
        old. Waits at most `wait_s`."""
        deadline = time.monotonic() + wait_s
        while True:
            now = time.monotonic()
            # Everything is due: the outbox was released, or its oldest chunk has waited long enough.
            if self._at_once or (self._runs and now >= self._since + gather_s):
                self._ended = []
                return self._taken(list(self._runs))
            # Ended requests leave early, because their client waits for whole responses.
            if self._ended:
                ended, self._ended = self._ended, []
                return self._taken(dict.fromkeys(ended))
            if now >= deadline:
                return []
            # Sleep until a request ends, the first chunk arrives, or the gathering or waiting time is over.
            self._news.clear()
            await wait_event(self._news, min(deadline, self._since + gather_s if self._runs else deadline) - now)

    def _taken(self, requests: Iterable[str]) -> list[TokenChunk]:
        return [_merged(run) for request in requests for run in self._runs.pop(request)]


def _continues(last: TokenChunk, chunk: TokenChunk) -> bool:
    whole = last.finish_reason is None and last.error is None and chunk.error is None
    return (
        whole
        and last.version == chunk.version
        and (not len(chunk.token_ids) or last.extra.keys() == chunk.extra.keys())
    )


def _merged(run: list[TokenChunk]) -> TokenChunk:
    last = run[-1]
    if len(run) == 1:
        return last
    ids, logprobs = (np.concatenate([getattr(chunk, name) for chunk in run]) for name in ("token_ids", "logprobs"))
    # an end without tokens has no arrays
    extra = {name: np.concatenate([c.extra[name] for c in run if len(c.token_ids)]) for name in run[0].extra}
    return TokenChunk(
        last.request_id, ids, logprobs, last.version, last.finish_reason, None, last.cached_tokens, extra=extra
    )


@dataclass(slots=True, eq=False)
class _InFlight:
    """A request in flight. `external`: it comes from outside the run. `at_gate`: it has not reached the engine."""

    client_id: str
    request: GenerationRequest
    outbox: Outbox
    external: bool = False
    at_gate: bool = True
    task: asyncio.Task[None] = field(init=False)


class Replica(HasConnections):
    """Serves requests with the weights of the last committed publish. Owns the engine, the gate, the requests in flight
    and the outbox of each client. `must_leave`: its process was asked to end."""

    must_leave: bool = False

    def __init__(
        self,
        replica_id: int,
        build_engine: Callable[[], InferenceEngine],
        *,
        gate_timeout_s: float,
        serves_at_once: bool = False,
        node: str | Callable[[], str] = "",
        external: ExternalLimits | None = None,
    ) -> None:
        """
        Args:
            build_engine: called in the replica's process.
            serves_at_once: the engine starts with real weights (`asyncrl-serve`); otherwise the gate opens at the first
                commit.
            node: address of this machine, or a function that returns it in the process of the replica.
            external: limits of requests from outside the run; None refuses them.
        """
        self._id = replica_id
        self._node = node() if callable(node) else node
        self._cpu = CpuTime()
        self._engine = build_engine()
        self._sleep = EngineSleep(self._engine)
        self._gate_timeout_s = gate_timeout_s
        self._serves_at_once = serves_at_once
        self._gate = asyncio.Event()
        self._closed_because = "it has no committed version yet: its weights are placeholders until the first publish"
        self._closed_at: float | None = None
        self._paused_s = 0.0
        self._outboxes: dict[str, Outbox] = {}
        self._places = ExternalPlaces(external)
        self._external_timeout_s = external.timeout_s if external is not None else gate_timeout_s
        self._external_tokens = 0
        self._forgotten: set[str] = set()
        self._requests: dict[str, _InFlight] = {}
        self._received: tuple[int, Digest | None] | None = None
        self._receiving = 0
        self._received_all = asyncio.Event()
        """Set while no transfer is in progress, however the last one ended."""
        self._received_all.set()
        self._resets = 0
        self._incarnation = 0
        """Requests for earlier incarnations are refused."""
        self._stopping = False

    async def start(self) -> ReplicaStats:
        await self._engine.start()
        if self._serves_at_once:
            self._gate.set()
        return await self.stats()

    # -- generation ----------------------------------------------------------------------------------------------

    async def submit(
        self, client_id: str, requests: list[GenerationRequest], external: bool = False, incarnation: int | None = None
    ) -> None:
        """Starts these requests; `collect(client_id)` returns their chunks.

        Args:
            external: the client is not part of the run. Each request then also waits for one of the external places.
            incarnation: the replica incarnation that the requests are meant for; None: any.

        Raises ProcessDied; GenerationError: the client was forgotten, or external requests are refused;
        DeadlineExceeded: the requests were sent before a reset and arrived after it.
        """
        self._require_engine()
        self._require_known(client_id)
        if incarnation is not None and incarnation < self._incarnation:
            found = f"they are for incarnation {incarnation} of it, and it is {self._incarnation} since its last reset"
            raise DeadlineExceeded(explain(f"requests to replica {self._id}", found, "send them elsewhere"))
        if external and not self._places.allowed:
            found, do = "it takes requests of the run only", "set rollout.serve.enabled=true"
            raise GenerationError(explain(f"replica {self._id} to serve {client_id}", found, do))
        outbox = self._outboxes.setdefault(client_id, Outbox())
        for request in requests:
            if request.request_id in self._requests:
                outbox.add(_final(request, None, error=f"request_id {request.request_id} is already in flight"))
                continue
            entry = self._requests[request.request_id] = _InFlight(client_id, request, outbox, external)
            entry.task = asyncio.create_task(self._serve(entry), name=f"request {request.request_id}")
            # The default argument binds the id of this iteration.
            entry.task.add_done_callback(lambda _, key=request.request_id: self._requests.pop(key, None))

    async def collect(self, client_id: str, wait_s: float, gather_s: float = 0.0) -> list[TokenChunk]:
        """Returns uncollected chunks, in order within each request; waits like `Outbox.take`.

        Raises ProcessDied: the engine is dead and its last chunks were collected. Raises GenerationError: the client
        was forgotten.
        """
        self._require_known(client_id)
        outbox = self._outboxes.setdefault(client_id, Outbox())
        chunks = await outbox.take(wait_s, gather_s) or (await outbox.take(0.0) if self._lost_engine else [])
        if not chunks:
            self._require_engine()
        return chunks

    async def abort(self, request_ids: list[str]) -> None:
        """Ends these requests; unknown ids are ignored. Requests still at the gate end without a token."""
        for request_id in request_ids:
            entry = self._requests.get(request_id)
            if entry is not None and entry.at_gate:
                entry.at_gate = False
                entry.outbox.add(_final(entry.request, self._engine.health().version))
                entry.task.cancel()
        await self._engine.abort(request_ids)

    async def forget_client(self, client_id: str) -> None:
        """Ends all requests of the clients `client_id` and `client_id/...`, and refuses their later calls."""
        self._forgotten.add(client_id)
        for name in [name for name in self._outboxes if _owner(name) == client_id]:
            del self._outboxes[name]
        await self.abort([key for key, entry in self._requests.items() if _owner(entry.client_id) == client_id])

    async def reset(self, timeout_s: float, incarnation: int) -> None:
        """Returns the replica to its state before the first publish: the gate is closed, no request is in flight, no
        chunk waits to be collected, and no transfer is in progress. The weights are undefined. From now on requests for
        incarnations before `incarnation`, which may still be on their way, are refused.

        Raises DeadlineExceeded: an earlier transfer is still in progress. Raises ProcessDied.
        """
        self._require_engine()
        self._resets += 1
        self._incarnation = incarnation
        self._received = None
        self._close_gate("it answered too late, or the training side restarted; the next publish opens the gate")
        self._outboxes.clear()
        # A transfer cannot be interrupted: its sender may still write into the engine's memory.
        found = "a transfer of weights that began before has not ended, or the engine does not answer"
        async with deadline(timeout_s, f"reset of replica {self._id}", found=found, do="replace it"):
            await self.abort(list(self._requests))
            await self._received_all.wait()
            await self._engine.pause("abort")

    # -- publish -------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """Closes the gate and interrupts generation as `mode` says; returns when no token is being sampled. A drain
        waits for requests of the run only: external requests are aborted, and their client resumes them. A sleeping
        engine reallocates its weights here and its KV cache at the commit."""
        self._close_gate("a publish of weights is in progress")
        if mode == "drain" and self._places.taken:
            external = [key for key, entry in self._requests.items() if entry.external and not entry.at_gate]
            await self._engine.abort(external)
        await self._engine.pause(mode)
        await self._sleep.wake_weights()

    async def sleep(self) -> None:
        """Closes the gate until the next commit and releases the memory of weights and KV cache. Requests at the engine
        end with the tokens so far. Idempotent.

        Raises GenerationError: the engine cannot sleep.
        """
        self._close_gate("the trainer has its turn on the devices that they share")
        self._received = None
        await self._engine.pause("abort")
        await self._sleep.begin()

    async def receive_weights(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        """Receives and applies a publish; the gate stays closed until `commit`. A staged publish is only received:
        `adopt` applies it. Returns this side's digest.

        Raises WeightTransferError when the gate is open: weights never change under a running generation.
        """
        if self._gate.is_set() and not manifest.is_staged:
            raise WeightTransferError(f"replica {self._id} was sent weights without a pause")
        # A failed transfer must leave nothing to commit, and a reset during it invalidates it.
        self._received, resets = None, self._resets
        with self._transferring():
            if manifest.is_staged:
                digest = await self._staging_engine.stage_weights(manifest, source, timeout_s)
            else:
                digest = await self._engine.load_weights(manifest, source, timeout_s)
        self._require_no_reset(resets)
        self._received = (manifest.publish_id, digest)
        return digest

    async def adopt(
        self, publish_id: int, version: int | None, digest: Digest | None, mode: PauseMode, timeout_s: float
    ) -> float:
        """Interrupts generation as `mode` says, applies the staged weights of `publish_id` and commits them. Returns
        the seconds from pause to commit.

        Raises the errors of `pause`, `receive_weights` and `commit`. The gate is then closed, unless the weights were
        never received.
        """
        self._require_received(publish_id, digest)
        resets = self._resets
        await self.pause(mode)
        began = time.monotonic()
        self._require_no_reset(resets)
        with self._transferring():
            await self._staging_engine.load_staged(timeout_s)
        self._require_no_reset(resets)
        await self.commit(publish_id, version, digest)
        return time.monotonic() - began

    async def commit(self, publish_id: int, version: int | None, digest: Digest | None) -> None:
        """Serves the weights of `publish_id` as `version` and opens the gate.

        Raises WeightTransferError: the weights were not received completely, or the digest differs.
        """
        self._require_received(publish_id, digest)
        resets = self._resets
        # The sender's buffers are free now, so the KV cache fits again.
        await self._sleep.end()
        await self._engine.commit(version)
        if self._engine.health().version is None:
            raise WeightTransferError(f"replica {self._id}: the first publish must carry a version")
        self._require_no_reset(resets)
        await self._engine.resume()
        self._require_no_reset(resets)
        self._open_gate()

    # -- life ----------------------------------------------------------------------------------------------------

    async def ping(self) -> int:
        """Process id of the replica, whether or not its engine is alive."""
        return os.getpid()

    async def stats(self) -> ReplicaStats:
        """Raises ProcessDied when the engine is dead, unless `must_leave` is set: the same SIGTERM may have ended the
        engine, and the pool must still learn that the replica leaves."""
        if not self.must_leave:
            self._require_engine()
        health = self._engine.health()
        paused_s = self._paused_s + (time.monotonic() - self._closed_at if self._closed_at is not None else 0.0)
        return ReplicaStats(
            self._id,
            os.getpid(),
            health,
            paused_s,
            self._cpu.total_s(),
            self._node,
            asleep_s=self._sleep.asleep_s,
            waking_s=self._sleep.waking_s,
            external_tokens=self._external_tokens,
            must_leave=self.must_leave,
        )

    async def stop(self) -> None:
        self._stopping = True
        self._close_gate("the replica is stopping")
        await self._engine.stop()
        # The stopped engine has ended its requests; tasks that still wait at the gate are cancelled here.
        await cancel(*(entry.task for entry in self._requests.values()))

    # -- inside --------------------------------------------------------------------------------------------------

    async def _serve(self, entry: _InFlight) -> None:
        """The task of one request.

        Consumes: the request.
        Produces: its chunks, in the outbox of its client.
        Waits for: the gate, at most `gate_timeout_s` (external requests: the gate and a place, at most
        `external.timeout_s`); tokens of the engine.
        Unblocked by: the commit of a publish, which opens the gate; the end of a request, which frees a place.
        Stops when: the engine has returned the last chunk; an error becomes the last chunk.
        """
        request, outbox, reached = entry.request, entry.outbox, False
        try:
            await self._pass_gate(external=entry.external)
            reached = True
            if not entry.at_gate:
                return  # aborted as the gate opened: its final chunk is on the way
            entry.at_gate = False
            async for chunk in self._engine.generate(request):
                self._external_tokens += len(chunk.token_ids) if entry.external else 0
                outbox.add(chunk)
        except asyncio.CancelledError:
            if reached or entry.at_gate:
                outbox.add(_final(request, self._engine.health().version))
            raise
        except AsyncRLError as e:
            if self._lost_engine:
                outbox.release()  # `collect` raises after the last chunks: the client resumes the request elsewhere
            elif self._stopping and not isinstance(e, BadRequest):
                outbox.add(_final(request, self._engine.health().version))  # an abort, after which clients resume
            else:
                outbox.add(_final(request, self._engine.health().version, str(e), isinstance(e, BadRequest)))
        except Exception as e:  # task boundary: the client gets it as the request's error
            logger.exception("request %s failed", request.request_id)
            outbox.add(_final(request, self._engine.health().version, error=f"{type(e).__name__}: {e}"))
        finally:
            if reached and entry.external:
                self._places.release()
            elif reached:
                self._places.count_run(-1)

    @property
    def _lost_engine(self) -> bool:
        return not self._stopping and not self._engine.health().alive

    def _require_engine(self) -> None:
        if self._lost_engine:
            detail = self._engine.health().detail
            raise ProcessDied(f"the engine of replica {self._id} is dead: {detail}")

    def _require_known(self, client_id: str) -> None:
        if _owner(client_id) in self._forgotten:
            found = "this client counts as dead and was replaced"
            raise GenerationError(explain(f"replica {self._id} to work for {client_id}", found, "end this process"))

    @property
    def _staging_engine(self) -> StagingEngine:
        """Raises WeightTransferError: the engine cannot stage weights."""
        if not isinstance(self._engine, StagingEngine):
            found, do = f"{type(self._engine).__name__} loads weights as they come", "set weights.stage=false"
            raise WeightTransferError(explain(f"replica {self._id} to stage weights", found, do))
        return self._engine

    @contextlib.contextmanager
    def _transferring(self) -> Iterator[None]:
        """Marks a transfer in progress, which `reset` waits for."""
        self._receiving += 1
        self._received_all.clear()
        try:
            yield
        finally:
            self._receiving -= 1
            if not self._receiving:
                self._received_all.set()

    def _require_received(self, publish_id: int, digest: Digest | None) -> None:
        if self._received is None or self._received[0] != publish_id:
            raise WeightTransferError(f"replica {self._id}: commit of publish {publish_id}, received {self._received}")
        if digest is not None and self._received[1] != digest:
            raise WeightTransferError(f"replica {self._id}: the digest of publish {publish_id} differs")

    def _require_no_reset(self, resets: int) -> None:
        if resets != self._resets:
            raise WeightTransferError(f"replica {self._id} was reset in the middle of a publish")

    async def _pass_gate(self, *, external: bool) -> None:
        """Returns once the gate is open and the request has a place at the engine."""
        if not external and self._gate.is_set():
            self._places.count_run(1)
            return
        timeout_s = self._external_timeout_s if external else self._gate_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    # The gate can close again while this request waits for its place, so both are checked in a loop.
                    await self._gate.wait()
                    if not external:
                        self._places.count_run(1)
                        return
                    await self._places.acquire()
                    if self._gate.is_set():
                        return
                    self._places.release()  # the gate has closed since the place was granted
        except TimeoutError:
            why = "requests of the run take its places" if self._gate.is_set() else self._closed_because
            raise DeadlineExceeded(f"replica {self._id} did not serve within {timeout_s} s: {why}") from None

    def _close_gate(self, because: str) -> None:
        self._closed_because = because
        if self._closed_at is None:
            self._closed_at = time.monotonic()
        self._gate.clear()

    def _open_gate(self) -> None:
        if self._closed_at is not None:
            self._paused_s += time.monotonic() - self._closed_at
            self._closed_at = None
        self._gate.set()


def _owner(client_id: str) -> str:
    """Name of the owning client: the part before the first slash."""
    return client_id.partition("/")[0]


def _final(
    request: GenerationRequest, version: int | None, error: str | None = None, bad_request: bool = False
) -> TokenChunk:
    """The last chunk of a request, without tokens: aborted, or refused because of `error`."""
    return empty_chunk(request, version, "abort", error=error, bad_request=bad_request)
