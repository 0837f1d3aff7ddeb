"""The weight-transfer engine "asyncrl", which vLLM imports into its worker processes; the import registers it.

An exception inside a worker reaches the caller as text at best, and may kill the engine. So no phase raises: each keeps
its error, which is fetched when the update has ended (`WorkerExtension.asyncrl_outcome`).
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from asyncrl.errors import DeadlineExceeded, explain
from asyncrl.inference.shared.orphan_guard import die_with
from asyncrl.inference.shared.tensor_feed import CheckedSink, Feed, StreamFeed
from asyncrl.inference.vllm.launch import BACKEND, OWNER_KEY
from asyncrl.inference.vllm.layerwise_reload import Reload
from asyncrl.inference.vllm.nccl_receiver import NativeReceiver, VllmNccl
from asyncrl.types import Digest, Manifest, TransferSource, VllmNcclSource
from asyncrl.weights.encodings.decoder import Decoder, Plan
from asyncrl.weights.transport import WeightReceiver
from asyncrl.weights.transports import build_receiver

logger = logging.getLogger(__name__)

_CLOSE_S = 30.0
"""Time for an abandoned receiver to disconnect from its sender."""
_GRACE_S = 5.0
"""Time that a receiver has beyond its deadline before it is abandoned."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """`source`: a pickled TransferSource; its `receiver` is the number of the worker with tensor-parallel rank 0."""

    source: bytes


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """`manifest`: a pickled Manifest. `timeout_s`: the remaining time of the publish."""

    manifest: bytes
    timeout_s: float


class AsyncrlWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives publishes of asyncrl's transports; the receiver stays joined while the source stays the same."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        die_with(vllm_config.additional_config[OWNER_KEY])
        if device.type == "cpu" and self.model_config.enforce_eager:
            torch.compiler.set_stance("force_eager")  # the sampler compiles even then: 20 s for the first request
        self._reload = Reload(model, self.model_config)
        served, together = self.model_config, self._reload.expected.loaded_together
        self._decoder = Decoder(served.model, served.revision, served.dtype, loaded_together=together)
        self._loaded: Manifest | None = None
        """The publish that was loaded and is not finished."""
        self._executor = ThreadPoolExecutor(1, "weight-receiver")  # sockets stay in one thread
        self._source: TransferSource | None = None
        self._receiver: WeightReceiver | NativeReceiver | None = None
        self._failure: Exception | None = None
        self._digest: Digest | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        source: TransferSource = pickle.loads(init_info.source)  # from the process that started this one
        source = replace(source, receiver=source.receiver + get_tensor_model_parallel_rank())
        if source != self._source:
            self._source = None
            self._failure = None
            try:
                self._executor.submit(self._close_receiver).result(_CLOSE_S)
            except TimeoutError:
                self._failure = DeadlineExceeded(
                    explain("leave the former sender", f"not done within {_CLOSE_S:g} s", "restart this replica")
                )
                return
            self._source = source

    def start_weight_update(self) -> None:
        self._digest = self._loaded = None
        if self._source is not None:
            self._failure = None

    def receive_weights(self, update_info: UpdateInfo) -> None:
        manifest = pickle.loads(update_info.manifest)  # from the process that started this one
        self._attempt(lambda: self._receive(manifest, update_info.timeout_s))

    def finish_weight_update(self) -> None:
        self._attempt(self._finish)
        if self._failure is not None:
            self.forget()
            try:
                self._reload.abandon()
            except Exception:
                logger.exception("the model cannot be made whole after a failed update")

    def forget(self) -> None:
        """Records that the model's weights are no longer those of the last publish: the next one must send all of
        them."""
        self._decoder.forget()

    def outcome(self) -> list[Any]:
        """The outcome of the last update, as `transfer.agree` reads it."""
        if self._failure is None:
            return ["", "", None if self._digest is None else list(self._digest)]
        return [type(self._failure).__name__, str(self._failure), None]

    def shutdown(self) -> None:
        self._source = None
        self._executor.submit(self._close_receiver)
        self._executor.shutdown(wait=False)  # the process ends with it

    def _attempt(self, step: Callable[[], None]) -> None:
        """Does nothing after a failure; keeps the first one."""
        if self._failure is not None:
            return
        try:
            step()
        except Exception as error:
            logger.warning("the weight update failed", exc_info=True)
            self._failure = error

    def _finish(self) -> None:
        self._reload.finish()
        if self._loaded is not None:
            self._decoder.applied(self._loaded)

    def _receive(self, manifest: Manifest, timeout_s: float) -> None:
        """The receiver fills the feed in its thread; this thread, vLLM's own, loads from it."""
        plan = self._decoder.plan(manifest)
        names = None if plan.whole else plan.names
        self._reload.start(names)
        # The receiver has its own deadline, and its error says more.
        feed = StreamFeed(len(plan.names), timeout_s + 1.0, self.device)
        received = self._executor.submit(self._fill, feed, manifest, plan, timeout_s)
        try:
            self._reload.load(feed, names)
        except Exception as error:
            feed.fail(error)
            received.exception(timeout_s + _GRACE_S)
            raise
        feed.finish()
        self._digest = received.result(timeout_s + _GRACE_S)
        self._loaded = manifest

    def _fill(self, feed: Feed, manifest: Manifest, plan: Plan, timeout_s: float) -> Digest | None:
        """In the receiver's thread."""
        try:
            if self._receiver is None:
                self._receiver = self._join()
            if isinstance(self._receiver, NativeReceiver):
                self._receiver.receive(manifest, feed, timeout_s)
                return None
            sink = CheckedSink(self._reload.expected.check, feed.offer)
            return self._decoder.receive(self._receiver, manifest, plan, sink, timeout_s)
        except BaseException as error:
            feed.fail(error)
            raise

    def _join(self) -> WeightReceiver | NativeReceiver:
        assert self._source is not None, "update before init"
        if not isinstance(self._source, VllmNcclSource):
            return build_receiver(self._source, device=self.device)
        parallel = self.parallel_config
        worker_rank = parallel.data_parallel_index * parallel.world_size + parallel.rank  # as vLLM's engine counts
        backend = VllmNccl(self.config, self.vllm_config, self.device)
        return NativeReceiver(self._source, self._reload.expected, worker_rank, backend)

    def _close_receiver(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()


class WorkerExtension:
    """Methods that vLLM adds to its workers."""

    weight_transfer_engine: AsyncrlWeightTransfer

    def asyncrl_outcome(self) -> list[Any]:
        """The outcome of the last weight update of this worker."""
        return self.weight_transfer_engine.outcome()

    def asyncrl_forget(self) -> None:
        """As `AsyncrlWeightTransfer.forget`."""
        self.weight_transfer_engine.forget()


WeightTransferEngineFactory.register_engine(BACKEND, AsyncrlWeightTransfer)
