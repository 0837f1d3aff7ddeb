"""Router replay, for every backend: whether recorded experts are of the model in training, and who takes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrl.errors import ConfigError, explain
from asyncrl.weights.experts import MODEL_TYPES


@dataclass(frozen=True, slots=True)
class Routers:
    """Of a mixture.

    Attributes:
        layers: number of layers with experts.
        per_token: experts that a token takes in each.
        experts: of each such layer.
    """

    layers: int
    per_token: int
    experts: int

    def require(self, recorded: torch.Tensor) -> None:
        """`recorded`: [N, layers, per_token] integers, -1 where nothing was recorded. Raises ValueError: they are of
        another model."""
        found, largest = tuple(recorded.shape[1:]), int(recorded.max())
        if found != (self.layers, self.per_token) or largest >= self.experts:
            raise ValueError(
                f"recorded experts of shape {found}, the largest {largest}: the model has (layers, experts per token) "
                f"{(self.layers, self.per_token)} and {self.experts} experts"
            )


def no_routers(what: str) -> ConfigError:
    """For a model without routers that are known here; `what` names it."""
    return ConfigError(
        explain(
            "trainer.router_replay=rollout",
            f"{what} has no routers that are known here",
            f"set it to off, or train a mixture of experts ({', '.join(MODEL_TYPES)})",
        )
    )


def taken(recorded: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """[n, k]: of each token the recorded experts, and the `chosen` ones where nothing was recorded."""
    return torch.where(recorded >= 0, recorded, chosen)
