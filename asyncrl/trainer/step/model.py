"""What a training step asks of a backend: its models, and sums over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from asyncrl.algorithms.objective import LossStatistics
from asyncrl.trainer.step.batch import PackedTokens

Output = TypeVar("Output")


@dataclass(frozen=True, slots=True, eq=False)
class TokenOutputs:
    """What a policy or a reference says about one micro-batch.

    Attributes:
        logprobs: [n] float32, log-probabilities of the predicted tokens at the temperature of the batch.
        entropy: [n] float32, nats; a gradient flows through it where the loss asks for one.
        chosen, given: [L, E] float32 each, what the routers of a mixture did with all tokens of the row; see
            `routing_sums`. None without a load-balancing loss.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    chosen: torch.Tensor | None = None
    given: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What a loss function makes of one micro-batch. `loss`: [] float32, the micro-batch's part of what the update
    minimises; carries the gradient. `seen` carries none."""

    loss: torch.Tensor
    seen: LossStatistics

    def detached(self) -> Part:
        return Part(self.loss.detach(), self.seen)


LossFunction = Callable[[int, Output], Part]
"""(number of the micro-batch in the update, what the model says about it) -> its part of the loss."""


class FrozenModel(Protocol[Output]):
    def evaluate(self, batches: Sequence[PackedTokens]) -> list[Output]:
        """What the model says about each micro-batch, without gradient. The same on all ranks that share a plan;
        collective over all ranks, which bring equally many micro-batches."""
        ...


class Model(FrozenModel[Output], Protocol[Output]):
    """A model in training with its optimizer. All methods are collective over all ranks, in the same order."""

    def train(self, mode: bool) -> None:
        """Switches to training (dropout on) or evaluation."""
        ...

    def forward_backward(
        self, batches: Sequence[PackedTokens], loss_function: LossFunction[Output], *, learns: bool
    ) -> list[Part]:
        """Adds the gradient of the sum of all losses, over the micro-batches of all data-parallel ranks, to the
        gradients; the parts, detached, in the order of `batches`.

        The backend owns the schedule: it calls `loss_function` once for each micro-batch, at any time and in any
        order, on the ranks that hold the model's output. A rank that does not hold it receives the parts from one that
        does: all ranks that share a plan return the same.

        Args:
            learns: False: no gradient is computed, and the parts are those of the weights as they are.
        """
        ...

    def clip_gradients(self) -> float:
        """Scales the gradients to the largest norm that the recipe allows; returns their global norm before that, 0
        without any."""
        ...

    def update(self, rate: float) -> None:
        """One optimizer step with this learning rate; then there are no gradients."""
        ...

    def drop_gradients(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StepModels:
    """The models that the algorithm asks for: `needs_critic` and `needs_reference` of its section say which. A critic
    says [n] float32, the value of the text before each predicted token."""

    policy: Model[TokenOutputs]
    critic: Model[torch.Tensor] | None = None
    reference: FrozenModel[TokenOutputs] | None = None


@dataclass(frozen=True, slots=True)
class Peers:
    """One rank of each data-parallel index, this rank among them: together they hold every micro-batch of an update
    once. `group` None: there is one index."""

    group: dist.ProcessGroup | None = None

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """`values`, now the sum over all peers. Collective."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """`values`, now the largest of all peers, entry by entry. Collective."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.group is not None:
            dist.all_reduce(values, op=operation, group=self.group)
        return values
