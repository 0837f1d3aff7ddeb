"""The training step: prepares once, then for each update computes gradients, checks them and steps the optimizers.

It does not know how a model is sharded: it sees the micro-batches of its data-parallel index, `Model`s, and sums over
`Peers`. Each token's loss is weighted by its share of the update, so the result does not depend on packing or on the
number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from asyncrl.algorithms import build_objective
from asyncrl.algorithms.loss import LossInputs
from asyncrl.algorithms.objective import LossStatistics
from asyncrl.algorithms.proximal import log_linear
from asyncrl.algorithms.router_balance import balance_weights
from asyncrl.algorithms.value_loss import value_clipped, value_loss
from asyncrl.config.trainer import TrainerConfig
from asyncrl.errors import RunFailed, explain
from asyncrl.trainer.step.batch import PackedBatch, PackedTokens, Trajectories, pack
from asyncrl.trainer.step.model import Part, Peers, StepModels, TokenOutputs
from asyncrl.trainer.step.prepare import Prepared, Preparer
from asyncrl.trainer.step.totals import StepTotals
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl.types import Microbatch, RankPlan, TrainMetrics, TrajectoryKey
from asyncrl.types.metrics import Metric


class TrainingStep:
    """Implements `train_step`, `logprobs` and `reference_kl` of `TrainBackend`, over the models of any backend."""

    def __init__(
        self,
        spec: TrainerSpec,
        models: StepModels,
        *,
        peers: Peers,
        device: torch.device,
        share_prompts: bool = False,
    ) -> None:
        """
        Args:
            device: of the micro-batches.
            share_prompts: the models support rows in which sequences share tokens; see `PackedLayout`.
        """
        self._spec, self._models, self._peers, self._device = spec, models, peers, device
        self._in_training = [model for model in (models.policy, models.critic) if model is not None]
        self._objective, self._correction_bounds = build_objective(spec.algorithm), 1.0
        self._replayed = ("experts",) if spec.trainer.router_replay == "rollout" else ()
        self._pack = partial(
            pack,
            predict="trained",
            device=device,
            temperature=spec.temperature or 1.0,
            # No sharing under a balance loss, where each token counts once: shared prompts would count less. Nor under
            # replay: the last token of a prompt has recorded experts for each response.
            share_prompts=share_prompts and spec.algorithm.router_aux_coefficient == 0 and not self._replayed,
            extra=(*spec.algorithm.distillation.token_arrays, *self._replayed, *("kept_ids",) * spec.over_kept),
        )
        self._preparer = Preparer(
            spec.algorithm,
            models,
            peers=peers,
            device=device,
            pack=self._pack,
        )

    def train_step(self, plan: RankPlan, trajectories: Trajectories) -> TrainMetrics:
        """The updates of one step; see `TrainBackend`. An update without a trained token on any rank is skipped:
        momentum and weight decay would otherwise change the weights.

        Raises:
            RunFailed: loss or gradient is not finite. The failed update has changed neither weights nor optimizers.
            ValueError: a trajectory is missing or differs from its plan.
        """
        # Phase 1: everything without a gradient, under the weights before the first update and without dropout.
        self._train(False)
        if plan.correction_bounds != self._correction_bounds:
            algorithm = self._spec.algorithm
            self._objective = build_objective(algorithm.closer(plan.correction_bounds))
            self._correction_bounds = plan.correction_bounds
        prepared = self._preparer.prepare(plan, trajectories, self._objective.corrections)
        self._train(True)
        spec, policy, critic = self._spec, self._models.policy, self._models.critic
        start = spec.algorithm.critic.warmup_steps if critic is not None else 0
        rate = learning_rate(spec.trainer, plan.step, spec.total_steps, start=start)
        critic_rate = learning_rate(spec.trainer, plan.step, spec.total_steps, peak=spec.algorithm.critic.lr)
        learns = plan.step >= start
        # Phase 2: one update per entry of the plan.
        totals, norms, critic_norms, skipped = StepTotals(self._device), [], [], 0
        for number, (update, ready) in enumerate(zip(plan.updates, prepared, strict=True), start=1):
            batches = [self._pack(microbatch, trajectories, step=plan.step) for microbatch in update]
            silent = plan.silent[number - 1] if plan.silent else 0
            loss = self._gradients(batches, ready, totals, learns=learns, silent=silent)
            norms.append(policy.clip_gradients())
            if critic is not None:
                critic_norms.append(critic.clip_gradients())
            place = f"update {number} of {len(plan.updates)} in optimizer step {plan.step}"
            # Checked before any optimizer steps: a NaN on one rank stops all ranks with their weights intact.
            if not self._agree(loss, update, [norms[-1], *critic_norms[-1:]], place):
                self._drop_gradients()
                skipped += 1
                continue
            if learns:
                policy.update(rate)
            if critic is not None:
                critic.update(critic_rate)
        return totals.reduce(self._peers, norms, rate, critic_norms, skipped)

    @torch.no_grad()
    def logprobs(self, plan: RankPlan, trajectories: Trajectories) -> dict[TrajectoryKey, torch.Tensor]:
        """[T] float32 on the CPU for each sequence of the plan, at temperature 1; see `TrainBackend`."""
        self._train(False)
        batches = [
            self._pack(m, trajectories, predict="response", temperature=1.0, extra=self._replayed)
            for m in plan.microbatches
        ]
        found: dict[TrajectoryKey, torch.Tensor] = {}
        outputs = self._models.policy.evaluate([batch.tokens for batch in batches])
        for microbatch, output in zip(plan.microbatches, outputs, strict=True):
            counts = [s.lengths.response for s in microbatch]
            parts = output.logprobs[: sum(counts)].cpu().split(counts)  # without predictions there is one placeholder
            found.update(((s.ordinal, s.index), part) for s, part in zip(microbatch, parts, strict=True))
        return found

    def reference_kl(self, plan: RankPlan, trajectories: Trajectories) -> dict[TrajectoryKey, float]:
        """See `TrainBackend`. The next step reuses the reference's log-probabilities."""
        self._train(False)
        return self._preparer.reference_kl(plan, trajectories)

    def _train(self, mode: bool) -> None:
        for model in self._in_training:
            model.train(mode)

    def _gradients(
        self,
        batches: Sequence[PackedBatch],
        ready: Sequence[Prepared],
        totals: StepTotals,
        *,
        learns: bool,
        silent: int,
    ) -> torch.Tensor:
        """Forward and backward through one update; returns this rank's part of the minimised loss, including the
        critic's, [] float64. `learns`: True trains the policy; False trains only the critic. `silent`: as in
        `RankPlan`."""
        parts = self._models.policy.forward_backward(
            [self._balanced(batch, prepared) for batch, prepared in zip(batches, ready, strict=True)],
            lambda at, output: Part(*self._objective(self._inputs(batches[at], ready[at], output))),
            learns=[learns and at >= silent for at in range(len(batches))],
        )
        parts = [self._with_balance(part, prepared) for part, prepared in zip(parts, ready, strict=True)]
        for part, batch, prepared in zip(parts, batches, ready, strict=True):
            totals.add(part, batch)
            totals.add_sums(prepared.sums)
        if self._models.critic is not None:
            critic_parts = self._models.critic.forward_backward(
                [batch.tokens for batch in batches],
                lambda at, values: self._critic_part(batches[at], ready[at], values),
                learns=[True] * len(batches),
            )
            for part in critic_parts:
                totals.add_sums(part.seen.sums)
            parts = [*parts, *critic_parts]
        return torch.stack([part.loss.double() for part in parts]).sum()

    def _balanced(self, batch: PackedBatch, prepared: Prepared) -> PackedTokens:
        """The micro-batch with the weights of its load-balancing loss, if any."""
        coefficient = self._spec.algorithm.router_aux_coefficient
        if not coefficient:
            return batch.tokens
        assert prepared.routed is not None, "prepared with the routing"
        assert prepared.routed_tokens is not None, "prepared with the routing"
        weights = balance_weights(prepared.routed, prepared.routed_tokens.float())
        return replace(batch.tokens, balance=weights * (coefficient * (batch.num_tokens > 0)))

    def _with_balance(self, part: Part, prepared: Prepared) -> Part:
        """The part with its load-balancing loss in loss and metrics."""
        if part.balance is None:
            return part
        assert prepared.token_share is not None, "prepared with the routing"
        share = prepared.token_share * self._spec.algorithm.router_aux_coefficient
        watched = (Metric.ROUTER_BALANCE, part.balance / share)
        return Part(part.total, replace(part.seen, sums=(watched, *part.seen.sums)))

    def _critic_part(self, batch: PackedBatch, prepared: Prepared, values: torch.Tensor) -> Part:
        """The micro-batch's part of the critic's mean loss over the trained tokens of the update."""
        assert prepared.values is not None, "prepared with the critic"
        assert prepared.returns is not None, "prepared with the critic"
        assert prepared.token_share is not None, "prepared with the critic"
        clip = self._spec.algorithm.critic.clip
        losses = value_loss(values, prepared.values, prepared.returns, batch.mask, clip=clip)
        touched = value_clipped(values, prepared.values, prepared.returns, batch.mask, clip=clip)
        sums = ((Metric.CRITIC_LOSS, losses.detach().sum()), (Metric.CRITIC_CLIPPED, touched.sum()))
        loss = losses.sum() * prepared.token_share.float()
        return Part(loss, LossStatistics(sums, ratio_max=loss.new_zeros(())))

    def _inputs(self, batch: PackedBatch, prepared: Prepared, output: TokenOutputs) -> LossInputs:
        algorithm, logprobs = self._spec.algorithm, output.logprobs
        old = batch.behavior_logprobs
        if algorithm.ratio == "proximal" and algorithm.proximal == "log_linear":
            old = log_linear(logprobs, batch.behavior_logprobs, batch.lags)
        elif algorithm.ratio == "proximal":  # in a step of one update the policy before the step is the policy itself
            old = logprobs.detach() if prepared.before_logprobs is None else prepared.before_logprobs
        return replace(
            batch.inputs(logprobs, old, output.entropy),
            advantages=batch.advantages if prepared.advantages is None else prepared.advantages,
            reference_logprobs=prepared.reference_logprobs,
            top_logprobs=output.others,
            fitted=prepared.fitted,
        )

    def _agree(self, loss: torch.Tensor, update: Sequence[Microbatch], norms: Sequence[float], place: str) -> bool:
        """True when the update trains a token on any rank. All ranks see the same reduced numbers, so all of them
        raise.

        Raises:
            RunFailed: loss or gradient is not finite; the gradients are dropped.
        """
        trained = sum(s.lengths.trained for microbatch in update for s in microbatch)
        whole, tokens = self._peers.add_up(torch.stack([loss, loss.new_tensor(trained)])).tolist()
        if math.isfinite(whole) and all(math.isfinite(norm) for norm in norms):
            return tokens > 0
        self._drop_gradients()
        found = f"loss={whole}, gradient norm={', '.join(map(str, norms))}; this update changed no weights"
        raise RunFailed(explain(place, found, "lower trainer.lr, or look for odd rewards in samples.jsonl"))

    def _drop_gradients(self) -> None:
        for model in self._in_training:
            model.drop_gradients()


# The learning rate is a pure function of the step: a resumed run needs no scheduler state.


def learning_rate(
    config: TrainerConfig, step: int, total_steps: int, *, peak: float | None = None, start: int = 0
) -> float:
    """The rate of the optimizer step that starts at `global_steps == step`.

        step < start           0
        n = step - start < w   peak * (n + 1) / w, with w = warmup_steps
        then                   by `schedule` from peak to peak * min_lr_fraction
        step >= end            peak * min_lr_fraction

    `start`: first step that trains. The end is `decay_steps`, or `total_steps` if that is not set. `peak` None: `lr`.

    Raises ValueError: `step` is negative."""
    if step < 0:
        raise ValueError(f"step is {step}; global_steps counts from 0")
    if step < start:
        return 0.0
    peak, number, warmup = config.lr if peak is None else peak, step - start, config.warmup_steps
    if number < warmup:
        return peak * (number + 1) / warmup
    if config.schedule == "constant":
        return peak
    decay_steps = (config.decay_steps or total_steps) - start
    done = min(1.0, (number - warmup) / max(decay_steps - warmup, 1))
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * (config.min_lr_fraction + (1 - config.min_lr_fraction) * left)
