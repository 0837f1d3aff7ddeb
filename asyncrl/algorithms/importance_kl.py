"""KL estimate for tokens that another policy sampled, weighted by the ratio to that policy.

    estimate_t = ratio_t k_t        ratio_t = pi_theta(t) / pi_behavior(t), k_t: k1 or k3 of `kl.py`, both with gradient

For k1 and k3 alike, its mean over tokens of the behaviour policy is KL(policy || reference), and its mean gradient is
the gradient of that divergence. The plain estimate has neither property: for a stale token, k3 estimates the divergence
at tokens that the policy no longer writes, and its gradient omits the change of the sampling distribution, even at lag
0, where the ratio is 1 but its gradient is not 0. The ratio is always to the policy that sampled, whatever
algorithm.ratio says. It is not truncated, so variance is high where lag is large.
Source: DeepSeek-V3.2 (arXiv:2512.02556) sec. 3.1, unbiased KL estimate.
"""

from __future__ import annotations

import torch

from asyncrl.algorithms.loss import bounded_ratio, masked_log_ratio


def importance_weighted(
    estimate: torch.Tensor, logprobs: torch.Tensor, behavior_logprobs: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """[tokens] float32, differentiable in `logprobs`, also through the ratio.

    Args:
        estimate: [tokens], from `kl.kl_estimate`: 0 outside the mask [tokens] bool.
    """
    return bounded_ratio(masked_log_ratio(logprobs, behavior_logprobs, mask)) * estimate
