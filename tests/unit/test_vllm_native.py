"""vLLM's own NCCL backend as a transport: everything but NCCL itself.

In the place of NCCL stands vLLM's rendezvous store, through which small tensors can be broadcast on a CPU: ports,
ranks, packing and the control channel are the real ones.
"""

import importlib.util
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asyncrl.config.load import load_recipe
from asyncrl.errors import ConfigError, DeadlineExceeded, TransferEnded, WeightTransferError
from asyncrl.inference.shared.tensor_feed import Feed
from asyncrl.inference.vllm.nccl_receiver import NativeReceiver, init_info, update_info
from asyncrl.types import VllmNcclSource
from asyncrl.weights.packing import spec_of
from asyncrl.weights.plan import make_manifest
from asyncrl.weights.transports import build_receiver, build_sender
from asyncrl.weights.transports.interruptible_sender import GuardedSender
from asyncrl.weights.transports.vllm_nccl import VllmNcclSender, checked_walk, require_nccl, reserve_port

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

VLLM_NCCL = ["weights.transport=vllm_nccl", "rollout.engine=vllm"]


def test_a_recipe_for_gpus_can_choose_it():
    recipe = load_recipe(ROOT / "recipes" / "dapo_qwen.yaml", VLLM_NCCL)
    assert recipe.weights.transport == "vllm_nccl"


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("trainer.device=cpu", "trainer.device=cpu"),
    ],
)
def test_what_it_needs_is_said_at_load(override, names):
    with pytest.raises(ConfigError, match=f"weights.transport=vllm_nccl with {names}"):
        load_recipe(ROOT / "recipes" / "quickstart.yaml", [*VLLM_NCCL, override])


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
    common = {"bucket_bytes": BUCKET_BYTES, "num_receivers": num_receivers, "receiver": receiver, "epoch": 5}
    return VllmNcclSource(endpoint="tcp://h:1", host="10.0.0.7", **common)


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
        self.closed = False

    def broadcast(self, weights, bucket_bytes):
        from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

        while (chunk := pack_tensors(weights, lambda item: item[1], bucket_bytes)) is not None:
            self.group.broadcast(chunk.packed_tensor, 0)

    def close(self):
        self.closed = True


class StoreGroup:
    """The worker's communicator, over the store."""

    available, disabled = True, False

    def __init__(self, info):
        from vllm.distributed.utils import StatelessProcessGroup

        rank, self.limit = info.rank_offset, info.packed_buffer_size_bytes
        self.store = StatelessProcessGroup.create(info.master_address, info.master_port, rank, info.world_size)

    def chunks(self, update_info):
        """Lists of (name, tensor), cut as vLLM's consumer cuts."""
        from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

        columns = zip(update_info.names, update_info.shapes, update_info.dtype_names, strict=True)
        pending = [(name, shape, getattr(torch, dtype)) for name, shape, dtype in columns]
        while pending:
            chunk, sizes = [], []
            while pending and sum(sizes) <= self.limit:
                chunk.append(pending.pop(0))
                sizes.append(torch.empty(chunk[-1][1], dtype=chunk[-1][2], device="meta").nbytes)
            packed = self.store.broadcast(torch.empty(sum(sizes), dtype=torch.uint8), 0)
            yield unpack_tensor(packed, *(list(column) for column in zip(*chunk, strict=True)), sizes)


class StoreBackend:
    """Makes vLLM's NCCL engines with the store in the place of NCCL."""

    def __init__(self, stuck=None, broken=None):
        """`stuck`: an event for which they wait instead of receiving; `broken`: a tensor that arrives with one bit more
        or less."""
        self.stuck, self.broken = stuck, broken
        self.made = 0

    def require(self):
        pass

    def make(self, model):
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        stuck, broken, self.made = self.stuck, self.broken, self.made + 1

        class Engine(NCCLWeightTransferEngine):
            def __init__(self):
                self.model_update_group = None

            def init_transfer_engine(self, init_info):
                self.model_update_group = StoreGroup(init_info)

            def receive_weights(self, update_info):
                if stuck is not None:
                    stuck.wait(30)
                for tensors in self.model_update_group.chunks(update_info):
                    for name, tensor in tensors:
                        if name == broken:
                            tensor.view(torch.int32)[0, 0] ^= 1
                    model.load_weights(tensors)

            def shutdown(self):
                pass

        return Engine()


