"""The training step's view of a backend: its models, and sums over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from asyncrl.algorithms.objective import LossStatistics
from asyncrl.errors import ConfigError, explain
from asyncrl.trainer.step.batch import PackedTokens
from asyncrl.trainer.trainer_spec import TrainerSpec

Output = TypeVar("Output")


@dataclass(frozen=True, slots=True, eq=False)
class TokenOutputs:
    """The output of a policy or a reference for one micro-batch.

    Attributes:
        logprobs: [n] float32, log-probabilities of the predicted tokens at the temperature of the batch.
        entropy: [n] float32, nats; carries a gradient if the loss uses it.
        chosen, given: [L, E] float32 each, sums over the routing decisions for all tokens of the row; see
            `routing_sums`. None without a load-balancing loss.
        others: [n, k] float32, log-probabilities of `PackedTokens.others`; None if not requested.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    chosen: torch.Tensor | None = None
    given: torch.Tensor | None = None
    others: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The result of a loss function for one micro-batch. `loss`: [] float32, the micro-batch's part of the minimised
    loss; carries the gradient. `seen` carries none. `balance`: [] float32, its part of the load-balancing loss, which
    the model adds; None without one."""

    loss: torch.Tensor
    seen: LossStatistics
    balance: torch.Tensor | None = None

    @property
    def total(self) -> torch.Tensor:
        """[]: the micro-batch's total contribution to the minimised loss."""
        return self.loss if self.balance is None else self.loss + self.balance

    def detached(self) -> Part:
        return Part(self.loss.detach(), self.seen, None if self.balance is None else self.balance.detach())


LossFunction = Callable[[int, Output], Part]
"""(number of the micro-batch in the update, the model's output for it) -> its part of the loss."""


class FrozenModel(Protocol[Output]):
    def evaluate(self, batches: Sequence[PackedTokens]) -> list[Output]:
        """The model's output for each micro-batch, without gradient; the same on all ranks that share a plan.
        Collective over all ranks, each with the same number of micro-batches."""
        ...


class Model(FrozenModel[Output], Protocol[Output]):
    """A model in training with its optimizer. All methods are collective over all ranks, in the same order."""

    def train(self, mode: bool) -> None:
        """Switches to training (dropout on) or evaluation."""
        ...

    def forward_backward(
        self, batches: Sequence[PackedTokens], loss_function: LossFunction[Output], *, learns: Sequence[bool]
    ) -> list[Part]:
        """Adds the gradient of the sum of all losses, over the micro-batches of all data-parallel ranks, to the
        gradients; returns the detached parts in the order of `batches`.

        The backend owns the schedule: it calls `loss_function` once for each micro-batch, at any time and in any order,
        on the ranks that hold the model's output. Other ranks receive the parts: all ranks that share a plan return the
        same.

        `PackedTokens.balance` of a micro-batch is multiplied by its routers' sums `given` and added to the loss, as
        `Part.balance`. The weights are known before the forward pass, so each pipeline stage adds the gradient of its
        own layers.

        Args:
            learns: for each micro-batch; False computes its part without gradient, which a backend may do too where
                other micro-batches learn: the gradient is 0. The same on all ranks.
        """
        ...

    def clip_gradients(self) -> float:
        """Scales the gradients to at most the recipe's norm; returns their global norm before, 0 without gradients."""
        ...

    def update(self, rate: float) -> None:
        """Makes one optimizer step with this learning rate, then drops the gradients."""
        ...

    def drop_gradients(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StepModels:
    """The models that the algorithm needs (`needs_critic`, `needs_reference`). A critic returns the value of the text
    before each predicted token, [n] float32."""

    policy: Model[TokenOutputs]
    critic: Model[torch.Tensor] | None = None
    reference: FrozenModel[TokenOutputs] | None = None


@dataclass(frozen=True, slots=True)
class Peers:
    """One rank of each data-parallel index, including this rank: together they hold every micro-batch of an update
    once. `group` None: there is one index."""

    group: dist.ProcessGroup | None = None

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """Replaces `values` by their sum over all peers. Collective."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Replaces each entry of `values` by its maximum over all peers. Collective."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.group is not None:
            dist.all_reduce(values, op=operation, group=self.group)
        return values


# Router replay, for every backend: checks recorded experts against the model in training and applies them.


@dataclass(frozen=True, slots=True)
class Routers:
    """The routers of a mixture of experts.

    Attributes:
        layers: number of layers with experts.
        per_token: experts per token in each such layer.
        experts: number of experts of each such layer.
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


def require_experts(spec: TrainerSpec, *, has_some: bool) -> None:
    """Raises ConfigError: router replay or a load-balancing loss is requested, and the model has no experts."""
    coefficient = spec.algorithm.router_aux_coefficient
    replays = spec.trainer.router_replay == "rollout"
    if not has_some and (replays or coefficient > 0):
        asked = "trainer.router_replay=rollout" if replays else f"algorithm.router_aux_coefficient={coefficient:g}"
        do = f"set it to {'off' if replays else 0}, or train a mixture of experts"
        raise ConfigError(explain(asked, f"{spec.model.path} has no experts", do))


def taken(recorded: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """[n, k]: the recorded experts of each token, or the `chosen` ones where nothing was recorded."""
    return torch.where(recorded >= 0, recorded, chosen)
