"""Every weight transport against the conformance suite, and which memory `ipc` uses."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from asyncrl.errors import WeightTransferError
from asyncrl.weights.assembling_sink import AssemblingSink
from asyncrl.weights.packing import byte_view, spec_of
from asyncrl.weights.plan import make_manifest
from asyncrl.weights.transports import build_receiver, build_sender, collective
from asyncrl.weights.transports.interruptible_sender import InterruptibleSender
from asyncrl.weights.transports.ipc import IpcSender
from asyncrl.weights.transports.media import (
    EXPORTED,
    CudaMapping,
    CudaMedium,
    HostMapping,
    Stage,
    decode_export,
    encode_export,
    exported,
)
from asyncrl.weights.transports.shared_segment import SHARED_MEMORY
from asyncrl_testing.cuda_driver import FakeDriver
from asyncrl_testing.delta_suite import DeltaSuite
from asyncrl_testing.fake_transport import FakeNetwork
from asyncrl_testing.packed_collective import as_over_nccl, build_packed_receiver
from asyncrl_testing.second_memory import SecondMemory, build_second_memory_receiver
from asyncrl_testing.split_sender import guarded
from asyncrl_testing.strangers import StrangerSuite
from asyncrl_testing.transport_lifecycle_suite import TransportLifecycleSuite
from asyncrl_testing.transport_rig import BUCKET_BYTES, Rig, Worker, many_weights, plain_weights
from asyncrl_testing.transport_suite import TransportSuite

torch.set_num_threads(1)

# torch's TCPStore looks up the names of its peers' addresses; where nothing answers, the resolver waits 5 s by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@contextmanager
def three(build, *, in_process: bool = False) -> Iterator[list[Worker]]:
    workers = [Worker(build, in_process=in_process) for _ in range(3)]
    yield workers
    for worker in workers:
        worker.stop()


@pytest.fixture(scope="module")
def processes() -> Iterator[list[Worker]]:
    with three(build_receiver) as workers:
        yield workers


class BetweenProcesses(TransportSuite, TransportLifecycleSuite, DeltaSuite):
    """`directory`: where the transport writes files, with a place for that of the test."""

    transport: ClassVar[str]
    directory: ClassVar[str] = ""

    def sender(self, **settings: str):
        """What builds it."""
        return partial(build_sender, self.transport, **settings)

    @pytest.fixture
    def rig(self, processes: list[Worker], tmp_path: Path) -> Rig:
        settings = {"directory": self.directory.format(tmp_path)} if self.directory else {}
        build = self.sender(**settings)
        return Rig(build, processes, workers_can_die=True, places=(SHARED_MEMORY, tmp_path))


class TestIpc(BetweenProcesses, StrangerSuite):
    transport = "ipc"


class TestCollective(BetweenProcesses, StrangerSuite):
    transport = "collective"


@pytest.mark.slow
class TestCollectiveAsOverNccl(TransportSuite):
    @pytest.fixture(scope="class")
    def processes_of_gpus(self) -> Iterator[list[Worker]]:
        with three(build_packed_receiver) as workers:
            yield workers

    @pytest.fixture
    def rig(self, processes_of_gpus: list[Worker], monkeypatch: pytest.MonkeyPatch) -> Rig:
        monkeypatch.setattr(collective, "broadcasts", as_over_nccl)
        return Rig(partial(build_sender, "collective"), processes_of_gpus, workers_can_die=True)


class TestDisk(BetweenProcesses, StrangerSuite):
    transport, directory = "disk", "{}"


class TestObjects(BetweenProcesses, StrangerSuite):
    """Object storage, by fsspec over local files."""

    transport, directory = "disk", "file://{}"


class TwoSenders(BetweenProcesses):
    """The second one sends all from the fourth tensor on."""

    def sender(self, **settings: str):
        def build(bucket_bytes: int, num_receivers: int):
            senders = [build_sender(self.transport, bucket_bytes, num_receivers, **settings) for _ in range(2)]
            return guarded(senders, (0, 3), bucket_bytes)

        return build


@pytest.mark.slow
class TestTwoSendersOverIpc(TwoSenders):
    transport = "ipc"


@pytest.mark.slow
class TestTwoSendersOverCollective(TwoSenders):
    transport = "collective"


@pytest.mark.slow
class TestTwoSendersOverDisk(TwoSenders):
    transport, directory = "disk", "{}"


class TestFake(TransportSuite, TransportLifecycleSuite, DeltaSuite):
    @pytest.fixture
    def rig(self) -> Iterator[Rig]:
        network = FakeNetwork()
        with three(network.receiver, in_process=True) as workers:
            yield Rig(network.sender, workers, workers_can_die=False)


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    """Receivers that may map a second memory."""
    with three(build_second_memory_receiver) as workers:
        yield workers


class LateStage(Stage):
    """Copies only when it is waited for."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        super().__init__(buffers)
        self._late: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self.packed_meanwhile = 0

    def begin(self, slot: torch.Tensor) -> None:
        assert self._late is None, "one copy at a time"
        packed = self.place[: len(slot)]
        self._late = slot, packed, packed.clone()
        self._turn = (self._turn + 1) % 2

    def wait(self) -> None:
        if self._late is not None:
            slot, packed, then = self._late
            assert torch.equal(packed, then), "it was packed over"
            slot.copy_(packed)
            self._late = None
            self.packed_meanwhile += 1


