"""GPUs of teachers and judges: what the policy's replicas and the trainer ranks leave."""

import pytest

from asyncrl.driver.fleet.model_pools import ClusterGpus, pool_gpus
from asyncrl.errors import ConfigError
from tests.make import quickstart


def recipe(*overrides):
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
    assert pool_gpus(recipe(*overrides), ClusterGpus(total, (free,))) == {"teacher": each}


@pytest.mark.parametrize(
    "overrides", [(), ("teacher.engine=vllm", "teacher.vllm.tensor_parallel_size=2")], ids=["torch", "vllm"]
)
def test_too_few_gpus_are_named_with_the_way_to_do_without(overrides):
    with pytest.raises(ConfigError, match=r"leave 0(?s:.*)teacher\.torch\.device=cpu"):
        pool_gpus(recipe(*overrides), ClusterGpus(8, (0,)))


def test_a_replica_of_a_pool_lives_on_one_node():
    teacher = recipe("teacher.num_replicas=1", "teacher.engine=vllm", "teacher.vllm.tensor_parallel_size=2")
    assert pool_gpus(teacher, ClusterGpus(8, (0, 2))) == {"teacher": 2.0}
    with pytest.raises(ConfigError, match="1, 1 on each node"):
        pool_gpus(teacher, ClusterGpus(8, (1, 1)))


def test_a_run_without_pools_takes_none():
    assert pool_gpus(quickstart(), ClusterGpus(8, (0,))) == {}
