"""Second-moment trust region: drops the tokens on which the policies differ most, as few as suffice.

    factor_t = 1 where m_t^2 <= cut, else 0
    cut      = the largest for which  mean(m_t^2 | m_t^2 <= cut) <= high        over all trained tokens of the update

Clipping bounds each token alone; here only the mean counts. Where policies are close on the whole, a single token may
be far off; where samples are stale, only the extreme tokens are dropped. The mean of m_t itself would not do, since
ratios above and below 1 cancel. The factor does not weight tokens.
The paper uses no clip and weights by the full ratio: either loss clipped_surrogate without bounds, as preset m2po has
it, or decoupled PPO with truncated_is. `cut` is fitted before the update, from the trainer's policy before the step,
over all ranks and micro-batches; AReaL fits one per micro-batch. With ratio=behavior it also bounds how far later
updates of the step move. Equal tokens stay or go together. If even the closest tokens exceed `high`, all are dropped.
Source: M2PO, "Prosperity before collapse" (arXiv:2510.01161) sec. 4, there with high = 0.04.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncrl.algorithms.loss import AddUp, LossInputs
from asyncrl.algorithms.mismatch import Bounded, log_mismatch

NAME = "m2po"
LARGEST = 0x7F7FFFFF
"""Bits of the largest finite float32."""


class M2po(Bounded):
    """The `FittedCorrection` of this file. `high` bounds the mean, in squared nats."""

    def fit(self, microbatches: Sequence[LossInputs], add_up: AddUp) -> torch.Tensor:
        """[] float32: `cut`, below 0 where nothing can be kept. Collective.

        Non-negative floats are ordered as their bits are, so bisection over the bits finds the cut exactly, with one
        sum over ranks per halving. No rank needs the tokens of another.
        """
        squares = torch.cat([self._squares(inputs)[inputs.mask] for inputs in microbatches]).float()
        bits, exact = squares.view(torch.int32), squares.double()
        low, high = (torch.tensor(bound, device=squares.device) for bound in (-1, LARGEST))  # int64
        # Bisection: `low` always fits, everything above `high` does not.
        for _ in range(LARGEST.bit_length() + 1):
            middle = (low + high + 1) // 2
            kept = bits <= middle
            count, total = add_up(torch.stack([kept.sum().double(), torch.where(kept, exact, 0.0).sum()]))
            fits = total <= self.high * count
            low, high = torch.where(fits, middle, low), torch.where(fits, high, middle - 1)
        return torch.where(low < 0, -1.0, low.clamp(min=0).to(torch.int32).view(torch.float32))

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        squares = self._squares(inputs)
        kept = inputs.mask & (squares.float() <= inputs.fitted[NAME])
        return kept.to(squares.dtype), inputs.mask & ~kept

    def _squares(self, inputs: LossInputs) -> torch.Tensor:
        return log_mismatch(inputs, self.ratio).square()
