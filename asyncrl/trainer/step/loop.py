"""The training step: prepares once, then for each update computes gradients, checks them and steps the optimizers.

It does not know how a model is sharded: it sees the micro-batches of its data-parallel index, `Model`s, and sums over
`Peers`. Each token's loss is weighted by its share of the update, so the result does not depend on packing or on the
number of ranks.

A step may make several updates over the same groups. What it prepares, by passes without gradient (log-probabilities,
values and the token advantages computed from them), uses the weights before the first update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from asyncrl.algorithms import build_objective, build_token_advantage
from asyncrl.algorithms.kl import kl_estimate
from asyncrl.algorithms.loss import Correction, FittedCorrection, LossInputs, masked
from asyncrl.algorithms.objective import LossStatistics
from asyncrl.algorithms.proximal import log_linear
from asyncrl.algorithms.returns import token_rewards, whitened, whitening_sums
from asyncrl.algorithms.router_balance import balance_weights
from asyncrl.algorithms.value_loss import value_clipped, value_loss
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.algorithm_parts import ADVANTAGES
from asyncrl.config.trainer import TrainerConfig
from asyncrl.errors import RunFailed, explain
from asyncrl.trainer.step.batch import PackedBatch, PackedTokens, Trajectories, pack
from asyncrl.trainer.step.model import Part, Peers, StepModels, TokenOutputs
from asyncrl.trainer.step.totals import ERRORS, ERRORS_SQUARED, RETURNS, RETURNS_SQUARED, StepTotals
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl.types import Microbatch, RankPlan, TrainMetrics, TrajectoryKey
from asyncrl.types.metrics import Metric


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Prepared values of one micro-batch; each tensor is [n] float32, or None if not needed.

    Attributes:
        before_logprobs: log-probabilities under the policy before the step.
        advantages: replace the plan's.
        returns: targets of the critic.
        token_share: [] float64, 1 / trained tokens of the update on all ranks.
        fitted: see `LossInputs`.
        routed: [L, E] float32. Until `_with_routing`: how often each expert was chosen; then, for the update on all
            ranks, mean number of a token's experts.
        routed_tokens: [] float64, tokens of the update on all ranks, prompts included.
        sums: (metric, scalar) for the totals of the step.
    """

    before_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    token_share: torch.Tensor | None = None
    fitted: Mapping[str, torch.Tensor] = field(default_factory=dict)
    routed: torch.Tensor | None = None
    routed_tokens: torch.Tensor | None = None
    sums: tuple[tuple[str, torch.Tensor], ...] = ()


