"""Which bundles of GPUs a run asks for, where they fit, and which trainer rank goes where."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.driver.cluster.placement import Demand, describe_demand, fit, place_run, plan_placement, words
from asyncrl.driver.fleet.model_pools import ClusterGpus, pool_gpus
from asyncrl.errors import ConfigError
from tests.make import quickstart

NODES = st.lists(st.integers(0, 8), min_size=1, max_size=6)
FEW = st.integers(1, 12)


def whole(num_replicas, tensor, num_ranks, **more):
    return Demand(num_replicas=num_replicas, num_ranks=num_ranks, replica_gpus=tensor, rank_gpus=1, **more)


def held(placement):
    """Ids of the replicas and number of the ranks of all bundles."""
    return (
        sorted(i for bundle in placement.bundles for i in bundle.replicas),
        sum(bundle.num_ranks for bundle in placement.bundles),
    )


def assert_room(placement, nodes):
    chosen = fit(placement.bundles, nodes)
    assert chosen is not None
    for node, gpus in enumerate(nodes):
        assert sum(b.gpus for b, at in zip(placement.bundles, chosen, strict=True) if at == node) <= gpus


@given(FEW, st.sampled_from([1, 2, 4, 8]), FEW, NODES)
def test_what_fits_is_placed_and_nothing_else(num_replicas, tensor, num_ranks, nodes):
    """Replicas of equal size fit if the nodes have room for that many; ranks of one GPU fill what is left."""
    demand = whole(num_replicas, tensor, num_ranks)
    fits = sum(gpus // tensor for gpus in nodes) >= num_replicas and sum(nodes) >= demand.num_gpus
    if not any(nodes):
        assert not any(bundle.gpus for bundle in plan_placement(demand, nodes).bundles)
    elif fits:
        found = plan_placement(demand, nodes)
        assert held(found) == (list(range(num_replicas)), num_ranks)
        assert all(bundle.gpus == tensor for bundle in found.bundles if bundle.replicas)
        assert not found.shares_gpus
        sizes = [bundle.num_ranks for bundle in found.bundles if bundle.num_ranks]
        assert max(sizes) - min(sizes) <= 1, "ranks are divided evenly"
        assert_room(found, nodes)
    else:
        with pytest.raises(ConfigError, match="nodes with"):
            plan_placement(demand, nodes)


@given(FEW, st.integers(1, 4), NODES)
def test_processes_that_share_gpus_have_no_two_ranks_on_one(num_replicas, num_ranks, nodes):
    demand = whole(num_replicas, 1, num_ranks, may_share=True)
    total = sum(nodes)
    if not 0 < total < demand.num_gpus:
        return
    if num_ranks > total:
        with pytest.raises(ConfigError, match="two ranks on one GPU"):
            plan_placement(demand, nodes)
        return
    found = plan_placement(demand, nodes)
    assert held(found) == (list(range(num_replicas)), num_ranks)
    assert found.shares_gpus
    for bundle in found.bundles:
        assert (bundle.gpus, bundle.num_ranks <= 1) == (1, True)
        assert len(bundle.replicas) * found.replica_gpus + bundle.num_ranks * found.rank_gpus <= 1
    loads = [len(bundle.replicas) + bundle.num_ranks for bundle in found.bundles]
    assert max(loads) - min(loads) <= 1
    assert_room(found, nodes)


@given(FEW, FEW, st.sampled_from([0.05, 0.3, 0.5, 0.7777, 0.95]))
def test_a_replica_and_a_rank_share_a_gpu_and_take_all_of_it(num_replicas, num_ranks, share):
    pairs = max(num_replicas, num_ranks)
    found = plan_placement(whole(num_replicas, 1, num_ranks, gpu_share=share), [pairs])
    assert held(found) == (list(range(num_replicas)), num_ranks)
    assert all(
        (bundle.gpus, len(bundle.replicas) <= 1, bundle.num_ranks <= 1) == (1, True, True) for bundle in found.bundles
    )
    assert len(found.bundles) == pairs
    assert found.replica_gpus + found.rank_gpus == pytest.approx(1)
    assert min(found.replica_gpus, found.rank_gpus) > 0
    if pairs > 1:
        with pytest.raises(ConfigError, match=f"{pairs - 1} of {pairs}"):
            plan_placement(whole(num_replicas, 1, num_ranks, gpu_share=share), [pairs - 1])


@given(st.lists(st.sampled_from("abc"), min_size=12, max_size=12), FEW, FEW)
def test_ranks_of_a_node_are_consecutive(nodes, num_replicas, num_ranks):
    found = plan_placement(Demand(num_replicas=num_replicas, num_ranks=num_ranks), [0, 0])
    nodes = (nodes * 2)[: len(found.bundles)]
    bundles = found.bundle_of_rank(nodes)
    assert len(bundles) == len(set(bundles)) == num_ranks
    assert all(found.bundles[i].num_ranks for i in bundles)
    passed = [nodes[i] for i in bundles]
    changes = sum(a != b for a, b in itertools.pairwise(passed))
    assert changes == len(set(passed)) - 1


@pytest.mark.parametrize(
    ("demand", "nodes", "expected"),
    [
        (whole(3, 4, 8), [8, 8, 8], "3 bundles of 4 GPUs (a replica), 1 of 8 GPUs (8 trainer ranks)"),
        (whole(1, 1, 8), [8, 8], "1 bundle of 1 GPU (a replica), 1 of 8 GPUs (8 trainer ranks)"),
        (whole(2, 1, 8), [5, 5], "2 bundles of 1 GPU (a replica), 2 of 4 GPUs (4 trainer ranks)"),
        # parts of a model that is split over four ranks stay together: 4 + 8, not 6 + 6
        (
            whole(2, 4, 12, ranks_together=4),
            [8, 8, 8],
            "2 bundles of 4 GPUs (a replica), 1 of 4 GPUs (4 trainer ranks), 1 of 8 GPUs (8 trainer ranks)",
        ),
        # unless the nodes are too small for that
        (
            whole(1, 1, 4, ranks_together=4),
            [3, 2],
            "1 bundle of 1 GPU (a replica), 2 of 2 GPUs (2 trainer ranks)",
        ),
        (
            Demand(num_replicas=2, num_ranks=1, replica_gpus=1),
            [1, 1],
            "2 bundles of 1 GPU (a replica), 1 without GPUs (a trainer rank)",
        ),
    ],
)
def test_ranks_are_packed_by_node(demand, nodes, expected):
    found = plan_placement(demand, nodes)
    assert words(found.bundles) == expected
    assert_room(found, nodes)


@pytest.mark.parametrize(
    ("demand", "nodes", "parts"),
    [
        (whole(3, 4, 1), [8, 2], ["3 bundles of 4 GPUs (a replica), 1 of 1 GPU (a trainer", "8, 2 GPUs: 10 of 13"]),
        (whole(1, 4, 1), [2, 2, 2], ["a replica lives on one node", "tensor_parallel_size of its engine to 2 or less"]),
        (whole(3, 4, 2), [7, 7], ["hold 2 of the 3 replicas of 4 GPUs whole", "num_replicas=2 trainer.num_ranks=2"]),
        (whole(1, 1, 3, may_share=True), [1, 1], ["trainer.num_ranks=3 on 2 GPUs", "num_ranks to 2 or less"]),
        (whole(2, 1, 1, gpu_share=0.5), [1], ["nodes with 1 GPUs: 1 of 2"]),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(demand, nodes, parts):
    with pytest.raises(ConfigError) as raised:
        plan_placement(demand, nodes)
    for part in parts:
        assert part in str(raised.value)


def test_what_reaches_one_node_only_is_kept_there_if_it_has_room():
    assert plan_placement(whole(2, 1, 2, one_node=True), [4, 4]).strategy == "STRICT_PACK"
    assert plan_placement(whole(2, 1, 2, one_node=True), [3, 3]).strategy == "PACK"
    assert plan_placement(whole(2, 1, 2), [4, 4]).strategy == "PACK"
    on_cpus = Demand(num_replicas=2, num_ranks=2)
    assert plan_placement(on_cpus, [0, 0]).strategy == "SPREAD"
    assert plan_placement(Demand(num_replicas=2, num_ranks=2, one_node=True), [0, 0]).strategy == "STRICT_PACK"


@pytest.mark.parametrize("transport", ["ipc", "disk"])
def test_replicas_that_a_transport_does_not_reach_are_refused(transport):
    asked = ("rollout.engine=vllm", "trainer.num_ranks=1", f"weights.transport={transport}")
    assert place_run(quickstart(*asked, "rollout.num_replicas=1"), [2, 2]).strategy == "STRICT_PACK"
    with pytest.raises(ConfigError, match=rf"weights\.transport={transport}(?s:.*)1, 1 GPUs(?s:.*)collective"):
        place_run(quickstart(*asked, "rollout.num_replicas=1"), [1, 1])
    far = quickstart(*asked[:2], "rollout.num_replicas=1", "weights.transport=collective")
    assert place_run(far, [1, 1]).strategy == "PACK"


VLLM = ["rollout.engine=vllm", "trainer.num_ranks=2", "rollout.num_replicas=2", "weights.transport=collective"]


def test_a_recipe_says_what_it_takes():
    assert Demand.of(quickstart(*VLLM)) == whole(2, 1, 2)
    of_four = Demand.of(quickstart(*VLLM, "rollout.vllm.tensor_parallel_size=4"))
    assert of_four == whole(2, 4, 2)
    assert describe_demand(of_four).startswith(
        "where there are any: 2 bundles of 4 GPUs (a replica), 1 of 2 GPUs (2 trainer ranks)"
    )
    torch = Demand.of(quickstart())
    assert torch == whole(2, 1, 1, may_share=True, one_node=True)
    assert "at most one rank on each" in describe_demand(torch)
    cpu = Demand.of(quickstart("trainer.device=cpu", "rollout.torch.device=cpu"))
    assert (cpu.num_gpus, describe_demand(cpu)) == (0, "none: everything computes on CPUs")
    assert plan_placement(cpu, [8]).rank_gpus == 0, "GPUs that nobody asked for are left alone"


def test_a_shared_gpu_takes_ipc_and_one_rank():
    shared = (*VLLM, "rollout.vllm.gpu_share=0.4")
    found = place_run(quickstart(*shared, "weights.transport=ipc"), [2])
    assert words(found.bundles) == "2 bundles of 1 GPU (a replica and a trainer rank)"
    assert (found.replica_gpus, found.rank_gpus, found.shares_gpus) == (0.4, 0.6, True)


def test_processes_that_turn_out_to_share_a_gpu_do_not_exchange_weights_over_nccl():
    collective = quickstart("weights.transport=collective")
    assert not place_run(collective, [3]).shares_gpus
    assert not place_run(collective, [0, 0]).shares_gpus
    with pytest.raises(ConfigError, match=r"transport=collective(.|\n)*share the 2 GPUs(.|\n)*transport=ipc"):
        place_run(collective, [2])


@pytest.mark.parametrize(("section", "memory"), [("vllm", "gpu_memory_utilization"), ("sglang", "mem_fraction_static")])
def test_a_replica_takes_no_more_of_a_shared_gpu_than_its_share(section, memory):
    key = f"rollout.{section}"
    shared = (f"rollout.engine={section}", f"{key}.gpu_share=0.5", "weights.transport=ipc")
    assert quickstart(*shared).rollout.settings.memory_share == pytest.approx(0.425)
    assert quickstart(*shared, f"{key}.{memory}=0.5").rollout.settings.memory_share == 0.5
    with pytest.raises(ConfigError, match=rf"{memory}=0\.6 with {key}\.gpu_share=0\.5"):
        quickstart(*shared, f"{key}.{memory}=0.6")
    with pytest.raises(ConfigError, match="one GPU only"):
        quickstart(*shared, f"{key}.tensor_parallel_size=2")
    for share in (0.01, 0.99):
        with pytest.raises(ConfigError, match=rf"{key}\.gpu_share between 0\.05 and 0\.95"):
            quickstart(*shared, f"{key}.gpu_share={share}")
    with pytest.raises(ConfigError, match=rf"{key}\.gpu_share must be"):
        quickstart(*shared, f"{key}.gpu_share=0")


def test_colocated_on_several_nodes_a_rank_on_each_sends_by_ipc():
    words = ["placement=colocated", "mode=sync", "weights.transport=ipc", "trainer.num_ranks=16", "trainer.device=cuda"]
    words += ["rollout.engine=vllm", "rollout.num_replicas=16", "batch.groups_per_step=16"]
    found = place_run(quickstart(*words), [8, 8])
    assert sum(len(bundle.replicas) for bundle in found.bundles) == 16
    with pytest.raises(ConfigError, match="node of a sending rank only"):
        place_run(quickstart(*words, "trainer.backend=megatron"), [8, 8])


def test_ranks_of_a_copy_of_the_model_share_a_node():
    words = ["trainer.num_ranks=12", "trainer.fsdp.shard_ranks=4", "trainer.device=cuda", "rollout.num_replicas=4"]
    words += ["rollout.torch.device=cuda", "batch.groups_per_step=12", "weights.transport=collective"]
    ranks = [bundle.num_ranks for bundle in place_run(quickstart(*words), [8, 8]).bundles if bundle.num_ranks]
    assert sum(ranks) == 12
    assert all(number % 4 == 0 for number in ranks)


# -- what teachers and judges get --------------------------------------------------------------------------------------


def taught(*overrides):
    teacher = ("teacher.path=teacher", "teacher.num_replicas=2", "algorithm.distillation.coefficient=0.5")
    return quickstart(*teacher, *overrides)


@pytest.mark.parametrize(
    ("total", "free", "overrides", "each"),
    [
        (0, 0, (), 0.0),
        (8, 4, (), 1.0),
        (8, 1, (), 0.5),
        (8, 0, ("teacher.torch.device=cpu",), 0.0),
        (8, 4, ("teacher.engine=vllm", "teacher.vllm.tensor_parallel_size=2"), 2.0),
    ],
)
def test_pools_take_what_is_left(total, free, overrides, each):
    assert pool_gpus(taught(*overrides), ClusterGpus(total, (free,))) == {"teacher": each}


@pytest.mark.parametrize(
    "overrides", [(), ("teacher.engine=vllm", "teacher.vllm.tensor_parallel_size=2")], ids=["torch", "vllm"]
)
def test_too_few_gpus_are_named_with_the_way_to_do_without(overrides):
    with pytest.raises(ConfigError, match=r"leave 0(?s:.*)teacher\.torch\.device=cpu"):
        pool_gpus(taught(*overrides), ClusterGpus(8, (0,)))


def test_a_replica_of_a_pool_lives_on_one_node():
    teacher = taught("teacher.num_replicas=1", "teacher.engine=vllm", "teacher.vllm.tensor_parallel_size=2")
    assert pool_gpus(teacher, ClusterGpus(8, (0, 2))) == {"teacher": 2.0}
    with pytest.raises(ConfigError, match="1, 1 on each node"):
        pool_gpus(teacher, ClusterGpus(8, (1, 1)))


def test_a_run_without_pools_takes_none():
    assert pool_gpus(quickstart(), ClusterGpus(8, (0,))) == {}
