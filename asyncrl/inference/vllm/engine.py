"""`VllmEngine`: vLLM's AsyncLLM behind the protocol of engines."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import VllmEngineConfig
from asyncrl.errors import ConfigError, GenerationError, WeightTransferError, explain
from asyncrl.inference.shared.engine_queue import EngineQueue
from asyncrl.inference.shared.request_checks import misfit
from asyncrl.inference.vllm.launch import Launcher, death_of
from asyncrl.inference.vllm.sampling_params import sampling_params
from asyncrl.inference.vllm.streams import RequestStream, empty_chunk
from asyncrl.inference.vllm.transfer import VllmTransfer
from asyncrl.types import Digest, EngineHealth, GenerationRequest, Manifest, PauseMode, TokenChunk, TransferSource

logger = logging.getLogger(__name__)

T = TypeVar("T")

_WATCH_S = 0.25
"""Pause between two checks that EngineCore is alive."""
_STOP_S = 30.0


class VllmEngine:
    """An `InferenceEngine` over vLLM, whose processes run below this one.

    Until a version is committed, requests wait: dummy weights sample nothing. Sampling is not deterministic: a resumed
    request draws from a new random stream (`sampling_params.stream_seed`), and rounding depends on the batch.

    Args:
        load_real_weights: load the model's files and start as version 0; otherwise random weights and version None.
        seed: of vLLM and of the random weights.
    """

    def __init__(
        self, model: ModelConfig, settings: VllmEngineConfig, *, load_real_weights: bool, seed: int = 0
    ) -> None:
        self._model = model
        self._settings = settings
        self._real_weights = load_real_weights
        self._launcher = Launcher(model, settings, load_real_weights=load_real_weights, seed=seed)
        self._queue = EngineQueue(settings.max_num_seqs, self._send, time.monotonic)
        self._streams: dict[str, RequestStream] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._drains: set[asyncio.Future[None]] = set()
        self._frozen = asyncio.Lock()
        self._llm: Any = None
        self._transfer: VllmTransfer | None = None
        self._ended: asyncio.Future[str] | None = None
        """Set with the reason when the engine dies or is stopped."""
        self._closed = False
        self._paused = False
        self._version: int | None = None
        self._salt = 0
        self._generated = 0

    # -- the protocol --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Also raises ConfigError: vLLM is missing, or its version cannot be used."""
        if self._ended is not None:
            raise GenerationError(explain("start", "the engine was started before", "make a new engine"))
        self._ended = asyncio.get_running_loop().create_future()
        self._launcher.start()
        try:
            started = asyncio.wrap_future(self._launcher.started)
            await asyncio.wait((started, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if not started.done():
                raise GenerationError(
                    explain("start", f"the engine was stopped: {self._ended.result()}", "start a new engine")
                )
            self._llm = started.result()
        except (ConfigError, GenerationError):
            self._end("it could not be started")
            raise
        except Exception as error:
            self._end(f"it could not be started: {type(error).__name__}: {error}")
            asked = f"start vLLM for {self._model.path}"
            do = "the log of vLLM's processes says more; rollout.vllm has the settings"
            raise GenerationError(explain(asked, f"{type(error).__name__}: {error}", do)) from error
        self._transfer = VllmTransfer(self._llm)
        self._spawn(self._watch(), "vllm-watch")
        if self._real_weights:
            await self.commit(0)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        self._require_alive()
        self._check(request)
        stream = self._streams[request.request_id] = RequestStream(request)
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
        self._set_gate()
        if mode == "drain" and not self._paused and self._queue.running:
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
        async with self._frozen:
            if self._paused:
                await self._ask(self._llm.resume_generation())
                self._paused = False
        self._closed = False
        self._set_gate()

    async def commit(self, version: int | None) -> None:
        self._require_alive()
        if version is None:
            return
        await self._ask(self._llm.update_weight_version(str(version)))
        self._version = version
        self._salt += 1
        self._set_gate()

    async def load_weights(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        self._require_alive()
        if not self._paused or self._transfer is None:
            raise WeightTransferError(
                explain("load_weights", "the engine is sampling", "await pause(...) before a publish")
            )
        self._salt += 1  # also without a new version: no prompt may use the KV cache of other weights
        assert self._ended is not None
        receiving = asyncio.ensure_future(self._transfer.receive(manifest, source, timeout_s))
        try:
            await asyncio.wait((receiving, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                return receiving.result()
        finally:
            receiving.cancel()
        asked = f"load_weights of publish {manifest.publish_id}"
        raise WeightTransferError(explain(asked, self._failure or "", "start a new engine"))

    def health(self) -> EngineHealth:
        alive = self._llm is not None and self._failure is None
        running, waiting = len(self._queue.running), len(self._queue.waiting)
        busy_s, detail = self._queue.busy_s, self._failure or ""
        return EngineHealth(alive, running, waiting, self._version, busy_s, self._generated, detail)

    async def stop(self) -> None:
        self._end("the engine was stopped")
        if self._transfer is not None:
            self._transfer.close()
        if not await asyncio.to_thread(self._launcher.stop, _STOP_S):
            logger.error("vLLM did not shut down within %g s and is left behind", _STOP_S)
        self._llm = self._transfer = None

    # -- beyond the protocol -------------------------------------------------------------------------------------

    async def sleep(self, level: int = 1) -> None:
        """As `SleepingEngine.sleep`."""
        self._require_sleep_mode(f"sleep(level={level})")
        if level > 1:
            await self._ask(self._llm.collective_rpc("asyncrl_forget"))
        await self._ask(self._llm.sleep(level))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """As `SleepingEngine.wake_up`."""
        self._require_sleep_mode("wake_up()")
        await self._ask(self._llm.wake_up(tags))
        await self._ask(self._llm.pause_generation(mode="keep", clear_cache=False))  # vLLM resumes when it wakes

    # -- requests ------------------------------------------------------------------------------------------------

    def _send(self, stream: RequestStream) -> None:
        """Sends a stream to vLLM; the request queue calls this when the stream has a place."""
        self._spawn(self._serve(stream), f"vllm {stream.request.request_id}")

    async def _serve(self, stream: RequestStream) -> None:
        """Moves what vLLM samples for one request into its stream."""
        request, llm = stream.request, self._llm
        from vllm.inputs import tokens_input

        try:
            prompt = tokens_input(request.prompt_ids.tolist(), cache_salt=str(self._salt))
            params = sampling_params(request, llm.model_config.get_vocab_size())
            collector = await llm.add_request(request.request_id, prompt, params)
            stream.enter(collector, llm.output_processor.request_states.get(collector.request_id))
            if stream.fate is not None:
                await self._abort_in_vllm([stream])
            finished = False
            while not finished:
                output = await collector.get()
                finished = output.finished
                self._hand_over(stream, output)
        except Exception as error:  # task boundary: it becomes the request's error
            if reason := death_of(llm):
                self._end(reason)
                return
            logger.exception("request %s failed", request.request_id)
            self._finish(stream, self._failed(f"generate {request.request_id!r}", f"{type(error).__name__}: {error}"))

    def _hand_over(self, stream: RequestStream, output: Any) -> None:
        before = stream.num_tokens
        chunks = stream.take(output, self._version)
        self._generated += stream.num_tokens - before
        if output.finished and stream.fate == "requeue" and stream.num_tokens == 0:
            stream.leave()
            self._queue.requeue(stream)
            return
        for chunk in chunks:
            if chunk.finish_reason is None:
                stream.chunks.put_nowait(chunk)
            else:
                self._finish(stream, chunk)

    def _finish(self, stream: RequestStream, last: TokenChunk | GenerationError) -> None:
        """Frees the place first, so that a consumer that sees the last chunk finds it free."""
        if self._streams.get(stream.request.request_id) is stream:
            del self._streams[stream.request.request_id]
        self._queue.leave(stream)
        stream.end(last)
        if not self._queue.running:
            self._end_drains(None)

    def _take_out(self, streams: Iterable[RequestStream]) -> None:
        """Ends these streams with the tokens that they have: queued ones at once, the others when vLLM has answered."""
        running: list[RequestStream] = []
        for stream in streams:
            if stream in self._queue.running:
                stream.fate = "abort"
                running.append(stream)
            else:
                self._finish(stream, empty_chunk(stream.request, self._version, "abort"))
        inside = [stream for stream in running if stream.internal_id is not None]
        if inside:
            self._spawn(self._abort_in_vllm(inside), "vllm-abort")

    async def _abort_in_vllm(self, streams: list[RequestStream]) -> None:
        """vLLM answers each with a final output, at once."""
        await self._llm.abort([stream.internal_id for stream in streams], internal=True)

    # -- pausing -------------------------------------------------------------------------------------------------

    def _set_gate(self) -> None:
        self._queue.set_open(not self._closed and self._version is not None and self._failure is None)

    async def _freeze(self) -> None:
        """Returns when vLLM samples nothing and everything that it had sampled is in the streams."""
        async with self._frozen:
            self._require_alive()
            for stream in list(self._queue.running):
                await stream.entered.wait()  # otherwise it would enter after the pause
            if not self._paused:
                self._paused = True  # set before the call: a superfluous resume is harmless, a missing one is not
                await self._ask(self._llm.pause_generation(mode="keep", clear_cache=False))
            await self._settle()
            unborn = [s for s in self._queue.running if s.num_tokens == 0 and s.fate is None]
            for stream in unborn:  # without tokens: they start again with the new weights
                stream.fate = "requeue"
            if unborn:
                await self._ask(self._abort_in_vllm(unborn[::-1]))
                await self._settle()
            self._end_drains(None)

    async def _settle(self) -> None:
        """Waits until no output is in transit between vLLM's socket and the streams.

        vLLM queues the answer to a pause after the last outputs. Moving these takes one turn of the loop per 128.
        """
        quiet = 0
        while quiet < 4 + self._settings.max_num_seqs // 64:
            under_way = not self._llm.engine_core.outputs_queue.empty()
            leaving = any(s.behind or s.fate is not None for s in self._queue.running)
            quiet = 0 if under_way or leaving else quiet + 1
            self._require_alive()
            await asyncio.sleep(0)

    def _end_drains(self, error: GenerationError | None) -> None:
        for drained in self._drains:
            if not drained.done():
                drained.set_exception(error) if error else drained.set_result(None)
        self._drains.clear()

    # -- life ----------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while self._failure is None:
            if reason := death_of(self._llm):
                self._end(reason)
            await asyncio.sleep(_WATCH_S)

    def _end(self, reason: str) -> None:
        """Ends everything that waits for vLLM with a GenerationError; the first reason counts."""
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
        if self._ended.done():
            return
        self._ended.set_result(reason)
        self._queue.set_open(False)
        for stream in list(self._streams.values()) + list(self._queue.running):
            self._finish(stream, self._failed("generate", reason))
        self._end_drains(self._failed("pause(drain)", reason))
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    async def _ask(self, call: Awaitable[T]) -> T:
        """The answer of vLLM. Raises GenerationError when vLLM dies or is stopped first: it would never answer."""
        assert self._ended is not None
        answer = asyncio.ensure_future(call)
        await asyncio.wait((answer, self._ended), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            self._require_alive()
        try:
            return answer.result()
        except Exception as error:
            if reason := death_of(self._llm):
                self._end(reason)
            self._require_alive()
            raise self._failed("a call of vLLM", f"{type(error).__name__}: {error}") from error

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def _failure(self) -> str | None:
        return self._ended.result() if self._ended is not None and self._ended.done() else None

    def _failed(self, asked: str, found: str) -> GenerationError:
        return GenerationError(explain(f"{asked}, vLLM for {self._model.path}", found, "start a new engine"))

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise self._failed("use the engine", self._failure)
        if self._llm is None:
            raise self._failed("use the engine", "it was not started")

    def _require_sleep_mode(self, asked: str) -> None:
        self._require_alive()
        if not self._settings.enable_sleep_mode:
            raise GenerationError(explain(asked, "sleep mode is off", "set rollout.vllm.enable_sleep_mode, on a GPU"))
        if not self._paused or self._queue.running:
            raise GenerationError(explain(asked, "the engine is not paused and empty", "await pause('abort') first"))

    def _check(self, request: GenerationRequest) -> None:
        found = misfit(
            request,
            engine="vllm",
            max_model_len=self._settings.context_tokens,
            vocab_size=self._llm.model_config.get_vocab_size(),
        )
        if found is None and request.request_id in self._streams:
            found = ("a request of that id is in flight", "use a new id per attempt")
        if found is not None:
            raise GenerationError(explain(f"generate {request.request_id!r}", *found))
