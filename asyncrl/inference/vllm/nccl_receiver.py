"""The worker's side of `weights.transport: vllm_nccl`: vLLM's own NCCL engine receives, our reload loads.

vLLM's engine would load each broadcast at once, in the thread that NCCL blocks. Here that thread can be abandoned at a
deadline: the engine gets a model whose `load_weights` hands the tensors to the thread that really loads.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from asyncrl.errors import WeightTransferError, explain
from asyncrl.inference.shared.tensor_feed import Feed
from asyncrl.types import Digest, Manifest, VllmNcclSource
from asyncrl.weights.packing import Digester
from asyncrl.weights.transports.blocking import BlockingCalls, wait_for
from asyncrl.weights.transports.control_channel import Deadline, Kind, ReceiverChannel
from asyncrl.weights.transports.vllm_nccl import (
    FITS,
    LOADED,
    NUM_BUFFERS,
    VLLM_NCCL,
    require_nccl,
)

if TYPE_CHECKING:
    from asyncrl.inference.vllm.expected_tensors import ExpectedTensors


class Backend(Protocol):
    """Where the group's engines come from; `VllmNccl` is the one."""

    def require(self) -> None:
        """Raises WeightTransferError: it cannot work here."""
        ...

    def make(self, model: FedModel) -> Any:
        """A WeightTransferEngine of vLLM around `model`. Called in the thread that will use it."""
        ...


def init_info(source: VllmNcclSource, port: int, worker_rank: int) -> dict[str, Any]:
    """The fields of vLLM's NCCLWeightTransferInitInfo.

    Args:
        source: with the number of this worker as receiver.
        worker_rank: this worker's rank within its replica, which vLLM adds to the offset.
    """
    return {
        "master_address": source.host,
        "master_port": port,
        "rank_offset": source.receiver + 1 - worker_rank,
        "world_size": source.num_receivers + 1,
        "packed": True,
        "packed_buffer_size_bytes": source.bucket_bytes,
        "packed_num_buffers": NUM_BUFFERS,
    }


def update_info(manifest: Manifest) -> dict[str, Any]:
    """The fields of vLLM's NCCLWeightTransferUpdateInfo."""
    return {
        "names": [spec.name for spec in manifest.tensors],
        "dtype_names": [spec.dtype for spec in manifest.tensors],
        "shapes": [list(spec.shape) for spec in manifest.tensors],
    }


