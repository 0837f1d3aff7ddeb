"""vLLM's own NCCL backend as a transport: everything but NCCL itself.

In the place of NCCL stands vLLM's rendezvous store, through which small tensors can be broadcast on a CPU: ports, ranks,
packing and the control channel are the real ones.
"""

import importlib.util
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asyncrl.config.load import load_recipe
from asyncrl.errors import ConfigError, WeightTransferError
from asyncrl.inference.vllm.feed import Feed
from asyncrl.inference.vllm.native import NativeReceiver, init_info, update_info
from asyncrl.types import TensorSpec
from asyncrl.weights.packing import spec_of
from asyncrl.weights.plan import make_manifest
from asyncrl.weights.transport import TransferSource
from asyncrl.weights.transports import build_receiver, build_sender
from asyncrl.weights.transports.vllm_native import VllmNcclSender, checked_walk, require_nccl, reserve_port

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
BUCKET_BYTES = 4096
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")


def weights(seed=0):
    """One tensor above the bucket, many below it, one scalar, one without elements."""
    rng = torch.Generator().manual_seed(seed)
    shapes = {"big": (40, 50), "scalar": (), "empty": (0, 7), **{f"small.{i}": (3, 5 + i) for i in range(40)}}
    return [(name, torch.randn(shape, generator=rng)) for name, shape in shapes.items()]


def manifest_of(tensors, publish_id=1, **settings):
    return make_manifest(
        publish_id, 1, [spec_of(n, t) for n, t in tensors], BUCKET_BYTES, **{"verify": False} | settings
    )


# -- the recipe --------------------------------------------------------------------------------------------------------

VLLM_NCCL = ["weights.transport=vllm_nccl", "weights.verify=off", "rollout.engine=vllm"]


def test_a_recipe_for_gpus_can_choose_it():
    recipe = load_recipe(ROOT / "recipes" / "dapo_qwen.yaml", VLLM_NCCL)
    assert recipe.weights.transport == "vllm_nccl"


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("rollout.engine=torch", "rollout.engine=torch"),
        ("weights.verify=first", "weights.verify=first"),
        ("trainer.device=cpu", "trainer.device=cpu"),
    ],
)
def test_what_it_needs_is_said_at_load(override, names):
    with pytest.raises(ConfigError, match=f"weights.transport=vllm_nccl with {names}"):
        load_recipe(ROOT / "recipes" / "dapo_qwen.yaml", [*VLLM_NCCL, override])


def test_a_trainer_on_a_cpu_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"vllm_nccl from a trainer on cpu(?s:.)*ipc or collective"):
        build_sender("vllm_nccl", BUCKET_BYTES, 1, device="cpu")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="needs an environment without vLLM")
def test_a_trainer_without_vllm_is_refused_by_name():
    with pytest.raises(ConfigError, match="the package vllm is not installed"):
        build_sender("vllm_nccl", BUCKET_BYTES, 1, device="cuda")


def test_other_engines_cannot_receive_it():
    with pytest.raises(ConfigError, match=r"rollout\.engine=vllm"):
        build_receiver(source_of(1))


# -- the parts ---------------------------------------------------------------------------------------------------------


def source_of(num_receivers, receiver=0):
    return TransferSource("vllm_nccl", "tcp://h:1", "10.0.0.7", BUCKET_BYTES, num_receivers, receiver, 5)


WRONG = {
    "missing": (lambda w: w[:-1], "ended before it"),
    "extra": (lambda w: [*w, ("more", torch.zeros(2))], "one more: more"),
    "reordered": (lambda w: [w[1], w[0], *w[2:]], "publish tensor 0: big(?s:.)*found: scalar"),
    "reshaped": (lambda w: [(n, t.T if n == "big" else t) for n, t in w], r"big, float32 \(50, 40\)"),
    "of another dtype": (lambda w: [(n, t.half() if n == "big" else t) for n, t in w], "big, float16"),
}


@pytest.mark.parametrize("fault", list(WRONG))
def test_the_walk_is_checked_against_the_manifest(fault):
    make_wrong, found = WRONG[fault]
    taken = []
    with pytest.raises(WeightTransferError, match=found):
        taken.extend(name for name, _ in checked_walk(manifest_of(weights()), make_wrong(weights())))
    assert len(taken) < len(weights()), "the last tensor is not sent, so no receiver has everything"


def test_the_walk_yields_what_it_was_given_without_gradients():
    tensors = [(n, t.requires_grad_()) for n, t in weights()]
    walked = list(checked_walk(manifest_of(tensors), tensors))
    assert [n for n, _ in walked] == [n for n, _ in tensors]
    assert not any(t.requires_grad for _, t in walked)
    assert list(checked_walk(manifest_of([]), [])) == []
    with pytest.raises(WeightTransferError, match="publish 0 tensors"):
        list(checked_walk(manifest_of([]), tensors))


def test_digests_are_refused():
    with closing(VllmNcclSender(BUCKET_BYTES, 1, open_endpoint=StoreEndpoint)) as sender:
        sender.open()
        with pytest.raises(WeightTransferError, match=r"weights\.verify=off"):
            sender.send(manifest_of(weights(), verify=True), weights(), 1.0)


def test_a_reserved_port_is_kept_for_a_server_alone():
    with reserve_port("127.0.0.1") as place:
        address = place.getsockname()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(address)
            server.listen()
            socket.create_connection(address, timeout=5).close()