class Expected:
    """In the place of a model's `ExpectedTensors`."""

    def check(self, spec):
        if spec.name == "foreign":
            raise WeightTransferError("the model has no tensor 'foreign'")


class Worker:
    """The worker's side of a publish: the receiver in a thread, the loader in this one."""

    def __init__(self, source, receiver=0, backend=None):
        self.backend = backend or StoreBackend()
        self.receiver = NativeReceiver(replace(source, receiver=receiver), Expected(), 0, self.backend)
        self.thread = ThreadPoolExecutor(1)
        self.digest = None

    def receive(self, manifest, timeout_s=10.0):
        feed = Feed(len(manifest.tensors), timeout_s + 1)
        received = self.thread.submit(self.receiver.receive, manifest, feed, timeout_s)
        loaded = {name: tensor.clone() for name, tensor in feed}
        feed.finish()
        self.digest = received.result(timeout_s)
        return loaded

    def close(self):
        self.thread.submit(self.receiver.close).result(5)
        self.thread.shutdown()


class Transfer:
    """A sender and its workers."""

    def __init__(self, sender, workers, pool, endpoints):
        self.sender, self.workers, self._pool, self.endpoints = sender, workers, pool, endpoints
        self.received = []
        """What each worker loaded in the last publish, or raised."""

    def publish(self, tensors, publish_id, timeout_s=10.0, given=None, **settings):
        """`given`: what the sender gets in place of what the manifest says; `settings`: of the manifest. Returns the
        digest. Raises the sender's error."""
        manifest = manifest_of(tensors, publish_id, **settings)
        receiving = [self._pool.submit(worker.receive, manifest, timeout_s) for worker in self.workers]
        try:
            return self.sender.send(manifest, tensors if given is None else given, timeout_s)
        finally:
            self.received = [f.exception(timeout_s + 5) or f.result() for f in receiving]

    def assert_received(self, tensors):
        for loaded in self.received:
            assert list(loaded) == [name for name, _ in tensors]
            assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors)

    @property
    def groups_made(self):
        return [worker.backend.made for worker in self.workers]


@contextmanager
def connected(num_workers, backends=None):
    # Both sides import vLLM in threads of their own, and its modules import each other: that may deadlock.
    import vllm.distributed.weight_transfer.nccl_engine
    import vllm.distributed.weight_transfer.packed_tensor  # noqa: F401

    endpoints = []

    def open_endpoint(*where):
        endpoints.append(StoreEndpoint(*where))
        return endpoints[-1]

    sender = GuardedSender(VllmNcclSender(BUCKET_BYTES, num_workers, open_endpoint=open_endpoint))
    with closing(sender), ThreadPoolExecutor(num_workers) as pool, ExitStack() as stack:
        source = sender.open()
        workers = [Worker(source, i, (backends or {}).get(i)) for i in range(num_workers)]
        for worker in workers:
            stack.callback(worker.close)
        yield Transfer(sender, workers, pool, endpoints)


@needs_vllm
@pytest.mark.parametrize("num_workers", [1, 3])
def test_every_worker_gets_every_tensor(num_workers):
    with connected(num_workers) as transfer:
        for publish_id in (1, 2, 3):
            transfer.publish(weights(publish_id), publish_id)
            transfer.assert_received(weights(publish_id))
        assert transfer.groups_made == [1] * num_workers, "the group stays"


@needs_vllm
def test_both_sides_digest_what_is_sent_and_what_arrives():
    broken = StoreBackend(broken="small.7")
    with connected(3, {1: broken}) as transfer:
        assert transfer.publish(weights(1), 1) is None
        assert [worker.digest for worker in transfer.workers] == [None] * 3, "nobody asked"
        sent = transfer.publish(weights(2), 2, verify=True)
        found = [worker.digest for worker in transfer.workers]
        assert found[0] == found[2] == sent
        assert [weights()[i][0] for i, (a, b) in enumerate(zip(sent, found[1], strict=True)) if a != b] == ["small.7"]
        assert transfer.publish(weights(3), 3, verify=True) != sent


