"""What an update needs to know before it begins: passes without gradient, and the token advantages made from them.

One step may take several updates over the same groups; all that is prepared is of the weights before the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from asyncrl.algorithms.gae import gae_advantages
from asyncrl.algorithms.kl import kl_estimate
from asyncrl.algorithms.loss import masked
from asyncrl.algorithms.returns import discounted_returns, token_rewards, whitened, whitening_sums
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.trainer.backend import TrajectoryKey
from asyncrl.trainer.fsdp.batch import PackedBatch, PackedTokens, pack
from asyncrl.trainer.fsdp.totals import ERRORS, ERRORS_SQUARED, RETURNS, RETURNS_SQUARED
from asyncrl.trainer.planner import TOKEN_ADVANTAGES
from asyncrl.types import Microbatch, RankPlan, Trajectory

TokenLogprobs = Callable[[PackedTokens], torch.Tensor]
"""[n] float32 of the predicted tokens; without gradient. Collective over ranks."""
TokenValues = TokenLogprobs
Trajectories = Mapping[TrajectoryKey, Trajectory]

WHITENED = (*TOKEN_ADVANTAGES, "reinforce_plus_plus_baseline")
"""Advantages that the spread over an update scales."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Of one micro-batch; each tensor [n] float32, None where nothing asks for it.

    Attributes:
        advantages: what takes the place of the plan's.
        returns: what the critic learns.
        token_share: [] float64, 1 / trained tokens of the update on all ranks.
        sums: (metric, scalar) for the totals of the step.
    """

    proximal_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    token_share: torch.Tensor | None = None
    sums: tuple[tuple[str, torch.Tensor], ...] = ()


class Preparer:
    """Args:
    policy, reference: log-probabilities under the policy now and under the reference model; None without one.
    values: of the critic; None without one.
    """

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        device: torch.device,
        *,
        policy: TokenLogprobs,
        reference: TokenLogprobs | None,
        values: TokenValues | None,
    ) -> None:
        self._algorithm, self._device = algorithm, device
        self._policy, self._reference, self._values = policy, reference, values
        self._known: dict[TrajectoryKey, torch.Tensor] = {}
        """Log-probabilities of the trained tokens under the reference, found by `reference_kl` for the step to come."""

    @torch.no_grad()
    def prepare(self, plan: RankPlan, trajectories: Trajectories) -> list[list[Prepared]]:
        """One for each micro-batch of each update. Collective when anything is to be found out."""
        algorithm = self._algorithm
        recompute = algorithm.ratio == "proximal" and algorithm.proximal == "recompute" and len(plan.updates) > 1
        makes_advantages = algorithm.advantage in WHITENED
        if not (recompute or makes_advantages or self._reference):
            return [[Prepared()] * len(update) for update in plan.updates]
        distinct, known = self._agree(plan)
        found = []
        for update in plan.updates[:distinct]:
            batches = [pack(m, trajectories, predict="trained", device=self._device, step=plan.step) for m in update]
            ready = [
                self._passes(microbatch, batch, known=known, recompute=recompute)
                for microbatch, batch in zip(update, batches, strict=True)
            ]
            if makes_advantages:
                ready = self._with_advantages(ready, batches)
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

    def _passes(self, microbatch: Microbatch, batch: PackedBatch, *, known: bool, recompute: bool) -> Prepared:
        reference = None
        if self._reference is not None and known:
            parts = [self._known[s.ordinal, s.index] for s in microbatch]
            reference = torch.cat([batch.behavior_logprobs[:0], *parts])
            reference = reference if len(reference) else torch.zeros_like(batch.behavior_logprobs)
        elif self._reference is not None:
            reference = self._reference(batch.tokens)
        return Prepared(
            proximal_logprobs=self._policy(batch.tokens) if recompute else None,
            reference_logprobs=reference,
            values=None if self._values is None else self._values(batch.tokens),
        )

    def _with_advantages(self, ready: list[Prepared], batches: Sequence[PackedBatch]) -> list[Prepared]:
        """Of one update; collective, since the update's tokens are those of all ranks."""
        raw = [self._raw_advantages(p, batch) for p, batch in zip(ready, batches, strict=True)]
        sums = torch.zeros(3, dtype=torch.float64, device=self._device)
        for (advantages, _), batch in zip(raw, batches, strict=True):
            sums += whitening_sums(advantages, batch.mask)
        dist.all_reduce(sums)
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
        found = [("train/advantage_mean", advantages)]
        if prepared.values is not None and returns is not None:
            error = returns - prepared.values
            found += [("critic/value_mean", prepared.values), (RETURNS, returns), (RETURNS_SQUARED, returns.square())]
            found += [(ERRORS, error), (ERRORS_SQUARED, error.square())]
        return tuple((name, masked(tokens.double(), mask).sum()) for name, tokens in found)
