"""`TorchEngine`: the asyncio side of the embedded engine."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import torch

from asyncrl.config.checks import has_nvidia_gpu, require_cuda
from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import TorchEngineConfig
from asyncrl.errors import GenerationError, WeightTransferError, explain
from asyncrl.inference.cpu_time import yield_to_others
from asyncrl.inference.engine import PauseMode
from asyncrl.inference.shared.request_checks import misfit, samplable_stops
from asyncrl.inference.torch_engine.loop import Command, DecodeLoop, LoopReport
from asyncrl.inference.torch_engine.runner import ModelRunner, load_model
from asyncrl.inference.torch_engine.transfer import TorchTransfer
from asyncrl.kernels.cpu_products import use_onednn
from asyncrl.remote.waits import deadline
from asyncrl.types import Digest, EngineHealth, GenerationRequest, Manifest, TokenChunk, TransferSource
from asyncrl.types.images import FIRST_ID, without_images

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 30.0
_PARTS = frozenset({"weights", "kv_cache"})
"""The parts that sleep together and wake together or separately."""


class TorchEngine:
    """An `InferenceEngine` and `SleepingEngine` in this process: a slot loop over the Hugging Face forward pass.

    A separate thread owns the model; this side sends commands and gets reports. Until a version is committed, requests
    wait in the queue: dummy weights sample nothing.

    Args:
        load_real_weights: load the model's files and start as version 0; otherwise random weights and version None.
    """

    def __init__(self, model: ModelConfig, settings: TorchEngineConfig, *, load_real_weights: bool) -> None:
        self._config = model
        self._settings = settings
        self._real_weights = load_real_weights
        has_gpu = torch.cuda.is_available() or has_nvidia_gpu()
        chosen = settings.device if settings.device != "auto" else "cuda" if has_gpu else "cpu"
        self._device = torch.device(chosen)
        if self._device.type == "cuda":
            require_cuda("rollout.torch.device", chosen, is_available=torch.cuda.is_available())
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="torch-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started: asyncio.Future[None] | None = None
        self._runner: ModelRunner | None = None
        self._decode: DecodeLoop | None = None
        self._transfer: TorchTransfer | None = None
        self._streams: dict[str, asyncio.Queue[TokenChunk | GenerationError]] = {}
        self._tickets = itertools.count()
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._drains: set[int] = set()
        self._paused = False
        self._asleep: frozenset[str] = frozenset()
        """The parts whose memory is released."""
        self._failure: BaseException | None = None
        self._stopped = False

    async def start(self) -> None:
        if self._loop is not None:
            raise GenerationError(explain("start", "the engine was started before", "make a new engine"))
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.create_future()
        self._thread.start()
        await self._started

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        self._require_alive()
        self._check(request)
        stream: asyncio.Queue[TokenChunk | GenerationError] = asyncio.Queue()
        self._streams[request.request_id] = stream
        bounded = self._bounded(request)
        self._commands.put(lambda loop: loop.submit(bounded))
        try:
            while True:
                item = await stream.get()  # the thread ends every stream, and fails all of them when it dies
                if isinstance(item, GenerationError):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            if self._streams.get(request.request_id) is stream:  # the consumer left early
                del self._streams[request.request_id]
                self._commands.put(lambda loop: loop.abort((request.request_id,)))

    async def abort(self, request_ids: Sequence[str] | None) -> None:
        if self._alive:  # otherwise every request has ended with an error already
            ids = None if request_ids is None else tuple(request_ids)
            await self._ask(lambda loop, ticket: loop.abort(ids, ticket))

    async def pause(self, mode: PauseMode) -> None:
        self._require_alive()
        await self._ask(lambda loop, ticket: loop.pause(mode, ticket), drains=mode == "drain")
        self._paused = True

    async def resume(self) -> None:
        self._require_alive()
        if self._asleep:
            raise GenerationError(explain("resume()", f"{sorted(self._asleep)} sleep", "await wake_up() first"))
        self._paused = False
        # A drain that has not finished is cancelled by the resume.
        for ticket in tuple(self._drains):
            found = explain("pause(drain)", "resume() came before the running requests had finished", "pause again")
            if not self._answers[ticket].done():
                self._answers[ticket].set_exception(GenerationError(found))
        await self._ask(DecodeLoop.resume)

    async def commit(self, version: int | None) -> None:
        self._require_alive()
        await self._ask(lambda loop, ticket: loop.commit(version, ticket))

    async def load_weights(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        return await self._loadable("load_weights").receive(manifest, source, timeout_s)

    async def stage_weights(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        """As `StagingEngine.stage_weights`."""
        self._require_alive()
        assert self._transfer is not None, "the engine was started"
        return await self._transfer.stage(manifest, source, timeout_s)

    async def load_staged(self, timeout_s: float) -> None:
        """As `StagingEngine.load_staged`."""
        async with deadline(timeout_s, "load staged weights", do="raise weights.transfer_timeout_s"):
            await self._loadable("load_staged").load_staged()

    async def sleep(self) -> None:
        """As `SleepingEngine.sleep`. Afterwards the engine has no version and samples nothing before a commit."""
        self._require_sleepable("sleep()")
        assert self._transfer is not None, "the engine was started"
        if self._asleep == _PARTS:
            return
        if self._asleep:
            raise GenerationError(explain("sleep()", "it sleeps in part", "await wake_up() first"))
        self._transfer.forget()
        self._asleep = _PARTS  # even if the call is cancelled: the thread still does it
        await self._ask(lambda loop, ticket: loop.sleep(ticket))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """As `SleepingEngine.wake_up`. The weights are 0."""
        parts = _PARTS if tags is None else frozenset(tags)
        if unknown := parts - _PARTS:
            raise GenerationError(explain(f"wake_up({tags})", f"no part {sorted(unknown)}", f"of {sorted(_PARTS)}"))
        self._require_sleepable(f"wake_up({tags})")
        await self._ask(lambda loop, ticket: loop.wake(parts, ticket))
        self._asleep -= parts

    def health(self) -> EngineHealth:
        if self._decode is None:
            return EngineHealth(self._alive, 0, 0, None, 0.0, 0, self._detail)
        counters = self._decode.counters
        running = counters.running if self._alive else 0
        waiting = max(0, len(self._streams) - running)
        version, busy_s, generated = counters.version, counters.busy_s, counters.generated_tokens
        steps = counters.decode_steps
        return EngineHealth(self._alive, running, waiting, version, busy_s, generated, self._detail, decode_steps=steps)

    async def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        self._commands.put(DecodeLoop.stop)
        # Callers get their error now; the thread may still be in a step.
        self._fail_pending("the engine was stopped", None)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, _JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                logger.error("the decode thread did not end within %g s and is left behind", _JOIN_TIMEOUT_S)
        if self._transfer is not None:
            await self._transfer.close()
        self._transfer = self._decode = self._runner = None

    @property
    def _alive(self) -> bool:
        return self._thread.is_alive() and self._failure is None and not self._stopped

    @property
    def _detail(self) -> str:
        if self._failure is not None:
            return f"{type(self._failure).__name__}: {self._failure}"
        return "stopped" if self._stopped else ""

    def _loadable(self, asked: str) -> TorchTransfer:
        """The transfer, if weights may be loaded now. Raises WeightTransferError: the engine is sampling or its weights
        sleep."""
        self._require_alive()
        if not self._paused or self._transfer is None:
            raise WeightTransferError(explain(asked, "the engine is sampling", "await pause(...) before a publish"))
        if "weights" in self._asleep:
            raise WeightTransferError(explain(asked, "the weights sleep", "await wake_up(['weights']) first"))
        return self._transfer

    def _require_alive(self) -> None:
        if not self._alive or self._decode is None:
            found = self._detail or "it has not been started"
            raise GenerationError(explain("the torch engine", found, "start a new engine")) from self._failure

    def _require_sleepable(self, asked: str) -> None:
        self._require_alive()
        if not self._paused or self.health().running:
            raise GenerationError(explain(asked, "the engine is not paused and empty", "await pause('abort') first"))

    def _check(self, request: GenerationRequest) -> None:
        """Raises GenerationError for a request that does not fit, or whose error would end the thread for all
        requests."""
        assert self._runner is not None
        found = misfit(
            request if self._config.image_directory is None else without_images(request),
            engine="torch",
            max_model_len=self._settings.context_tokens,
            vocab_size=self._runner.vocab_size,
            scores=True,
            records=("kept_ids", "experts") if self._runner.expert_row else ("kept_ids",),
        )
        if request.request_id in self._streams:
            found = ("a request of that id is in flight", "use a new id per attempt")
        if self._config.image_directory is not None and request.prompt_ids[-1] >= FIRST_ID:
            found = found or ("its prompt ends with an image", "put text behind it")
        if found is not None:
            raise GenerationError(explain(f"generate {request.request_id!r}", *found))

    def _bounded(self, request: GenerationRequest) -> GenerationRequest:
        """The request without stop tokens outside the vocabulary: the slot table has a column per stop token."""
        assert self._runner is not None
        sampling, stops = request.sampling, tuple(samplable_stops(request, self._runner.vocab_size))
        if len(stops) == len(sampling.stop_token_ids):
            return request
        return replace(request, sampling=replace(sampling, stop_token_ids=stops))

    async def _ask(self, command: Callable[[DecodeLoop, int], None], *, drains: bool = False) -> None:
        """Sends a command, which is called with its ticket; returns when the thread has answered. Raises
        GenerationError if the thread died."""
        assert self._loop is not None
        ticket = next(self._tickets)
        answer = self._answers[ticket] = self._loop.create_future()
        if drains:
            self._drains.add(ticket)
        self._commands.put(lambda loop: command(loop, ticket))
        try:
            await answer
        finally:
            self._drains.discard(ticket)
            self._answers.pop(ticket, None)

    # The decode thread.

    def _main(self) -> None:
        """Loads the model and runs the loop until it is stopped or fails."""
        try:
            if self._device.type == "cpu":
                yield_to_others()
                torch.set_num_threads(self._settings.num_threads)
                use_onednn(num_shapes=256)  # batch sizes and prompt lengths
            runner, decode = self._load()
            self._post(lambda: self._on_loaded(runner, decode))
            decode.run()
        except Exception as error:
            logger.exception("the torch engine died")
            # Set here: whoever finds the thread dead before the event loop hears of it needs the reason.
            self._failure = failure = error  # `error` is unbound when the block ends
            self._post(lambda: self._fail_pending(f"{type(failure).__name__}: {failure}", failure))

    def _load(self) -> tuple[ModelRunner, DecodeLoop]:
        model = load_model(
            self._config,
            self._device,
            max_model_len=self._settings.context_tokens,
            real_weights=self._real_weights,
            seed=0,
        )
        runner = ModelRunner(model, self._settings)
        with torch.inference_mode():
            runner.warm_up()
        decode = DecodeLoop(
            runner,
            self._commands,
            lambda report: self._post(lambda: self._on_report(report)),
            num_slots=self._settings.num_slots,
            chunk_tokens=self._settings.chunk_tokens,
            version=0 if self._real_weights else None,
        )
        return runner, decode

    def _post(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the event loop was closed without stop(): nobody is left to answer
            logger.warning("the event loop is closed: the torch engine ends")
            self._commands.put(DecodeLoop.stop)

    # Back on the event loop.

    def _on_loaded(self, runner: ModelRunner, decode: DecodeLoop) -> None:
        self._runner, self._decode = runner, decode
        self._transfer = TorchTransfer(runner.model, self._device, self._config)
        assert self._started is not None
        if not self._started.done():
            self._started.set_result(None)

    def _on_report(self, report: LoopReport) -> None:
        for chunk in report.chunks:
            if chunk.finish_reason is None:
                stream = self._streams.get(chunk.request_id)
            else:
                stream = self._streams.pop(chunk.request_id, None)
            if stream is not None:
                stream.put_nowait(chunk)
        for ticket in report.tickets:
            answer = self._answers.get(ticket)
            if answer is not None and not answer.done():
                answer.set_result(None)

    def _fail_pending(self, found: str, cause: BaseException | None) -> None:
        """Ends every wait for the thread, each with a separate GenerationError."""

        def failure() -> GenerationError:
            error = GenerationError(explain(f"the torch engine for {self._config.path}", found, "start a new engine"))
            error.__cause__ = cause
            return error

        for stream in self._streams.values():
            stream.put_nowait(failure())
        self._streams.clear()
        for answer in (self._started, *self._answers.values()):
            if answer is not None and not answer.done():
                answer.set_exception(failure())
