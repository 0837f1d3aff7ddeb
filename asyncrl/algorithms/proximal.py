"""The proximal policy without a forward pass: interpolated between behaviour and trained policy by the token's lag.

    log pi_prox = alpha log pi_behavior + (1 - alpha) log pi_theta       alpha = 1 / max(d, 1) for lag d

In decoupled PPO the proximal policy (the trainer's before the update) only anchors the trust region. Here it is taken
to lie on the line from the policy that sampled the token (d steps back) to the policy in training, one step before it.
Tokens of lag 0 and 1 are anchored to the behaviour policy itself. The paper anchors lag 0 to the policy in training;
with several updates per step the ratio of such a token would always be 1, and nothing would bound it. Assumes that the
policy moved evenly over the d steps; `algorithm.proximal=recompute` does not.
Source: A-3PO (arXiv:2512.06547).
"""

from __future__ import annotations

import torch


def log_linear(logprobs: torch.Tensor, behavior_logprobs: torch.Tensor, lags: torch.Tensor) -> torch.Tensor:
    """[tokens] float32 without gradient: `old_logprobs` for ratio=proximal.

    Args:
        logprobs: [tokens], of the policy in training.
        behavior_logprobs: [tokens], as the replica reported.
        lags: [tokens], steps; 0 or more.
    """
    alpha = 1 / lags.clamp(min=1)
    return torch.lerp(logprobs.detach(), behavior_logprobs, alpha.to(logprobs.dtype))
