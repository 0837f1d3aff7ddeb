"""Weights that mark their tokens: every token identifies which of eight sets of weights sampled it."""

from __future__ import annotations

from typing import Any

from asyncrl_testing.random_model import random_qwen3

NUM_MARKS = 8
_TOKENS_PER_MARK = 16
_BITS = 3
_CONSTANT = _BITS  # the place of the hidden state that is the same for every token


def mark_of(token: int) -> int:
    """The mark of the weights that sampled `token`."""
    return token // _TOKENS_PER_MARK


def marked_qwen3(mark: int, *, tied: bool) -> Any:
    """A random Qwen3ForCausalLM, float32, that samples only tokens of `mark`, whatever the context.

    Three places of the hidden state hold the mark in binary: the embeddings of token t (and, tied or not, the rows
    of the head) have the signs of `mark_of(t)` there, nothing in between writes to them, and the last MLP adds the
    signs of `mark` with twenty times that weight, out of a fourth place that is the same for all tokens. A token of
    another mark is behind by over 80 in its logit: it has probability 0 in float32. Which of its sixteen tokens a
    mark writes depends on the context as in any random model. All other weights differ from mark to mark too, and
    all shapes are those of `random_qwen3`.
    """
    import torch

    model = random_qwen3(seed=1000 + mark, tie_word_embeddings=tied)
    signs = torch.tensor([_signs(mark_of(t)) for t in range(model.config.vocab_size)])
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    # Write the mark into embeddings and head, and a constant into a place of its own.
    head[:, _CONSTANT] = 0.0
    embedding[:, _CONSTANT] = 4.0
    for matrix in (embedding, head):
        matrix[:, :_BITS] = signs
    # No layer may overwrite these places or read the constant.
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for writes in (attention.o_proj.weight, mlp.down_proj.weight):
            writes[: _CONSTANT + 1] = 0.0
        for reads in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            reads.weight[:, _CONSTANT] = 0.0
    # Only the last MLP reads the constant; it adds the signs of the mark.
    mlp = model.model.layers[-1].mlp
    for reads in (mlp.gate_proj.weight, mlp.up_proj.weight):
        reads[0] = 0.0
        reads[0, _CONSTANT] = 4.0
    mlp.down_proj.weight[:, 0] = 0.0
    mlp.down_proj.weight[:_BITS, 0] = torch.tensor(_signs(mark))
    # The norm amplifies the mark over all else, so that other marks get probability 0.
    model.model.norm.weight[:] = 6.0
    model.model.norm.weight[:_BITS] = 20.0
    model.model.norm.weight[_CONSTANT] = 0.0
    return model


def _signs(mark: int) -> list[float]:
    return [1.0 if mark >> bit & 1 else -1.0 for bit in range(_BITS)]
