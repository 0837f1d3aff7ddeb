"""The input of losses and corrections, their protocols, and shared tensor functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    import torch

    from asyncrl.config.algorithm import AlgorithmConfig

AddUp = Callable[["torch.Tensor"], "torch.Tensor"]
"""The sum of a tensor over all ranks. Collective."""


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """Tokens of one micro-batch. Each field is [tokens] on the trainer's device unless stated otherwise.

    Attributes:
        logprobs: float32, log pi_theta of the token under the weights in training; carries the gradient.
        old_logprobs: float32, denominator of the loss's ratio: `behavior_logprobs`, or the proximal policy's.
        behavior_logprobs: float32, as the replica reported at sampling time.
        advantages: float32.
        mask: bool, True where the policy wrote the token and it is trained. Other positions may hold anything.
        weights: float32, the token's share of the update's objective: 1 / trained tokens of the update with aggregation
            token_mean.
        sequences: int64, ascending from 0: number of the token's sequence in the micro-batch. A sequence is a
            trajectory, or one branch of it; losses and corrections treat a branch as a trajectory.
        lags: float32, `global_steps` minus the version that sampled the token.
        entropy: float32, of the policy at the token; carries a gradient where an entropy bonus asks for it.
        reference_logprobs: float32, under the reference model; None without one.
        teacher_logprobs: float32, under the teacher of `algorithm.distillation`; None without one.
        teacher_top_logprobs, top_logprobs: [tokens, k] float32, the teacher's k likeliest tokens at this position,
            under the teacher and under the weights in training; `top_logprobs` carry a gradient. None without
            `algorithm.distillation.top_k`.
        fitted: name of a `FittedCorrection` -> the value it fitted for the update, [].
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
        """[tokens] float32: unweighted loss of each token. Masked entries are 0 without gradient, whatever they
        hold."""
        ...

    def clipped(self, inputs: LossInputs) -> torch.Tensor:
        """[tokens] bool: unmasked tokens whose gradient the loss cuts or bounds because they are too far from the old
        policy."""
        ...


@dataclass(frozen=True, slots=True)
class Clips:
    """The settings of a loss that holds a ratio in [1 - clip_low, 1 + clip_high]."""

    clip_low: float
    clip_high: float

    @classmethod
    def of(cls, config: AlgorithmConfig) -> Self:
        return cls(config.clip_low, config.clip_high)


class Correction(Protocol):
    """The weight of a token, given the distance between the trainer's policy before the update and the policy that
    sampled (`mismatch.py`)."""

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """([tokens] float32, [tokens] bool): a factor for each token's loss, without gradient, and whether the
        correction truncated the factor or dropped the token. Both are 0 at masked entries."""
        ...


@runtime_checkable
class FittedCorrection(Correction, Protocol):
    """A correction fitted over all tokens of an update before the update begins. `__call__` reads the result of `fit`
    from `LossInputs.fitted`."""

    def fit(self, microbatches: Sequence[LossInputs], add_up: AddUp) -> torch.Tensor:
        """[] float32, of one update, the same on every rank and for every packing. Collective.

        Args:
            microbatches: this rank's; `logprobs` and `old_logprobs` are of the trainer's policy before the step.
        """
        ...


MAX_LOG_RATIO = 20.0
"""Bound of log-ratios: a token whose probability is nearly 0 under one of two policies must not make the update
infinite, or NaN where a bound gives it no gradient."""


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` with 0 outside the mask. A product with the mask would keep NaN, also in the gradient."""
    import torch

    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_log_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[tokens] float32: log of the ratio, 0 outside the mask."""
    return masked(logprobs, mask) - masked(old_logprobs, mask)


def bounded_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """[tokens] float32: exp(log_ratio), at most exp(MAX_LOG_RATIO). Beyond the bound the gradient is that at the bound:
    a clamp would give none, and a sum with other terms (k3) would then have a gradient of the wrong sign."""
    excess = (log_ratio.detach() - MAX_LOG_RATIO).clamp(min=0)
    return (log_ratio - excess).exp()


def sequence_sums(values: torch.Tensor, mask: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """[tokens] float32: sum of `values` over the unmasked tokens of each token's trajectory."""
    import torch

    # Numbers ascend, so the last is the largest.
    count = int(sequences[-1]) + 1 if sequences.numel() else 0
    sums = torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, sequences, masked(values, mask))
    return sums[sequences]


def sequence_means(values: torch.Tensor, mask: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """[tokens] float32: mean of `values` over the unmasked tokens of each token's trajectory; 0 if there are none."""
    import torch

    sizes = sequence_sums(torch.ones_like(values), mask, sequences)
    return sequence_sums(values, mask, sequences) / sizes.clamp(min=1)


def require_same_shape(**tensors: torch.Tensor) -> None:
    """Raises ValueError if the shapes differ, naming all tensors."""
    if len({t.shape for t in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
        raise ValueError(f"tensors of the same tokens differ in shape: {shapes}")
