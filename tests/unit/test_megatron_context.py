"""How a packed row is split over context-parallel ranks: every token once, in the chunks that balance causal attention;
and attention of the parts is attention of the whole."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.trainer.megatron.context import split_row
from asyncrl.trainer.packed_attention import packed_attention, split_attention
from asyncrl.trainer.step.batch import PackedLayout

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
