"""A process group of one rank, which FSDP needs."""

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
