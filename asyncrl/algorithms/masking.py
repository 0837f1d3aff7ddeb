"""Masking: drops tokens, or whole trajectories, on which trainer and engine disagree. Truncation trains a token over
the bound with too small a weight, trusting an engine that was wrong about the token; masking drops it. With
algorithm.ratio=behavior the factor of a token is 1 instead of exp(m_t): see `mismatch.py`."""

from __future__ import annotations

import torch

from asyncrl.algorithms.loss import LossInputs, bounded_ratio, masked, sequence_means
from asyncrl.algorithms.mismatch import Bounded, KeptWithin, log_mismatch


class MaskedIs(KeptWithin):
    """Masked importance sampling: tokens that the trainer finds much likelier than the engine did.

        factor_t = exp(m_t) where exp(m_t) <= high, else 0

    Source: J. Liu, Y. Li et al., "When speed kills stability" (2025), token-level MIS.
    """


class IcePop(KeptWithin):
    """Double-sided masking: in either direction. A token that the trainer finds much less likely than the engine did is
    engine noise too. The paper holds ratios in [0.5, 5].

        factor_t = exp(m_t) where low <= exp(m_t) <= high, else 0

    Source: IcePop, Ring-1T (arXiv:2510.18855) sec. 3, "Small leak can sink a great ship" (2025).
    """


class GeometricRejection(Bounded):
    """Rejection of whole trajectories by the geometric mean of their tokens' ratios.

        factor_i = 1 where low <= exp(mean_t m_t) <= high, else 0      over the trained tokens of trajectory i

    Unlike the ratio of the trajectory, the mean does not grow with length, so one narrow pair of bounds, say [0.99,
    1.01], fits short and long trajectories. The factor does not weight tokens: combine it with a token correction or
    with a loss over the behaviour policy.

    Source: J. Liu, Y. Li et al., "When speed kills stability" (2025), geometric sequence masking.
    """

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        log_ratio = log_mismatch(inputs, self.ratio)
        mean = bounded_ratio(sequence_means(log_ratio, inputs.mask, inputs.sequences))
        kept = inputs.mask & (mean >= self.low) & (mean <= self.high)
        return kept.to(log_ratio.dtype), inputs.mask & ~kept


class OffPolicyMask(Bounded):
    """Off-policy sequence masking: drops bad trajectories that the policy would no longer write.

        factor_t = 0 where A_t < 0 and mean_t (log pi_behavior(t) - log pi_theta(t)) > high, else 1

    The mean is over the trained tokens of the trajectory, in nats. A wrong response that the policy would hardly write
    any more teaches little, and pushing it further down spreads probability over untried text. A right response is
    worth learning at any distance. pi_theta is the policy in training, so lag, the updates of this step and the
    engine's mismatch all count. The factor does not weight tokens.

    Source: DeepSeek-V3.2 (arXiv:2512.02556) sec. 3.1, off-policy sequence masking.
    """

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        left = -sequence_means(log_mismatch(inputs, "behavior"), inputs.mask, inputs.sequences)
        dropped = (masked(inputs.advantages, inputs.mask) < 0) & (left > self.high)
        return (inputs.mask & ~dropped).to(left.dtype), dropped
