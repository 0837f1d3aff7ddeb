"""What a number of judged responses says about a policy: pass@k, mean@k and how sure one may be of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

NORMAL_95 = 1.959963984540054
"""Two-sided 95% quantile of the standard normal distribution."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of k responses is right, drawn without replacement from `num_samples` of which
    `num_correct` are: the unbiased estimate of the share of prompts that one of k responses gets right.

    Raises ValueError: not 1 <= k <= num_samples, or not 0 <= num_correct <= num_samples.
    Source: Chen et al. 2021 (arXiv:2107.03374) eq. 1, as a product: the binomials overflow.
    """
    if not (1 <= k <= num_samples and 0 <= num_correct <= num_samples):
        raise ValueError(f"pass@{k} of {num_correct} right ones among {num_samples}")
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / n for n in range(num_samples - num_correct + 1, num_samples + 1))


def wilson_interval(rate: float, number: int) -> tuple[float, float]:
    """95% interval of a rate that was seen in `number` independent trials. Never empty, also at 0 and 1.

    Source: Wilson 1927, score interval without continuity correction.
    """
    z2 = NORMAL_95**2
    center = (rate + z2 / (2 * number)) / (1 + z2 / number)
    half = NORMAL_95 / (1 + z2 / number) * math.sqrt(rate * (1 - rate) / number + z2 / (4 * number**2))
    return max(0.0, min(rate, center - half)), min(1.0, max(rate, center + half))


def mean_interval(num_correct: Sequence[int], num_samples: int) -> tuple[float, float]:
    """95% interval of the accuracy: over which prompts were asked, and over how they were sampled.

    One response to each prompt: Wilson's. Several: responses to one prompt are alike, so that the prompts are the
    independent draws; the standard error is that of their means (clustered by prompt, with N - 1), and the interval the
    normal one, cut to [0, 1]. Where all prompts do equally well that would be a single point: Wilson's over the prompts
    instead.

    Args:
        num_correct: right responses to each prompt, each of `num_samples`.
    """
    prompts = len(num_correct)
    rates = [c / num_samples for c in num_correct]
    mean = math.fsum(rates) / prompts
    if num_samples == 1 or prompts == 1 or min(num_correct) == max(num_correct):
        return wilson_interval(mean, prompts)
    variance = math.fsum((r - mean) ** 2 for r in rates) / (prompts - 1)
    half = NORMAL_95 * math.sqrt(variance / prompts)
    return max(0.0, mean - half), min(1.0, mean + half)
