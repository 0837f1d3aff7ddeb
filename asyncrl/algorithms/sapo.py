"""Policy gradient through a soft gate on the ratio instead of a hard bound.

    f(r)   = 4 / tau sigmoid(tau (r - 1))          tau = temperature_positive where A_t > 0, else temperature_negative
    loss_t = - f(ratio_t) A_t

The gradient of a token is that of the plain ratio times 4 p (1 - p), p = sigmoid(tau (r - 1)): 1 at ratio 1, falling
with distance on either side, for either sign of the advantage. Unlike the clipped surrogate, no token is cut off, and
tokens that return towards ratio 1 are damped as well. tau is larger for negative advantages because lowering one token
raises all others of the vocabulary, most of which are wrong.
Source: SAPO (arXiv:2511.20347).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrl.algorithms.loss import LossInputs, bounded_ratio, masked, masked_log_ratio
from asyncrl.config.algorithm import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class Sapo:
    """The `Loss` of this file with its two temperatures."""

    temperature_positive: float
    temperature_negative: float

    @classmethod
    def of(cls, config: AlgorithmConfig) -> Sapo:
        return cls(config.sapo.temperature_positive, config.sapo.temperature_negative)

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        advantages, temperature, gate = self._gate(inputs)
        return -4 / temperature * gate * advantages

    def clipped(self, inputs: LossInputs) -> torch.Tensor:
        """True where the gate passes less than half of the plain ratio's gradient; none is cut to 0."""
        with torch.no_grad():
            advantages, _, gate = self._gate(inputs)
            return (advantages != 0) & (4 * gate * (1 - gate) < 0.5)

    def _gate(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Advantages, temperature and sigmoid(tau (r - 1)), each [tokens] float32."""
        advantages = masked(inputs.advantages, inputs.mask)
        positive, negative = (
            torch.full_like(advantages, tau) for tau in (self.temperature_positive, self.temperature_negative)
        )
        temperature = torch.where(advantages > 0, positive, negative)
        ratio = bounded_ratio(masked_log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask))
        return advantages, temperature, torch.sigmoid(temperature * (ratio - 1))
