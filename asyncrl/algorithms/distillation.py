"""On-policy distillation: the student samples, and a teacher's log-probabilities score each token.

    A_t = B_t - coefficient (log pi_theta(y_t) - log pi_teacher(y_t))

B_t is the advantage from rewards, 0 with algorithm.advantage=teacher_only. The difference is the k1 estimate of the
reverse KL(pi_theta || pi_teacher) of this token, with discount 0: a token answers for its own divergence only. With the
unclipped surrogate and no other advantage, the expected gradient is that of the reverse KL of every token, given the
text before it.

It differs from the source's cookbook in that log pi_theta is under the weights in training, not the weights that
sampled. In asynchronous training the sampling weights are older, and their advantage would push the policy back to
where it was. In sync mode with one update per step the two agree.
Source: On-Policy Distillation of Language Models (arXiv:2306.13649); K. Lu et al., "On-Policy Distillation" (2025).

With algorithm.distillation.top_k the divergence is computed instead of estimated, and enters the loss with a gradient
through every probability of the policy. Let S be the teacher's k likeliest tokens at the position, and p_S and q_S the
sums of pi_theta and pi_teacher over S:

    D_t = sum_{v in S} pi_theta(v) log(pi_theta(v) / pi_teacher(v)) + (1 - p_S) log((1 - p_S) / (1 - q_S))

D_t is the reverse KL of the two distributions over S and one bucket for all other tokens. By the log-sum inequality it
is at most the KL over the whole vocabulary, with equality at k = V. It is 0 only where both agree on S and on the
bucket. Without the bucket the sum over S would not be a divergence: it falls when the policy moves its mass out of S.
No gradient flows through sampling, and stale tokens are not weighted by their ratio.
Source: arXiv:2306.13649 sec. 3 (text of the student, reverse KL of each place, no gradient through sampling), there
over the whole vocabulary; Sparse Logit Sampling (arXiv:2503.16870) on what dropping the mass outside of S does.
"""

from __future__ import annotations

import torch

from asyncrl.algorithms.loss import MAX_LOG_RATIO, masked, masked_log_ratio, require_same_shape


def reverse_kl(logprobs: torch.Tensor, teacher_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[tokens] float32: k1 estimate of KL(policy || teacher) in nats, without gradient; 0 outside the mask. Bounded by
    MAX_LOG_RATIO in size, so a token that the teacher all but excludes cannot make the update infinite."""
    return masked_log_ratio(logprobs.detach(), teacher_logprobs, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


LEAST_TAIL = 1e-6
"""Lower bound for the probability outside the top k: one minus a float32 sum is no more precise, and a teacher that
leaves no mass must not make the loss infinite."""


def top_reverse_kl(logprobs: torch.Tensor, teacher_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[tokens] float32: the reverse KL to the teacher over its k likeliest tokens and one bucket for the others, in
    nats, with gradient; 0 outside the mask.

    Args:
        logprobs: [tokens, k] float32, of the teacher's likeliest tokens under the weights in training.
        teacher_logprobs: [tokens, k] float32, of the same tokens under the teacher.
        mask: [tokens] bool. Other rows may hold anything.

    Raises:
        ValueError: shapes differ.
    """
    require_same_shape(logprobs=logprobs, teacher_logprobs=teacher_logprobs)
    own, teacher = masked(logprobs, mask[:, None]), masked(teacher_logprobs, mask[:, None])
    inside = (own.exp() * (own - teacher)).sum(-1)
    # The bucket of all tokens outside S.
    tail, teacher_tail = ((1 - values.exp().sum(-1)).clamp(min=LEAST_TAIL) for values in (own, teacher))
    return masked(inside + tail * (tail.log() - teacher_tail.log()), mask)


def distilled_advantages(
    advantages: torch.Tensor,
    logprobs: torch.Tensor,
    teacher_logprobs: torch.Tensor,
    mask: torch.Tensor,
    coefficient: float,
) -> torch.Tensor:
    """[tokens] float32, without gradient: the advantages minus the divergence from the teacher.

    Args:
        advantages: [tokens] float32, from the rewards.
        logprobs: [tokens] float32, log pi_theta of the sampled token under the weights in training.
        teacher_logprobs: [tokens] float32, of the same tokens under the teacher.
        mask: [tokens] bool, True where the token is trained. Other entries may hold anything.
        coefficient: of the divergence.

    Raises:
        ValueError: lengths differ.
    """
    require_same_shape(advantages=advantages, logprobs=logprobs, teacher_logprobs=teacher_logprobs, mask=mask)
    return masked(advantages, mask) - coefficient * reverse_kl(logprobs, teacher_logprobs, mask)
