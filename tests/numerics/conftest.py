"""A process group of one rank, which FSDP needs, and a thread of its own for an engine beside other processes."""

import datetime

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="module")
def process_group():
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=30)
    )
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def one_thread():
    """Threads that spin on shared cores are slower than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
