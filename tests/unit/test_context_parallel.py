"""Ranks that share the tokens of a row: which numbers of ranks a model allows, who has which plan and which tokens."""

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.trainer import FsdpConfig, Layout, TrainerConfig
from asyncrl.errors import ConfigError
from asyncrl.trainer.backends import BACKENDS, open_checkpoint, require_fits
from asyncrl.trainer.fsdp.context import ContextRanks, HeadExchange
from asyncrl.trainer.megatron.context import split_row
from asyncrl.trainer.packed_attention import packed_attention, split_attention
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


# -- how a packed row is split: every token once, in chunks that balance causal attention ------------------------------


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=6)
RANKS, MULTIPLES = st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4])


def layout_of(lengths):
    return PackedLayout.of(lengths, torch.device("cpu"))


def splits(lengths, ranks, multiple):
    return [split_row(layout_of(lengths), ranks=ranks, rank=rank, multiple=multiple) for rank in range(ranks)]


@given(LENGTHS, RANKS, MULTIPLES)
@settings(max_examples=80, deadline=None)
def test_split_and_gathered_again_is_the_row(lengths, ranks, multiple):
    parts = splits(lengths, ranks, multiple)
    assert {part.tokens.numel() for part in parts} == {parts[0].tokens.numel()}
    assert parts[0].tokens.numel() % multiple == 0
    whole = torch.cat([part.tokens for part in parts])[parts[0].order]
    assert torch.equal(whole[whole >= 0], torch.arange(sum(lengths)))
    assert torch.equal(whole[parts[0].places], torch.arange(sum(lengths)))
    positions = torch.cat([part.positions for part in parts])[parts[0].order]
    assert positions[whole >= 0].tolist() == [at for length in lengths for at in range(length)]


@given(LENGTHS, RANKS, MULTIPLES)
@settings(max_examples=80, deadline=None)
def test_each_rank_has_two_chunks_of_each_sequence_the_n_th_and_the_n_th_last(lengths, ranks, multiple):
    for rank, part in enumerate(splits(lengths, ranks, multiple)):
        bounds = part.own.boundaries.tolist()
        filled = part.whole.boundaries.diff().tolist()
        for number, (low, high) in enumerate(pairwise(bounds)):
            chunk = filled[number] // (2 * ranks) if ranks > 1 else 0
            expected = [*range(rank * chunk, (rank + 1) * chunk)]
            expected += range(filled[number] - (rank + 1) * chunk, filled[number] - rank * chunk)
            if ranks == 1:
                expected = list(range(filled[number]))
            assert part.positions[low:high].tolist() == expected


@given(LENGTHS, RANKS, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_every_predictor_is_on_one_rank_and_finds_its_token(lengths, ranks, random):
    predictors = torch.tensor([random.randrange(sum(lengths)) for _ in range(12)])
    found = torch.full((12,), -1)
    for part in splits(lengths, ranks, 2):
        chosen, places = part.of_this_rank(predictors)
        assert (found[chosen] == -1).all()
        found[chosen] = part.tokens[places]
    assert torch.equal(found, predictors)


@pytest.mark.parametrize("lengths", [[7, 1, 12, 4], [7, 1, 90, 4, 33]])
@pytest.mark.parametrize("ranks", [2, 3])
def test_attention_of_the_parts_is_attention_of_the_whole_with_its_gradient(ranks, lengths):
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(sum(lengths), heads, 8, generator=draw, dtype=torch.float64) for heads in (4, 2, 2)]
    ours, theirs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    expected = packed_attention(*theirs, layout_of(lengths), scaling=0.3)
    found = torch.zeros_like(expected)
    for part in splits(lengths, ranks, 1):
        filled = [x.new_zeros(len(part.order), *x.shape[1:]).index_copy(0, part.places, x) for x in ours]
        query = ours[0][part.tokens.clamp(min=0)]
        out = split_attention(query, *filled[1:], part.own, part.whole, part.positions, scaling=0.3)
        real = part.tokens >= 0
        found = found.index_copy(0, part.tokens[real], out[real])
    torch.testing.assert_close(found, expected)
    mix = torch.randn(expected.shape, generator=draw, dtype=torch.float64)
    (found * mix).sum().backward()
    (expected * mix).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