class Preparer:
    """Computes `Prepared` for the micro-batches of a step. Owns the reference's log-probabilities for the next step."""

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        models: StepModels,
        *,
        peers: Peers,
        device: torch.device,
        pack: Callable[..., PackedBatch],
    ) -> None:
        """`pack`: `batch.pack` for the trained tokens."""
        self._algorithm, self._models, self._peers = algorithm, models, peers
        self._device, self._pack = device, pack
        self._advantage = ADVANTAGES[algorithm.advantage]
        self._of_tokens = build_token_advantage(algorithm.advantage)
        self._known: dict[TrajectoryKey, torch.Tensor] = {}
        """Reference log-probabilities of the trained tokens, computed by `reference_kl` for the next step."""

    @torch.no_grad()
    def prepare(
        self, plan: RankPlan, trajectories: Trajectories, corrections: Sequence[tuple[str, Correction]]
    ) -> list[list[Prepared]]:
        """One `Prepared` per micro-batch of each update. Collective when a pass is needed.

        Args:
            corrections: (name, correction) of the objective.
        """
        algorithm = self._algorithm
        fits = [(name, c) for name, c in corrections if isinstance(c, FittedCorrection)]
        recompute = algorithm.ratio == "proximal" and algorithm.proximal == "recompute" and len(plan.updates) > 1
        routes = algorithm.router_aux_coefficient > 0
        asks_policy = recompute or bool(fits) or routes
        makes_advantages = self._of_tokens is not None or self._advantage.whitens
        if not (asks_policy or makes_advantages or self._models.reference):
            return [[Prepared()] * len(update) for update in plan.updates]
        # Later epochs may repeat the same micro-batches, so only distinct updates are prepared.
        distinct, known = self._agree(plan)
        found = []
        for update in plan.updates[:distinct]:
            batches = [self._pack(microbatch, trajectories, step=plan.step) for microbatch in update]
            ready = self._passes(update, batches, known=known, asks_policy=asks_policy)
            if makes_advantages:
                ready = self._with_advantages(ready, batches)
            if fits:
                ready = self._with_fitted(ready, batches, fits)
            if routes:
                ready = self._with_routing(ready, batches)
            found.append(ready)
        self._known = {}
        return [found[number % distinct] for number in range(len(plan.updates))]

    @torch.no_grad()
    def reference_kl(self, plan: RankPlan, trajectories: Trajectories) -> dict[TrajectoryKey, float]:
        """Divergence of every trajectory of this rank; see `TrainBackend`. Collective over ranks."""
        if self._models.reference is None:
            raise ValueError("reference_kl was called, and algorithm.kl.coefficient=0 loads no reference")
        self._known, found = {}, {}
        distinct, _ = self._agree(plan)
        microbatches = [m for update in plan.updates[:distinct] for m in update]
        batches = [self._pack(m, trajectories, step=plan.step) for m in microbatches]
        outputs = self._models.reference.evaluate([batch.tokens for batch in batches])
        for microbatch, batch, output in zip(microbatches, batches, outputs, strict=True):
            logprobs = output.logprobs
            kl = self._divergence(batch, logprobs)
            counts = [s.lengths.trained for s in microbatch]
            for s, part, nats in zip(
                microbatch, logprobs[: sum(counts)].split(counts), kl[: sum(counts)].split(counts), strict=True
            ):
                self._known[s.ordinal, s.index] = part
                found[s.ordinal, s.index] = float(nats.double().sum())
        return found

    def _divergence(self, batch: PackedBatch, reference: torch.Tensor) -> torch.Tensor:
        """[n]: divergence of the sampling policy from the reference, estimated from each token."""
        return kl_estimate(batch.behavior_logprobs, reference, self._algorithm.kl.estimator, batch.mask)

    def _agree(self, plan: RankPlan) -> tuple[int, bool]:
        """Number of distinct updates (the others are later epochs), and whether every rank already knows the
        reference's log-probabilities. Collective: all ranks must make the same passes."""
        keys = [[[(s.ordinal, s.index) for s in microbatch] for microbatch in update] for update in plan.updates]
        # a rank without sequences must not force further passes: it reports no distinct updates and nothing unknown
        missing = any(key not in self._known for update in keys for run in update for key in run)
        # The smallest period of the updates: later epochs may repeat the same micro-batches.
        distinct = next(n for n in range(1, len(keys) + 1) if keys[n:] == keys[:-n])
        agreed = self._peers.largest(torch.tensor([distinct, int(missing)], device=self._device))
        return int(agreed[0]), not bool(agreed[1])

    def _passes(
        self, update: Sequence[Microbatch], batches: Sequence[PackedBatch], *, known: bool, asks_policy: bool
    ) -> list[Prepared]:
        """The passes without gradient over one update; collective."""
        models, tokens = self._models, [batch.tokens for batch in batches]
        ready = [Prepared()] * len(batches)
        if asks_policy:
            outputs = models.policy.evaluate(tokens)
            ready = [Prepared(before_logprobs=output.logprobs, routed=output.chosen) for output in outputs]
        if models.reference is not None:
            found = (
                [self._known_logprobs(microbatch, batch) for microbatch, batch in zip(update, batches, strict=True)]
                if known
                else [output.logprobs for output in models.reference.evaluate(tokens)]
            )
            ready = [replace(p, reference_logprobs=logprobs) for p, logprobs in zip(ready, found, strict=True)]
        if models.critic is not None:
            values = models.critic.evaluate(tokens)
            ready = [replace(p, values=value) for p, value in zip(ready, values, strict=True)]
        return ready

    def _known_logprobs(self, microbatch: Microbatch, batch: PackedBatch) -> torch.Tensor:
        """Log-probabilities computed by `reference_kl`. A micro-batch without predictions has one placeholder."""
        parts = [self._known[s.ordinal, s.index] for s in microbatch]
        found = torch.cat([batch.behavior_logprobs[:0], *parts])
        return found if len(found) else torch.zeros_like(batch.behavior_logprobs)

    def _with_fitted(
        self, ready: list[Prepared], batches: Sequence[PackedBatch], fits: Sequence[tuple[str, FittedCorrection]]
    ) -> list[Prepared]:
        """Adds the corrections' fitted values of one update; collective."""
        inputs = []
        for prepared, batch in zip(ready, batches, strict=True):
            before = prepared.before_logprobs
            assert before is not None, "fitted corrections ask the policy"
            inputs.append(batch.inputs(before, before, torch.zeros_like(before)))
        fitted = {name: correction.fit(inputs, self._peers.add_up) for name, correction in fits}
        return [replace(prepared, fitted=fitted) for prepared in ready]

    def _with_routing(self, ready: list[Prepared], batches: Sequence[PackedBatch]) -> list[Prepared]:
        """Adds the load of each expert in one update; collective. The placeholder row of an empty micro-batch does not
        count."""
        counts = [p.routed.double() for p in ready if p.routed is not None]
        real = torch.tensor([batch.num_tokens for batch in batches], device=self._device)
        whole = self._peers.add_up((torch.stack(counts) * (real > 0)[:, None, None]).sum(0))
        trained = torch.stack([batch.mask.sum() for batch in batches]).sum()
        tokens = self._peers.add_up(torch.stack([real.sum(), trained]).double()).clamp(min=1)
        routed = (whole / tokens[0]).float()
        return [replace(p, routed=routed, routed_tokens=tokens[0], token_share=1 / tokens[1]) for p in ready]

    def _with_advantages(self, ready: list[Prepared], batches: Sequence[PackedBatch]) -> list[Prepared]:
        """Adds the token advantages of one update; collective, since whitening uses the tokens of all ranks."""
        raw = [self._raw_advantages(p, batch) for p, batch in zip(ready, batches, strict=True)]
        sums = torch.zeros(3, dtype=torch.float64, device=self._device)
        for (advantages, _), batch in zip(raw, batches, strict=True):
            sums += whitening_sums(advantages, batch.mask)
        sums, whitens = self._peers.add_up(sums), self._advantage.whitens and self._algorithm.gae.whiten
        found = []
        for prepared, (advantages, returns), batch in zip(ready, raw, batches, strict=True):
            final = whitened(advantages, sums) if whitens else advantages
            watched = self._watched(prepared, advantages, returns, batch.mask)
            share = 1 / sums[0].clamp(min=1)
            found.append(replace(prepared, advantages=final, returns=returns, token_share=share, sums=watched))
        return found

    def _raw_advantages(self, prepared: Prepared, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Advantages before whitening, and the targets of the critic, if any."""
        if self._of_tokens is None:
            return batch.advantages, None
        kl, penalties = self._algorithm.kl, None
        if prepared.reference_logprobs is not None and kl.place == "reward":
            penalties = kl.coefficient * self._divergence(batch, prepared.reference_logprobs)
        rewards = token_rewards(batch.advantages, batch.sequences, penalties)
        return self._of_tokens(rewards, prepared.values, batch.sequences, self._algorithm.gae)

    def _watched(
        self, prepared: Prepared, advantages: torch.Tensor, returns: torch.Tensor | None, mask: torch.Tensor
    ) -> tuple[tuple[str, torch.Tensor], ...]:
        if self._of_tokens is None:
            return ()
        found = [(Metric.ADVANTAGE_MEAN, advantages)]
        if prepared.values is not None and returns is not None:
            error = returns - prepared.values
            found += [(Metric.CRITIC_VALUE, prepared.values), (RETURNS, returns), (RETURNS_SQUARED, returns.square())]
            found += [(ERRORS, error), (ERRORS_SQUARED, error.square())]
        return tuple((name, masked(tokens.double(), mask).sum()) for name, tokens in found)


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
