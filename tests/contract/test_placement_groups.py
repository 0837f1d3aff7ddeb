"""Where Ray puts the bundles of a run, on a cluster of several nodes on this machine. Their GPUs are there by name
alone, which is all that a placement needs."""

import asyncio
import time

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from ray.util.placement_group import placement_group, remove_placement_group

from asyncrl.driver.cluster.placement import words
from asyncrl.driver.cluster.placement_groups import PlacementGroups, reserved
from asyncrl.errors import ConfigError, DeadlineExceeded, NoPlace, RunFailed
from tests.make import quickstart
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ANSWER_S = 120.0


class Where:
    """A process that says where it is."""

    def node_and_gpus(self):
        return ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()


@pytest.fixture(scope="module")
def cluster():
    """A head without GPUs, and nodes with 8, 4 and 4."""
    soon = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3}  # until a lost node is missed
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": soon}
    started = Cluster(initialize_head=True, head_node_args=head)
    for gpus in (4, 8, 4):
        started.add_node(num_cpus=1, num_gpus=gpus, object_store_memory=80 * 2**20)
    ray.init(address=started.address, log_to_driver=False)
    yield started
    ray.shutdown()
    started.shutdown()


def recipe(*overrides):
    """Replicas of vLLM, which is not needed for a place."""
    return quickstart("rollout.engine=vllm", "weights.transport=collective", *overrides)


def spawned(num_gpus, strategy):
    options = {"num_cpus": 0, "num_gpus": num_gpus, "scheduling_strategy": strategy}
    return ray.remote(Where).options(**options).remote()


def found(actors):
    """Node and GPUs of each."""
    return ray.get([actor.node_and_gpus.remote() for actor in actors], timeout=ANSWER_S)


def nodes_of_ranks(places):
    bundles = [strategy.placement_group_bundle_index for strategy in asyncio.run(places.of_ranks(5))]
    return [places.nodes()[bundle] for bundle in bundles]


def node_of_replica(places, replica_id):
    return places.nodes()[places.of_replica(replica_id).strategy.placement_group_bundle_index]


def gpus_of(node_id):
    (found,) = [node for node in ray.nodes() if node["NodeID"] == node_id]
    return found["Resources"]["GPU"]


def free_gpus():
    """Of the nodes with GPUs."""
    available = ray._private.state.available_resources_per_node()
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")}
    return sorted(available.get(node, {}).get("GPU", 0) for node in alive)


def test_replicas_are_whole_ranks_are_packed_and_all_is_given_back(cluster):
    with reserved(
        recipe("rollout.vllm.tensor_parallel_size=4", "trainer.num_ranks=8", "batch.group_size=16")
    ) as places:
        assert words(places.placement.bundles) == "2 bundles of 4 GPUs (a replica), 1 of 8 GPUs (8 trainer ranks)"
        ranks, replicas = nodes_of_ranks(places), [node_of_replica(places, i) for i in range(2)]
        assert (len(ranks), len(set(ranks))) == (8, 1), "neighbours share a node"
        assert len({*ranks, *replicas}) == 3
        assert free_gpus() == [0, 0, 0], "others cannot take what a restart needs"
    wait_until(lambda: free_gpus() == [4, 4, 8])


def test_ranks_on_several_nodes_are_numbered_by_node(cluster):
    many = "trainer.num_ranks=12", "batch.groups_per_step=12", "rollout.num_replicas=1"
    with reserved(recipe("rollout.vllm.tensor_parallel_size=4", *many)) as places:
        assert words(places.placement.bundles) == "1 bundle of 4 GPUs (a replica), 3 of 4 GPUs (4 trainer ranks)"
        ranks, replica = nodes_of_ranks(places), node_of_replica(places, 0)
        assert gpus_of(replica) in (4, 8)
    assert (len(ranks), len(set(ranks))) in ((12, 2), (12, 3))
    assert ranks == sorted(ranks, key=ranks.index)
    wait_until(lambda: free_gpus() == [4, 4, 8])


