"""The TrainBackend of FSDP2."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from asyncrl.algorithms import build_objective
from asyncrl.algorithms.loss import LossInputs
from asyncrl.errors import RunFailed, explain
from asyncrl.trainer.backend import TrainMetrics, TrajectoryKey
from asyncrl.trainer.fsdp import state
from asyncrl.trainer.fsdp.batch import PackedBatch, pack
from asyncrl.trainer.fsdp.optimizer import build_optimizer
from asyncrl.trainer.fsdp.policy import load_policy, shard
from asyncrl.trainer.fsdp.totals import StepTotals
from asyncrl.trainer.schedule import learning_rate
from asyncrl.trainer.spec import TrainerSpec
from asyncrl.types import RankPlan, TensorSpec, Trajectory


class FsdpBackend:
    """One rank. Needs torch.distributed's default group, whose timeout bounds every collective made here.

    The loss of a token is weighed by its share of the update and multiplied by the number of ranks, because FSDP
    averages gradients over ranks: the result is the same for every packing and every number of ranks.

    Gradients are reduced after every micro-batch, not only after the last one: what accumulates is then the rank's
    shard, where unreduced gradients would take the memory of a whole model on every rank.
    """

    def __init__(self, spec: TrainerSpec, *, rank: int, world_size: int, device: torch.device) -> None:
        """Loads and shards the model; collective. Raises ConfigError: the model cannot be read or trained."""
        self._spec, self._world_size, self._rank, self._device = spec, world_size, rank, device
        torch.manual_seed(spec.seed + rank)  # dropout, where a model has it, differs between ranks
        fsdp = spec.trainer.fsdp
        self._policy = load_policy(spec.model, fsdp, device)
        self._mesh = init_device_mesh(device.type, (world_size,))
        shard(self._policy, self._mesh, fsdp)
        self._optimizer = build_optimizer(self._policy.causal_lm, spec.trainer)
        self._objective = build_objective(spec.algorithm)
        self._temperature = spec.temperature or 1.0
        self._publish_dtype: torch.dtype = getattr(torch, spec.model.inference_dtype)
        self._captured: dict[str, torch.Tensor] | None = None
        # Saving runs beside training in a thread of its own: without a group of its own the collectives of the two
        # would meet each other. A rank waits in it while another one writes.
        timeout = timedelta(seconds=max(spec.trainer.step_timeout_s, spec.trainer.collective_timeout_s))
        saving = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(saving, dist.ProcessGroup), "every rank is a member"
        self._saving = saving

    def train_step(self, plan: RankPlan, trajectories: Mapping[TrajectoryKey, Trajectory]) -> TrainMetrics:
        """The updates of one step; see `TrainBackend`.

        Raises:
            RunFailed: loss or gradient is not finite. The weights and the optimizer are as before that update.
            ValueError: a trajectory is missing or differs from its plan.
        """
        self._policy.train()
        totals, norms = StepTotals(self._device), []
        rate = self._rate(plan.step)
        for microbatches in plan.updates:
            loss = torch.zeros((), dtype=torch.float64, device=self._device)
            for microbatch in microbatches:
                batch = pack(microbatch, trajectories, predict="trained", device=self._device, step=plan.step)
                logprobs, entropy = self._policy(batch.tokens, self._temperature)
                part, seen = self._objective(_inputs(batch, logprobs, entropy))
                (part * self._world_size).backward()
                totals.add(part, seen, batch)
                loss += part.detach()
            norms.append(self._clip_gradients())
            self._check_finite(loss, norms[-1], plan.step)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return totals.reduce(norms, rate)

    def _rate(self, step: int) -> float:
        trainer = self._spec.trainer
        return learning_rate(step, peak=trainer.lr, warmup_steps=trainer.warmup_steps)

    @torch.no_grad()
    def logprobs(
        self, plan: RankPlan, trajectories: Mapping[TrajectoryKey, Trajectory]
    ) -> dict[TrajectoryKey, torch.Tensor]:
        """[T] float32 on the CPU for each sequence of this rank, at temperature 1; see `TrainBackend`."""
        self._policy.eval()
        found: dict[TrajectoryKey, torch.Tensor] = {}
        for microbatch in plan.microbatches:
            batch: PackedBatch = pack(microbatch, trajectories, predict="response", device=self._device)
            logprobs, _ = self._policy(batch.tokens, 1.0)
            counts = [s.lengths.response for s in microbatch]
            parts = logprobs[: sum(counts)].cpu().split(counts)  # nothing predicted still gives one placeholder
            found.update(((s.ordinal, s.index), part) for s, part in zip(microbatch, parts, strict=True))
        return found

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        width = self._publish_dtype.itemsize
        return tuple(
            TensorSpec(name, tuple(t.shape), self._spec.model.inference_dtype, t.numel() * width)
            for name, t in state.published_tensors(self._policy.causal_lm)
        )

    @torch.no_grad()
    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TrainBackend`. Tensors lie on the trainer's device; one may share memory with the master weights where
        nothing had to be gathered or cast, so take it before the next step."""
        for name, tensor in state.published_tensors(self._policy.causal_lm):
            # cast before gathering: half the bytes for 16-bit replicas
            yield name, state.full(tensor.detach().to(self._publish_dtype))

    def capture(self) -> None:
        self._captured = None  # freed before the next one is made
        self._captured = state.capture(self._policy.causal_lm, self._optimizer, rank=self._rank, device=self._device)

    def save(self, directory: Path) -> None:
        """See `TrainBackend`. Raises StorageError: it cannot be written there."""
        captured, self._captured = self._captured, None
        if captured is None:
            raise RuntimeError("save was called before capture")
        state.save(directory, captured, self._saving)

    def load(self, directory: Path) -> None:
        """Raises ConfigError: there is no checkpoint below `directory`, or it is of another model."""
        state.load(directory, self._policy.causal_lm, self._optimizer, rank=self._rank, device=self._device)

    def _clip_gradients(self) -> float:
        """Scales gradients to at most `max_grad_norm` and returns their global norm before that."""
        parameters = [p for p in self._policy.parameters() if p.grad is not None]
        total = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = state.full(total)
        limit = self._spec.trainer.max_grad_norm
        if limit > 0:
            nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return float(norm)

    def _check_finite(self, loss: torch.Tensor, grad_norm: float, step: int) -> None:
        """Every rank sees the same reduced numbers, so every rank raises."""
        dist.all_reduce(loss)
        if math.isfinite(grad_norm) and math.isfinite(loss):
            return
        self._optimizer.zero_grad(set_to_none=True)
        raise RunFailed(
            explain(
                f"optimizer step {step}",
                f"loss={float(loss)}, gradient norm={grad_norm}; the weights were not changed",
                "lower trainer.lr, or look for odd rewards in samples.jsonl",
            )
        )


def _inputs(batch: PackedBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> LossInputs:
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=batch.behavior_logprobs,
        behavior_logprobs=batch.behavior_logprobs,
        advantages=batch.advantages,
        mask=batch.mask,
        weights=batch.weights,
        sequences=batch.sequences,
        lags=batch.lags,
        entropy=entropy,
    )
