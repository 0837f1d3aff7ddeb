"""What a trainer rank fetches, and what it holds already."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.config.load import load_recipe
from asyncrl.queue.masking import StoredGroup, mask_older, summarize
from asyncrl.trainer import trainer_worker
from asyncrl.trainer.packing import PackingRules, plan_step
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl.trainer.trainer_worker import TrainerWorker
from asyncrl.types import LeaseManifest
from tests.make import group

pytestmark = pytest.mark.unit


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
    recipe = load_recipe(Path(__file__).parents[2] / "recipes" / "quickstart.yaml", [])
    asked = []

    def fetch(keys):
        asked.append(list(keys))
        return [f"fetched {key}" for key in keys]

    worker = TrainerWorker(TrainerSpec.of(recipe), 0, 1, fetch)
    worker._backend, worker._device = _Backend(), torch.device("cpu")
    worker.asked = asked
    return worker


def test_what_was_fetched_ahead_is_not_fetched_again(worker):
    here, other = (group(n, 0, versions=(1, 2)) for n in (0, 1))
    worker.keep({(0, i): t for i, t in enumerate(here.sequences)} | {(9, 0): here.sequences[0]})
    worker.train_step(_plan(here, other))
    assert worker.asked == [[(1, i) for i in range(len(other.sequences))]]
    trained = worker._backend.trained
    assert [trained[0, i] for i in range(len(here.sequences))] == list(here.sequences)
    assert trained[1, 0] == "fetched (1, 0)"
    assert (9, 0) not in trained
    worker.train_step(_plan(here))
    assert len(worker.asked) == 1, "nothing is missing"


def test_what_a_step_trains_with_another_mask_is_fetched(worker):
    """It was foreseen with a higher limit on the lag."""
    before = group(0, 0, versions=(1, 2))
    worker.keep({(0, i): t for i, t in enumerate(before.sequences)})
    worker.train_step(_plan(mask_older(before, 2)))
    assert worker.asked == [[(0, i) for i in range(len(before.sequences))]]


def test_a_rank_beside_a_gpu_has_its_threads_too(worker, monkeypatch):
    """It reads models, copies weights and steps an offloaded optimizer on the cores of its node."""
    asked = []

    class Enough(Exception):
        pass

    def stop(device):
        raise Enough

    monkeypatch.setattr(trainer_worker, "resolve_device", lambda *_: torch.device("cuda:0"))
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(torch.cuda, "set_device", stop)
    worker._spec = replace(worker._spec, num_threads=11)
    with pytest.raises(Enough):
        worker.start("127.0.0.1", 1, 1.0)
    assert asked == [11]
