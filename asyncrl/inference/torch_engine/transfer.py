"""Receives publishes for the embedded engine, in one thread."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import torch
from transformers import PreTrainedModel

from asyncrl.config.model import ModelConfig
from asyncrl.errors import WeightTransferError, explain
from asyncrl.inference.shared.staged_weights import Staging
from asyncrl.inference.torch_engine.parameter_sink import ParameterSink
from asyncrl.types import Digest, Manifest, TransferSource
from asyncrl.weights.encodings.decoder import Decoder, Scope
from asyncrl.weights.packing import byte_view, spec_of
from asyncrl.weights.stored_layout import StoredLayout
from asyncrl.weights.transport import HeldReceiver
from asyncrl.weights.transports import build_receiver
from asyncrl.weights.transports.blocking import BlockingCalls

logger = logging.getLogger(__name__)


class TorchTransfer:
    """Applies publishes to the served model, one at a time. Owns the receiver and its thread: sockets must stay in one
    thread.

    Consumes: one publish at a time.
    Produces: the parameters, written in place (a staged publish: exchanged at its load); this side's digest.
    Waits for: buckets, at most `weights.transfer_timeout_s` or what is left of `weights.publish_timeout_s`.
    Unblocked by: messages of the sender.
    Stops when: the engine stops.
    """

    def __init__(self, served: PreTrainedModel, device: torch.device, model: ModelConfig) -> None:
        whole, layout = served.state_dict().items(), StoredLayout.of(served)
        # A tensor comes in the parts of the files, so each gets a view as its target.
        self._targets = {name: part for own, tensor in whole for name, part in layout.split(own, tensor)}
        self._parameters = dict(served.named_parameters(remove_duplicate=False))
        self._names_of: dict[int, list[str]] = {}
        """id of a parameter -> its names; tied parameters have several."""
        for name, parameter in self._parameters.items():
            self._names_of.setdefault(id(parameter), []).append(name)
        dtype: torch.dtype = getattr(torch, model.inference_dtype)
        self._decoder = Decoder(model.path, model.revision, dtype, publishes=self._targets.__contains__)
        self._calls = BlockingCalls("weight-transfer")
        if device.type == "cpu":
            self._calls.submit(partial(torch.set_num_threads, 1))
        self._receiver = HeldReceiver(partial(build_receiver, device=device))
        self._staging = Staging(device)
        self._staged: tuple[Manifest, Scope] | None = None
        """The publish in `_staging`, until it is loaded."""
        self._deadline_s = 0.0

    async def receive(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        """As `InferenceEngine.load_weights`. After a cancellation the thread continues until the call's deadline."""
        self._deadline_s = timeout_s
        return await self._calls.do(self._receive, manifest, source, timeout_s)

    async def stage(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        """As `StagingEngine.stage_weights`; cancellation as in `receive`."""
        self._deadline_s = timeout_s
        return await self._calls.do(self._stage, manifest, source, timeout_s)

    async def load_staged(self) -> None:
        """As `StagingEngine.load_staged`."""
        await self._calls.do(self._load_staged)

    def forget(self) -> None:
        """The weights no longer match the last publish. No publish may be in progress."""
        self._decoder.forget()

    async def close(self) -> None:
        """Closes the receiver, at the latest after the deadline of a publish in progress."""
        closing = asyncio.wrap_future(self._calls.submit(self._receiver.close))
        done, _ = await asyncio.wait((closing,), timeout=self._deadline_s + 10.0)
        if done:
            closing.result()
        else:
            logger.error("a weight transfer did not end at its deadline and is left behind")
        self._calls.close()

    def _receive(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        receiver, scope, sink = self._receiver.of(source), self._decoder.scope(manifest), ParameterSink(self._targets)
        digest = self._decoder.receive(receiver, manifest, scope, sink, timeout_s)
        self._finish(sink, manifest, scope)
        return digest

    def _stage(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        self._staged = None
        receiver, scope = self._receiver.of(source), self._decoder.scope(manifest)
        sink = self._staging.sink(ParameterSink(self._targets).check)
        digest = self._decoder.receive(receiver, manifest, scope, sink, timeout_s)
        self._staged = manifest, scope
        return digest

    def _load_staged(self) -> None:
        staged, self._staged = self._staged, None
        if staged is None:
            raise WeightTransferError(explain("load staged weights", "none came whole", "stage a publish first"))
        sink = ParameterSink(self._targets)
        for name, tensor in self._staging:
            parameter = self._parameters.get(name)
            # Same device and dtype: swap instead of copying.
            if parameter is not None and (parameter.device, parameter.dtype) == (tensor.device, tensor.dtype):
                self._exchange(name, parameter, tensor)
                sink.exchanged(name)
            else:
                sink.write(spec_of(name, tensor), 0, byte_view(tensor))
        self._finish(sink, *staged)

    def _exchange(self, name: str, parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
        """Swaps the parameter's memory with the staged tensor; the old memory becomes the buffer of the next
        publish."""
        former, parameter.data = parameter.data, tensor
        self._staging.exchange(name, former)
        for each in self._names_of[id(parameter)]:
            self._targets[each] = tensor

    def _finish(self, sink: ParameterSink, manifest: Manifest, scope: Scope) -> None:
        sink.finish(None if scope.whole else scope.names)
        self._decoder.applied(manifest)
