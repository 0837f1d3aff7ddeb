"""Token sampling: a counter-based random stream per request and a vectorised sampler over rows.

Shape letters: N rows (requests that decode now), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from asyncrl.inference.shared.token_filters import kept_tokens
from asyncrl.types.splitmix import GOLDEN, mix, mix_array


def stream_key(seed: int) -> int:
    """The unsigned 64-bit initial state of the stream of `seed`, any Python integer."""
    return mix(seed)


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[N] float64 in [0, 1 - 2**-52], each a function of (seed, position) alone.

    Args:
        keys: [N] uint64, from `stream_key`.
        positions: [N] int64, absolute response positions.
    Source: SplitMix64, at an arbitrary position instead of in sequence. 52 bits, not 53: `u * total` is then below
        `total` in float64 for every total, so that the inverse CDF never runs off its end.
    """
    state = mix_array(keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN))
    return (state >> np.uint64(12)) * 2.0**-52


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """Sampling settings per row. `temperature` [N] float32 (0 greedy), `top_p` [N] float32 (1 off), `top_k` [N] int64
    (0 off), `uniforms` [N] float64. `barred` [N, any] int64: tokens that a row must not draw, padded with ids outside
    the vocabulary; None: no row bars any."""

    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    uniforms: np.ndarray
    barred: np.ndarray | None = None


def sample_with_sets(
    logits: torch.Tensor, rows: SamplingRows, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Like `sample`, and the `most` likeliest tokens that the filters kept, [N, most] int64, likeliest first, padded
    with -1."""
    logprobs = _logprobs(logits, rows)
    found = logprobs.topk(min(most, logprobs.shape[1]))
    kept = found.indices.masked_fill(found.values == float("-inf"), -1)
    return *_drawn(logprobs, rows), torch.nn.functional.pad(kept, (0, most - kept.shape[1]), value=-1)


def sample(logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one token per row.

    A row's result depends only on its own logits and settings, never on other rows.

    Args:
        logits: [N, V] float32.
    Returns:
        token ids [N] int64 and their log-probabilities [N] float32: without the barred tokens, after temperature,
        top-k and top-p (in this order, top-p on what top-k left); for greedy rows at temperature 1 without filters.
    """
    return _drawn(_logprobs(logits, rows), rows)


def _logprobs(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """[N, V] float32; minus infinity for tokens that must not be drawn."""
    greedy = rows.temperature == 0
    scale = np.where(greedy, np.float32(1), rows.temperature)
    filtered = ~greedy & ((rows.top_k > 0) | (rows.top_p < 1))
    if rows.barred is not None:
        logits = _without(logits, rows.barred)
    if (scale != 1).any():
        logits = logits / torch.from_numpy(scale).to(logits.device)[:, None]
    if filtered.any():
        logits = logits.masked_fill(~_kept(logits, rows, filtered), float("-inf"))
    return log_softmax(logits)


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """[..., V] float32. As `torch.log_softmax`, which on CPUs is off by 8e-6 nats at 49,152 tokens; this by 4e-8."""
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return shifted - shifted.exp().sum(dim=-1, keepdim=True).log()


def _drawn(logprobs: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    greedy = rows.temperature == 0
    if greedy.all():
        tokens = logprobs.argmax(dim=-1)
    else:
        tokens = _inverse_cdf(logprobs, torch.from_numpy(rows.uniforms).to(logprobs.device))
        if greedy.any():
            tokens = torch.where(torch.from_numpy(greedy).to(logprobs.device), logprobs.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _without(logits: torch.Tensor, barred: np.ndarray) -> torch.Tensor:
    """A copy of `logits` with minus infinity at the barred tokens."""
    rows, places = np.nonzero((barred >= 0) & (barred < logits.shape[1]))
    index = torch.from_numpy(rows), torch.from_numpy(barred[rows, places])
    kept = logits.clone()
    kept[index[0].to(logits.device), index[1].to(logits.device)] = float("-inf")
    return kept


def _inverse_cdf(logprobs: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative probability exceeds the draw. float64, so that no tail token is rounded away;
    `right=True`, so that a token of probability 0 is never chosen."""
    cdf = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    chosen = torch.searchsorted(cdf, (draws * cdf[:, -1])[:, None], right=True)[:, 0]
    return chosen.clamp_(max=cdf.shape[1] - 1)  # only NaN rows run beyond the end; their log-probability reveals them


def _kept(logits: torch.Tensor, rows: SamplingRows, filtered: np.ndarray) -> torch.Tensor:
    """[N, V] bool, the tokens that top-k and top-p keep; all tokens in the rows that use neither.

    The tokens stay in vocabulary order, so that a filtered neighbour does not change which token a draw picks.
    """
    vocabulary = logits.shape[1]
    off = ~filtered | (rows.top_k == 0)
    top_k = torch.from_numpy(np.where(off, vocabulary, rows.top_k)).to(logits.device)
    top_p = torch.from_numpy(np.where(filtered, rows.top_p, np.float32(1))).to(logits.device)
    return kept_tokens(logits, top_k, top_p)
