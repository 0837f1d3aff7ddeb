"""Rewards, returns and whitening per token, for advantages that the trainer computes. Pure functions of tensors.

`values`-like tensors are [n], one entry per trained token of a micro-batch; `sequences` [n] int64 are ascending
trajectory numbers. Tokens of prompts and environments are excluded, so a discount counts trained tokens. A token's
result depends on its own trajectory only, bit for bit, so packing does not matter.

    token_rewards       r_t = -penalty_t, and the trajectory's reward is added at its last trained token
    discounted_returns  R_t = sum_{s >= t} gamma^(s - t) r_s
    whitened            (x - mean) / sqrt(variance + EPSILON) over all tokens of the update, on all ranks

Source: KL as reward: InstructGPT (arXiv:2203.02155) sec. 3.5; whitening: REINFORCE++ (arXiv:2501.03262) sec. 3.
"""

from __future__ import annotations

import torch

from asyncrl.algorithms.loss import masked
from asyncrl.config.algorithm import GaeConfig

EPSILON = 1e-8
"""Added to the variance, so equal values give 0."""


def token_rewards(
    rewards: torch.Tensor, sequences: torch.Tensor, penalties: torch.Tensor | None = None
) -> torch.Tensor:
    """[n]: the reward that each token earns.

    Args:
        rewards: [n], the total reward of the token's trajectory, the same for all its tokens.
        penalties: [n], subtracted from each token: `kl.coefficient` times the estimated divergence. Without gradient.
    """
    last = torch.ones_like(sequences, dtype=torch.bool)
    last[:-1] = sequences[1:] != sequences[:-1]
    earned = masked(rewards, last)
    return earned if penalties is None else earned - penalties.detach()


def discounted_returns(rewards: torch.Tensor, sequences: torch.Tensor, gamma: float) -> torch.Tensor:
    """[n]: sum of the token rewards [n] from each token to the end of its trajectory, discounted.

    By doubling: after k rounds an entry holds the sum over its next 2^k tokens, so a trajectory of T tokens takes
    log2(T) rounds of whole-tensor arithmetic instead of T steps.
    """
    sums, distance, factor = rewards, 1, gamma
    while distance < len(sums):
        same = sequences[distance:] == sequences[:-distance]
        # No trajectory is longer than `distance`: all sums are complete.
        if not bool(same.any()):
            break
        shifted = torch.zeros_like(sums)
        shifted[:-distance] = masked(sums[distance:], same)
        sums = sums + factor * shifted
        distance, factor = 2 * distance, factor * factor
    return sums


def return_advantages(
    rewards: torch.Tensor, values: torch.Tensor | None, sequences: torch.Tensor, config: GaeConfig
) -> tuple[torch.Tensor, None]:
    """The `TokenAdvantage` of REINFORCE++: the discounted return. `values` are not read."""
    return discounted_returns(rewards, sequences, config.gamma), None


def whitening_sums(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[3] float64: count, sum and sum of squares of `values` where `mask` [n] is True. Their sum over micro-batches and
    ranks is the input of `whitened`."""
    kept = masked(values.detach().double(), mask)
    return torch.stack([mask.sum().double(), kept.sum(), kept.square().sum()])


def whitened(values: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """[n], of the dtype of `values`: mean 0 and population variance 1 over the tokens behind `sums` [3]."""
    count = sums[0].clamp(min=1)
    mean = sums[1] / count
    variance = (sums[2] / count - mean.square()).clamp(min=0)
    return ((values.double() - mean) * (variance + EPSILON).rsqrt()).to(values.dtype)
