"""What an update needs to know before it begins: passes without gradient, and the token advantages made from them.

One step may take several updates over the same groups; all that is prepared is of the weights before the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from asyncrl.algorithms.gae import gae_advantages
from asyncrl.algorithms.kl import kl_estimate
from asyncrl.algorithms.loss import Correction, FittedCorrection, masked
from asyncrl.algorithms.returns import discounted_returns, token_rewards, whitened, whitening_sums
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.trainer.fsdp.batch import PackedBatch, PackedTokens, pack
from asyncrl.trainer.fsdp.totals import ERRORS, ERRORS_SQUARED, RETURNS, RETURNS_SQUARED
from asyncrl.trainer.planner import TOKEN_ADVANTAGES
from asyncrl.types import Microbatch, RankPlan, Trajectory, TrajectoryKey
from asyncrl.types.metrics import Metric

TokenLogprobs = Callable[[PackedTokens], torch.Tensor]
"""[n] float32 of the predicted tokens; without gradient. Collective over ranks."""
TokenValues = TokenLogprobs
PolicyPass = Callable[[PackedTokens], tuple[torch.Tensor, ...]]
"""The same, and with a load-balancing loss how often each expert was chosen, [L, E] float32."""
Trajectories = Mapping[TrajectoryKey, Trajectory]

WHITENED = (*TOKEN_ADVANTAGES, "reinforce_plus_plus_baseline")
"""Advantages that the spread over an update scales."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Of one micro-batch; each tensor [n] float32, None where nothing asks for it.

    Attributes:
        before_logprobs: of the policy before the step.
        advantages: what takes the place of the plan's.
        returns: what the critic learns.
        token_share: [] float64, 1 / trained tokens of the update on all ranks.
        fitted: what corrections have found for the update, see `LossInputs`.
        routed: [L, E] float32. In the pass: how often each expert was chosen; then, for the update on all ranks, by
            how many of a token's experts.
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
    """Args:
    policy, reference: log-probabilities under the policy now and under the reference model; None without one.
    values: of the critic; None without one.
    corrections: those of the objective, with their names.
    """

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        device: torch.device,
        *,
        corrections: Sequence[tuple[str, Correction]],
        policy: PolicyPass,
        reference: TokenLogprobs | None,
        values: TokenValues | None,
    ) -> None:
        self._algorithm, self._device = algorithm, device
        self._fitted = [(name, c) for name, c in corrections if isinstance(c, FittedCorrection)]
        self._policy, self._reference, self._values = policy, reference, values
        self._known: dict[TrajectoryKey, torch.Tensor] = {}
        """Log-probabilities of the trained tokens under the reference, found by `reference_kl` for the step to come."""

    @torch.no_grad()
    def prepare(self, plan: RankPlan, trajectories: Trajectories) -> list[list[Prepared]]:
        """One for each micro-batch of each update. Collective when anything is to be found out."""
        algorithm = self._algorithm
        recompute = algorithm.ratio == "proximal" and algorithm.proximal == "recompute" and len(plan.updates) > 1
        routes = algorithm.router_aux_coefficient > 0
        asks_policy = recompute or bool(self._fitted) or routes
        makes_advantages = algorithm.advantage in WHITENED
        if not (asks_policy or makes_advantages or self._reference):
            return [[Prepared()] * len(update) for update in plan.updates]
        distinct, known = self._agree(plan)
        found = []
        for update in plan.updates[:distinct]:
            batches = [pack(m, trajectories, predict="trained", device=self._device, step=plan.step) for m in update]
            ready = [
                self._passes(microbatch, batch, known=known, asks_policy=asks_policy)
                for microbatch, batch in zip(update, batches, strict=True)
            ]
            if makes_advantages:
                ready = self._with_advantages(ready, batches)
            if self._fitted:
                ready = self._with_fitted(ready, batches)
            if routes:
                ready = self._with_routing(ready, batches)
            found.append(ready)
        self._known = {}
        return [found[number % distinct] for number in range(len(plan.updates))]

    @torch.no_grad()
    def reference_kl(self, plan: RankPlan, trajectories: Trajectories) -> dict[TrajectoryKey, float]:
        """Of every trajectory of this rank; see `TrainBackend`. Collective over ranks."""
        if self._reference is None:
            raise ValueError("reference_kl was called, and algorithm.kl.coefficient=0 loads no reference")
        self._known, found = {}, {}
        distinct, _ = self._agree(plan)
        for microbatch in (m for update in plan.updates[:distinct] for m in update):
            batch = pack(microbatch, trajectories, predict="trained", device=self._device, step=plan.step)
            logprobs = self._reference(batch.tokens)
            kl = self._divergence(batch, logprobs)
            counts = [s.lengths.trained for s in microbatch]
            for s, part, nats in zip(
                microbatch, logprobs[: sum(counts)].split(counts), kl[: sum(counts)].split(counts), strict=True
            ):
                self._known[s.ordinal, s.index] = part
                found[s.ordinal, s.index] = float(nats.double().sum())
        return found

    def _divergence(self, batch: PackedBatch, reference: torch.Tensor) -> torch.Tensor:
        """[n]: of the policy that sampled the token from the reference, as estimated from it."""
        return kl_estimate(batch.behavior_logprobs, reference, self._algorithm.kl.estimator, batch.mask)

    def _agree(self, plan: RankPlan) -> tuple[int, bool]:
        """How many updates differ (the rest are later epochs), and whether every rank knows the reference's
        log-probabilities already. Collective: all ranks must make the same passes."""
        keys = [[[(s.ordinal, s.index) for s in microbatch] for microbatch in update] for update in plan.updates]
        # a rank without a sequence sees no difference between updates, and misses nothing
        missing = any(key not in self._known for update in keys for run in update for key in run)
        distinct = next(n for n in range(1, len(keys) + 1) if keys[n:] == keys[:-n])
        agreed = torch.tensor([distinct, int(missing)], device=self._device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return int(agreed[0]), not bool(agreed[1])

    def _passes(self, microbatch: Microbatch, batch: PackedBatch, *, known: bool, asks_policy: bool) -> Prepared:
        before, *routed = self._policy(batch.tokens) if asks_policy else (None,)
        reference = None
        if self._reference is not None and known:
            parts = [self._known[s.ordinal, s.index] for s in microbatch]
            reference = torch.cat([batch.behavior_logprobs[:0], *parts])
            reference = reference if len(reference) else torch.zeros_like(batch.behavior_logprobs)
        elif self._reference is not None:
            reference = self._reference(batch.tokens)
        return Prepared(
            before_logprobs=before,
            reference_logprobs=reference,
            values=None if self._values is None else self._values(batch.tokens),
            routed=routed[0] if routed else None,
        )

    def _with_fitted(self, ready: list[Prepared], batches: Sequence[PackedBatch]) -> list[Prepared]:
        """What corrections find in one update; collective."""
        inputs = []
        for prepared, batch in zip(ready, batches, strict=True):
            before = prepared.before_logprobs
            assert before is not None, "fitted corrections ask the policy"
            inputs.append(batch.inputs(before, before, torch.zeros_like(before)))
        fitted = {name: correction.fit(inputs, _add_up) for name, correction in self._fitted}
        return [replace(prepared, fitted=fitted) for prepared in ready]

    def _with_routing(self, ready: list[Prepared], batches: Sequence[PackedBatch]) -> list[Prepared]:
        """The load of each expert in one update; collective. A row that only holds a rank's place does not count."""
        counts = [p.routed.double() for p in ready if p.routed is not None]
        real = torch.tensor([batch.num_tokens for batch in batches], device=self._device)
        whole = _add_up((torch.stack(counts) * (real > 0)[:, None, None]).sum(0))
        trained = torch.stack([batch.mask.sum() for batch in batches]).sum()
        tokens = _add_up(torch.stack([real.sum(), trained]).double()).clamp(min=1)
        routed = (whole / tokens[0]).float()
        return [replace(p, routed=routed, routed_tokens=tokens[0], token_share=1 / tokens[1]) for p in ready]

    def _with_advantages(self, ready: list[Prepared], batches: Sequence[PackedBatch]) -> list[Prepared]:
        """Of one update; collective, since the update's tokens are those of all ranks."""
        raw = [self._raw_advantages(p, batch) for p, batch in zip(ready, batches, strict=True)]
        sums = torch.zeros(3, dtype=torch.float64, device=self._device)
        for (advantages, _), batch in zip(raw, batches, strict=True):
            sums += whitening_sums(advantages, batch.mask)
        sums = _add_up(sums)
        found = []
        for prepared, (advantages, returns), batch in zip(ready, raw, batches, strict=True):
            final = whitened(advantages, sums) if self._algorithm.gae.whiten else advantages
            watched = self._watched(prepared, advantages, returns, batch.mask)
            share = 1 / sums[0].clamp(min=1)
            found.append(replace(prepared, advantages=final, returns=returns, token_share=share, sums=watched))
        return found

    def _raw_advantages(self, prepared: Prepared, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Advantages before whitening, and with a critic what it learns."""
        algorithm, gae = self._algorithm, self._algorithm.gae
        if algorithm.advantage not in TOKEN_ADVANTAGES:
            return batch.advantages, None
        penalties = None
        if prepared.reference_logprobs is not None and algorithm.kl.place == "reward":
            penalties = algorithm.kl.coefficient * self._divergence(batch, prepared.reference_logprobs)
        rewards = token_rewards(batch.advantages, batch.sequences, penalties)
        if prepared.values is None:
            return discounted_returns(rewards, batch.sequences, gae.gamma), None
        return gae_advantages(rewards, prepared.values, batch.sequences, gae.gamma, gae.lam)

    def _watched(
        self, prepared: Prepared, advantages: torch.Tensor, returns: torch.Tensor | None, mask: torch.Tensor
    ) -> tuple[tuple[str, torch.Tensor], ...]:
        if self._algorithm.advantage not in TOKEN_ADVANTAGES:
            return ()
        found = [(Metric.ADVANTAGE_MEAN, advantages)]
        if prepared.values is not None and returns is not None:
            error = returns - prepared.values
            found += [(Metric.CRITIC_VALUE, prepared.values), (RETURNS, returns), (RETURNS_SQUARED, returns.square())]
            found += [(ERRORS, error), (ERRORS_SQUARED, error.square())]
        return tuple((name, masked(tokens.double(), mask).sum()) for name, tokens in found)


def _add_up(values: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(values)
    return values
