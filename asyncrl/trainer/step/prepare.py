"""Prepares the updates of a step: passes without gradient, and the token advantages computed from them.

A step may make several updates over the same groups. All values here use the weights before the first update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from asyncrl.algorithms import build_token_advantage
from asyncrl.algorithms.kl import kl_estimate
from asyncrl.algorithms.loss import Correction, FittedCorrection, masked
from asyncrl.algorithms.returns import token_rewards, whitened, whitening_sums
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.algorithm_parts import ADVANTAGES
from asyncrl.trainer.step.batch import PackedBatch, Trajectories
from asyncrl.trainer.step.model import Peers, StepModels
from asyncrl.trainer.step.totals import ERRORS, ERRORS_SQUARED, RETURNS, RETURNS_SQUARED
from asyncrl.types import Microbatch, RankPlan, TrajectoryKey
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
