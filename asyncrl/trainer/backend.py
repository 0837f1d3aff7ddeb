"""The protocols of a training backend: `TrainBackend` trains (one instance per trainer rank, all ranks call the same
method together), `CheckpointReader` reads its checkpoints, as the `TrainingState` that conversion reads and writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from asyncrl.types import RankPlan, SendingRank, TensorSpec, TrainMetrics, Trajectory, TrajectoryKey

if TYPE_CHECKING:
    import torch

    from asyncrl.config.model import ModelConfig


TensorKind = Literal["weight", "exp_avg", "exp_avg_sq"]
WEIGHT: TensorKind = "weight"
MOMENTS: tuple[TensorKind, ...] = ("exp_avg", "exp_avg_sq")
MODELS = ("model", "critic")
"""The models that a checkpoint may hold."""


class TrainingState(Protocol):
    """Weights, moments and step counts that one backend's `save` wrote, read in one process and without a process
    group. Tensors have Hugging Face names, experts separate; a critic's head is `head.weight` and `head.bias`."""

    def total_steps(self) -> int:
        """Length of the run. Raises ConfigError: it cannot be read."""
        ...

    def steps(self, model: str) -> int:
        """Number of steps of the optimizer of `model`. Raises ConfigError: it cannot be read."""
        ...

    def shapes(self, model: str) -> dict[str, tuple[int, ...]]:
        """The tensors of `model`, in the best order for reading; empty if there is no such model."""
        ...

    def read(self, model: str, name: str, kind: TensorKind) -> torch.Tensor:
        """A whole tensor, float32. Raises ConfigError: it cannot be read."""
        ...


class TrainBackend(Protocol):
    """One trainer rank. A backend composes `step.TrainingStep` over its models for the first three methods, and adds
    the methods that depend on its sharding: weights and state. Ranks that share a plan (`config.layout.Layout`) return
    the same values."""

    def train_step(self, plan: RankPlan, trajectories: Mapping[TrajectoryKey, Trajectory]) -> TrainMetrics:
        """One optimizer step over the micro-batches of all ranks' plans; collective. The same metrics on every rank."""
        ...

    def logprobs(
        self, plan: RankPlan, trajectories: Mapping[TrajectoryKey, Trajectory]
    ) -> dict[TrajectoryKey, torch.Tensor]:
        """Log-probabilities of the response tokens of the plan's sequences, [T] float32 each, at temperature 1, no
        gradient. Collective over ranks. Only the numerics tests call it."""
        ...

    def reference_kl(
        self, plan: RankPlan, trajectories: Mapping[TrajectoryKey, Trajectory]
    ) -> dict[TrajectoryKey, float]:
        """Divergence of the sampling policy from the reference model for each sequence of the plan, by
        `algorithm.kl.estimator`: summed over its trained tokens, in nats; 0 without trained tokens. Collective over
        ranks; the next call must be the step of the same plan.

        Raises:
            ValueError: `algorithm.kl.coefficient` is 0, so there is no reference.
        """
        ...

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """All tensors of a publish, in the order of their senders. Local, without gathering; the same on every rank."""
        ...

    def sending_ranks(self) -> tuple[SendingRank, ...]:
        """The ranks that send, in the order of their tensors in `weight_specs`. The same on every rank."""
        ...

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """On a sending rank: its tensors of `weight_specs`, full, with HF names and the replicas' dtype, one at a time.
        Other ranks get meaningless values. Collective: every rank must exhaust the iterator. A tied tensor comes once,
        under the name that HF keeps."""
        ...

    def capture(self) -> None:
        """Copies model, optimizer and RNG state into host memory and drops an earlier copy. Local to the rank. The
        memory of a written or dropped copy may be reused."""
        ...

    def save(self, directory: Path) -> tuple[str, ...]:
        """Writes the last `capture` of all ranks below `directory` and releases it, also when writing fails;
        collective. Returns the names of the files that this rank wrote.

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
    """The adapters of a checkpoint, unscaled. `scale`: alpha / rank. `base`: directory or hub name of their base
    weights. `tensors`: by published names."""

    scale: float
    base: str
    tensors: dict[str, torch.Tensor]


class CheckpointReader(Protocol):
    """Reads what a backend's `save` wrote, in one process and without a process group."""

    def weights(self, model: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in the files of `model`, whole float32 tensor) of the policy, one at a time, with adapters merged.

        Args:
            model: that was trained; its `path` is where the adapters' base weights are now.

        Raises:
            ConfigError: the checkpoint cannot be read.
            WeightTransferError: the adapters are not of that model.
        """
        ...

    def adapter(self) -> StoredAdapter | None:
        """None: the run trained all weights. Raises ConfigError: the checkpoint cannot be read."""
        ...
