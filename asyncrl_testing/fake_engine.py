"""An inference engine without a model, for tests of everything around engines."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from asyncrl.errors import GenerationError, explain
from asyncrl.inference.engine import PauseMode
from asyncrl.inference.shared.request_checks import misfit
from asyncrl.types import Digest, EngineHealth, FinishReason, GenerationRequest, Manifest, TokenChunk, TransferSource

LoadHook = Callable[[Manifest, TransferSource, float], Awaitable[Digest | None]]
ResponseLength = Callable[[GenerationRequest], int]

_VOCAB_SIZE = 10**9
"""`fake_token` writes three times three digits."""


def fake_token(version: int, prompt_id: int, index: int) -> int:
    """The token that `version` writes at place `index` of a sequence (prompt and response) that begins with
    `prompt_id`: three decimal digits each, so that a test reads who wrote what, where (a stop token that `min_tokens`
    forbids is left out: the token is that of the next place). `token // 10**6` is the version modulo 1000."""
    return version % 1000 * 1_000_000 + prompt_id % 1000 * 1000 + index % 1000


def fake_scores(ids: np.ndarray) -> np.ndarray:
    """float32, of the shape of `ids`: the log-probabilities that a `FakeEngine` gives these tokens: they depend on the
    token alone. The likeliest tokens of a place are 0, 1, 2 and so on."""
    return -((ids % 10 + 1) / 10).astype(np.float32)


def fake_experts(ids: np.ndarray) -> np.ndarray:
    """[n, 2, 2] int16: the experts that a `FakeEngine` records for these tokens: they depend on the token alone."""
    first = (ids % 8).astype(np.int16)
    return np.stack([np.stack([first, first + 1], 1), np.stack([first + 2, first + 3], 1)], 1)


async def _load_nothing(_manifest: Manifest, _source: TransferSource, _timeout_s: float) -> Digest | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeScript:
    """How a `FakeEngine` behaves. `response_tokens` gives the length, over all attempts, at which a response ends with
    "stop"; without it responses end at their budget. `start_version` None is an engine that waits for a publish."""

    num_slots: int = 64
    max_model_len: int = 4096
    chunk_tokens: int = 4
    tick_s: float = 0.0
    start_version: int | None = 0
    response_tokens: ResponseLength | None = None
    load_hook: LoadHook = _load_nothing
    guided: bool = False
    """Takes requests with a JSON schema, and ignores it."""


@dataclass(slots=True, eq=False)
class _Stream:
    request: GenerationRequest
    out: asyncio.Queue[TokenChunk | GenerationError] = field(default_factory=asyncio.Queue)
    ids: list[int] = field(default_factory=list)
    produced: int = 0


class FakeEngine:
    """Writes `fake_token`s, one per running request and tick (`tick_s` seconds; 0 yields to the loop once).

    Faults on demand: `crash` kills it as a lost process would, `stall` stops sampling without a word, `refuse_next`
    makes generate raise.
    """

    def __init__(self, script: FakeScript | None = None) -> None:
        self.script = script or FakeScript()
        self.loaded: list[Manifest] = []
        self._staged: Manifest | None = None
        self._version = self.script.start_version
        self._waiting: deque[_Stream] = deque()
        self._running: dict[str, _Stream] = {}
        self._paused = False
        self._asleep: set[str] = set()
        self._draining = False
        self._stalled = False
        self._refusals = 0
        self._dead = "it has not been started"
        self._generated = 0
        self._busy_ticks = 0
        self._changed = asyncio.Event()
        self._drained = asyncio.Event()
        self._clock: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._dead = ""
        self._clock = asyncio.create_task(self._run())

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        self._require_alive()
        self._check(request)
        if (start := request.sampling.score_from) is not None:
            ids = request.prompt_ids[start:].astype(np.int32)
            stamp = -1 if self._version is None else self._version
            top = np.tile(np.arange(request.sampling.score_top, dtype=np.int32), (len(ids), 1))
            extra = {"top_ids": top, "top_logprobs": fake_scores(top)} if top.size else {}
            yield TokenChunk(request.request_id, ids, fake_scores(ids), stamp, "stop", extra=extra)
            return
        # The stream is registered before the wait, so that a pause or abort in between finds it.
        stream = _Stream(request)
        self._waiting.append(stream)
        self._changed.set()
        try:
            while True:
                item = await stream.out.get()
                if isinstance(item, GenerationError):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            self._forget(stream)

    async def abort(self, request_ids: Sequence[str] | None) -> None:
        self._abort(request_ids)

    async def pause(self, mode: PauseMode) -> None:
        self._require_alive()
        if mode == "drain" and not self._paused and self._running:
            self._draining = True
            self._drained.clear()
            await self._drained.wait()  # set when the last one ends, at resume and by whatever kills the engine
            self._require_alive()
            if not self._paused:
                raise GenerationError(explain("pause(drain)", "resume() came first", "pause again"))
            return
        if mode == "abort":
            self._abort(tuple(self._running) if self._paused else None)
        for stream in self._running.values():
            self._emit(stream, None)
        self._end_pause_wait(paused=True)

    async def load_weights(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        self._require_alive()
        assert self._paused, "load_weights on an engine that samples"
        assert "weights" not in self._asleep, "load_weights on weights that sleep"
        digest = await self.script.load_hook(manifest, source, timeout_s)
        self.loaded.append(manifest)
        return digest

    async def stage_weights(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        """By the same hook as `load_weights`."""
        self._require_alive()
        digest = await self.script.load_hook(manifest, source, timeout_s)
        self._staged = manifest
        return digest

    async def load_staged(self, timeout_s: float) -> None:
        self._require_alive()
        assert self._paused, "load_staged on an engine that samples"
        assert self._staged is not None, "nothing was staged"
        self.loaded.append(self._staged)
        self._staged = None

    async def commit(self, version: int | None) -> None:
        self._require_alive()
        for stream in self._running.values():
            self._emit(stream, None)
        self._version = self._version if version is None else version
        self._changed.set()

    async def resume(self) -> None:
        self._require_alive()
        if self._asleep:
            raise GenerationError(explain("resume()", f"{sorted(self._asleep)} sleep", "await wake_up() first"))
        self._end_pause_wait(paused=False)
        self._changed.set()

    async def sleep(self) -> None:
        self._require_alive()
        if not self._paused or self._running:
            raise GenerationError(explain("sleep", "the engine is not paused and empty", "await pause('abort') first"))
        self._asleep = {"weights", "kv_cache"}
        self._version = None

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self._require_alive()
        self._asleep -= self._asleep if tags is None else set(tags)

    @property
    def asleep(self) -> frozenset[str]:
        """The parts that have given their memory back."""
        return frozenset(self._asleep)

    def health(self) -> EngineHealth:
        running, waiting, busy_s = len(self._running), len(self._waiting), self._busy_ticks * self.script.tick_s
        return EngineHealth(not self._dead, running, waiting, self._version, busy_s, self._generated, self._dead)

    async def stop(self) -> None:
        self.crash("stopped")
        if self._clock is not None:
            await asyncio.wait((self._clock,))

    def crash(self, reason: str) -> None:
        """Ends every request with GenerationError; nothing works any more."""
        self._dead = reason
        for stream in (*self._running.values(), *self._waiting):
            stream.out.put_nowait(GenerationError(explain("the fake engine", reason, "start a new one")))
        self._running.clear()
        self._waiting.clear()
        self._end_pause_wait(paused=self._paused)
        if self._clock is not None:
            self._clock.cancel()

    def stall(self, stalled: bool = True) -> None:
        """Samples nothing, and tells nobody, until `stall(False)`."""
        self._stalled = stalled
        self._changed.set()

    def refuse_next(self, count: int = 1) -> None:
        """The next `count` calls of generate raise GenerationError."""
        self._refusals += count

    async def _run(self) -> None:
        while True:
            self._admit()
            if self._stalled or self._paused or not self._running:
                self._changed.clear()
                await self._changed.wait()
                continue
            await asyncio.sleep(self.script.tick_s)
            if not (self._stalled or self._paused):
                self._tick()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.script.num_slots:
            if self._paused or self._draining or self._version is None:
                return
            stream = self._waiting.popleft()
            self._running[stream.request.request_id] = stream

    def _tick(self) -> None:
        self._busy_ticks += 1
        for stream in tuple(self._running.values()):
            self._generated += 1
            reason = self._sample(stream)
            if reason is not None:
                del self._running[stream.request.request_id]
            if reason is not None or len(stream.ids) == self.script.chunk_tokens:
                self._emit(stream, reason)
        if self._draining and not self._running:
            self._end_pause_wait(paused=True)

    def _sample(self, stream: _Stream) -> FinishReason | None:
        request = stream.request
        assert self._version is not None
        sampling, index = request.sampling, len(request.prompt_ids) + stream.produced
        may_stop = stream.produced >= sampling.min_tokens
        token = fake_token(self._version, int(request.prompt_ids[0]), index)
        while not may_stop and token in sampling.stop_token_ids:
            index += 1
            token = fake_token(self._version, int(request.prompt_ids[0]), index)
        stream.ids.append(token)
        stream.produced += 1
        length = self.script.response_tokens
        if token in sampling.stop_token_ids:
            return "stop"
        if may_stop and length is not None and request.first_position + stream.produced >= length(request):
            return "stop"
        return "length" if stream.produced == request.sampling.max_tokens else None

    def _emit(self, stream: _Stream, reason: FinishReason | None) -> None:
        """Log-probabilities are -1/2 for even tokens and -1/4 for odd ones: exact in float32 and tied to the token."""
        if reason is None and not stream.ids:
            return
        ids = np.array(stream.ids, dtype=np.int32)
        stream.ids.clear()
        logprobs = np.where(ids % 2 == 0, -0.5, -0.25).astype(np.float32)
        version = -1 if self._version is None else self._version
        extra = {"experts": fake_experts(ids)} if stream.request.sampling.experts and len(ids) else {}
        stream.out.put_nowait(TokenChunk(stream.request.request_id, ids, logprobs, version, reason, extra=extra))

    def _abort(self, request_ids: Sequence[str] | None) -> None:
        for stream in (*self._running.values(), *self._waiting):
            if request_ids is None or stream.request.request_id in request_ids:
                self._forget(stream)
                self._emit(stream, "abort")

    def _forget(self, stream: _Stream) -> None:
        if self._running.get(stream.request.request_id) is stream:
            del self._running[stream.request.request_id]
        if stream in self._waiting:
            self._waiting.remove(stream)
        if self._draining and not self._running:
            self._end_pause_wait(paused=True)
        self._changed.set()

    def _end_pause_wait(self, *, paused: bool) -> None:
        self._paused, self._draining = paused, False
        self._drained.set()

    def _require_alive(self) -> None:
        if self._dead:
            raise GenerationError(explain("the fake engine", self._dead, "start a new one"))

    def _check(self, request: GenerationRequest) -> None:
        script = self.script
        found = misfit(
            request,
            engine="fake",
            max_model_len=script.max_model_len,
            vocab_size=_VOCAB_SIZE,
            guided=script.guided,
            scores=True,
            records=("experts",),
        )
        if self._refusals:
            self._refusals -= 1
            found = "told to refuse", "send it again"
        if request.request_id in self._running or any(
            request.request_id == s.request.request_id for s in self._waiting
        ):
            found = "it is in flight", "use a new id"
        if found is not None:
            raise GenerationError(explain(f"generate {request.request_id!r}", *found))