@pytest.mark.slow
class TestIpcFromAGpuThatNobodySees(TransportSuite, TransportLifecycleSuite, DeltaSuite, StrangerSuite):
    """Buckets are packed in a second piece of shared memory, and copied to the first beside that."""

    @pytest.fixture
    def rig(self, workers: list[Worker]) -> Rig:
        make = partial(SecondMemory, unreachable=(0, 1, 2))

        def build(bucket_bytes: int, num_receivers: int):
            return InterruptibleSender(IpcSender(bucket_bytes, num_receivers, make_medium=make, make_stage=LateStage))

        return Rig(build, workers, workers_can_die=True)


@pytest.fixture
def driver(monkeypatch) -> FakeDriver:
    return FakeDriver(monkeypatch)


class TestDeviceMemoryOfIpc:
    """Which of its two rings `ipc` uses. A second piece of shared memory stands for a GPU's."""

    def rig(self, workers: list[Worker], **troubles: tuple[int, ...]) -> tuple[Rig, list[SecondMemory]]:
        """And the device memories that its senders make."""
        made: list[SecondMemory] = []

        def make(nbytes: int) -> SecondMemory:
            made.append(SecondMemory(nbytes, **troubles))
            return made[-1]

        def build(bucket_bytes: int, num_receivers: int) -> IpcSender:
            return IpcSender(bucket_bytes, num_receivers, make_medium=make)

        return Rig(build, workers, workers_can_die=True), made

    def test_it_is_used_when_everybody_can_map_it(self, workers, caplog):
        rig, made = self.rig(workers)
        before = rig.files()
        with rig.connected(2) as transfer:
            transfer.publish(many_weights(1))
            transfer.publish(plain_weights(2))
            weights = dict(plain_weights(2))
            assert torch.equal(made[0].data[:BUCKET_BYTES], byte_view(weights["layer.10"]))
            assert os.path.getsize(transfer.source.path) == 0, "no shared memory is taken beside"
        assert not caplog.records
        assert rig.files() == before

    @pytest.mark.parametrize("trouble", ["unreachable", "mistaken"])
    def test_shared_memory_serves_all_when_one_cannot(self, workers, caplog, trouble):
        rig, made = self.rig(workers, **{trouble: (1,)})
        before = rig.files()
        with rig.connected(2) as transfer:
            transfer.publish(many_weights(1))
            taken = os.path.getsize(transfer.source.path)
            assert 0 < taken < made[0].data.numel()
            transfer.publish(plain_weights(2))
            assert os.path.getsize(transfer.source.path) == taken
        assert [record.levelname for record in caplog.records] == ["WARNING"], "once, however many publishes"
        reason = {"unreachable": "out of reach", "mistaken": "other memory"}[trouble]
        assert "receiver 1: asked: map" in caplog.text
        assert reason in caplog.text
        assert rig.files() == before

    def test_shared_memory_serves_when_the_sender_cannot_export(self, workers, caplog):
        def refuse(nbytes: int) -> SecondMemory:
            raise WeightTransferError(f"{nbytes} bytes cannot be exported")

        rig = Rig(lambda size, receivers: IpcSender(size, receivers, make_medium=refuse), workers, workers_can_die=True)
        with rig.connected(2) as transfer:
            transfer.publish(plain_weights(1))
            transfer.publish(plain_weights(2))
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "cannot be exported" in caplog.text

    def test_a_receiver_that_comes_back_can_change_the_medium(self, workers):
        rig, made = self.rig(workers)
        with rig.connected(2) as transfer:
            transfer.publish(plain_weights(1))
            transfer.workers[1].kill()
            transfer.workers[1].start()
            transfer.workers[1].join(replace(transfer.source, receiver=1))
            transfer.publish(plain_weights(2))
            assert torch.equal(made[0].data[:BUCKET_BYTES], byte_view(plain_weights(2)[10][1]))

    @pytest.mark.parametrize("unreachable", [(), (0,)])
    @pytest.mark.parametrize(
        ("digest", "is_kept", "found"), [("words", False, "meta"), ("words", True, "cpu"), ("xxh3", False, "cpu")]
    )
    def test_buckets_of_another_device_come_to_that_of_the_sink(self, unreachable, digest, is_kept, found):
        """Device meta stands for the GPU of a receiver, whether it sees the sender's or not. What the host reads stays:
        its digests, and weights of which it keeps a copy."""
        weights, devices = plain_weights(1), []
        manifest = make_manifest(1, 1, [spec_of(*item) for item in weights], BUCKET_BYTES, verify=False)
        sender = IpcSender(BUCKET_BYTES, 1, make_medium=partial(SecondMemory, unreachable=unreachable))
        sink = AssemblingSink(lambda name, tensor: devices.append(tensor.device.type))
        with closing(sender), ThreadPoolExecutor(1) as receiving:
            receiver = build_second_memory_receiver(replace(sender.open(), digest=digest), "meta")
            received = receiving.submit(receiver.receive, replace(manifest, is_kept=is_kept), sink, 30.0)
            sender.send(replace(manifest, is_kept=is_kept), weights, 30.0)
            received.result()
            receiving.submit(receiver.close).result()
        assert devices == [found] * len(weights)

    def test_a_bucket_is_announced_when_it_has_left_the_gpu(self, workers):
        """The copies to shared memory are late, and the next bucket is packed before they are complete."""
        stages: list[LateStage] = []

        def stage(buffers: Sequence[torch.Tensor]) -> LateStage:
            stages.append(LateStage(buffers))
            return stages[-1]

        def build(bucket_bytes: int, num_receivers: int) -> IpcSender:
            make = partial(SecondMemory, unreachable=(1,))
            return IpcSender(bucket_bytes, num_receivers, make_medium=make, make_stage=stage)

        rig = Rig(build, workers, workers_can_die=True)
        with rig.connected(2) as transfer:
            transfer.publish(many_weights(1))
            transfer.publish(plain_weights(2))
            weights = plain_weights(3)
            transfer.publish_failing(transfer.manifest(weights), weights[:-1], WeightTransferError, "ended before")
            transfer.publish(plain_weights(4))
        assert len(stages) == 1
        assert stages[0].packed_meanwhile > 5

    def test_shared_memory_beside_a_gpu_is_pinned_until_it_is_closed(self, driver):
        data = torch.zeros(4096, dtype=torch.uint8)
        mapping = HostMapping(data, torch.device("cuda"))
        assert driver.pinned == {data.data_ptr(): 4096}
        mapping.close()
        mapping.close()
        assert driver.pinned == {}
        HostMapping(data[:0], torch.device("cuda")).close()
        HostMapping(data).close()
        assert driver.pinned == {}

    def test_the_ring_of_a_gpu_is_used_again(self):
        class Ring(CudaMedium):
            def __init__(self, nbytes, device):
                self._asked = nbytes, device

        cuda = torch.device("cuda")
        first, other = Ring.take(64, cuda), Ring.take(64, cuda)
        assert first is not other, "it is in use"
        first.close()
        assert Ring.take(128, cuda) is not first
        assert Ring.take(64, cuda) is first
        assert Ring.take(64, cuda) is not first

    def test_what_a_gpu_exports_survives_its_description(self):
        fields = {"handle": b"\0\xff", "size": 64, "offset": 512, "counter": b"/torch_1", "counter_offset": 3}
        fields |= {"event": b"", "event_sync": False}
        assert decode_export(encode_export("GPU-1", fields)) == ("GPU-1", fields)

    @pytest.mark.parametrize("fields", [range(8), range(9), range(7), None])
    def test_a_torch_that_exports_other_fields_cannot_export(self, fields):
        """Shared memory serves then, as after any other WeightTransferError."""
        storage = SimpleNamespace() if fields is None else SimpleNamespace(_share_cuda_=lambda: tuple(fields))
        expected = nullcontext() if fields == range(8) else pytest.raises(WeightTransferError, match="export memory")
        with expected:
            assert list(exported(storage).items()) == list(zip(EXPORTED, range(1, 8), strict=True))

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
    def test_without_a_gpu_nothing_is_exported_or_mapped(self):
        with pytest.raises(WeightTransferError, match="export 64 bytes of cuda"):
            CudaMedium(64, torch.device("cuda"))
        with pytest.raises(WeightTransferError, match="no GPU"):
            CudaMapping(encode_export("GPU-1", dict.fromkeys(EXPORTED, b"")), torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("device_of_receivers", ["cuda", "cpu"])
def test_weights_on_a_gpu(device_of_receivers, caplog):
    """From GPU memory to GPU memory, and through shared memory for a receiver that has no GPU."""
    worker = Worker(partial(build_receiver, device=device_of_receivers), in_process=False)
    rig = Rig(lambda size, receivers: build_sender("ipc", size, receivers, device="cuda"), [worker], True)
    before = rig.files()
    with rig.connected(1) as transfer:
        for seed in (1, 2, 3):
            transfer.publish([(name, tensor.cuda()) for name, tensor in many_weights(seed)])
        transfer.publish([(name, tensor.cuda()) for name, tensor in plain_weights(4)])
        shared = os.path.getsize(transfer.source.path)
        assert (shared == 0) == (device_of_receivers == "cuda")
    worker.stop()
    assert len(caplog.records) == (0 if device_of_receivers == "cuda" else 1)
    assert rig.files() == before
