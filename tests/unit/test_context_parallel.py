"""Ranks that share the tokens of a row: which numbers of ranks a model allows, who has which plan and which tokens."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.trainer import FsdpConfig, Layout, TrainerConfig
from asyncrl.errors import ConfigError
from asyncrl.trainer.backends import BACKENDS, open_checkpoint, require_fits
from asyncrl.trainer.fsdp.context import ContextRanks, HeadExchange
from asyncrl.trainer.step.batch import PackedLayout, PackedTokens
from asyncrl.types import ModelFacts
from asyncrl.types.models import LayerSizes


def facts(heads, kv_heads):
    return ModelFacts("model", is_local=True, sizes=LayerSizes(heads=heads, kv_heads=kv_heads))


def trainer(ranks, context, **fsdp):
    return TrainerConfig(num_ranks=ranks, fsdp=FsdpConfig(context_parallel=context, **fsdp))


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 48))
def test_every_rank_gets_query_heads_with_their_own_key_heads_or_the_layout_is_refused(kv_heads, group, ranks):
    """The shares as `HeadExchange.to_heads` cuts them: rank r has the r-th run of the heads, and of the key heads or of
    their copies."""
    heads = kv_heads * group
    own_keys = torch.arange(heads) // group
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        with pytest.raises(ConfigError, match=f"{heads} attention heads and {kv_heads} key-value heads") as refused:
            require_fits(trainer(ranks, ranks), facts(heads, kv_heads))
        nearest = [int(word) for word in str(refused.value).split("set it to ")[1].split() if word.isdigit()]
        assert nearest, "there is a number that works"
        for number in nearest:
            require_fits(trainer(number, number), facts(heads, kv_heads))
        return
    require_fits(trainer(ranks, ranks), facts(heads, kv_heads))
    shares = own_keys.view(ranks, -1)
    keys = torch.arange(kv_heads).repeat_interleave(max(1, ranks // kv_heads)).view(ranks, -1)
    for share, key in zip(shares, keys, strict=True):
        in_attention = key.repeat_interleave(len(share) // len(key))
        assert torch.equal(in_attention, share)


def test_rotary_positions_that_follow_the_longest_one_do_not_share_rows():
    """Each rank would see the longest position of its own run."""
    facts = ModelFacts("m", is_local=True, unusual=("rotary positions of kind dynamic",))
    require_fits(trainer(6, 1), facts)
    with pytest.raises(ConfigError, match=r"of kind dynamic(?s:.*)context_parallel to 1"):
        require_fits(trainer(6, 3), facts)


def test_a_model_of_unknown_sizes_is_left_to_the_start():
    require_fits(trainer(6, 3), ModelFacts("org/model", is_local=False))


def test_megatron_has_its_own_layout():
    assert TrainerConfig(num_ranks=3, backend="megatron").layout == Layout(3)


def test_consecutive_ranks_share_a_plan():
    assert trainer(6, 2).layout.by_rank(["a", "b", "c"]) == ["a", "a", "b", "b", "c", "c"]


class Group:
    """A process group that is asked for its sizes alone."""

    def __init__(self, size, rank):
        self.size, self.rank = (lambda: size), (lambda: rank)


@given(st.integers(1, 40), st.integers(2, 6), st.data())
def test_the_parts_of_a_row_are_the_row(num_tokens, ranks, data):
    """Every token and every prediction is in one part, runs are equally long, and predictors keep their tokens."""
    predictors = torch.tensor(data.draw(st.lists(st.integers(0, num_tokens - 1), min_size=1)))
    ids = torch.arange(num_tokens) + 100
    row = PackedTokens(
        ids[None], ids[None] - 100, PackedLayout.of([num_tokens], torch.device("cpu")), predictors, predictors * 2, 1.0
    )
    parts = [ContextRanks(Group(ranks, rank)).part_of(row) for rank in range(ranks)]
    assert {part.tokens.input_ids.shape[1] for part in parts} == {-(-num_tokens // ranks)}
    real = [part.tokens.input_ids[0, : part.num_real] for part in parts]
    assert torch.equal(torch.cat(real), ids)
    assert torch.equal(torch.cat([part.own for part in parts]).sort().values, torch.arange(len(predictors)))
    for part in parts:
        assert torch.equal(part.tokens.input_ids[0, part.tokens.predictors], ids[predictors[part.own]])
        assert torch.equal(part.tokens.targets, row.targets[part.own])
        assert isinstance(part.exchange, HeadExchange)
        assert part.exchange.num_tokens == num_tokens


# -- copies of the model -----------------------------------------------------------------------------------------------


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