def test_a_replica_and_a_rank_share_a_gpu_and_no_two_ranks_do(cluster):
    shared = recipe("rollout.vllm.gpu_share=0.4", "weights.transport=ipc", "trainer.num_ranks=2")
    with reserved(shared) as places:
        assert (places.placement.replica_gpus, places.placement.rank_gpus) == (0.4, 0.6)
        ranks = [spawned(0.6, strategy) for strategy in asyncio.run(places.of_ranks(5))]
        replica = spawned(0.4, places.of_replica(0).strategy)
        (first_rank, second_rank, first) = found([*ranks, replica])
        assert first_rank != second_rank, "each rank has a GPU of its own"
        assert first == first_rank, "replica and rank share theirs"
        assert first_rank[0] == second_rank[0], "ipc reaches one node"
        ray.kill(replica)
        assert found([spawned(0.4, places.of_replica(0).strategy)]) == [first], "so does its replacement"
    wait_until(lambda: free_gpus() == [4, 4, 8])


def test_what_cannot_fit_is_refused_before_anything_starts(cluster):
    with pytest.raises(ConfigError) as raised, reserved(recipe("rollout.vllm.tensor_parallel_size=8")):
        pytest.fail("it has no place")
    for part in ("2 bundles of 8 GPUs (a replica)", "nodes with 8, 4, 4, 0 GPUs", "16 of 17", "add nodes"):
        assert part in str(raised.value)
    assert free_gpus() == [4, 4, 8]


def test_gpus_that_others_use_are_waited_for_until_the_deadline_and_an_error_gives_all_back(cluster):
    others = placement_group([{"GPU": 6}])
    ray.get(others.ready(), timeout=ANSWER_S)
    began = time.monotonic()
    asked = recipe("rollout.vllm.tensor_parallel_size=8", "rollout.num_replicas=1", "ray.start_timeout_s=2")
    with pytest.raises(DeadlineExceeded) as raised, reserved(asked):
        pytest.fail("it has no place")
    assert time.monotonic() - began < ANSWER_S
    for part in (
        "1 bundle of 8 GPUs (a replica)",
        "not free within 2 s; 4 node(s) with 4, 4, 2, 0 GPUs free",
        "ray.start_t",
    ):
        assert part in str(raised.value)
    remove_placement_group(others)
    wait_until(lambda: free_gpus() == [4, 4, 8])
    with pytest.raises(KeyError), reserved(asked):
        raise KeyError("the run has failed")
    wait_until(lambda: free_gpus() == [4, 4, 8])


def test_without_gpus_processes_are_spread_over_the_nodes_or_kept_on_one(cluster):
    on_cpu = ("rollout.engine=torch", "trainer.device=cpu", "rollout.torch.device=cpu", "rollout.num_replicas=4")
    for transport, nodes in (("collective", 4), ("ipc", 1)):
        with reserved(recipe(*on_cpu, f"weights.transport={transport}")) as places:
            assert places.placement.rank_gpus == places.placement.replica_gpus == 0
            assert len(set(places.nodes())) == nodes
            if transport == "collective":  # an actor that asks for nothing goes to its bundle too
                assert found([spawned(0, places.of_replica(3).strategy)])[0][0] == node_of_replica(places, 3)


def test_a_replica_that_joins_has_a_place_of_its_own_and_a_node_that_comes_later_is_used(cluster):
    def ready(places, replica_id, timeout_s=ANSWER_S):
        asyncio.run(places.ready(replica_id, timeout_s))

    asked = recipe("rollout.vllm.tensor_parallel_size=4", "rollout.num_replicas=1", "trainer.num_ranks=4")
    with reserved(asked) as places:
        ready(places, 7)
        actor = spawned(4, places.of_replica(7).strategy)
        assert len(found([actor])[0][1]) == 4
        ready(places, 8)
        assert sum(free_gpus()) == 0, "nobody else takes what a replacement needs"
        with pytest.raises(NoPlace, match=r"a place for replica 9: 4 GPUs of one node(.|\n)*GPUs free"):
            ready(places, 9, 1.0)
        ray.kill(actor)
        asyncio.run(places.give_back(7))
        ready(places, 9)
        with pytest.raises(NoPlace):
            ready(places, 10, 1.0)
        added = cluster.add_node(num_cpus=1, num_gpus=4, object_store_memory=80 * 2**20)
        ready(places, 10)
        assert found([spawned(4, places.of_replica(10).strategy)])[0][0] == added.node_id
        asyncio.run(places.give_back(0))
        ready(places, 0)  # it is reserved for the whole run
    wait_until(lambda: free_gpus() == [4, 4, 4, 8])
    cluster.remove_node(added)
    wait_until(lambda: free_gpus() == [4, 4, 8])


