"""Base class of the adapters to engines that sample in separate processes."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import EngineConfig
from asyncrl.errors import BadRequest, ConfigError, GenerationError, WeightTransferError, explain
from asyncrl.inference.shared.engine_queue import EngineQueue
from asyncrl.inference.shared.publish_calls import PublishCalls
from asyncrl.inference.shared.request_checks import misfit
from asyncrl.inference.shared.streams import RequestStream, empty_chunk
from asyncrl.remote.tasks import kept
from asyncrl.types import Digest, EngineHealth, GenerationRequest, Manifest, PauseMode, TokenChunk, TransferSource
from asyncrl.types.images import without_images

logger = logging.getLogger(__name__)

T = TypeVar("T")
S = TypeVar("S", bound=RequestStream)

_LOG_BYTES = 1 << 16
_EXCEPTION = re.compile(r"^(?:\S.*\] )?((?:\w+\.)*\w+(?:Error|Exception): .{1,300})", re.MULTILINE)
_WATCH_S = 0.25
"""Pause between two checks that the engine's processes are alive."""


def last_logged_error() -> str:
    """The last exception in the file that this process and the engine's processes have as stderr; empty if there is
    none. Packages often say only that another process failed."""
    try:
        if not stat.S_ISREG(os.fstat(2).st_mode):  # a terminal or a pipe cannot be read
            return ""
        with open("/proc/self/fd/2", "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
            found = _EXCEPTION.findall(file.read().decode(errors="replace"))
    except OSError:  # no file, or not on Linux
        return ""
    return next((text for text in reversed(found) if "root cause" not in text), "")


class ProcessEngine(ABC, Generic[S]):
    """An `InferenceEngine` over a package that samples in other processes.

    Owns the requests from the queue to their last chunk, the pause, the version, and the end of the engine. A subclass
    implements the calls of its package as abstract methods, which only this class calls.

    Until a version is committed, requests wait: placeholder weights sample nothing.
    """

    package: ClassVar[str]
    """The engine's name in messages."""
    key: ClassVar[str]
    """The engine's name in a recipe."""
    no_sleep: ClassVar[tuple[str, str]] = ("", "")
    """(found, do) of the error if the engine has a sleep mode that is off."""
    _sleeps = False
    """The engine's sleep mode is on."""
    _guided = False
    """The engine has guided decoding."""
    _scores: ClassVar[bool] = False
    """The engine scores given tokens (`SamplingParams.score_from`)."""
    _max_top: int | None = None
    """Largest `SamplingParams.score_top`; None: vocabulary size."""
    _records: tuple[str, ...] = ()
    """As `misfit`."""

    def __init__(self, model: ModelConfig, settings: EngineConfig, *, load_real_weights: bool) -> None:
        """`load_real_weights`: start as version 0; otherwise with version None."""
        self._model = model
        self._context_tokens = settings.context_tokens
        self._real_weights = load_real_weights
        self._queue: EngineQueue[S] = EngineQueue(
            settings.decodes_at_once,
            self._send,
            time.monotonic,
            is_resumed=lambda stream: stream.request.first_position > 0,
        )
        self._streams: dict[str, S] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._drains: set[asyncio.Future[None]] = set()
        self._frozen = asyncio.Lock()
        self._started = False
        self._ended: asyncio.Future[str] | None = None
        """Set with the reason when the engine dies or is stopped."""
        self._closed = False
        self._paused: bool | None = False
        """Whether the processes are frozen; None while a freeze or unfreeze call is unanswered, even if its caller gave
        up."""
        self._closings = 0
        self._version: int | None = None
        self._publishes: PublishCalls | None = None
        """Set by `_launch`."""
        self._salt = 0
        """Counts weight changes. The KV cache of a prompt is shared only by requests with the same salt."""
        self._generated = 0

    # -- what a subclass implements ------------------------------------------------------------------------------

    @abstractmethod
    async def _launch(self) -> None:
        """Starts the processes; returns when they can serve. Raises ConfigError, or whatever the package raises."""

    @abstractmethod
    async def _shut_down(self) -> None:
        """Ends the processes and frees everything, also after a failed launch. Idempotent."""

    @abstractmethod
    def _death(self) -> str | None:
        """Why the processes no longer serve; None while they do."""

    @abstractmethod
    def _vocab_size(self) -> int: ...

    @abstractmethod
    def _new_stream(self, request: GenerationRequest) -> S: ...

    @abstractmethod
    async def _sample(self, stream: S) -> None:
        """Sends the request, sets `stream.entered`, and calls `_hand_over` for each output until the last. Raises
        BadRequest, or whatever the package raises."""

    @abstractmethod
    async def _abort_inside(self, streams: list[S]) -> None:
        """Makes the engine end these streams, which have entered it; each gets a last output."""

    @abstractmethod
    async def _freeze_inside(self) -> None:
        """Stops sampling; requests in flight keep their KV cache."""

    @abstractmethod
    async def _unfreeze_inside(self) -> None: ...

    @abstractmethod
    async def _settle(self) -> None:
        """Called while frozen. Returns when all sampled tokens are in the streams and no running stream has a fate."""

    @abstractmethod
    async def _announce(self, version: int) -> None:
        """Tells the processes the version of tokens sampled from now on."""

    async def _receive(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        """As `InferenceEngine.load_weights`."""
        assert self._publishes is not None, "the engine was started"
        return await self._publishes.receive(manifest, source, timeout_s)

    # -- the protocol --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Also raises ConfigError: the package is missing or its version is unusable."""
        if self._ended is not None:
            raise GenerationError(explain("start", "the engine was started before", "make a new engine"))
        self._ended = asyncio.get_running_loop().create_future()
        # `stop` may come during the launch, which takes minutes and is then cancelled.
        launching = asyncio.ensure_future(self._launch())
        try:
            await asyncio.wait((launching, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if not launching.done():
                found = f"the engine was stopped: {self._ended.result()}"
                raise GenerationError(explain("start", found, "make a new engine"))
            launching.result()
        except (ConfigError, GenerationError):
            self._end("it could not be started")
            raise
        except Exception as error:
            self._end(f"it could not be started: {type(error).__name__}: {error}")
            asked, found = f"start {self.package} for {self._model.path}", f"{type(error).__name__}: {error}"
            if (logged := last_logged_error()) and logged not in found:
                found = f"{found.rstrip()} ({logged})"
            do = f"the log of its processes says more; rollout.{self.key} has the settings"
            raise GenerationError(explain(asked, found, do)) from error
        finally:
            launching.cancel()
        self._started = True
        self._spawn(self._watch(), f"{self.key}-watch")
        if self._real_weights:
            await self.commit(0)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        self._require_alive()
        self._check(request)
        stream = self._streams[request.request_id] = self._new_stream(request)
        self._queue.enter(stream)
        try:
            while True:
                item = await stream.chunks.get()  # always ends: `_end` ends every stream when the engine dies
                if isinstance(item, GenerationError):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            if not stream.ended.is_set():  # the consumer left early
                self._take_out([stream])

    async def abort(self, request_ids: Sequence[str] | None) -> None:
        if request_ids is None:
            streams = list(self._streams.values())
        else:
            streams = [self._streams[i] for i in dict.fromkeys(request_ids) if i in self._streams]
        self._take_out(streams)
        for stream in streams:
            await stream.ended.wait()  # as in `generate`

    async def pause(self, mode: PauseMode) -> None:
        self._require_alive()
        first = not self._closed
        self._closed = True
        self._closings += 1
        self._set_gate()
        if mode == "drain" and not self._paused and self._queue.running:
            # Queued requests stay queued; the last running one to finish sets the future.
            drained = asyncio.get_running_loop().create_future()
            self._drains.add(drained)
            await drained
        elif mode == "abort":
            # A second pause must not abort requests that were queued after the first one.
            await self.abort(None if first else [s.request.request_id for s in self._queue.running])
        await self._freeze()

    async def resume(self) -> None:
        self._require_alive()
        found = explain("pause(drain)", "resume() came before the running requests had finished", "pause again")
        self._end_drains(GenerationError(found))
        closings = self._closings
        async with self._frozen:
            if self._paused is not False:
                self._paused = None
                await self._ask(self._unfreeze_inside())
                self._paused = False
        if closings == self._closings:  # no pause came during the calls above
            self._closed = False
            self._set_gate()

    async def commit(self, version: int | None) -> None:
        self._require_alive()
        if version is None:
            return
        await self._ask(self._announce(version))
        self._version = version
        self._salt += 1
        self._set_gate()

    async def load_weights(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        self._begin_load("load_weights")
        asked = f"load_weights of publish {manifest.publish_id}"
        return await self._publish(asked, self._receive(manifest, source, timeout_s))

    def health(self) -> EngineHealth:
        alive = self._started and self._failure is None
        running, waiting = len(self._queue.running), len(self._queue.waiting)
        busy_s, detail = self._queue.busy_s, self._failure or ""
        return EngineHealth(alive, running, waiting, self._version, busy_s, self._generated, detail)

    async def stop(self) -> None:
        self._end("the engine was stopped")
        if self._publishes is not None:
            self._publishes.close()
        await self._shut_down()

    # -- for a subclass ------------------------------------------------------------------------------------------

    def _begin_load(self, asked: str) -> None:
        """The weights are about to change. Raises WeightTransferError: the engine is sampling."""
        self._require_alive()
        if not self._paused:
            raise WeightTransferError(explain(asked, "the engine is sampling", "await pause(...) before a publish"))
        self._salt += 1  # also without a new version: no prompt may use the KV cache of other weights

    def _require_sleep(self, asked: str) -> None:
        """Raises GenerationError: the engine cannot sleep or wake up now."""
        self._require_alive()
        if not self._sleeps:
            raise GenerationError(explain(asked, *self.no_sleep))
        if not self._paused or self._queue.running:
            raise GenerationError(explain(asked, "the engine is not paused and empty", "await pause('abort') first"))

    async def _publish(self, asked: str, calls: Awaitable[T]) -> T:
        """Awaits the calls of a publish. Raises WeightTransferError: the engine died first."""
        assert self._ended is not None, "the engine was started"
        publishing = asyncio.ensure_future(calls)
        try:
            await asyncio.wait((publishing, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if publishing.done():
                return publishing.result()
        finally:
            publishing.cancel()
        raise WeightTransferError(explain(asked, self._failure or "", "start a new engine"))

    # -- requests ------------------------------------------------------------------------------------------------

    def _send(self, stream: S) -> None:
        """Sends a stream to the engine; called by the queue once the stream has a place."""
        self._spawn(self._serve(stream), f"{self.key} {stream.request.request_id}")

    async def _serve(self, stream: S) -> None:
        """Moves one request's outputs into its stream."""
        request = stream.request
        try:
            await self._sample(stream)
        except BadRequest as error:
            self._finish(stream, error)
        except Exception as error:  # task boundary: it becomes the request's error
            if reason := self._death():
                self._end(reason)
                return
            logger.exception("request %s failed", request.request_id)
            self._finish(stream, self._failed(f"generate {request.request_id!r}", f"{type(error).__name__}: {error}"))

    def _hand_over(self, stream: S, chunks: list[TokenChunk], *, is_last: bool) -> None:
        """Delivers the chunks of one output; called by `_sample`. A requeued request's last output has no token and is
        dropped."""
        self._generated += sum(len(chunk.token_ids) for chunk in chunks)
        # `_freeze` took the stream out before its first token.
        if is_last and stream.fate == "requeue" and stream.num_tokens == 0:
            self._leave(stream)
            self._queue.requeue(stream)
            return
        for chunk in chunks:
            if chunk.finish_reason is None:
                stream.chunks.put_nowait(chunk)
            else:
                self._finish(stream, chunk)

    def _leave(self, stream: S) -> None:
        """Resets the stream so that it can be sent again."""
        stream.fate = None
        stream.entered.clear()

    def _finish(self, stream: S, last: TokenChunk | GenerationError) -> None:
        """Ends the stream. Frees its place first, so that the place is free when the consumer sees the last chunk."""
        if self._streams.get(stream.request.request_id) is stream:
            del self._streams[stream.request.request_id]
        self._queue.leave(stream)
        stream.end(last)
        if not self._queue.running:
            self._end_drains(None)

    def _take_out(self, streams: Iterable[S]) -> None:
        """Ends these streams with the tokens so far: queued streams immediately, running ones when the engine
        answers."""
        running: list[S] = []
        for stream in streams:
            if stream in self._queue.running:
                stream.fate = "abort"
                running.append(stream)
            else:
                self._finish(stream, empty_chunk(stream.request, self._version, "abort"))
        # The fate is set before the abort is sent, so that a request about to enter ends too.
        inside = [stream for stream in running if stream.entered.is_set()]  # for the others `_sample` checks the fate
        if inside:
            self._spawn(self._abort_inside(inside), f"{self.key}-abort")

    # -- pausing -------------------------------------------------------------------------------------------------

    def _forget_version(self) -> None:
        """The weights are dropped: nothing is sampled until a commit with a version."""
        self._version = None
        self._salt += 1
        self._set_gate()

    def _set_gate(self) -> None:
        self._queue.set_open(not self._closed and self._version is not None and self._failure is None)

    async def _freeze(self) -> None:
        """Stops sampling; returns when all sampled tokens are in the streams."""
        async with self._frozen:
            self._require_alive()
            for stream in list(self._queue.running):
                await stream.entered.wait()  # otherwise it would enter after the pause
            if not self._paused:
                self._paused = None
                await self._ask(self._freeze_inside())
                self._paused = True
            await self._settle()
            unborn = [s for s in self._queue.running if s.num_sampled == 0 and s.fate is None]
            for stream in unborn:  # they have no tokens, so they restart with the new weights
                stream.fate = "requeue"
            if unborn:
                await self._ask(self._abort_inside(unborn[::-1]))
                await self._settle()
            self._end_drains(None)

    def _end_drains(self, error: GenerationError | None) -> None:
        for drained in self._drains:
            if not drained.done():
                drained.set_exception(error) if error else drained.set_result(None)
        self._drains.clear()

    # -- life ----------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while self._failure is None:
            if reason := self._death():
                self._end(reason)
            await asyncio.sleep(_WATCH_S)

    def _end(self, reason: str) -> None:
        """Ends every wait for the engine with a GenerationError; the first reason counts."""
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
        if self._ended.done():
            return
        self._ended.set_result(reason)
        self._queue.set_open(False)
        # Every consumer gets the reason as its last item.
        for stream in list(self._streams.values()) + list(self._queue.running):
            self._finish(stream, self._failed("generate", reason))
        self._end_drains(self._failed("pause(drain)", reason))
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    async def _ask(self, call: Awaitable[T]) -> T:
        """Awaits the engine's answer. Raises GenerationError if the engine dies or is stopped first: it would never
        answer."""
        assert self._ended is not None
        answer = asyncio.ensure_future(call)
        await asyncio.wait((answer, self._ended), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            # The death of the engine won the race.
            answer.cancel()
            self._require_alive()
        try:
            return answer.result()
        except Exception as error:
            if reason := self._death():
                self._end(reason)
            self._require_alive()
            raise self._failed(f"a call of {self.package}", f"{type(error).__name__}: {error}") from error

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        kept(self._tasks, work, name)

    @property
    def _failure(self) -> str | None:
        return self._ended.result() if self._ended is not None and self._ended.done() else None

    def _failed(self, asked: str, found: str) -> GenerationError:
        return GenerationError(explain(f"{asked}, {self.package} for {self._model.path}", found, "start a new engine"))

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise self._failed("use the engine", self._failure)
        if not self._started:
            raise self._failed("use the engine", "it was not started")

    def _check(self, request: GenerationRequest) -> None:
        found = misfit(
            request if self._model.image_directory is None else without_images(request),
            engine=self.key,
            max_model_len=self._context_tokens,
            vocab_size=self._vocab_size(),
            guided=self._guided,
            scores=self._scores,
            max_top=self._max_top,
            records=self._records,
        )
        # An id names the request's stream, so it must be unique among requests in flight.
        if found is None and request.request_id in self._streams:
            found = ("a request of that id is in flight", "use a new id per attempt")
        if found is not None:
            raise GenerationError(explain(f"generate {request.request_id!r}", *found))
