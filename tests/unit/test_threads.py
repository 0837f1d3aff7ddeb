"""Threads of trainer ranks: the cores are used, none twice, and a resumed run has as many."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.threads import local_cores, rank_threads, trainer_threads
from asyncrl.driver import actors
from asyncrl.trainer.trainer_spec import TrainerSpec
from tests.make import quickstart

MODES = st.sampled_from(["sync", "one_step_off", "fully_async"])
COUNTS = {
    "cores": st.integers(1, 256),
    "num_ranks": st.integers(1, 16),
    "num_replicas": st.integers(0, 32),
    "replica_threads": st.integers(1, 8),
}


@given(MODES, st.fixed_dictionaries(COUNTS))
def test_cores_are_used_and_none_twice(mode, counts):
    found = rank_threads(mode, **counts)
    busy = 0 if mode == "sync" else counts["num_replicas"] * counts["replica_threads"]
    used = found * counts["num_ranks"] + busy
    assert found >= 1
    assert found == 1 or used <= counts["cores"]
    assert used + counts["num_ranks"] > counts["cores"]  # one more for each rank would be too many
    assert rank_threads("sync", **counts) >= found
    assert rank_threads("one_step_off", **counts) == rank_threads("fully_async", **counts)


@pytest.mark.parametrize(
    ("overrides", "cores", "num_nodes", "threads"),
    [
        (["mode=sync", "rollout.num_replicas=2"], 2, 1, 2),
        (["mode=fully_async", "rollout.num_replicas=2"], 2, 1, 1),
        (["mode=fully_async", "rollout.num_replicas=2"], 8, 1, 6),
        (["mode=fully_async", "rollout.num_replicas=2", "rollout.torch.num_threads=3"], 8, 1, 2),
        (["mode=one_step_off", "rollout.num_replicas=3", "trainer.num_ranks=2"], 8, 1, 2),
        (["mode=one_step_off", "rollout.num_replicas=3", "trainer.num_ranks=2"], 8, 2, 6),
        (["mode=fully_async", "rollout.num_replicas=2", "rollout.max_replicas=6"], 8, 1, 6),  # ADR 42
        (["mode=sync", "trainer.num_threads=5"], 2, 1, 5),
    ],
)
def test_a_recipe_divides_the_cores_of_a_node(overrides, cores, num_nodes, threads):
    recipe = quickstart(*overrides)
    assert trainer_threads(recipe, cores=cores, num_nodes=num_nodes) == threads
    resumed = replace(recipe, run=replace(recipe.run, max_steps=7), resume="auto")
    assert trainer_threads(resumed, cores=cores, num_nodes=num_nodes) == threads


@pytest.mark.parametrize(
    ("overrides", "node_gpus", "threads"),
    [
        (["trainer.num_ranks=4", "rollout.num_replicas=4"], 8, (96 - 4) // 4),
        (["trainer.num_ranks=8", "rollout.num_replicas=8"], 8, 96 // 8),  # the replicas are on the other node
        (["trainer.num_ranks=8", "rollout.num_replicas=8", "rollout.vllm.gpu_share=0.5"], 8, (96 - 8) // 8),
        (["trainer.num_ranks=16", "rollout.num_replicas=16"], 8, (96 - 8) // 8),  # two processes to a GPU
        (["trainer.num_ranks=1", "rollout.num_replicas=1"], 1, 96),
        (["trainer.num_ranks=2", "rollout.num_replicas=1"], 1, 96 - 1),
        (["rollout.engine=torch", "rollout.torch.device=cpu", "rollout.num_replicas=8"], 4, 96 - 4),
        (["trainer.num_ranks=4", "rollout.num_replicas=4", "trainer.num_threads=3"], 8, 3),
    ],
)
def test_ranks_with_gpus_divide_the_cores_of_the_node_that_they_fill(overrides, node_gpus, threads):
    recipe = quickstart("mode=fully_async", "rollout.engine=vllm", *overrides)
    assert trainer_threads(recipe, cores=96, num_nodes=2, node_gpus=node_gpus) == threads


def test_cores_are_those_that_this_process_may_use():
    assert 1 <= local_cores() <= (os.cpu_count() or 1)


def test_the_threads_of_ranks_follow_the_nodes_that_they_may_be_on(monkeypatch):
    """A head without GPUs runs the driver, and no rank."""
    nodes = [{"CPU": 4.0}, {"CPU": 192.0, "GPU": 8.0}, {"CPU": 96.0, "GPU": 4.0}]
    found = [{"Alive": True, "NodeID": str(i), "Resources": resources} for i, resources in enumerate(nodes)]
    monkeypatch.setattr(actors.ray, "nodes", lambda: [*found, {"Alive": False, "NodeID": "3", "Resources": {}}])
    driver = SimpleNamespace(get_node_id=lambda: "0")
    monkeypatch.setattr(actors.ray, "get_runtime_context", lambda: driver)
    assert actors._smallest_node() == (96, 2, 8)
    found[2:] = []
    assert actors._smallest_node() == (192, 1, 8), "not the cores of the head"
    found[1:] = []
    assert actors._smallest_node() == (min(4, local_cores()), 1, 0)


@pytest.mark.parametrize(
    ("keys", "spins"),
    [(["mode=sync"], True), (["mode=one_step_off"], False), (["mode=fully_async"], False)],
    ids=str,
)
def test_threads_that_wait_spin_only_where_replicas_are_idle(keys, spins):
    spec = TrainerSpec.of(quickstart(*keys))
    assert ("GOMP_SPINCOUNT" in spec.environment) == spins
    assert spec.environment["OMP_WAIT_POLICY"] == "PASSIVE"