def test_a_replica_that_joins_is_where_its_weights_reach_it(cluster):
    on_cpu = ("rollout.engine=torch", "trainer.device=cpu", "rollout.torch.device=cpu", "rollout.num_replicas=1")
    with reserved(recipe(*on_cpu, "weights.transport=ipc")) as places:
        for replica_id in (1, 2, 3):
            asyncio.run(places.ready(replica_id, ANSWER_S))
            assert found([spawned(0, places.of_replica(replica_id).strategy)])[0][0] == node_of_replica(places, 0)


def test_after_the_loss_of_a_node_a_process_waits_for_another_and_not_for_ever(cluster):
    """With the one after it the last of this file: they change the cluster."""

    async def waits(places, timeout_s):
        with pytest.raises(NoPlace, match=r"a place for replica 0: 1 bundle of 8 GPUs(.|\n)*GPUs free"):
            await places.of_replica(0).ready(timeout_s)
        with pytest.raises(RunFailed, match=r"a place for trainer ranks: 1 bundle of 4 GPUs(.|\n)*resume=auto"):
            await places.of_ranks(timeout_s)

    def loses(places, bundle):
        (node,) = [node for node in cluster.worker_nodes if node.node_id == places.nodes()[bundle]]
        cluster.remove_node(node, allow_graceful=False)
        wait_until(lambda: places.nodes()[bundle] != node.node_id)

    asked = recipe("rollout.vllm.tensor_parallel_size=8", "rollout.num_replicas=1", "trainer.num_ranks=4")
    with reserved(asked) as places:
        of_rank = asyncio.run(places.of_ranks(5))[0].placement_group_bundle_index
        of_replica = places.of_replica(0).strategy.placement_group_bundle_index
        before = places.nodes()[of_rank]
        loses(places, of_rank)
        wait_until(lambda: places.nodes()[of_rank] is not None)  # Ray has found it another node
        (after,) = set(nodes_of_ranks(places))
        assert after not in (before, places.nodes()[of_replica])
        loses(places, of_rank)
        loses(places, of_replica)
        asyncio.run(waits(places, 1.0))
        cluster.add_node(num_cpus=1, num_gpus=8, object_store_memory=80 * 2**20)
        cluster.add_node(num_cpus=1, num_gpus=4, object_store_memory=80 * 2**20)
        wait_until(lambda: None not in places.nodes())
        asyncio.run(places.of_replica(0).ready(5))
        assert gpus_of(node_of_replica(places, 0)) == 8
        node, gpus = found([spawned(8, places.of_replica(0).strategy)])[0]
        assert (node, sorted(gpus)) == (node_of_replica(places, 0), list(range(8))), "a replacement finds its bundle"


def test_a_node_that_was_asked_to_end_is_seen_and_is_no_place_any_more(cluster):
    async def looks(places):
        async with asyncio.timeout(ANSWER_S):
            while await places.ending() != {0}:
                await asyncio.sleep(0.2)
        with pytest.raises(NoPlace):
            await places.ready(0, 1.0)

    asked = recipe("rollout.vllm.tensor_parallel_size=8", "rollout.num_replicas=1", "trainer.num_ranks=4")
    with reserved(asked) as places:
        assert asyncio.run(places.ending()) == set()
        found([actor := spawned(8, places.of_replica(0).strategy)])
        client = ray._raylet.GcsClient(address=cluster.address)
        reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION  # as a node that gets SIGTERM does itself
        node, deadline_ms = node_of_replica(places, 0), int((time.time() + 600) * 1000)
        accepted, why = client.drain_node(node, reason, "its provider takes it back", deadline_ms)
        assert accepted, why
        asyncio.run(looks(places))
        del actor


def test_where_there_is_one_place_no_group_is_made(monkeypatch):
    """A run on one machine without GPUs asks Ray for its nodes, and for nothing else."""
    node = {"Alive": True, "NodeID": "here", "Resources": {"CPU": 2.0}}
    monkeypatch.setattr(ray, "nodes", lambda: [node])
    with reserved(quickstart()) as places:
        assert isinstance(places, PlacementGroups)
        assert places.of_replica(0) is None
        assert asyncio.run(places.of_ranks(1)) == ["DEFAULT"]
