"""What a trainer rank fetches, and what it holds already."""

import asyncio
import threading

import numpy as np
import pytest
import torch

from asyncrl.queue.masking import StoredGroup, mask_older, summarize
from asyncrl.trainer.packing import PackingRules, plan_step
from asyncrl.trainer.rank_device import RankDevice
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl.trainer.trainer_worker import TrainerWorker
from asyncrl.types import LeaseManifest
from tests.make import group, quickstart


class _Backend:
    def train_step(self, plan, trajectories):
        self.trained = trajectories


def _plan(*groups, step=2):
    summaries = tuple(summarize(StoredGroup(g, 2), g, step=step, max_lag=2) for g in groups)
    rules = PackingRules(num_plans=1, max_tokens_per_microbatch=1000)
    (plan,) = plan_step(LeaseManifest(step, summaries), [np.zeros(len(g.trajectories)) for g in groups], rules)
    return plan


@pytest.fixture
def worker():
    """`ahead`: what the queue has foreseen; `asked`: what was fetched."""
    recipe = quickstart()
    asked, ahead = [], {}

    def fetch(keys):
        asked.append(list(keys))
        return [f"fetched {key}" for key in keys]

    worker = TrainerWorker(TrainerSpec.of(recipe), 0, fetch, lambda keys: dict(ahead), lambda: "127.0.0.1")
    worker._backend, worker._device.device = _Backend(), torch.device("cpu")
    worker.asked, worker.ahead = asked, ahead
    return worker


async def test_what_was_fetched_ahead_is_not_fetched_again(worker):
    here, other = (group(n, 0, versions=(1, 2)) for n in (0, 1))
    worker.ahead |= {(0, i): t for i, t in enumerate(here.sequences)} | {(9, 0): here.sequences[0]}
    await worker.fetch_ahead(_plan(here, other))
    await worker.train_step(_plan(here, other))
    assert worker.asked == [[(1, i) for i in range(len(other.sequences))]]
    trained = worker._backend.trained
    assert [trained[0, i] for i in range(len(here.sequences))] == list(here.sequences)
    assert trained[1, 0] == "fetched (1, 0)"
    assert (9, 0) not in trained
    await worker.train_step(_plan(here))
    assert len(worker.asked) == 1, "nothing is missing"


async def test_what_a_step_trains_with_another_mask_is_fetched(worker):
    """It was foreseen with a higher limit on the lag."""
    before = group(0, 0, versions=(1, 2))
    worker.ahead |= {(0, i): t for i, t in enumerate(before.sequences)}
    await worker.fetch_ahead(_plan(before))
    await worker.train_step(_plan(mask_older(before, 2)))
    assert worker.asked == [[(0, i) for i in range(len(before.sequences))]]


async def test_a_call_that_blocks_keeps_no_other_from_being_answered(worker):
    """Each thread makes one call after the other; the event loop and the other threads go on."""
    began, go, order = threading.Event(), threading.Event(), []

    class Slow:
        def train_step(self, plan, trajectories):
            began.set()
            assert go.wait(20)
            order.append("step")

        def capture(self):
            order.append("capture")

    worker._backend = Slow()
    step = asyncio.create_task(worker.train_step(_plan(group(0, 0, versions=(1, 2)))))
    capture = asyncio.create_task(worker.capture())
    await asyncio.to_thread(began.wait, 20)
    assert await worker.ping() > 0
    await worker.close_weights()
    assert order == []
    go.set()
    await asyncio.gather(step, capture)
    assert order == ["step", "capture"]


def test_a_rank_beside_a_gpu_has_its_threads_too(monkeypatch):
    """It reads models, copies weights and steps an offloaded optimizer on the cores of its node."""
    asked = []

    class Enough(Exception):
        pass

    def stop(device):
        raise Enough

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(torch.cuda, "set_device", stop)
    recipe = quickstart("trainer.device=cuda:0")
    with pytest.raises(Enough):
        RankDevice(TrainerSpec.of(recipe, num_threads=11), 0).join("127.0.0.1", 1, 1.0)
    assert asked == [11]
