"""The input of losses and corrections, their protocols, and the tensor functions that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

AddUp = Callable[["torch.Tensor"], "torch.Tensor"]
"""The sum of a tensor over all ranks. Collective."""


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """Tokens of one micro-batch, each field [tokens] on the trainer's device where nothing else is said.

    Attributes:
        logprobs: float32, log pi_theta of the token under the weights in training; carries the gradient.
        old_logprobs: float32, what the ratio of a loss divides by: `behavior_logprobs`, or the proximal policy's.
        behavior_logprobs: float32, as the replica reported at sampling time.
        advantages: float32.
        mask: bool, True where the policy wrote the token and it is trained. Other positions may hold anything.
        weights: float32, share of the update's objective that the token has: 1 / trained tokens of the update with
            aggregation token_mean.
        sequences: int64, number of the token's sequence in the micro-batch, ascending from 0: a trajectory or, of one
            with branches, a branch. What is said of a trajectory in losses and corrections is said of a branch there.
        lags: float32, `global_steps` minus the version that sampled the token.
        entropy: float32, of the policy at the token; carries a gradient where an entropy bonus asks for it.
        reference_logprobs: float32, under the reference model; None without one.
        teacher_logprobs: float32, under the teacher of `algorithm.distillation`; None without one.
        teacher_top_logprobs, top_logprobs: [tokens, k] float32, of the teacher's k likeliest tokens at the token's
            place, under the teacher and under the weights in training; the latter carry a gradient. None without
            `algorithm.distillation.top_k`.
        fitted: by the name of a `FittedCorrection` what it has found for the update, [] each.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    weights: torch.Tensor
    sequences: torch.Tensor
    lags: torch.Tensor
    entropy: torch.Tensor
    reference_logprobs: torch.Tensor | None = None
    teacher_logprobs: torch.Tensor | None = None
    teacher_top_logprobs: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    fitted: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Loss(Protocol):
    """A policy-gradient loss."""

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        """[tokens] float32: the loss of each token, not weighed. Masked entries are 0 and have no gradient, whatever
        they hold."""
        ...

    def clipped(self, inputs: LossInputs) -> torch.Tensor:
        """[tokens] bool: unmasked tokens whose gradient the loss cuts, or bounds, for being too far from the old
        policy."""
        ...


class Correction(Protocol):
    """The weight of a token, given how far the trainer's policy before the update is from the one that sampled it
    (`mismatch.py`)."""

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """([tokens] float32, [tokens] bool): a factor for each token's loss, without gradient, and whether the
        correction's bound touched it, that is truncated the factor or dropped the token. Both are 0 at masked
        entries."""
        ...


@runtime_checkable
class FittedCorrection(Correction, Protocol):
    """A correction that is fitted over all tokens of an update before the update begins: `__call__` finds the result of
    `fit` in `LossInputs.fitted`."""

    def fit(self, microbatches: Sequence[LossInputs], add_up: AddUp) -> torch.Tensor:
        """[] float32, of one update, the same on every rank and for every packing. Collective.

        Args:
            microbatches: those of this rank; `logprobs` and `old_logprobs` are of the trainer's policy before the step.
        """
        ...


MAX_LOG_RATIO = 20.0
"""Ratios are at most exp of this: a token whose probability is nearly 0 under one of two policies must not make the
update infinite, nor NaN where a bound gives it no gradient."""


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` with 0 outside the mask: a product with the mask would keep NaN, also in the gradient."""
    import torch

    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_log_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[tokens] float32: log of the ratio, 0 outside the mask."""
    return masked(logprobs, mask) - masked(old_logprobs, mask)


def bounded_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """[tokens] float32: exp(log_ratio), at most exp(MAX_LOG_RATIO). Beyond, the gradient is that of the bound: a clamp
    would give none, and a sum with other terms (k3) then a gradient of the wrong sign."""
    excess = (log_ratio.detach() - MAX_LOG_RATIO).clamp(min=0)
    return (log_ratio - excess).exp()


def sequence_sums(values: torch.Tensor, mask: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """[tokens] float32: for each token the sum of `values` over the unmasked tokens of its trajectory."""
    import torch

    count = int(sequences[-1]) + 1 if sequences.numel() else 0
    sums = torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, sequences, masked(values, mask))
    return sums[sequences]


def sequence_means(values: torch.Tensor, mask: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """[tokens] float32: for each token the mean of `values` over the unmasked tokens of its trajectory; 0 where it has
    none."""
    import torch

    sizes = sequence_sums(torch.ones_like(values), mask, sequences)
    return sequence_sums(values, mask, sequences) / sizes.clamp(min=1)


def require_same_shape(**tensors: torch.Tensor) -> None:
    """Raises ValueError, naming all of them: they differ in shape."""
    if len({t.shape for t in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
        raise ValueError(f"tensors of the same tokens differ in shape: {shapes}")
