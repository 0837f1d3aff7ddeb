"""Estimates of KL(policy || reference) from one sampled token, per token.

    d  = log pi_theta - log pi_ref of the sampled token
    k1 = d                  unbiased, of high variance, may be negative
    k2 = d^2 / 2            biased, its gradient is that of the KL when the token was sampled by pi_theta
    k3 = exp(-d) - 1 + d    unbiased, never negative

In the reward all three are numbers without gradient, and k1 is usual. In the loss the gradient matters: that of k1
averages to zero over the policy's own tokens, so it does not regularise; k2 and k3 pull towards the reference. k3 grows
as exp(-d): it is bounded by exp(MAX_LOG_RATIO). Beyond the bound it keeps the gradient at the bound, which is huge but
of the right sign; gradient clipping then makes it a step for that token alone.

For tokens that another policy sampled, an estimate can be weighted by the ratio to that policy:

    estimate_t = ratio_t k_t        ratio_t = pi_theta(t) / pi_behavior(t), k_t: k1 or k3, both with gradient

For k1 and k3 alike, its mean over tokens of the behaviour policy is KL(policy || reference), and its mean gradient is
the gradient of that divergence. The plain estimate has neither property: for a stale token, k3 estimates the divergence
at tokens that the policy no longer writes, and its gradient omits the change of the sampling distribution, even at lag
0, where the ratio is 1 but its gradient is not 0. The ratio is always to the policy that sampled, whatever
algorithm.ratio says. It is not truncated, so variance is high where lag is large.

Source: J. Schulman, "Approximating KL divergence" (2020); k3 in the loss as in GRPO (arXiv:2402.03300) eq. 4; unbiased
KL estimate: DeepSeek-V3.2 (arXiv:2512.02556) sec. 3.1.
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


def importance_weighted(
    estimate: torch.Tensor, logprobs: torch.Tensor, behavior_logprobs: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """[tokens] float32, differentiable in `logprobs`, also through the ratio.

    Args:
        estimate: [tokens], from `kl.kl_estimate`: 0 outside the mask [tokens] bool.
    """
    return bounded_ratio(masked_log_ratio(logprobs, behavior_logprobs, mask)) * estimate
