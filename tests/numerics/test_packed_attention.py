"""Attention over a packed row is attention of each sequence by itself: values and gradients, for any mix of lengths."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from asyncrl.trainer.packed_attention import packed_attention
from asyncrl.trainer.step.batch import PackedLayout

pytestmark = pytest.mark.numerics

CPU = torch.device("cpu")
HEADS, HEAD_SIZE = 4, 8
ORDERS = {"sorted": lambda lengths: sorted(lengths, reverse=True), "mixed": list}


def rows(total, seed):
    """Query, key, value and the gradient of the output; two heads share each key."""
    draw = torch.Generator().manual_seed(seed)
    counts = (HEADS, HEADS // 2, HEADS // 2, HEADS)
    found = [torch.randn(total, heads, HEAD_SIZE, generator=draw, dtype=torch.float64) for heads in counts]
    return [x.requires_grad_(at < 3) for at, x in enumerate(found)]


def one_by_one(query, key, value, lengths, window, scaling):
    """Every sequence with a mask of its own."""
    out = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        at = torch.arange(len(q))
        distance = at[:, None] - at
        seen = (distance >= 0) & (distance < (window or len(q)))
        part = scaled_dot_product_attention(
            q.transpose(0, 1), *(x.transpose(0, 1).repeat_interleave(2, 0) for x in (k, v)), seen, scale=scaling
        )
        out.append(part.transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("order", ORDERS)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=7), st.booleans(), st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_values_and_gradients_are_those_of_single_sequences(order, window, lengths, exact, seed):
    lengths = ORDERS[order](lengths)
    classes = None if not exact else [np.array([i]) for i in np.argsort([-n for n in lengths], kind="stable")]
    layout = PackedLayout.of(lengths, CPU, classes)
    assert not exact or len(layout.classes) == len(lengths)
    assert layout.order is None or order == "mixed"
    query, key, value, grad = rows(sum(lengths), seed)
    expected = one_by_one(query, key, value, lengths, window, 0.3)
    found = packed_attention(query, key, value, layout, scaling=0.3, sliding_window=window)
    torch.testing.assert_close(found, expected)
    theirs = torch.autograd.grad(expected, (query, key, value), grad)
    ours = torch.autograd.grad(found, (query, key, value), grad)
    torch.testing.assert_close(ours, theirs)
