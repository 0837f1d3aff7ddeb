"""Every weight transport against the conformance suite."""

import os
from collections.abc import Iterator

import pytest
import torch

from asyncrl.testing.fake_transport import FakeNetwork
from asyncrl.testing.transport_rig import Rig, Worker
from asyncrl.testing.transport_suite import TransportSuite
from asyncrl.weights.transports import build_receiver, build_sender

pytestmark = pytest.mark.contract

torch.set_num_threads(1)

# torch's TCPStore looks up the names of its peers' addresses; where nothing answers, the resolver waits 5 s by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture(scope="module")
def processes() -> Iterator[list[Worker]]:
    workers = [Worker(build_receiver, in_process=False) for _ in range(3)]
    yield workers
    for worker in workers:
        worker.stop()


class TestIpc(TransportSuite):
    @pytest.fixture
    def rig(self, processes: list[Worker]) -> Rig:
        return Rig(lambda size, receivers: build_sender("ipc", size, receivers), processes, workers_can_die=True)


class TestCollective(TransportSuite):
    @pytest.fixture
    def rig(self, processes: list[Worker]) -> Rig:
        return Rig(lambda size, receivers: build_sender("collective", size, receivers), processes, workers_can_die=True)


class TestFake(TransportSuite):
    @pytest.fixture
    def rig(self) -> Iterator[Rig]:
        network = FakeNetwork()
        workers = [Worker(network.receiver, in_process=True) for _ in range(3)]
        yield Rig(network.sender, workers, workers_can_die=False)
        for worker in workers:
            worker.stop()
