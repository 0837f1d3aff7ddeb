"""`VllmEngine`: adapter to vLLM's AsyncLLM."""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import VllmEngineConfig
from asyncrl.errors import BadRequest, DeadlineExceeded, GenerationError, WeightTransferError, explain
from asyncrl.inference.shared.process_engine import ProcessEngine
from asyncrl.inference.shared.publish_calls import PublishCalls
from asyncrl.inference.vllm.launch import Launcher, death_of
from asyncrl.inference.vllm.sampling_params import sampling_params
from asyncrl.inference.vllm.streams import VllmStream
from asyncrl.kernels.routers import expert_layers
from asyncrl.types import Digest, EngineHealth, GenerationRequest, Manifest, TransferSource
from asyncrl.types.images import ImageRun, ImageStore, as_model_ids, images_in

logger = logging.getLogger(__name__)

_STOP_S = 30.0


class VllmEngine(ProcessEngine[VllmStream]):
    """An `InferenceEngine` over vLLM.

    Sampling is not deterministic: a resumed request draws from a new random stream (`sampling_params.stream_seed`), and
    rounding depends on the batch.
    """

    package = "vLLM"
    key = "vllm"
    no_sleep = ("sleep mode is off", "set rollout.vllm.enable_sleep_mode, on a GPU")
    _scores = True

    def __init__(self, model: ModelConfig, settings: VllmEngineConfig, *, load_real_weights: bool) -> None:
        """`load_real_weights`: load the model's files as version 0; otherwise random weights without a version."""
        super().__init__(model, settings, load_real_weights=load_real_weights)
        self._settings = settings
        self._sleeps = settings.enable_sleep_mode
        self._guided = settings.structured_outputs
        self._max_top = settings.max_logprobs
        self._records = ("experts",) if settings.record_experts else ()
        self._expert_layers: list[int] = []
        self._images = None if model.image_directory is None else ImageStore(model.image_directory)
        self._token = 0  # of images
        self._launcher = Launcher(model, settings, load_real_weights=load_real_weights)
        self._llm: Any = None
        self._transfer: VllmPublishCalls | None = None

    # -- beyond the protocol -------------------------------------------------------------------------------------

    async def stage_weights(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        """As `StagingEngine.stage_weights`."""
        self._require_alive()
        assert self._transfer is not None, "the engine was started"
        return await self._publish(
            f"stage_weights of publish {manifest.publish_id}", self._transfer.stage(manifest, source, timeout_s)
        )

    async def load_staged(self, timeout_s: float) -> None:
        """As `StagingEngine.load_staged`."""
        assert self._transfer is not None, "the engine was started"
        self._begin_load("load_staged")
        await self._publish("load_staged", self._transfer.load_staged(timeout_s))

    async def sleep(self) -> None:
        """As `SleepingEngine.sleep`, at vLLM's level 2: the weights are dropped."""
        self._require_sleep("sleep()")
        await self._ask(self._llm.collective_rpc("asyncrl_forget"))
        self._forget_version()
        await self._ask(self._llm.sleep(level=2))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """As `SleepingEngine.wake_up`."""
        self._require_sleep("wake_up()")
        await self._ask(self._llm.wake_up(tags))
        await self._ask(self._freeze_inside())  # vLLM resumes sampling when it wakes

    def health(self) -> EngineHealth:
        found, counts = super().health(), self._launcher.counts
        if counts is None:
            return found
        return replace(found, preemptions=counts.preemptions, decode_steps=counts.decode_steps)

    # -- what `ProcessEngine` asks for ---------------------------------------------------------------------------

    async def _launch(self) -> None:
        self._launcher.start()
        self._llm = await asyncio.shield(asyncio.wrap_future(self._launcher.started))
        self._publishes = self._transfer = VllmPublishCalls(self._llm)
        if self._images is not None:
            self._token = self._llm.model_config.hf_config.image_token_id
        if self._records:
            self._expert_layers = expert_layers(self._llm.model_config.hf_config.to_dict())

    async def _shut_down(self) -> None:
        if not await asyncio.to_thread(self._launcher.stop, _STOP_S):
            logger.error("vLLM did not shut down within %g s and is left behind", _STOP_S)
        self._llm = None

    def _death(self) -> str | None:
        return death_of(self._llm)

    def _vocab_size(self) -> int:
        return self._llm.model_config.get_vocab_size()

    def _new_stream(self, request: GenerationRequest) -> VllmStream:
        return VllmStream(request, self._expert_layers, image_token=self._token)

    async def _sample(self, stream: VllmStream) -> None:
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input

        request, llm = stream.request, self._llm
        images = images_in(request.prompt_ids)
        prompt: Any = tokens_input(request.prompt_ids.tolist(), cache_salt=str(self._salt))
        if images:
            prompt = self._with_images(request.prompt_ids, images)
        params = sampling_params(request, self._vocab_size())
        try:
            collector = await llm.add_request(request.request_id, prompt, params)
        except (ValueError, VLLMClientError) as error:  # everything but the schema was checked before
            if request.sampling.json_schema is None:
                raise
            asked = "a response that is guided by this JSON schema"
            raise BadRequest(explain(asked, f"vLLM refuses the schema: {error}", "correct or simplify it")) from error
        stream.enter(collector, llm.output_processor.request_states.get(collector.request_id))
        # An abort may have come while vLLM was adding the request.
        if stream.fate is not None:
            await self._abort_inside([stream])
        finished = False
        while not finished:
            output = await collector.get()
            if images and output.prompt_token_ids != as_model_ids(request.prompt_ids, self._token).tolist():
                found = (
                    f"vLLM makes other tokens of it than the model's processor: {len(output.prompt_token_ids or [])}"
                )
                do = "train this model on rows of text"
                raise GenerationError(explain(f"a prompt of {len(request.prompt_ids)} tokens with images", found, do))
            finished = output.finished
            self._hand_over(stream, stream.take(output, self._version), is_last=finished)

    def _with_images(self, ids: np.ndarray, images: list[ImageRun]) -> dict[str, Any]:
        """vLLM's prompt: each image is one token, which vLLM expands again. It keeps its encoder's outputs over
        publishes, which never change the encoder."""
        assert self._images is not None, "others refuse the ids"
        if (ids == self._token).any():
            found, do = "it sampled the token of images, which vLLM would take for one", "sample this response again"
            raise GenerationError(explain("resume a response to a prompt with images", found, do))
        keys = [image.key for image in images]
        rest = np.concatenate([image.at[1:] for image in images])
        return {
            "prompt_token_ids": np.delete(as_model_ids(ids, self._token), rest).tolist(),
            "multi_modal_data": {"image": self._images.open(keys)},
            "multi_modal_uuids": {"image": keys},
            "cache_salt": str(self._salt),
        }

    def _leave(self, stream: VllmStream) -> None:
        super()._leave(stream)
        stream.leave()

    async def _abort_inside(self, streams: list[VllmStream]) -> None:
        """vLLM immediately answers each with a final output."""
        await self._llm.abort([stream.internal_id for stream in streams], internal=True)

    async def _freeze_inside(self) -> None:
        # Not `pause_generation`, which adds a sleep of 20 ms for the last outputs: `_settle` waits for them.
        await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)

    async def _unfreeze_inside(self) -> None:
        await self._llm.resume_generation()

    async def _settle(self) -> None:
        """vLLM queues its answer to a pause after the last outputs, which take one loop turn per 128 to move on."""
        quiet = 0
        while quiet < 4 + self._settings.max_num_seqs // 64:
            under_way = not self._llm.engine_core.outputs_queue.empty()
            leaving = any(s.behind or s.fate is not None for s in self._queue.running)
            quiet = 0 if under_way or leaving else quiet + 1
            self._require_alive()
            await asyncio.sleep(0)

    async def _announce(self, version: int) -> None:
        await self._llm.update_weight_version(str(version))


