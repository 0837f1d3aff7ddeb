"""Estimates of KL(policy || reference) from one sampled token, per token.

    d  = log pi_theta - log pi_ref of the sampled token
    k1 = d                  unbiased, of high variance, may be negative
    k2 = d^2 / 2            biased, its gradient is that of the KL when the token was sampled by pi_theta
    k3 = exp(-d) - 1 + d    unbiased, never negative

Source: J. Schulman, "Approximating KL divergence" (2020); k3 in the loss as in GRPO (arXiv:2402.03300) eq. 4.
"""

from __future__ import annotations

from typing import Literal

import torch

from asyncrl.algorithms.loss import masked_log_ratio

MAX_LOG_RATIO = 20.0
"""k3 grows as exp(-d): a token that the policy has all but given up must not make the update infinite."""


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
            return (-d).clamp(max=MAX_LOG_RATIO).exp() - 1 + d
