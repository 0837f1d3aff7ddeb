"""On-policy distillation: the student samples, and a teacher's log-probabilities say how good each token was.

    A_t = B_t - coefficient (log pi_theta(y_t) - log pi_teacher(y_t))

B_t is the advantage that rewards give, 0 with algorithm.advantage=teacher_only. The difference is the k1 estimate of
the reverse KL(pi_theta || pi_teacher) of this token, with a discount of 0: a token answers for its own divergence only.
With the unclipped surrogate and no other advantage the expected gradient is that of the reverse KL of every token,
given the text before it.

It differs from the cookbook of the source in that log pi_theta is that of the weights in training, not of those that
sampled: in asynchronous training the latter are older, and an advantage of theirs would push towards where the policy
has been already. Where both agree, as in sync mode with one update a step, the two are the same.
Source: On-Policy Distillation of Language Models (arXiv:2306.13649); K. Lu et al., "On-Policy Distillation" (2025).
"""

from __future__ import annotations

import torch

from asyncrl.algorithms.loss import MAX_LOG_RATIO, masked, masked_log_ratio, require_same_shape


def reverse_kl(logprobs: torch.Tensor, teacher_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[tokens] float32: the k1 estimate of KL(policy || teacher) in nats, without gradient; 0 outside the mask. Held in
    [-MAX_LOG_RATIO, MAX_LOG_RATIO]: a token that the teacher all but excludes must not make the update infinite."""
    return masked_log_ratio(logprobs.detach(), teacher_logprobs, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def distilled_advantages(
    advantages: torch.Tensor,
    logprobs: torch.Tensor,
    teacher_logprobs: torch.Tensor,
    mask: torch.Tensor,
    coefficient: float,
) -> torch.Tensor:
    """[tokens] float32, without gradient: the advantages with the divergence from the teacher taken off.

    Args:
        advantages: [tokens] float32, what rewards give.
        logprobs: [tokens] float32, log pi_theta of the sampled token under the weights in training.
        teacher_logprobs: [tokens] float32, of the same tokens under the teacher.
        mask: [tokens] bool, True where the token is trained. Other entries may hold anything.
        coefficient: of the divergence.

    Raises:
        ValueError: lengths differ.
    """
    require_same_shape(advantages=advantages, logprobs=logprobs, teacher_logprobs=teacher_logprobs, mask=mask)
    return masked(advantages, mask) - coefficient * reverse_kl(logprobs, teacher_logprobs, mask)
