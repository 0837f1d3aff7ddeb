"""Policy gradient with a trust region on divergence instead of on ratios.

    loss_t = - M_t sg[min(ratio_t, max_ratio)] A_t log pi_theta(t)
    M_t    = 0 where A_t > 0, ratio_t > 1 and D_t > high, or A_t < 0, ratio_t < 1 and D_t > low, else 1
    tv:  D_t = |pi_theta(t) - pi_old(t)|
    kl:  D_t = q log(q / p) + (1 - q) log((1 - q) / (1 - p))        q = pi_old(t), p = pi_theta(t)

D_t is the divergence of two Bernoulli distributions: the sampled token or any other. The clipped surrogate bounds the
ratio; this loss bounds the probability that moves. A token of probability 0.001 may become 20 times as likely, which
moves almost no probability and which a ratio bound forbids; a token of 0.99 may not fall to 0.8, which a ratio bound
allows. As in PPO, the sign of A_t and the side of ratio 1 decide: a token on its way back is always trained.
The trust region is around the policy that sampled (algorithm.ratio=behavior), so it bounds both lag and the mismatch of
engine and trainer; the paper finds that anchoring it to a recomputed policy fails. max_ratio is from the authors' code,
not from the formula: it keeps a rare token of negative advantage from dominating the gradient.
Source: DPPO (arXiv:2602.04879) eq. 13 and 14, bounds 0.15 (tv) and 0.05 (kl) from its appendix C; the authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from asyncrl.algorithms.loss import LossInputs, bounded_ratio, masked, masked_log_ratio
from asyncrl.config.algorithm import AlgorithmConfig

SMALLEST = 1e-12
"""Lower bound for the probability of all other tokens, where rounding leaves none."""


@dataclass(frozen=True, slots=True)
class Dppo:
    """The `Loss` of this file: bounds on the divergence, and on the weight."""

    low: float
    high: float
    divergence: Literal["tv", "kl"] = "tv"
    max_ratio: float = 20.0

    @classmethod
    def of(cls, config: AlgorithmConfig) -> Dppo:
        return cls(*config.dppo.bounds, config.dppo.divergence, config.dppo.max_ratio)

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        with torch.no_grad():
            ratio = bounded_ratio(masked_log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask))
            weight = masked(ratio.clamp(max=self.max_ratio), ~self.clipped(inputs))
        return -weight * masked(inputs.advantages, inputs.mask) * masked(inputs.logprobs, inputs.mask)

    def clipped(self, inputs: LossInputs) -> torch.Tensor:
        """Where the token has left the trust region in the direction in which its advantage pushes: it is not
        trained."""
        with torch.no_grad():
            new, old = (masked(values, inputs.mask) for values in (inputs.logprobs, inputs.old_logprobs))
            advantages, apart = masked(inputs.advantages, inputs.mask), self._divergence(new, old)
            risen = (advantages > 0) & (new > old) & (apart > self.high)
            return risen | ((advantages < 0) & (new < old) & (apart > self.low))

    def _divergence(self, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        if self.divergence == "tv":
            return (new.exp() - old.exp()).abs()
        others_new, others_old = (-torch.expm1(x).clamp(max=-SMALLEST) for x in (new, old))
        return old.exp() * (old - new) + others_old * (others_old.log() - others_new.log())