class FedModel:
    """What vLLM's engine takes for the model: `load_weights` passes tensors on to a feed."""

    def __init__(self) -> None:
        self._feed: Feed | None = None
        self._digester: Digester | None = None
        self._number = 0

    def begin(self, feed: Feed, digester: Digester) -> None:
        """The tensors from now on are those of a manifest, in its order; they go to `feed`, and `digester` counts
        them."""
        self._feed, self._digester, self._number = feed, digester, 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Called when the broadcast of these tensors is queued on the current stream. Raises what the feed raises."""
        assert self._feed is not None, "an update is under way"
        assert self._digester is not None, "it came with the feed"
        for name, tensor in weights:
            self._digester.add_whole(self._number, tensor)
            self._number += 1
            self._feed.offer(name, tensor)


class NativeReceiver:
    """Rank `source.receiver + 1` of the group. All calls from one thread."""

    def __init__(self, source: VllmNcclSource, expected: ExpectedTensors, worker_rank: int, backend: Backend) -> None:
        """`source`, `worker_rank`: as `init_info`."""
        self._source = source
        self._expected = expected
        self._worker_rank = worker_rank
        self._backend = backend
        self._model = FedModel()
        self._engine: Any = None
        self._port = 0
        self._channel: ReceiverChannel | None = None
        self._calls: BlockingCalls | None = None

    def receive(self, manifest: Manifest, feed: Feed, timeout_s: float) -> Digest | None:
        """Offers every tensor of the manifest to `feed`; returns when all are loaded and the sender has confirmed it.
        The digest is of what was offered, if the manifest asks for it.

        Raises:
            WeightTransferError: no GPU, no NCCL, or the model has no such tensors: nothing was received then.
            DeadlineExceeded: sender or NCCL are late.
        """
        if self._channel is None:
            self._channel = ReceiverChannel(self._source.endpoint, self._source.receiver, self._source.key)
        channel, deadline = self._channel, Deadline(timeout_s)
        try:
            channel.join(manifest, self._port)
            self._backend.require()
            port = channel.expect(Kind.BEGIN, None, deadline, f"begin publish {manifest.publish_id}").value
            for spec in manifest.tensors:
                self._expected.check(spec)
            channel.ack(FITS)
            digester = Digester(manifest, self._source.digest)
            self._update(channel, manifest, feed, digester, port, deadline)
            channel.ack(LOADED)
            channel.expect(Kind.DONE, 0, deadline, f"end publish {manifest.publish_id}")
            return digester.result()
        except BaseException as error:
            channel.fail(error)
            feed.fail(error)  # before the group is dropped: an incomplete broadcast must not be loaded
            self._drop_group()
            raise

    def close(self) -> None:
        """Idempotent; a later `receive` joins again."""
        self._drop_group()
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _update(
        self,
        channel: ReceiverChannel,
        manifest: Manifest,
        feed: Feed,
        digester: Digester,
        port: int,
        deadline: Deadline,
    ) -> None:
        if self._engine is None or port != self._port:
            self._join(channel, port, deadline)
        engine = self._engine
        self._model.begin(feed, digester)
        assert engine is not None, "this worker has joined"
        assert self._calls is not None, "an engine has its thread"
        info = engine.parse_update_info(update_info(manifest))
        what = f"receive publish {manifest.publish_id}"
        receiving = self._calls.submit(lambda: engine.receive_weights(info))
        wait_for(receiving, deadline, what, lambda: channel.check(what))

    def _join(self, channel: ReceiverChannel, port: int, deadline: Deadline) -> None:
        """Forms the group that meets at `port`, in place of an earlier one."""
        self._drop_group()
        self._model = model = FedModel()
        self._calls, self._port = BlockingCalls("vllm-nccl-receiver"), port
        backend, info = self._backend, init_info(self._source, port, self._worker_rank)

        def join() -> Any:
            engine = backend.make(model)
            engine.init_transfer_engine(engine.parse_init_info(info))
            require_nccl(engine.model_update_group)
            return engine

        what = f"join vLLM's NCCL group at {self._source.host}:{port}"
        joining = self._calls.submit(join)
        try:
            self._engine = wait_for(joining, deadline, what, lambda: channel.check(what))
        finally:
            if self._engine is None:
                joining.add_done_callback(_shut_down_late)

    def _drop_group(self) -> None:
        engine, self._engine, self._port = self._engine, None, 0
        calls, self._calls = self._calls, None
        if calls is not None:
            calls.close()
        if engine is not None:
            engine.shutdown()


class VllmNccl:
    """The `Backend` of a worker on `device`."""

    def __init__(self, config: Any, vllm_config: Any, device: torch.device) -> None:
        """What vLLM's factory gives to its engines."""
        self._config, self._vllm_config, self._device = config, vllm_config, device

    def require(self) -> None:
        if self._device.type != "cuda":
            asked = f"weights.transport={VLLM_NCCL} into a vLLM worker on {self._device}"
            do = "serve on CUDA, or set weights.transport to ipc or collective"
            raise WeightTransferError(explain(asked, "NCCL needs a CUDA device", do))

    def make(self, model: FedModel) -> Any:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        torch.cuda.set_device(self._device)  # each thread has its own
        return NCCLWeightTransferEngine(self._config, self._vllm_config, self._device, cast("torch.nn.Module", model))


def _shut_down_late(joining: Future[Any]) -> None:
    """Shuts down a group that forms after its deadline."""
    if joining.exception() is None:
        joining.result().shutdown()
