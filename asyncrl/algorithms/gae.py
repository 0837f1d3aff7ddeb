"""Generalised advantage estimation, token by token, from the values of a critic.

    delta_t = r_t + gamma V_{t+1} - V_t          V after the last trained token of a trajectory is 0
    A_t     = sum_{s >= t} (gamma lam)^(s - t) delta_s
    R_t     = A_t + V_t                          target of the critic

It differs from the textbook in that time counts trained tokens: environment text between two trained tokens adds no
discount and its value is never read. lam=1: the whole return minus the value. lam=0: one-step TD error.
Source: GAE (arXiv:1506.02438) eq. 16; as PPO uses it: arXiv:1707.06347 eq. 11.
"""

from __future__ import annotations

import torch

from asyncrl.algorithms.loss import masked, require_same_shape
from asyncrl.algorithms.returns import discounted_returns
from asyncrl.config.algorithm import GaeConfig


def critic_advantages(
    rewards: torch.Tensor, values: torch.Tensor | None, sequences: torch.Tensor, config: GaeConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `TokenAdvantage` of this file."""
    assert values is not None, "advantage gae has a critic"
    return gae_advantages(rewards, values, sequences, config.gamma, config.lam)


def gae_advantages(
    rewards: torch.Tensor, values: torch.Tensor, sequences: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages [n], returns [n]), without gradient.

    Args:
        rewards: [n] float32, of each trained token (`returns.token_rewards`).
        values: [n] float32, of the critic before each trained token, under its weights before the update.
        sequences: [n] int64, ascending numbers of the trajectories.

    Raises:
        ValueError: lengths differ.
    """
    require_same_shape(rewards=rewards, values=values, sequences=sequences)
    values = values.detach()
    following = torch.zeros_like(values)
    # V_{t+1} is 0 after the last token of a trajectory, where the next entry belongs to another one.
    following[:-1] = masked(values[1:], sequences[1:] == sequences[:-1])
    delta = rewards.detach() + gamma * following - values
    # A_t is the return of the deltas at discount gamma * lam.
    advantages = discounted_returns(delta, sequences, gamma * lam)
    return advantages, advantages + values
