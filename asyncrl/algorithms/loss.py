"""What the trainer knows of a loss: the record it fills and the two calls it makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """Tokens of one micro-batch, each field [tokens] on the trainer's device.

    Attributes:
        logprobs: float32, log pi_theta of the token under the weights in training; carries the gradient.
        behavior_logprobs: float32, as the replica reported at sampling time.
        advantages: float32, that of the token's trajectory.
        mask: bool, True where the policy wrote the token and it is trained. Other positions may hold anything.
    """

    logprobs: torch.Tensor
    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LossStatistics:
    """Scalars over the True entries of one mask: sums of `clipped` (0 or 1), `ratio`, `kl` (behaviour minus policy
    log-probability) and the maximum `ratio_max` (0 where the mask is empty). They carry no gradient."""

    clipped: torch.Tensor
    ratio: torch.Tensor
    kl: torch.Tensor
    ratio_max: torch.Tensor


class Loss(Protocol):
    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        """Scalar float32, summed over the True mask entries and not normalised. Masked entries contribute neither
        value nor gradient, whatever they hold."""
        ...

    def statistics(self, inputs: LossInputs) -> LossStatistics:
        """What to watch, apart from the loss and its graph."""
        ...
