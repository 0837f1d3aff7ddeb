"""Estimates of KL(policy || reference) from one sampled token, per token.

    d  = log pi_theta - log pi_ref of the sampled token
    k1 = d                  unbiased, of high variance, may be negative
    k2 = d^2 / 2            biased, its gradient is that of the KL when the token was sampled by pi_theta
    k3 = exp(-d) - 1 + d    unbiased, never negative

In the reward all three are numbers without gradient, and k1 is usual. In the loss the gradient matters: that of k1
averages to zero over the policy's own tokens, so it does not regularise; k2 and k3 pull towards the reference. k3 grows
as exp(-d): it is bounded by exp(MAX_LOG_RATIO). Beyond the bound it keeps the gradient at the bound, which is huge but
of the right sign; gradient clipping then makes it a step for that token alone.

Source: J. Schulman, "Approximating KL divergence" (2020); k3 in the loss as in GRPO (arXiv:2402.03300) eq. 4.
"""

from __future__ import annotations

from typing import Literal

import torch

from asyncrl.algorithms.loss import bounded_ratio, masked_log_ratio


def kl_estimate(
    logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    estimator: Literal["k1", "k2", "k3"],
    mask: torch.Tensor,
) -> torch.Tensor:
    """[tokens] float32, differentiable in `logprobs`; 0 outside the mask [tokens] bool."""
    d = masked_log_ratio(logprobs, reference_logprobs, mask)
    match estimator:
        case "k1":
            return d
        case "k2":
            return d.square() / 2
        case "k3":
            return bounded_ratio(-d) - 1 + d
