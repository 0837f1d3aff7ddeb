"""Shared memory belongs to one process and disappears with it, however that process ends."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asyncrl.errors import ConfigError, WeightTransferError
from asyncrl.types import TransferSource
from asyncrl.weights.lock_files import remove_stale_segments
from asyncrl.weights.transports import TRANSPORTS, build_receiver, build_sender
from asyncrl.weights.transports.shared_segment import SharedSegment, attach


@pytest.fixture
def segment():
    segment = SharedSegment()
    segment.reserve(8192)
    yield segment
    segment.close()


def test_both_sides_see_one_memory(segment):
    other = attach(str(segment.path))
    segment.data[5] = 77
    other[6] = 78
    assert (other.numel(), other[5].item(), segment.data[6].item()) == (8192, 77, 78)


def test_a_view_outlives_the_owner(segment):
    other = attach(str(segment.path))
    segment.data[5] = 77
    segment.close()
    assert not segment.path.exists()
    assert other[5].item() == 77
    with pytest.raises(WeightTransferError, match="sender is gone"):
        attach(str(segment.path))


def test_only_the_user_may_read_weights(segment):
    assert segment.path.stat().st_mode & 0o077 == 0


def test_what_a_killed_owner_left_is_removed_by_the_next():
    code = (
        "import sys, time; from asyncrl.weights.transports.shared_segment import SharedSegment\n"
        "s = SharedSegment(); s.reserve(4096); s.socket_path.touch(); print(s.path, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    path = Path(owner.stdout.readline().strip())
    remove_stale_segments()
    assert path.exists()
    owner.send_signal(signal.SIGKILL)
    owner.wait(10)
    owner.stdout.close()
    assert path.exists()
    assert path.with_suffix(".sock").exists()
    SharedSegment().close()
    assert not path.exists()
    assert not path.with_suffix(".sock").exists()


def test_memory_can_be_taken_later():
    segment = SharedSegment()
    assert attach(str(segment.path)).numel() == 0
    segment.reserve(4096)
    segment.reserve(4096)
    segment.data[7] = 9
    assert attach(str(segment.path))[7].item() == 9
    with pytest.raises(ConfigError, match="lower weights"):
        segment.reserve(1 << 50)
    segment.close()
    assert not segment.path.exists()


def test_an_unknown_transport_is_a_config_error():
    with pytest.raises(ConfigError, match=r"carrier-pigeon(?s:.)*ipc, collective, disk"):
        build_sender("carrier-pigeon", 4096, 1)
    with pytest.raises(ConfigError, match=r"TransferSource(?s:.)*ipc, collective, disk"):
        build_receiver(TransferSource(endpoint="", bucket_bytes=4096, num_receivers=1, epoch=0))
    assert set(TRANSPORTS) == {"ipc", "collective", "disk"}


def test_a_device_that_no_backend_serves_is_a_config_error():
    with pytest.raises(ConfigError, match="meta"):
        build_sender("collective", 4096, 1, device=torch.device("meta"))
