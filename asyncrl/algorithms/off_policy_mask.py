"""Off-policy sequence masking: drops bad trajectories that the policy would no longer write.

    factor_t = 0 where A_t < 0 and mean_t (log pi_behavior(t) - log pi_theta(t)) > high, else 1

The mean is over the trained tokens of the trajectory, in nats. A wrong response that the policy would hardly write any
more teaches little, and pushing it further down spreads probability over untried text. A right response is worth
learning at any distance. pi_theta is the policy in training, so lag, the updates of this step and the engine's mismatch
all count. The factor does not weight tokens.
Source: DeepSeek-V3.2 (arXiv:2512.02556) sec. 3.1, off-policy sequence masking.
"""

from __future__ import annotations

import torch

from asyncrl.algorithms.loss import LossInputs, masked, sequence_means
from asyncrl.algorithms.mismatch import Bounded, log_mismatch


class OffPolicyMask(Bounded):
    """The `Correction` of this file: the threshold in nats per token."""

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        left = -sequence_means(log_mismatch(inputs, "behavior"), inputs.mask, inputs.sequences)
        dropped = (masked(inputs.advantages, inputs.mask) < 0) & (left > self.high)
        return (inputs.mask & ~dropped).to(left.dtype), dropped
