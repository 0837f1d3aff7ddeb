"""Attention over a packed row is attention of each sequence by itself: values and gradients, for any mix of lengths."""

import inspect
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from asyncrl.trainer.fsdp.attention import RowAttention, VarlenAttention, register_packed_attention
from asyncrl.trainer.fsdp.models import Policy
from asyncrl.trainer.packed_attention import packed_attention
from asyncrl.trainer.step.batch import PackedLayout, PackedTokens
from asyncrl_testing.random_model import random_qwen3

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


def by_the_words_of_torch(*args, **kwargs):
    """What `varlen_attn` says that it computes: sequences as `cu_seq_q` and `cu_seq_k` cut them, keys from
    `window_size[0]` before to `window_size[1]` behind a query, -1 for all of them."""
    given = inspect.signature(varlen_attn).bind(*args, **kwargs)
    given.apply_defaults()
    asked = given.arguments
    starts, key_starts = asked["cu_seq_q"], asked["cu_seq_k"]
    assert starts.dtype == key_starts.dtype == torch.int32
    assert asked["max_q"] == starts.diff().max()
    assert asked["max_k"] == key_starts.diff().max()
    assert starts[-1] == len(asked["query"])
    assert key_starts[-1] == len(asked["key"])
    assert all(asked[name].is_contiguous() for name in ("query", "key", "value"))
    copies = asked["query"].shape[1] // asked["key"].shape[1]
    assert copies == 1 or asked["enable_gqa"]
    before, behind = (float("inf") if n == -1 else n for n in asked["window_size"])
    out = []
    for at in range(len(starts) - 1):
        q = asked["query"][starts[at] : starts[at + 1]].transpose(0, 1)
        k, v = (
            asked[name][key_starts[at] : key_starts[at + 1]].transpose(0, 1).repeat_interleave(copies, 0)
            for name in ("key", "value")
        )
        distance = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
        seen = (distance <= before) & (-distance <= behind)
        scores = (q @ k.transpose(1, 2) * asked["scale"]).masked_fill(~seen, float("-inf"))
        out.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("window", [None, 5])
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(0, 20), st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_torchs_kernel_for_lengths_is_asked_for_the_same(window, lengths, prompt, seed):
    """Where sequences lie, causality, windows, shared keys and shared prompts: `packed_attention` in value and
    gradient."""
    responses = np.split(np.arange(prompt, prompt + sum(lengths)), np.cumsum(lengths)[:-1])
    rows_of = np.concatenate([np.append(np.arange(prompt), own) for own in responses])  # all after one prompt
    whole = [prompt + n for n in lengths]
    layout = PackedLayout.of(whole, CPU, rows=rows_of if prompt and len(lengths) > 1 else None)
    query, key, value, grad = rows(prompt + sum(lengths) if layout.order is not None and prompt else sum(whole), seed)
    expected = packed_attention(query, key, value, layout, scaling=0.3, sliding_window=window)
    attend = VarlenAttention(by_the_words_of_torch)
    found = attend(query, key, value, layout, scaling=0.3, sliding_window=window)
    torch.testing.assert_close(found, expected)
    theirs = torch.autograd.grad(expected, (query, key, value), grad)
    ours = torch.autograd.grad(found, (query, key, value), grad)
    torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match="dropout"):
        attend(query, key, value, layout, dropout=0.1, scaling=0.3)


def test_a_model_attends_by_the_kernel_as_by_classes():
    """Through transformers: the model of a training backend, with a kernel of the same signature."""
    lengths = [9, 30, 4]
    AttentionInterface.register("by_the_words", RowAttention("varlen", VarlenAttention(by_the_words_of_torch)))
    register_packed_attention()
    at = torch.arange(sum(lengths))
    row = PackedTokens(
        input_ids=at[None],
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        layout=PackedLayout.of(lengths, CPU),
        predictors=at[:-1],
        targets=at[1:],
        temperature=1.0,
    )
    model, found = random_qwen3(), {}
    for name in ("packed_rows", "by_the_words"):
        model.set_attn_implementation(name)
        found[name] = Policy(model)(row, 1.0)[0]
    torch.testing.assert_close(found["by_the_words"], found["packed_rows"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
def test_sinks_take_weight_and_give_no_value(window):
    """In value and gradient, as the softmax over one more logit."""
    lengths = [9, 1, 30, 4]
    query, key, value, grad = rows(sum(lengths), 0)
    sinks = torch.randn(query.shape[1], generator=torch.Generator().manual_seed(1)).requires_grad_()
    layout = PackedLayout.of(lengths, CPU)
    found = packed_attention(query, key, value, layout, scaling=0.3, sliding_window=window, sinks=sinks)
    expected, copies = [], query.shape[1] // key.shape[1]
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        seen = (distance >= 0) & (distance < (window or len(q)))
        scores = (torch.einsum("ihd,jhd->hij", q, k) * 0.3).masked_fill(~seen, float("-inf"))
        weights = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1).softmax(-1)[..., :-1]
        expected.append(torch.einsum("hij,jhd->ihd", weights, v))
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=1e-5)
    of = (query, key, value, sinks)
    theirs, ours = (torch.autograd.grad(out, of, grad) for out in (torch.cat(expected), found))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_keys_are_repeated_for_a_kernel_that_does_not_group_heads():
    """As that of torch 2.11."""
    lengths = [9, 1, 30, 4]
    query, key, value, _ = rows(sum(lengths), 0)
    layout, seen = PackedLayout.of(lengths, CPU), {}

    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        seen.update(keys=key.shape[1], window=window_size)
        starts = cu_seq_q.tolist()
        parts = [slice(a, b) for a, b in itertools.pairwise(starts)]
        return torch.cat(
            [
                scaled_dot_product_attention(
                    *(x[part].transpose(0, 1) for x in (query, key, value)), is_causal=True, scale=scale
                ).transpose(0, 1)
                for part in parts
            ]
        )

    found = VarlenAttention(older)(query, key, value, layout, scaling=0.3)
    torch.testing.assert_close(found, packed_attention(query, key, value, layout, scaling=0.3))
    assert seen == {"keys": HEADS, "window": (-1, 0)}


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 5])
def test_torchs_kernel_for_lengths_computes_the_same_on_a_gpu(window):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    lengths, device = [300, 17, 128, 1], torch.device("cuda")
    layout = PackedLayout.of(lengths, device)
    draw = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(sum(lengths), heads, 64, generator=draw).to(device, torch.bfloat16).requires_grad_()
        for heads in (4, 2, 2, 4)
    )
    expected = packed_attention(q, k, v, layout, sliding_window=window)
    found = VarlenAttention(varlen_attn)(q, k, v, layout, sliding_window=window)
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
    theirs = torch.autograd.grad(expected, (q, k, v), grad)
    ours = torch.autograd.grad(found, (q, k, v), grad)
    torch.testing.assert_close(ours, theirs, atol=5e-2, rtol=5e-2)
