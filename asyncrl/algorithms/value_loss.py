"""Loss of a critic: squared error of the value, clipped so that moving far from the old value does not pay.

    loss_t = max((V_t - R_t)^2, (clip(V_t, V_old_t - c, V_old_t + c) - R_t)^2) / 2

The maximum removes the gradient once a value has moved over c towards its return, as the policy's clip does. It is in
PPO's reference implementation, not in the paper. c is in units of reward, so it assumes rewards around 1.
Source: the implementation of PPO (arXiv:1707.06347); Implementation Matters (arXiv:2005.12729) sec. 3.
"""

from __future__ import annotations

import torch

from asyncrl.algorithms.loss import masked, require_same_shape


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, *, clip: float
) -> torch.Tensor:
    """[tokens] float32: unweighted loss of each token; 0 outside the mask, whatever the entries hold.

    Args:
        values: [tokens], of the critic in training; carries the gradient.
        old_values: [tokens], of the critic before the update.
        returns: [tokens], targets of the values (`gae.gae_advantages`).
        clip: how far a value may move from the old one; 0: no bound.

    Raises:
        ValueError: lengths differ.
    """
    require_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    values, old_values, returns = (masked(t, mask) for t in (values, old_values.detach(), returns.detach()))
    error = (values - returns).square()
    if clip:
        held = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (held - returns).square())
    return error / 2


def value_clipped(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, *, clip: float
) -> torch.Tensor:
    """[tokens] bool: True where the maximum takes the bound, so the gradient is 0."""
    with torch.no_grad():
        if not clip:
            return torch.zeros_like(mask)
        values, old_values, returns = (masked(t, mask) for t in (values, old_values, returns))
        # The clipped value is constant beyond the bound; where its error is the larger one, no gradient is left.
        moved = values - old_values
        held = old_values + moved.clamp(-clip, clip)
        return (moved.abs() > clip) & ((held - returns).square() > (values - returns).square())
