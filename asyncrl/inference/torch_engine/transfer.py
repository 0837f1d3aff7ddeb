"""Receiving publishes: the receiver of the current source, used and closed by one thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from asyncrl.config.model import ModelConfig
from asyncrl.inference.torch_engine.parameter_sink import ParameterSink
from asyncrl.types import Digest, Manifest, TensorSpec, TransferSource
from asyncrl.weights.adapters import BaseWeights, is_adapters
from asyncrl.weights.assembling_sink import AssemblingSink
from asyncrl.weights.transport import WeightReceiver
from asyncrl.weights.transports import build_receiver

logger = logging.getLogger(__name__)


class Transfer:
    """Applies publishes to `targets`, one after the other, in a thread of its own (sockets stay in one thread).

    `model`: whose files adapters are merged into.
    """

    def __init__(self, targets: Mapping[str, torch.Tensor], device: torch.device, model: ModelConfig) -> None:
        self._targets = targets
        self._device = device
        self._model = model
        self._adapted: frozenset[str] | None = None
        """Names of the adapters that the targets hold, beside the weights of the model's files; None: other weights."""
        self._executor = ThreadPoolExecutor(1, "weight-transfer", initializer=self._set_up_thread)
        self._source: TransferSource | None = None
        self._receiver: WeightReceiver | None = None
        self._deadline_s = 0.0

    async def receive(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        """As `InferenceEngine.load_weights`. A cancelled call ends in its thread, at its own deadline."""
        self._deadline_s = timeout_s
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, self._receive, manifest, source, timeout_s
        )

    async def close(self) -> None:
        """Closes the receiver, after a publish in progress has reached its deadline at the latest."""
        closing = asyncio.get_running_loop().run_in_executor(self._executor, self._close_receiver)
        done, _ = await asyncio.wait((closing,), timeout=self._deadline_s + 10.0)
        if done:
            closing.result()
        else:
            logger.error("a weight transfer did not end at its deadline and is left behind")
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _receive(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        if source != self._source:
            self._close_receiver()
            self._receiver = build_receiver(source, device=self._device)
            self._source = source
        assert self._receiver is not None
        if is_adapters(manifest):
            return self._receive_adapters(self._receiver, manifest, timeout_s)
        self._adapted = None
        sink = ParameterSink(self._targets)
        digest = self._receiver.receive(manifest, sink, timeout_s)
        sink.finish()
        return digest

    def _receive_adapters(self, receiver: WeightReceiver, manifest: Manifest, timeout_s: float) -> Digest | None:
        """The digest is that of the adapters, which is what was sent."""
        adapters: dict[str, torch.Tensor] = {}
        digest = receiver.receive(manifest, AssemblingSink(adapters.__setitem__), timeout_s)
        rest_is_there, self._adapted = self._adapted == frozenset(adapters), None
        sink = ParameterSink(self._targets)
        base = BaseWeights(self._model.path, self._model.revision)
        for name, tensor in base.merged(adapters, only_adapted=rest_is_there):
            spec = TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.nbytes)
            sink.write(spec, 0, tensor.contiguous().view(-1).view(torch.uint8))
        if not rest_is_there:
            sink.finish()
        self._adapted = frozenset(adapters)
        return digest

    def _close_receiver(self) -> None:
        receiver, self._receiver, self._source = self._receiver, None, None
        if receiver is not None:
            receiver.close()

    def _set_up_thread(self) -> None:
        if self._device.type == "cpu":
            torch.set_num_threads(1)
