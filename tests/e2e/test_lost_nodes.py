"""A real run on a cluster whose nodes are lost while it trains: it goes on as long as its processes find room."""

import psutil
import pytest

from tests.e2e.conftest import ALERT, SMALL, assert_audited, two_nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

START_S = 60
SOON = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3}
"""Ray misses a node that was killed after 3 s, by default after 15."""
LIMITS = (f"ray.start_timeout_s={START_S}", "recovery.max_replica_restarts=20", "weights.transport=collective")


@pytest.fixture
def nodes():
    with two_nodes(_system_config=SOON) as cluster:
        yield cluster


def nodes_of(run, role, cluster):
    """The cluster's nodes on which processes of this role run."""
    raylets = {node.all_processes["raylet"][0].process.pid: node for node in cluster.worker_nodes}
    above = {parent.pid for pid in run.actor_pids(role) for parent in psutil.Process(pid).parents()}
    return [node for pid, node in raylets.items() if pid in above]


def test_a_run_goes_on_after_a_lost_node_and_ends_with_its_checkpoint_when_no_node_is_left(start, nodes):
    joins = f"ray.address={nodes.address}", "rollout.num_replicas=2", "run.max_steps=2000"
    run = start(*SMALL, *ALERT, *LIMITS, *joins, joined=False)
    run.wait_for_event("checkpoint")
    (training,) = nodes_of(run, "TrainerWorker", nodes)
    (other,) = nodes.worker_nodes - {training}
    assert other in nodes_of(run, "Replica", nodes), "processes are spread over the nodes"
    nodes.remove_node(other, allow_graceful=False)
    run.wait_for_event("replica_failed")
    run.wait_for_event("replica_serving", count=3)  # the two of the start, and a replacement on the other node
    reached = max(record["step"] for record in run.metrics)
    run.wait_for_step(reached + 3)
    nodes.remove_node(training, allow_graceful=False)
    assert_audited(run, max_lag=2, code=3, timeout_s=4 * START_S)
    assert "a place for trainer ranks" in run.log
    assert "resume=auto" in run.log
    assert sorted((run.directory / "checkpoints").glob("step_*"))
