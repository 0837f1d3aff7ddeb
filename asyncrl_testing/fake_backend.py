"""A TrainBackend in memory: a bigram policy in numpy with the gradient written out by hand.

The policy reads the last token only: log p(token | previous) = log_softmax(logits[previous] + bias). It trains with the
clipped surrogate and plain Adam, one update a step, in float64, so that it stands in for a real backend where only the
contract matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.errors import ConfigError, RunFailed, StorageError, explain
from asyncrl.trainer.schedule import scheduled_rate
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl.types import RankPlan, TensorSpec, TrainMetrics, TrainSequence, Trajectory, TrajectoryKey
from asyncrl.types.metrics import Metric

if TYPE_CHECKING:
    import torch

FILE = "state.npz"


class FakeBackend:
    """One rank of one. Legend: n trained tokens, V vocabulary."""

    def __init__(self, spec: TrainerSpec, *, vocab_size: int) -> None:
        draw = np.random.default_rng(spec.seed)
        self._spec = spec
        self._temperature = spec.temperature or 1.0
        self._weights = {
            "model.logits.weight": draw.normal(0, 0.5, (vocab_size, vocab_size)),
            "model.bias": np.zeros(vocab_size),
        }
        self._moments = {
            f"{kind}.{n}": np.zeros_like(w) for kind in ("first", "second") for n, w in self._weights.items()
        }
        self._steps = 0
        self._captured: dict[str, np.ndarray] | None = None

    def train_step(self, plan: RankPlan, trajectories: Mapping[TrajectoryKey, Trajectory]) -> TrainMetrics:
        sequences = [s for run in plan.microbatches for s in run]
        chosen = [_checked(s, trajectories) for s in sequences]
        previous, targets = _pairs(chosen, lambda t: t.loss_mask)
        behavior = np.concatenate([[], *(t.logprobs[t.loss_mask] for t in chosen)]).astype(np.float64)
        counts = [t.num_trained_tokens for t in chosen]
        advantages = np.repeat([s.advantage for s in sequences], counts)
        weights = np.repeat([s.token_weight for s in sequences], counts)
        logp_nV = self._log_softmax(previous, self._temperature)
        at = np.arange(len(targets))
        kl = behavior - logp_nV[at, targets]
        ratio = np.exp(-kl)
        low, high = 1 - self._spec.algorithm.clip_low, 1 + self._spec.algorithm.clip_high
        clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
        tokens = -np.minimum(ratio * advantages, ratio.clip(low, high) * advantages)
        loss = float((weights * tokens).sum())
        gradient_nV = -np.exp(logp_nV)
        gradient_nV[at, targets] += 1
        gradient_nV *= (-np.where(clipped, 0, ratio * advantages) * weights / self._temperature)[:, None]
        gradients = {name: np.zeros_like(w) for name, w in self._weights.items()}
        np.add.at(gradients["model.logits.weight"], previous, gradient_nV)
        gradients["model.bias"] += gradient_nV.sum(0)
        grad_norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            raise RunFailed(explain(f"optimizer step {plan.step}", f"loss {loss}", "resume from the last checkpoint"))
        rate = self._adam(gradients, grad_norm, plan.step)
        count = max(len(targets), 1)
        return TrainMetrics(
            loss=loss,
            grad_norm=grad_norm,
            lr=rate,
            ratio_max=float(ratio.max(initial=0)),
            trained_tokens=len(targets),
            packed_tokens=sum(s.lengths.total for s in sequences),
            means=(
                (Metric.CLIPPED, float(clipped.sum()) / count),
                (Metric.CLIPPED_POSITIVE, float((clipped & (advantages > 0)).sum()) / count),
                (Metric.CLIPPED_NEGATIVE, float((clipped & (advantages < 0)).sum()) / count),
                (Metric.RATIO_MEAN, float(ratio.sum()) / count),
                (Metric.KL_BEHAVIOR, float(kl.sum()) / count),
                (Metric.ENTROPY, float(-(np.exp(logp_nV) * logp_nV).sum()) / count),
            ),
        )

    def logprobs(
        self, plan: RankPlan, trajectories: Mapping[TrajectoryKey, Trajectory]
    ) -> dict[TrajectoryKey, torch.Tensor]:
        import torch

        found = {}
        for s in (s for run in plan.microbatches for s in run):
            previous, targets = _pairs([_checked(s, trajectories)], lambda t: np.ones(len(t.response_ids), bool))
            values = self._log_softmax(previous, 1.0)[np.arange(len(targets)), targets]
            found[s.ordinal, s.index] = torch.from_numpy(values.astype(np.float32))
        return found

    def reference_kl(
        self, plan: RankPlan, trajectories: Mapping[TrajectoryKey, Trajectory]
    ) -> dict[TrajectoryKey, float]:
        raise ValueError("the fake has no reference model, whatever algorithm.kl.coefficient is")

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        dtype = self._spec.model.inference_dtype
        width = {"float32": 4, "bfloat16": 2, "float16": 2}[dtype]
        return tuple(TensorSpec(n, w.shape, dtype, w.size * width) for n, w in self._weights.items())

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        dtype = getattr(torch, self._spec.model.inference_dtype)
        for name, weight in self._weights.items():
            yield name, torch.from_numpy(weight).to(dtype)

    def capture(self) -> None:
        live = {"steps": np.array(self._steps), **self._weights, **self._moments}
        self._captured = {name: value.copy() for name, value in live.items()}

    def save(self, directory: Path) -> None:
        captured, self._captured = self._captured, None
        if captured is None:
            raise RuntimeError("save was called before capture")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            np.savez(directory / FILE, allow_pickle=False, **captured)
        except OSError as error:
            raise StorageError(explain(f"write {directory}", str(error), "make room there")) from error

    def load(self, directory: Path) -> None:
        if not (directory / FILE).exists():
            raise ConfigError(explain(f"load {directory}", "no checkpoint there", "name a directory that save wrote"))
        with np.load(directory / FILE) as stored:
            self._steps = int(stored["steps"])
            self._weights = {name: stored[name] for name in self._weights}
            self._moments = {name: stored[name] for name in self._moments}

    def _log_softmax(self, previous: np.ndarray, temperature: float) -> np.ndarray:
        logits_nV = (self._weights["model.logits.weight"][previous] + self._weights["model.bias"]) / temperature
        shifted_nV = logits_nV - logits_nV.max(-1, keepdims=True)
        return shifted_nV - np.log(np.exp(shifted_nV).sum(-1, keepdims=True))

    def _adam(self, gradients: dict[str, np.ndarray], grad_norm: float, step: int) -> float:
        config = self._spec.trainer
        rate = scheduled_rate(config, step, self._spec.total_steps)
        scale = min(1.0, config.max_grad_norm / (grad_norm + 1e-6)) if config.max_grad_norm else 1.0
        self._steps += 1
        for name, gradient in gradients.items():
            first, second = self._moments[f"first.{name}"], self._moments[f"second.{name}"]
            first += (1 - config.adam_beta1) * (gradient * scale - first)
            second += (1 - config.adam_beta2) * ((gradient * scale) ** 2 - second)
            mean = first / (1 - config.adam_beta1**self._steps)
            spread = np.sqrt(second / (1 - config.adam_beta2**self._steps)) + config.adam_eps
            self._weights[name] = self._weights[name] - rate * mean / spread
        return rate


def _checked(sequence: TrainSequence, trajectories: Mapping[TrajectoryKey, Trajectory]) -> Trajectory:
    trajectory = trajectories.get((sequence.ordinal, sequence.index))
    if trajectory is None:
        raise ValueError(f"trajectory {sequence.index} of group {sequence.ordinal} is planned but was not fetched")
    if trajectory.num_trained_tokens != sequence.lengths.trained:
        raise ValueError(f"trajectory {sequence.index} of group {sequence.ordinal} differs from its plan")
    return trajectory


def _pairs(
    trajectories: list[Trajectory], mask_of: Callable[[Trajectory], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """(previous token, token) of every chosen response token, [n] int64 each."""
    rows = [(np.append(t.prompt_ids[-1:], t.response_ids[:-1]), t.response_ids, mask_of(t)) for t in trajectories]
    previous = np.concatenate([[], *(before[: len(mask)][mask] for before, _, mask in rows)])
    targets = np.concatenate([[], *(ids[mask] for _, ids, mask in rows)])
    return previous.astype(np.int64), targets.astype(np.int64)