@needs_vllm
@pytest.mark.parametrize(("num_replicas", "workers"), [(1, 1), (3, 1), (2, 4)])
def test_every_worker_has_a_rank_of_its_own(num_replicas, workers):
    """vLLM adds the worker's rank within its replica to the offset that it is given."""
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo

    ranks = []
    for receiver in range(num_replicas * workers):
        worker_rank = receiver % workers
        info = init_info(source_of(num_replicas * workers, receiver), 29500, worker_rank)
        accepted = NCCLWeightTransferInitInfo(**info)
        assert accepted.rank_offset == receiver - worker_rank + 1, "the same for all workers of a replica"
        assert (accepted.world_size, accepted.master_address) == (num_replicas * workers + 1, "10.0.0.7")
        assert (accepted.packed, accepted.packed_buffer_size_bytes) == (True, BUCKET_BYTES)
        ranks.append(accepted.rank_offset + worker_rank)
    assert ranks == list(range(1, num_replicas * workers + 1))


@needs_vllm
def test_vllm_takes_the_manifest_as_update_info():
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

    manifest = manifest_of(weights())
    info = NCCLWeightTransferUpdateInfo(**update_info(manifest))
    assert info.names == [n for n, _ in weights()]
    assert info.shapes[:3] == [[40, 50], [], [0, 7]]
    assert {getattr(torch, name) for name in info.dtype_names} == {torch.float32}


@needs_vllm
def test_a_communicator_without_nccl_is_refused():
    """vLLM's communicator only logs that it found no NCCL, and then sends nothing."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    with reserve_port("127.0.0.1") as place:
        group = StatelessProcessGroup.create("127.0.0.1", place.getsockname()[1], rank=0, world_size=1)
    communicator = PyNcclCommunicator(group, device="cpu")
    with pytest.raises(WeightTransferError, match="NCCL"):
        require_nccl(communicator)


# -- a transfer --------------------------------------------------------------------------------------------------------


class StoreEndpoint:
    """An `Endpoint` that broadcasts vLLM's packed chunks through vLLM's rendezvous store."""

    def __init__(self, host, port, world_size):
        from vllm.distributed.utils import StatelessProcessGroup

        self.group = StatelessProcessGroup.create(host, port, rank=0, world_size=world_size)

    def broadcast(self, weights, bucket_bytes):
        from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

        while (chunk := pack_tensors(weights, lambda item: item[1], bucket_bytes)) is not None:
            self.group.broadcast(chunk.packed_tensor, 0)

    def close(self):
        pass


def store_engine(model, *, stuck=None):
    """vLLM's NCCL engine with the store in the place of NCCL; `stuck`: an event for which it waits in vain."""
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
    from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

    class StoreGroup:
        available, disabled = True, False

        def __init__(self, info):
            self.world = (info.rank_offset, info.world_size)
            self.store = StatelessProcessGroup.create(info.master_address, info.master_port, *self.world)
            self.limit = info.packed_buffer_size_bytes

    class StoreEngine(NCCLWeightTransferEngine):
        def __init__(self):
            self.model, self.model_update_group = model, None

        def init_transfer_engine(self, init_info):
            self.model_update_group = StoreGroup(init_info)

        def receive_weights(self, update_info):
            if stuck is not None:
                stuck.wait(30)
                return
            chunk, size = [], 0
            for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
                nbytes = torch.empty(shape, dtype=getattr(torch, dtype), device="meta").nbytes
                chunk.append((name, shape, getattr(torch, dtype), nbytes))
                size += nbytes
                if size > self.model_update_group.limit or len(self.received) + len(chunk) == len(update_info.names):
                    packed = self.model_update_group.store.broadcast(torch.empty(0), 0)
                    assert packed.numel() == size, "both sides cut alike"
                    model.load_weights(unpack_tensor(packed, *(list(column) for column in zip(*chunk, strict=True))))
                    self.received += [c[0] for c in chunk]
                    chunk, size = [], 0

        def shutdown(self):
            self.model_update_group = None

        @property
        def received(self):
            return self.__dict__.setdefault("_received", [])

        @received.setter
        def received(self, names):
            self.__dict__["_received"] = [] if len(names) == TOTAL else names

    TOTAL = len(weights())
    return StoreEngine()


class Expected:
    """In the place of a model's `ExpectedTensors`."""

    def check(self, spec: TensorSpec) -> None:
        if spec.name == "foreign":
            raise WeightTransferError("the model has no tensor 'foreign'")


class Worker:
    """One vLLM worker's side: the receiver in a thread, the loader in another."""

    def __init__(self, source, receiver, **settings):
        # `meta` stands for a device that is no CPU.
        self.receiver = NativeReceiver(
            replace(source, receiver=receiver), FAKE_GPU, Expected(), 0, lambda model: store_engine(model, **settings)
        )
        self.pool = ThreadPoolExecutor(1)

    def receive(self, manifest, timeout_s=10.0):
        feed = Feed(len(manifest.tensors), timeout_s + 1)
        received = self.pool.submit(self.receiver.receive, manifest, feed, timeout_s)
        try:
            loaded = {name: tensor.clone() for name, tensor in feed}
            feed.finish()
        finally:
            received.exception(timeout_s + 5)
        received.result()
        return loaded

    def close(self):
        self.pool.submit(self.receiver.close).result(5)
        self.pool.shutdown()


class FakeGpu:
    type = "cuda"


FAKE_GPU = FakeGpu()
