"""Ratio, clipping and KL statistics of the trained tokens, by staleness. They are kept as sums, so the result does not
depend on packing or on the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncrl.types.guard import LAG_BUCKETS, LAST_OF_BUCKET
from asyncrl.types.metrics import Metric

ROWS = 7
"""Rows of the sums: tokens, ratios, squared ratios, tails, clipped at the upper bound, clipped at the lower, nats."""
TAIL = 2.0
"""A ratio outside [1 / TAIL, TAIL] is in a tail. 2 is the usual bound of truncated importance sampling."""
SHAPE = (ROWS, len(LAG_BUCKETS))


def sums_by_lag(
    lags: torch.Tensor, mask: torch.Tensor, ratio: torch.Tensor, clipped: Sequence[torch.Tensor], kl: torch.Tensor
) -> torch.Tensor:
    """[ROWS, buckets] float64, without gradient. Everything else is [tokens].

    Args:
        ratio: of policy to behaviour probability; 0 outside the mask.
        clipped: tokens at the upper and at the lower bound.
        kl: behaviour minus policy log-probability.
    """
    buckets = torch.bucketize(lags, torch.tensor(LAST_OF_BUCKET, dtype=lags.dtype, device=lags.device))
    tails = (ratio > TAIL) | (ratio < 1 / TAIL)
    values = torch.stack([values.double() * mask for values in (mask, ratio, ratio.square(), tails, *clipped, kl)])
    sums = torch.zeros(SHAPE, dtype=torch.float64, device=lags.device)
    return sums.index_add_(1, buckets, values)


def means_by_lag(sums: torch.Tensor) -> dict[str, float]:
    """The `lag/` metrics of a loss for every bucket that has tokens; effective sample size and tail share of all
    tokens.

    Effective sample size (Kish), as a share of the tokens: (sum of ratios)^2 / (tokens * sum of squared ratios).

    Args:
        sums: of `sums_by_lag`, over all micro-batches and ranks.
    """
    tokens, ratios, squares, tails = sums[:4].sum(1).tolist()
    found: dict[str, float] = {
        Metric.EFFECTIVE_SAMPLES: _effective_share(tokens, ratios, squares),
        Metric.RATIO_TAILS: tails / max(1.0, tokens),
    }
    # Empty buckets have no metrics: a mean of nothing would read as 0.
    for bucket, column in zip(LAG_BUCKETS, sums.T.tolist(), strict=True):
        tokens, ratios, squares, tails, upper, lower, nats = column
        if tokens:
            found |= {
                Metric.LAG_RATIO.of(bucket): ratios / tokens,
                Metric.LAG_EFFECTIVE.of(bucket): _effective_share(tokens, ratios, squares),
                Metric.LAG_TAILS.of(bucket): tails / tokens,
                Metric.LAG_CLIPPED_POSITIVE.of(bucket): upper / tokens,
                Metric.LAG_CLIPPED_NEGATIVE.of(bucket): lower / tokens,
                Metric.LAG_KL.of(bucket): nats / tokens,
            }
    return found


def _effective_share(tokens: float, ratios: float, squares: float) -> float:
    return ratios**2 / (tokens * squares) if tokens and squares else 0.0
