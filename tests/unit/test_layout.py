"""Which trainer ranks share a plan."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.trainer import Layout, TrainerConfig
from asyncrl.errors import ConfigError
from asyncrl.trainer.backends import BACKENDS, open_checkpoint

sizes = st.integers(1, 4)


@given(tensor=sizes, context=sizes, data=sizes, pipeline=sizes)
def test_ranks_of_one_copy_of_the_model_share_a_plan(tensor, context, data, pipeline):
    layout = Layout(tensor * context * data * pipeline, tensor, context, pipeline)
    assert layout.num_plans == data
    # Megatron's order: the last coordinate changes fastest
    order = product(range(pipeline), range(data), range(context), range(tensor))
    plans = [f"plan {index}" for index in range(data)]
    assert layout.by_rank(plans) == [plans[index] for _, index, _, _ in order]


def test_every_rank_of_fsdp_has_its_own_plan():
    layout = TrainerConfig(num_ranks=3).layout
    assert layout.by_rank(["a", "b", "c"]) == ["a", "b", "c"]
    with pytest.raises(ValueError, match="2 plans for 3"):
        layout.by_rank(["a", "b"])


def test_a_copy_that_does_not_divide_the_ranks_is_refused():
    with pytest.raises(ConfigError, match="a multiple of 4"):
        Layout(6, tensor=2, pipeline=2)


@pytest.mark.parametrize("backend", ["os:system", "fsdp2", ["fsdp"], 1])
def test_a_checkpoint_of_a_backend_that_is_not_listed_is_refused_by_name(tmp_path, backend):
    """The recipe beside a checkpoint may come from anybody: it names no code."""
    with pytest.raises(ConfigError, match="the backends here are fsdp"):
        open_checkpoint(tmp_path, backend)


def test_a_recipe_may_name_every_backend():
    assert [TrainerConfig(backend=name).backend for name in BACKENDS] == list(BACKENDS)
