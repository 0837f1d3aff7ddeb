"""The protocols of a training backend: `TrainBackend` trains (one instance per trainer rank, all ranks call the same
method together), `CheckpointReader` reads its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from asyncrl.types import RankPlan, SendingRank, TensorSpec, TrainMetrics, Trajectory, TrajectoryKey

if TYPE_CHECKING:
    import torch

SAVING_TIMEOUT = timedelta(days=7)
"""Of the group in which ranks write a checkpoint. The checkpoint writer bounds that wait: while all ranks answer, it
waits for a late one."""


class TrainBackend(Protocol):
    """One trainer rank. A backend composes `step.TrainingStep` over its models for the first three methods. It adds the
    methods that depend on its sharding: weights and state. Ranks that share a plan (`config.layout.Layout`) return the
    same values."""

    def train_step(self, plan: RankPlan, trajectories: Mapping[TrajectoryKey, Trajectory]) -> TrainMetrics:
        """One optimizer step over the micro-batches of all ranks' plans; collective. The same metrics on every rank."""
        ...

    def logprobs(
        self, plan: RankPlan, trajectories: Mapping[TrajectoryKey, Trajectory]
    ) -> dict[TrajectoryKey, torch.Tensor]:
        """Log-probabilities of the response tokens of the plan's sequences, [T] float32 each, no gradient.
        Collective over ranks. At temperature 1. A run never calls it: the tests of numerics measure backends by it."""
        ...

    def reference_kl(
        self, plan: RankPlan, trajectories: Mapping[TrajectoryKey, Trajectory]
    ) -> dict[TrajectoryKey, float]:
        """Divergence of the policy that sampled each sequence of the plan from the reference model, by
        `algorithm.kl.estimator`: summed over its trained tokens, nats; 0 without any. Collective over ranks; the next
        call must be the step of the same plan.

        Raises:
            ValueError: `algorithm.kl.coefficient` is 0, so there is no reference.
        """
        ...

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """All tensors of a publish, in the order of their senders. Local: gathers nothing; the same on every rank."""
        ...

    def sending_ranks(self) -> tuple[SendingRank, ...]:
        """The ranks that send, in the order of `weight_specs`, whose tensors they share. The same on every rank."""
        ...

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """On a sending rank its tensors of `weight_specs`, full, in HF naming and in the replicas' dtype, one at a
        time; what other ranks get has no meaning. Producing one is collective: every rank must exhaust the iterator. A
        tied tensor comes once, under the name that HF keeps."""
        ...

    def capture(self) -> None:
        """Copies model, optimizer and RNG state into host memory and drops an earlier copy. Local to the rank. The
        memory of a copy that was written or dropped may be kept for the next."""
        ...

    def save(self, directory: Path) -> tuple[str, ...]:
        """Writes the last `capture` of all ranks below `directory` and ends its use, also when writing fails;
        collective. Returns the names of the files that this rank wrote there.

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


@dataclass(frozen=True, slots=True, eq=False)
class StoredAdapter:
    """The adapters of a checkpoint as they were trained. `scale`: alpha / rank. `base`: directory or hub name of the
    weights they were trained on. `tensors`: by their published names."""

    scale: float
    base: str
    tensors: dict[str, torch.Tensor]


class CheckpointReader(Protocol):
    """Reads what a backend's `save` wrote, in one process and without a process group."""

    def weights(self, base: str | None = None, revision: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Names in Hugging Face's naming and whole float32 tensors of the policy, one at a time, adapters merged,
        experts apart.

        Args:
            base: the present location of the base weights of adapters; None: the location in the checkpoint.
            revision: of the base on the hub; None: its default branch.

        Raises:
            ConfigError: the checkpoint cannot be read.
            WeightTransferError: the adapters are not of the model at `base`.
        """
        ...

    def adapter(self) -> StoredAdapter | None:
        """None: the run trained all weights. Raises ConfigError: the checkpoint cannot be read."""
        ...
