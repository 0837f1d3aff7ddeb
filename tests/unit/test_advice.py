"""What a dry run advises."""

import pytest

from asyncrl.driver.preflight import advice
from tests.make import quickstart


@pytest.mark.parametrize(
    ("overrides", "cores", "due"),
    [
        ([], 3, []),
        ([], None, []),
        ([], 2, ["rollout.num_replicas=1: 2 replicas and 1 trainer rank(s) share 2 cores"]),
        (["mode=sync"], 2, []),
        (["mode=sync"], 1, ["rollout.num_replicas=1: 2 replicas share 1 cores"]),
        (["trainer.num_threads=3", "rollout.num_replicas=4"], 5, ["rollout.num_replicas=2: 4 replicas and 1"]),
        (["rollout.torch.num_threads=2", "trainer.num_ranks=2"], 6, []),
        (["rollout.torch.num_threads=2", "trainer.num_ranks=2"], 5, ["rollout.num_replicas=1: 2 replicas and 2"]),
        (["batch.groups_per_step=32"], None, ["rollout.torch.num_slots=256 where", "512 responses, and 2 replica(s)"]),
        (["batch.groups_per_step=32", "rollout.torch.num_slots=256"], None, []),
        (
            ["rollout.engine=vllm", "rollout.num_replicas=1", "rollout.vllm.max_num_seqs=100"],
            4,
            ["rollout.vllm.max_num_seqs=256 where", "256 responses, and 1 replica(s) decode 100 at once"],
        ),
    ],
)
def test_numbers_that_make_processes_or_responses_wait_are_named(overrides, cores, due):
    found = " / ".join(advice(quickstart(*overrides), cores=cores))
    assert bool(found) == bool(due), found
    assert all(part in found for part in due), found
