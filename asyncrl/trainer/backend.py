"""The protocol of a training backend: one instance per trainer rank, all ranks call the same method together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from asyncrl.types import RankPlan, TensorSpec, TrainMetrics, Trajectory, TrajectoryKey

if TYPE_CHECKING:
    import torch


class TrainBackend(Protocol):
    def train_step(self, plan: RankPlan, trajectories: Mapping[TrajectoryKey, Trajectory]) -> TrainMetrics:
        """One optimizer step over this rank's micro-batches; collective over ranks. The same on every rank."""
        ...

    def logprobs(
        self, plan: RankPlan, trajectories: Mapping[TrajectoryKey, Trajectory]
    ) -> dict[TrajectoryKey, torch.Tensor]:
        """Log-probabilities of the response tokens of this rank's sequences, [T] float32 each, no gradient.
        Collective over ranks. At temperature 1."""
        ...

    def reference_kl(
        self, plan: RankPlan, trajectories: Mapping[TrajectoryKey, Trajectory]
    ) -> dict[TrajectoryKey, float]:
        """Divergence of the policy that sampled each trajectory of this rank from the reference model, by
        `algorithm.kl.estimator`: summed over its trained tokens, nats; 0 without any. Collective over ranks; the step
        of the same plan is to follow.

        Raises:
            ValueError: `algorithm.kl.coefficient` is 0, so there is no reference.
        """
        ...

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """The tensors of `named_weights` in its order. Local: gathers nothing."""
        ...

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors in HF naming and in the replicas' dtype, one at a time. Producing one is collective: every
        rank must walk the whole iterator. A tied tensor comes once, under the name that HF keeps."""
        ...

    def capture(self) -> None:
        """Copies model, optimizer and RNG state into host memory, in place of an earlier copy. Local to the rank."""
        ...

    def save(self, directory: Path) -> None:
        """Writes the last `capture` of all ranks below `directory` and frees it, also when writing fails; collective.

        May be called from another thread while any other method runs, `capture` included.

        Raises:
            RuntimeError: nothing was captured since the last call.
            StorageError: it cannot be written there. Raised on every rank.
        """
        ...

    def load(self, directory: Path) -> None:
        """Restores what `save` wrote, also with another number of ranks; collective.

        Raises:
            ConfigError: there is no checkpoint below `directory`, or it is of another model.
        """
        ...
