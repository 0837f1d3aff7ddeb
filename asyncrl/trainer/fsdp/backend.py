"""The TrainBackend of FSDP2."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from asyncrl.algorithms import build_objective
from asyncrl.algorithms.loss import LossInputs
from asyncrl.algorithms.proximal import log_linear
from asyncrl.algorithms.router_balance import balance_loss
from asyncrl.algorithms.value_loss import value_clipped, value_loss
from asyncrl.errors import RunFailed, explain
from asyncrl.trainer.fsdp import lora, sharded_state
from asyncrl.trainer.fsdp.batch import PackedBatch, PackedTokens, pack
from asyncrl.trainer.fsdp.models import Models
from asyncrl.trainer.fsdp.optimizer import Update
from asyncrl.trainer.fsdp.prepare import Prepared, Preparer
from asyncrl.trainer.fsdp.publication import Publication
from asyncrl.trainer.fsdp.totals import StepTotals
from asyncrl.trainer.schedule import scheduled_rate
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl.types import Microbatch, RankPlan, TensorSpec, TrainMetrics, Trajectory, TrajectoryKey
from asyncrl.types.metrics import Metric

logger = logging.getLogger(__name__)


class FsdpBackend:
    """One rank. Needs torch.distributed's default group, whose timeout bounds every collective made here.

    The loss of a token is weighed by its share of the update and multiplied by the number of ranks, because FSDP
    averages gradients over ranks: the result is the same for every packing and every number of ranks.

    Gradients are reduced after every micro-batch, not only after the last one: what accumulates is then the rank's
    shard, where unreduced gradients would take the memory of a whole model on every rank.
    """

    def __init__(self, spec: TrainerSpec, *, rank: int, world_size: int, device: torch.device) -> None:
        """Loads and shards the models; collective. Raises ConfigError: a model cannot be read or trained."""
        self._spec, self._world_size, self._rank, self._device = spec, world_size, rank, device
        torch.manual_seed(spec.seed)  # what is drawn anew (adapters) is the same on any number of ranks
        self._models = Models(spec, init_device_mesh(device.type, (world_size,)))
        torch.manual_seed(spec.seed + rank)  # dropout, where a model has it, differs between ranks
        self._policy, self._critic = self._models.policy, self._models.critic
        trainer, algorithm = spec.trainer, spec.algorithm
        host_state = trainer.fsdp.offload_optimizer
        self._update = Update(
            self._policy.causal_lm, trainer, max_grad_norm=trainer.max_grad_norm, host_state=host_state
        )
        self._critic_update = (
            Update(self._critic, trainer, max_grad_norm=algorithm.critic.max_grad_norm, host_state=host_state)
            if self._critic is not None
            else None
        )
        self._objective = build_objective(algorithm)
        self._routes = algorithm.router_aux_coefficient > 0
        self._temperature = spec.temperature or 1.0
        self._preparer = Preparer(
            algorithm,
            device,
            corrections=self._objective.corrections,
            policy=self._policy_pass,
            reference=self._reference_logprobs if algorithm.needs_reference else None,
            values=self._critic,
        )
        self._publication = Publication(self._policy.causal_lm, spec, device)
        self._captured: dict[str, torch.Tensor] | None = None
        # Saving runs beside training in a thread of its own: without a group of its own the collectives of the two
        # would meet each other. A rank waits in it while another one writes.
        timeout = timedelta(seconds=max(trainer.step_timeout_s, trainer.collective_timeout_s))
        saving = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(saving, dist.ProcessGroup), "every rank is a member"
        self._saving = saving

    def train_step(self, plan: RankPlan, trajectories: Mapping[TrajectoryKey, Trajectory]) -> TrainMetrics:
        """The updates of one step; see `TrainBackend`. One without a trained token on any rank is skipped: momentum and
        weight decay would move the weights.

        Raises:
            RunFailed: loss or gradient is not finite. The weights and the optimizers are as before that update.
            ValueError: a trajectory is missing or differs from its plan.
        """
        self._models.train(False)
        prepared = self._preparer.prepare(plan, trajectories)
        self._models.train(True)
        spec = self._spec
        start = spec.algorithm.critic.warmup_steps if self._critic is not None else 0
        rate = scheduled_rate(spec.trainer, plan.step, spec.total_steps, start=start)
        critic_rate = scheduled_rate(spec.trainer, plan.step, spec.total_steps, peak=spec.algorithm.critic.lr)
        learns = plan.step >= start
        totals, norms, critic_norms, skipped = StepTotals(self._device), [], [], 0
        for number, (microbatches, ready) in enumerate(zip(plan.updates, prepared, strict=True), start=1):
            loss = torch.zeros((), dtype=torch.float64, device=self._device)
            for microbatch, found in zip(microbatches, ready, strict=True):
                loss += self._pass(microbatch, trajectories, found, plan, totals, learns=learns)
            norms.append(self._update.clip())
            if self._critic_update is not None:
                critic_norms.append(self._critic_update.clip())
            trained = sum(s.lengths.trained for microbatch in microbatches for s in microbatch)
            place = f"update {number} of {len(plan.updates)} in optimizer step {plan.step}"
            if not self._agree(loss, trained, [norms[-1], *critic_norms[-1:]], place):
                self._drop_gradients()
                skipped += 1
                continue
            if learns:
                self._update.step(rate)
            if self._critic_update is not None:
                self._critic_update.step(critic_rate)
        return totals.reduce(norms, rate, critic_norms, skipped)

    def _pass(
        self,
        microbatch: Microbatch,
        trajectories: Mapping[TrajectoryKey, Trajectory],
        prepared: Prepared,
        plan: RankPlan,
        totals: StepTotals,
        *,
        learns: bool,
    ) -> torch.Tensor:
        """Forward and backward through one micro-batch; its part of what is minimised, the critic's included.
        `learns`: whether the policy does, or the critic alone."""
        batch = pack(microbatch, trajectories, predict="trained", device=self._device, step=plan.step)
        with torch.set_grad_enabled(learns):
            logprobs, entropy, *routed = self._policy(batch.tokens, self._temperature, routing=self._routes)
            part, seen = self._objective(self._inputs(batch, prepared, logprobs, entropy))
            if self._routes:
                part = part + self._balance(batch, prepared, routed[1], totals)
        if learns:
            (part * self._world_size).backward()
        totals.add(part, seen, batch)
        totals.add_sums(prepared.sums)
        if self._critic is None:
            return part.detach()
        return part.detach() + self._critic_pass(batch, prepared, totals)

    def _balance(
        self, batch: PackedBatch, prepared: Prepared, probabilities: torch.Tensor, totals: StepTotals
    ) -> torch.Tensor:
        """The micro-batch's part of the load-balancing loss."""
        assert prepared.routed is not None, "prepared with the routing"
        assert prepared.routed_tokens is not None, "prepared with the routing"
        assert prepared.token_share is not None, "prepared with the routing"
        real = probabilities * (batch.num_tokens > 0)
        part = balance_loss(prepared.routed, real, prepared.routed_tokens.float())
        totals.add_sums(((Metric.ROUTER_BALANCE, part.detach() / prepared.token_share),))
        return self._spec.algorithm.router_aux_coefficient * part

    def _critic_pass(self, batch: PackedBatch, prepared: Prepared, totals: StepTotals) -> torch.Tensor:
        """Forward and backward of the critic; its mean loss over the trained tokens of the update, this rank's part."""
        assert self._critic is not None, "it has one"
        assert prepared.values is not None, "prepared with the critic"
        assert prepared.returns is not None, "prepared with the critic"
        assert prepared.token_share is not None, "prepared with the critic"
        clip = self._spec.algorithm.critic.clip
        values = self._critic(batch.tokens)
        losses = value_loss(values, prepared.values, prepared.returns, batch.mask, clip=clip)
        part = losses.sum() * prepared.token_share.float()
        (part * self._world_size).backward()
        touched = value_clipped(values, prepared.values, prepared.returns, batch.mask, clip=clip)
        totals.add_sums(((Metric.CRITIC_LOSS, losses.detach().sum()), (Metric.CRITIC_CLIPPED, touched.sum())))
        return part.detach()

    def _inputs(
        self, batch: PackedBatch, prepared: Prepared, logprobs: torch.Tensor, entropy: torch.Tensor
    ) -> LossInputs:
        algorithm = self._spec.algorithm
        old = batch.behavior_logprobs
        if algorithm.ratio == "proximal" and algorithm.proximal == "log_linear":
            old = log_linear(logprobs, batch.behavior_logprobs, batch.lags)
        elif algorithm.ratio == "proximal":  # the policy before a single update is the policy itself
            old = logprobs.detach() if prepared.before_logprobs is None else prepared.before_logprobs
        return replace(
            batch.inputs(logprobs, old, entropy),
            advantages=batch.advantages if prepared.advantages is None else prepared.advantages,
            reference_logprobs=prepared.reference_logprobs,
            fitted=prepared.fitted,
        )

    def _policy_pass(self, tokens: PackedTokens) -> tuple[torch.Tensor, ...]:
        """Log-probabilities, and how often experts were chosen; see `Preparer`."""
        found = self._policy(tokens, self._temperature, routing=self._routes)
        return found[0], *found[2:3]

    def _reference_logprobs(self, tokens: PackedTokens) -> torch.Tensor:
        with self._models.reference() as reference:
            return reference(tokens, self._temperature)[0]

    def reference_kl(
        self, plan: RankPlan, trajectories: Mapping[TrajectoryKey, Trajectory]
    ) -> dict[TrajectoryKey, float]:
        """See `TrainBackend`. The step that follows does not ask the reference again."""
        self._models.train(False)
        return self._preparer.reference_kl(plan, trajectories)

    @torch.no_grad()
    def logprobs(
        self, plan: RankPlan, trajectories: Mapping[TrajectoryKey, Trajectory]
    ) -> dict[TrajectoryKey, torch.Tensor]:
        """[T] float32 on the CPU for each sequence of this rank, at temperature 1; see `TrainBackend`."""
        self._models.train(False)
        found: dict[TrajectoryKey, torch.Tensor] = {}
        for microbatch in plan.microbatches:
            batch: PackedBatch = pack(microbatch, trajectories, predict="response", device=self._device)
            logprobs = self._policy(batch.tokens, 1.0)[0]
            counts = [s.lengths.response for s in microbatch]
            parts = logprobs[: sum(counts)].cpu().split(counts)  # nothing predicted still gives one placeholder
            found.update(((s.ordinal, s.index), part) for s, part in zip(microbatch, parts, strict=True))
        return found

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        return self._publication.specs()

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TrainBackend`. Tensors lie on the trainer's device; one may share memory with the master weights where
        nothing had to be gathered or cast, so take it before the next step."""
        return self._publication.tensors()

    def capture(self) -> None:
        self._captured = None  # freed before the next one is made
        live = self._live_state() | self._facts()
        self._captured = sharded_state.capture(live, rank=self._rank, device=self._device)

    def save(self, directory: Path) -> None:
        """See `TrainBackend`. Raises StorageError: it cannot be written there."""
        captured, self._captured = self._captured, None
        if captured is None:
            raise RuntimeError("save was called before capture")
        sharded_state.save(directory, captured, self._saving)

    def load(self, directory: Path) -> None:
        """Raises ConfigError: there is no checkpoint below `directory`, or it is of another model."""
        facts = self._facts()
        written = sharded_state.read_entries(directory, facts)
        lora.check_same(facts, written)
        trainer, now, then = self._spec.trainer, self._spec.total_steps, written.get(sharded_state.TOTAL_STEPS)
        follows_length = trainer.schedule != "constant" and trainer.decay_steps is None
        if follows_length and self._rank == 0 and then is not None and int(then) != now:
            logger.warning(
                "the learning rate jumps: it fell towards step %d, and now falls towards run.max_steps=%d; "
                "trainer.decay_steps=%d keeps its curve",
                int(then),
                now,
                int(then),
            )
        sharded_state.load(directory, self._live_state(), rank=self._rank, device=self._device)

    def _live_state(self) -> dict[str, torch.Tensor]:
        found = sharded_state.of_model("model", self._policy.causal_lm, "optimizer", self._update.optimizer)
        if self._critic is not None and self._critic_update is not None:
            found |= sharded_state.of_model("critic", self._critic, "critic_optimizer", self._critic_update.optimizer)
        return found

    def _facts(self) -> dict[str, torch.Tensor]:
        """What a checkpoint says beside the state that is loaded."""
        total = torch.tensor(self._spec.total_steps, dtype=torch.int64)
        return self._models.lora_facts() | {sharded_state.TOTAL_STEPS: total}

    def _agree(self, loss: torch.Tensor, trained: int, norms: Sequence[float], place: str) -> bool:
        """Whether the update trains a token on any rank. All ranks see the same reduced numbers, so all of them raise.

        Raises:
            RunFailed: loss or gradient is not finite; the gradients are forgotten.
        """
        sums = torch.stack([loss, loss.new_tensor(trained)])
        dist.all_reduce(sums)
        whole, tokens = sums.tolist()
        if math.isfinite(whole) and all(math.isfinite(norm) for norm in norms):
            return tokens > 0
        self._drop_gradients()
        raise RunFailed(
            explain(
                place,
                f"loss={whole}, gradient norm={', '.join(map(str, norms))}; this update changed no weights",
                "lower trainer.lr, or look for odd rewards in samples.jsonl",
            )
        )

    def _drop_gradients(self) -> None:
        self._update.drop()
        if self._critic_update is not None:
            self._critic_update.drop()
