"""`SglangEngine`: adapter to SGLang."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import SglangEngineConfig
from asyncrl.inference.sglang.host_process import HostProcess, engine_arguments, runs_on_cpu
from asyncrl.inference.sglang.sampling_params import asked
from asyncrl.inference.sglang.weight_channel import LOADER, PublishOrder, WeightChannel
from asyncrl.inference.shared.process_engine import ProcessEngine
from asyncrl.inference.shared.publish_calls import PublishCalls
from asyncrl.inference.shared.stamped_stream import Output, StampedStream
from asyncrl.types import GenerationRequest, Manifest, TransferSource

# Requests.


class SglangStream(StampedStream):
    """The adapter's record of one request to SGLang."""

    package = "SGLang"
    no_spans = (
        "it was sampled under two versions, and this SGLang does not say which token under which",
        "set rollout.interrupt=abort_resume, or install sglang>=0.5.19",
    )

    def __init__(self, request: GenerationRequest) -> None:
        super().__init__(request)
        self.outputs: asyncio.Queue[Output] = asyncio.Queue()


_STOP_S = 10.0


class SglangEngine(ProcessEngine[SglangStream]):
    """An `InferenceEngine` over SGLang, which runs in a child process; its schedulers are children of that.

    Sampling is not deterministic: rounding depends on the batch.
    """

    package = "SGLang"
    key = "sglang"
    no_sleep = ("the memory saver is off", "set rollout.sglang.enable_memory_saver, on a GPU")

    def __init__(self, model: ModelConfig, settings: SglangEngineConfig, *, load_real_weights: bool) -> None:
        """`load_real_weights`: load the model's files as version 0; otherwise random weights without a version."""
        super().__init__(model, settings, load_real_weights=load_real_weights)
        self._settings = settings
        self._sleeps = settings.enable_memory_saver
        self._records = ("experts",) if settings.record_experts else ()
        self._pause_mode = ""
        self._host = HostProcess(self._distribute)
        self._transfer: _SglangPublishCalls | None = None
        self._facts: dict[str, Any] = {}
        self._by_rid: dict[str, SglangStream] = {}

    # -- beyond the protocol -------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """As `SleepingEngine.sleep`."""
        self._require_sleep("sleep()")
        if self._transfer is not None:
            self._transfer.forget()
            self._forget_version()
        await self._ask(self._host.call("sleep", ["kv_cache", "weights"]))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """As `SleepingEngine.wake_up`."""
        self._require_sleep("wake_up()")
        await self._ask(self._host.call("wake_up", tags or ["weights", "kv_cache"]))

    async def checksums(self) -> list[dict[str, str]]:
        """SGLang's checksums of the weights in use, per tensor-parallel rank: SGLang's parameter name -> checksum.
        Equal weights have equal checksums, however they were transferred. Reads all weights.

        Raises GenerationError: this SGLang computes none, or its process has ended."""
        return await self._ask(self._host.call("checksums"))

    # -- what `ProcessEngine` asks for ---------------------------------------------------------------------------

    async def _launch(self) -> None:
        on_cpu = runs_on_cpu()
        arguments = engine_arguments(self._model, self._settings, load_real_weights=self._real_weights, on_cpu=on_cpu)
        # With overlap scheduling, a step computed ahead would count for the next version: retract instead.
        self._pause_mode = "in_place" if arguments["disable_overlap_schedule"] else "retract"
        self._facts = await self._host.start(arguments, on_cpu=on_cpu)
        channel = WeightChannel(self._host.directory, self._settings.tensor_parallel_size)
        self._publishes = self._transfer = _SglangPublishCalls(self._host, channel, self._model)

    async def _shut_down(self) -> None:
        await self._host.stop(_STOP_S)

    def _death(self) -> str | None:
        return self._host.death()

    def _vocab_size(self) -> int:
        return self._facts["vocab_size"]

    def _new_stream(self, request: GenerationRequest) -> SglangStream:
        return SglangStream(request)

    async def _sample(self, stream: SglangStream) -> None:
        stream.enter()
        salt, vocab_size, eos = str(self._salt), self._vocab_size(), self._facts["eos"]
        self._by_rid[stream.rid] = stream
        try:
            request = asked(stream.request, rid=stream.rid, extra_key=salt, vocab_size=vocab_size, eos=eos)
            await self._host.call("submit", request)
            stream.entered.set()
            if stream.fate is not None:
                await self._abort_inside([stream])
            # The host always sends a last output, even for a request that SGLang lost.
            is_last = False
            while not is_last:
                output = await stream.outputs.get()
                is_last = output.reason is not None
                self._hand_over(stream, stream.take(output, self._version), is_last=is_last)
        finally:
            self._by_rid.pop(stream.rid, None)

    def _distribute(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if (stream := self._by_rid.get(output.rid)) is not None:
                stream.outputs.put_nowait(output)

    async def _abort_inside(self, streams: list[SglangStream]) -> None:
        await self._host.call("abort", [stream.rid for stream in streams])

    async def _freeze_inside(self) -> None:
        await self._host.call("freeze", self._pause_mode)

    async def _unfreeze_inside(self) -> None:
        await self._host.call("unfreeze")

    async def _settle(self) -> None:
        """The host sends all earlier outputs before its answer to a pause, so only local queues must drain."""
        while any(s.fate is not None or not s.outputs.empty() for s in self._queue.running):
            self._require_alive()
            await asyncio.sleep(0)

    async def _announce(self, version: int) -> None:
        # Tokens of the old version may still be on their way, or in a partly filled interval.
        if not self._paused or self._settings.stream_interval > 1:
            for stream in self._queue.running:
                stream.hold()
        await self._host.call("announce", str(version))


class _SglangPublishCalls(PublishCalls):
    """Sends publishes as orders to SGLang's schedulers."""

    def __init__(self, host: HostProcess, channel: WeightChannel, model: ModelConfig) -> None:
        super().__init__("SGLang")
        self._host = host
        self._channel = channel
        self._model = model
        self._is_known = False
        """Whether the weights match the last publish."""

    def forget(self) -> None:
        """The weights no longer match the last publish."""
        self._is_known = False

    async def _update(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Sequence[Sequence[Any]]:
        # Unknown until all schedulers have answered: a failure or cancellation leaves it so.
        was_known, self._is_known = self._is_known, False
        deadline_s = time.monotonic() + timeout_s
        name = self._channel.write(PublishOrder(manifest, source, deadline_s, self._model, after_failure=not was_known))
        try:
            await self._host.call("update", LOADER, name)
            outcomes = self._channel.outcomes(name)
        finally:
            self._channel.remove(name)
        self._is_known = True
        return outcomes