_LOOKS_S = 0.005, 0.1
"""First and longest polling interval for the end of staging; each poll costs a turn of vLLM's loop."""
_GRACE_S = 10.0
"""Extra time beyond the workers' own deadline."""


class VllmPublishCalls(PublishCalls):
    def __init__(self, llm: Any) -> None:
        super().__init__("vLLM")
        self._llm = llm
        self._staged: tuple[Manifest, TransferSource] | None = None
        """The staged publish."""

    async def stage(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        """As `StagingEngine.stage_weights`; cancellation as in `receive`."""
        self._staged = None
        digest = await self._ended(self._stage, manifest, source, timeout_s)
        self._staged = manifest, source
        return digest

    async def load_staged(self, timeout_s: float) -> None:
        """As `StagingEngine.load_staged`; cancellation as in `receive`."""
        staged, self._staged = self._staged, None
        if staged is None:
            raise WeightTransferError(explain("load staged weights", "none came whole", "stage a publish first"))
        await self.receive(*staged, timeout_s)

    async def _update(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Sequence[Sequence[Any]]:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        llm = self._llm
        if source != self._joined and not manifest.is_staged:
            await llm.init_weight_transfer_engine(WeightTransferInitRequest({"source": pickle.dumps(source)}))
        await llm.start_weight_update()
        update = {"manifest": pickle.dumps(manifest), "timeout_s": timeout_s}
        await llm.update_weights(WeightTransferUpdateRequest(update))
        await llm.finish_weight_update()
        return await llm.collective_rpc("asyncrl_outcome")

    async def _stage(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Sequence[Sequence[Any]]:
        llm, (wait_s, longest_s), deadline = self._llm, _LOOKS_S, time.monotonic() + timeout_s + _GRACE_S
        await llm.collective_rpc("asyncrl_stage", args=(pickle.dumps(source), pickle.dumps(manifest), timeout_s))
        while None in (outcomes := await llm.collective_rpc("asyncrl_staged")):
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"its workers keep no deadline: publish {manifest.publish_id} goes on")
            await asyncio.sleep(wait_s)
            wait_s = min(1.5 * wait_s, longest_s)
        return outcomes
