"""The replica's calls and requests, served inside SGLang's process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import zmq

from asyncrl.inference.sglang.outputs import ExpertRows, output_of
from asyncrl.inference.sglang.sampling_params import Asked
from asyncrl.inference.shared.stamped_stream import Output, end_output
from asyncrl.kernels.routers import expert_layers

logger = logging.getLogger(__name__)

_ABORT_S = 1.0
"""Time for SGLang to answer an abort before the request is ended without it."""
_SETTLE_S = 30.0
"""Time for the outputs from before a pause to arrive; the call fails after it."""
_TURNS = 8
"""Event-loop turns from a request's task to SGLang's socket, and from there to an output."""


class Host:
    """Owns SGLang's Engine and its requests. Public methods are the replica's calls."""

    def __init__(self, engine: Any, send: Callable[[Any], None]) -> None:
        from asyncrl.inference.sglang.logit_filter import LogitFilter
        from asyncrl.inference.sglang.support import abilities

        self._io: Any = import_module("sglang.srt.managers.io_struct")
        self._manager = engine.tokenizer_manager
        self._workers = engine.server_args.tp_size
        self._abilities = abilities()
        self._incremental = bool(getattr(engine.server_args, "incremental_streaming_output", False))
        self._experts: ExpertRows | None = None
        if getattr(engine.server_args, "enable_return_routed_experts", False):
            found = self._manager.model_config
            chosen = expert_layers(found.hf_config.to_dict())
            self._experts = ExpertRows(found.hf_text_config.num_hidden_layers, chosen)
        self._filter = LogitFilter.to_str()
        self._send = send
        self._outputs: list[Output] = []
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._begun: set[str] = set()
        """Requests with at least one output: the scheduler has them."""
        self._frozen = False
        self._order = asyncio.Lock()
        """Serializes calls that stop, change or start the schedulers, in order of arrival, even if the replica no
        longer waits for the previous one."""

    # -- calls ---------------------------------------------------------------------------------------------------

    async def submit(self, asked: Asked) -> None:
        self._requests[asked.rid] = asyncio.create_task(self._generate(asked), name=asked.rid)

    async def abort(self, rids: list[str]) -> None:
        """Ends these requests; each gets a last output. Unknown ids are ignored: they may just have ended."""
        await self._let_enter(rids)
        tasks = {rid: self._requests[rid] for rid in rids if rid in self._requests}
        for rid in tasks:
            self._manager.abort_request(rid)
        if tasks:
            # A frozen scheduler answers only for the requests in its queue.
            await asyncio.wait(tasks.values(), timeout=0.0 if self._frozen else _ABORT_S)
        for rid, task in tasks.items():
            if not task.done():
                task.cancel()
                self._emit(end_output(rid))

    async def freeze(self, mode: str) -> None:
        """`mode`: "in_place", or "retract" with overlap scheduling."""
        async with self._order:
            await self._let_enter(list(self._requests))
            await self._manager.pause_generation(self._io.PauseGenerationReqInput(mode=mode))
            self._frozen = True
            await self._settle()

    async def unfreeze(self) -> None:
        async with self._order:
            self._frozen = False
            await self._manager.continue_generation(self._io.ContinueGenerationReqInput())

    async def announce(self, version: str) -> None:
        """Sets the version of tokens sampled from now on, if SGLang tracks versions."""
        if self._abilities.version_spans:
            request = self._io.UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
            async with self._order:
                await self._settle()
                await self._manager.update_weight_version(request)

    async def update(self, loader: str, payload: str) -> None:
        """Calls `loader` in every scheduler with a tensor named `payload:rank`. Raises RuntimeError: SGLang refused."""
        import torch
        from sglang.srt.utils import MultiprocessingSerializer

        manager, io = self._manager, self._io
        notes = [  # SGLang passes on named tensors only
            MultiprocessingSerializer.serialize([(f"{payload}:{rank}", torch.empty(0))])
            for rank in range(self._workers)
        ]
        asked = {"serialized_named_tensors": notes, "load_format": loader, "flush_cache": False}
        request = io.UpdateWeightsFromTensorReqInput(**asked)
        async with self._order:
            if not self._abilities.update_session:
                _require(await manager.update_weights_from_tensor(request))
                return
            _require(await manager.begin_weight_update(io.BeginWeightUpdateReqInput()))
            # The update session must end even if the update failed; errors are raised after it.
            updated = await manager.update_weights_from_tensor(request)
            ended = await manager.end_weight_update(io.EndWeightUpdateReqInput())
            _require(updated)
            _require(ended)

    async def checksums(self) -> list[dict[str, str]]:
        """SGLang's checksums of its weights, per scheduler: parameter name -> checksum."""
        async with self._order:
            answer = await self._manager.check_weights(self._io.CheckWeightsReqInput())
        _require(answer)
        return [worker["checksums"] for worker in answer[2]]

    async def sleep(self, tags: list[str] | None) -> None:
        """Call it without requests in flight. A scheduler frozen in place still has the aborted requests and would
        exit; retracting drops them."""
        async with self._order:
            await self._manager.pause_generation(self._io.PauseGenerationReqInput(mode="retract"))
            await self._settle()
            await self._manager.release_memory_occupation(self._io.ReleaseMemoryOccupationReqInput(tags=tags))

    async def wake_up(self, tags: list[str] | None) -> None:
        async with self._order:
            await self._manager.resume_memory_occupation(self._io.ResumeMemoryOccupationReqInput(tags=tags))

    # -- requests ------------------------------------------------------------------------------------------------

    async def _generate(self, asked: Asked) -> None:
        """Emits one request's outputs until the last."""
        rid, sent, length, params = asked.rid, 0, 0, asked.sampling_params
        last: Output | None = None
        """The last output, if the response ends at a stop token that SGLang ignores."""
        recording: dict[str, Any] = {}
        if asked.filters is not None:
            params = params | {"custom_params": asked.filters}
        if asked.experts:
            # A token is predicted at the previous position, whose experts count as the token's.
            recording = {"return_routed_experts": True, "routed_experts_start_len": len(asked.input_ids) - 1}
        request = self._io.GenerateReqInput(
            rid=rid,
            input_ids=asked.input_ids,
            sampling_params=params,
            return_logprob=True,
            stream=True,
            extra_key=asked.extra_key,
            custom_logit_processor=None if asked.filters is None else self._filter,
            **recording,
        )
        try:
            async for out in self._manager.generate_request(request, None):
                output = output_of(rid, out, sent, incremental=self._incremental, experts=self._experts)
                before, sent = sent, sent + len(output.ids)
                self._begun.add(rid)
                # Phase 1: cut at the first stop token. SGLang keeps sampling until it sees the abort.
                if last is None and (until := _first_of(output.ids, asked.stops)):
                    last, length = Output(rid, output.ids[:until], output.logprobs[:until], "stop"), before + until
                    if output.reason is None:
                        self._manager.abort_request(rid)
                if last is None:
                    self._emit(output)
                    if output.reason is not None:
                        return
                # Phase 2: the cut response leaves now, or with its experts after SGLang's last output.
                elif output.reason is not None or not asked.experts:
                    experts = None if output.experts is None else output.experts[:length]
                    self._emit(replace(last, spans=output.spans, experts=experts))
                    return
            self._emit(end_output(rid, error="SGLang ended it without a word"))
        except Exception as error:  # task boundary: it becomes the request's error
            logger.exception("request %s failed", rid)
            self._emit(end_output(rid, error=f"{type(error).__name__}: {error}"))
        finally:
            self._requests.pop(rid, None)
            self._begun.discard(rid)

    def _emit(self, output: Output) -> None:
        if not self._outputs:
            asyncio.get_running_loop().call_soon(self.flush)  # one frame for all outputs of a step
        self._outputs.append(output)

    def flush(self) -> None:
        outputs, self._outputs = self._outputs, []
        if outputs:
            self._send(("outputs", outputs))

    async def _let_enter(self, rids: list[str]) -> None:
        """Waits until the requests have reached the scheduler: SGLang ignores calls about unknown requests."""
        if any(rid in self._requests and rid not in self._begun for rid in rids):
            for _ in range(_TURNS):
                await asyncio.sleep(0)

    async def _settle(self) -> None:
        """Returns when the scheduler has completed all earlier calls and its outputs are emitted. Its answers use
        another socket than its outputs. So a second answer gives the outputs time to arrive, and then the output socket
        must stay empty for the turns that the last output needs."""
        for _ in range(2):
            await self._manager.get_internal_state()
        async with asyncio.timeout(_SETTLE_S):
            await all_read(self._manager.recv_from_detokenizer, _TURNS + len(self._requests) // _TURNS)
        self.flush()


def _first_of(ids: np.ndarray, stops: Collection[int]) -> int:
    """Number of tokens up to and including the first of `stops`; 0: none."""
    return next((number for number, token in enumerate(ids.tolist(), 1) if token in stops), 0)


async def all_read(socket: zmq.Socket[Any], turns: int) -> None:
    """Returns when the socket has been empty for `turns` turns of the event loop."""
    quiet = 0
    while quiet < turns:
        quiet = 0 if int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN else quiet + 1
        await asyncio.sleep(0)


def _require(answer: Any) -> None:
    """Raises RuntimeError unless SGLang answered (success, message) with success."""
    success, message = (answer.success, answer.message) if hasattr(answer, "success") else answer[:2]
    if not success:
        raise RuntimeError(message)