@needs_vllm
def test_the_group_is_formed_anew_for_a_worker_that_came_back():
    with connected(2) as transfer:
        transfer.publish(weights(1), 1)
        transfer.workers[1].thread.submit(transfer.workers[1].receiver.close).result(5)
        transfer.publish(weights(2), 2)
        transfer.assert_received(weights(2))
        assert transfer.groups_made == [2, 2]
        assert [endpoint.closed for endpoint in transfer.endpoints] == [True, False]


@needs_vllm
def test_weights_that_contradict_the_manifest_end_both_sides_and_the_next_publish_works():
    with connected(2) as transfer:
        with pytest.raises(WeightTransferError, match="ended before it"):
            transfer.publish(weights(1), 1, given=weights(1)[:-1])
        assert [type(error) for error in transfer.received] == [TransferEnded] * 2
        assert all("ended before it" in str(error) for error in transfer.received)
        assert [endpoint.closed for endpoint in transfer.endpoints] == [True], "NCCL would block for ever"
        transfer.publish(weights(2), 2)
        transfer.assert_received(weights(2))
        assert transfer.groups_made == [2, 2], "a group that failed is not used again"


@needs_vllm
def test_a_worker_that_refuses_a_tensor_says_so_before_a_group_is_formed():
    with connected(2) as transfer:
        started = time.monotonic()
        with pytest.raises(WeightTransferError, match="no tensor 'foreign'"):
            transfer.publish([*weights(1), ("foreign", torch.zeros(3))], 1)
        assert time.monotonic() - started < 5.0
        assert transfer.groups_made == [0, 0]
        transfer.publish(weights(2), 2)
        transfer.assert_received(weights(2))


@needs_vllm
def test_a_worker_that_hangs_costs_the_deadline_and_is_named():
    stuck = threading.Event()
    with connected(2, {1: StoreBackend(stuck)}) as transfer:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="receiver 1"):
            transfer.publish(weights(1), 1, timeout_s=2.0)
        assert time.monotonic() - started < 6.0
        transfer.workers[1].backend.stuck = None
        stuck.set()
        transfer.publish(weights(2), 2)
        transfer.assert_received(weights(2))


@needs_vllm
def test_a_group_that_does_not_form_costs_the_deadline_and_is_named():
    """NCCL's own way to form a group waits for minutes, and nothing can interrupt it."""
    forever = threading.Event()

    def never(*_):
        forever.wait(30)
        raise WeightTransferError("too late")

    sender = GuardedSender(VllmNcclSender(BUCKET_BYTES, 1, open_endpoint=never))
    with closing(sender), ThreadPoolExecutor(1) as pool, closing(Worker(sender.open())) as worker:
        manifest = manifest_of(weights(1))
        receiving = pool.submit(worker.receive, manifest, 5.0)
        with pytest.raises(DeadlineExceeded, match=r"form vLLM's NCCL group at 127\.0\.0\.1:\d+ with 1 receiver"):
            sender.send(manifest, weights(1), 1.0)
        assert isinstance(receiving.exception(5), TransferEnded)
        forever.set()


def test_a_worker_that_never_comes_costs_the_deadline_and_is_named():
    with closing(VllmNcclSender(BUCKET_BYTES, 2, open_endpoint=StoreEndpoint)) as sender:
        sender.open()
        with pytest.raises(DeadlineExceeded, match="receiver 0 did not; receiver 1 did not"):
            sender.send(manifest_of(weights()), weights(), 0.5)


@needs_vllm
def test_closing_the_sender_ends_a_publish():
    stuck = threading.Event()
    with connected(1, {0: StoreBackend(stuck)}) as transfer, ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(transfer.publish, weights(1), 1, 20.0)
        while not transfer.groups_made[0]:
            assert not publishing.done()
            time.sleep(0.01)
        transfer.sender.close()
        assert isinstance(publishing.exception(10), WeightTransferError)
        stuck.set()
