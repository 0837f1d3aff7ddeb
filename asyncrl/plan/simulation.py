"""A run on a virtual clock: the ledger, staleness policy, pacing and router of a real run, with simulated replicas,
trainer and publishes that take the times of a cost model. Pure.

    ask -> lease -> train -> commit -> (wait until the queue is empty) -> publish -> the rest of the loop -> ask

is the order of the coordinator (`driver/coordinator.py`), one step after the other; a publish during training ends
before the next commit. The real queue decides at each call; this one after each event. There are no failures, deaths or
evaluations.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from asyncrl.config.recipe import Recipe
from asyncrl.config.threads import trainer_threads
from asyncrl.errors import ConfigError, explain
from asyncrl.plan.costs import CostModel
from asyncrl.plan.shared_replica import SharedReplica, SimulatedGroup, SimulatedRequest
from asyncrl.queue.budgets import EndWindow
from asyncrl.queue.ledger import Ledger
from asyncrl.queue.pacing import Pacing, build_pacing, shortfall
from asyncrl.queue.staleness import StalenessPolicy
from asyncrl.rollout.router import Router
from asyncrl.types import Ticket
from asyncrl.types.events import GroupChanged

LEAST_WAIT_S = 1e-6


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One optimizer step. Times are seconds since the start, on the run's wall clock.

    Attributes:
        asked: the trainer began to wait for its groups; `leased`: it got them; `computed`: the optimizer step was done;
            `trained`: it committed.
        published_from: the publish began, after the wait for an empty queue if the mode has one; `ended`: the step did.
        publish_s: 0 without a publish; during training it may end after the step. `paused_s`: pause by the publish,
            mean over replicas.
        tokens: trained response tokens; `lag_sum`: sum of their lags, in optimizer steps; `masked`: tokens over the
            limit.
        busy_s: seconds of decoding since the start, summed over replicas.
    """

    asked: float
    leased: float
    computed: float
    trained: float
    published_from: float
    ended: float
    publish_s: float
    paused_s: float
    tokens: float
    masked: float
    lag_sum: float
    lag_max: int
    busy_s: float

    @property
    def waited_s(self) -> float:
        """Seconds of waiting for groups, before the lease and before the publish."""
        return self.leased - self.asked + self.published_from - self.trained


def check_modelled(recipe: Recipe) -> None:
    """Raises ConfigError if the simulation does not model how the recipe's parts take turns."""
    if recipe.is_colocated and recipe.mode != "sync":
        found = "the simulated replicas generate while the trainer trains; only mode sync takes turns there"
        do = "set mode=sync or placement=separate for the forecast"
        raise ConfigError(explain(f"a forecast of placement=colocated in mode {recipe.mode}", found, do))


def threads_of(recipe: Recipe, cores: float | None) -> int | None:
    """Threads of each trainer rank where ranks and replicas share these cores; None: each has its own."""
    return None if cores is None else trainer_threads(recipe, cores=max(1, round(cores)))


class Workload:
    """The work of a run, independent of the order in which it is done: lengths and signals are drawn from the
    distributions of a cost model, by seed and ordinal."""

    def __init__(self, recipe: Recipe, costs: CostModel) -> None:
        self._recipe, self._costs = recipe, costs
        self._threads = threads_of(recipe, costs.cores)

    def lengths(self, ordinal: int, count: int) -> Sequence[float]:
        """Tokens of the responses of a group, each at least 1."""
        draws = np.random.default_rng([self._recipe.run.seed, ordinal]).random((count, 2)).clip(1e-9, 1 - 1e-9)
        of, limit = self._costs.generation.lengths, self._recipe.longest_response_tokens
        return [of.tokens(share, straggles, limit) for share, straggles in draws.tolist()]

    def is_filtered(self, ordinal: int) -> bool:
        """True if the group has no learning signal."""
        if not self._recipe.algorithm.dynamic_sampling:
            return False
        return np.random.default_rng([self._recipe.run.seed, ordinal, 1]).random() < self._costs.filtered_share

    def training_s(self, step: int, tokens: float) -> float:
        """Seconds of the optimizer step, given its tokens including prompts."""
        tokens *= self._recipe.batch.num_epochs
        return self._costs.training.seconds(tokens, self._recipe.trainer.num_ranks, self._threads)


class Simulation:
    """One run. Owns the virtual clock, the events to come, and the parts of the run."""

    def __init__(
        self,
        recipe: Recipe,
        costs: CostModel,
        *,
        workload: Workload | None = None,
        pacing: Pacing | None = None,
    ) -> None:
        """
        Args:
            workload, pacing: override those of the cost model and the recipe.

        Raises ConfigError if the recipe cannot be simulated.
        """
        check_modelled(recipe)
        self._recipe, self._costs = recipe, costs
        self._workload = workload or Workload(recipe, costs)
        self._groups_per_step = recipe.batch.groups_per_step
        self._pacing = pacing or build_pacing(recipe)
        self._wave = recipe.weights.rolling_replicas if recipe.rolls_publish else recipe.rollout.num_replicas
        # Parts of a real run.
        policy = StalenessPolicy(self._groups_per_step, recipe.max_lag, recipe.staleness.on_overdue)
        self._ledger = Ledger(policy, max_attempts=recipe.rollout.max_attempts, on_event=self._changed)
        self._filtered = EndWindow(recipe.algorithm.filtered_window)
        self._router = Router()
        # Simulated parts. `step_s` is cached: it is called once per event.
        step_s, rate = cache(costs.generation.step_s), costs.generation.prefill_tokens_per_s
        once = costs.generation.prompt_tokens / rate if rate else 0.0

        def prefill_s(group: SimulatedGroup, known: bool) -> float:
            return 0.0 if known and costs.generation.shares_prompts else once

        self._replicas = [
            SharedReplica(i, step_s, decodes_at_once=recipe.rollout.settings.decodes_at_once, prefill_s=prefill_s)
            for i in range(recipe.rollout.num_replicas)
        ]
        for replica in self._replicas:
            self._router.put(replica.replica_id, 0)
        self._groups: dict[tuple[int, int], SimulatedGroup] = {}
        self._stored: dict[int, SimulatedGroup] = {}
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        # The two clocks, and the load that separates them.
        self._training_cores = recipe.trainer.num_ranks * (threads_of(recipe, costs.cores) or 1)
        self._work = 0.0
        """Seconds of work, the clock of the events; `_wall` runs faster when cores are short."""
        self._wall = 0.0
        self._busy = 0
        self._busy_s = 0.0
        self._left_s = [0.0, 0.0]
        """Remaining work of the rollouter, and of the queue, coordinator and workers together."""
        self._training = False
        self._asks = False
        self._drains = False
        self._puts_needed = 0
        """Number of further ready groups before which a lease cannot succeed."""
        self._wakes_at: float | None = None
        self._draft: dict[str, Any] = {}
        """The step in progress."""
        self._publishing: dict[str, Any] = {}
        """The step whose publish is in progress; empty: none is."""
        self._commits_later = False
        """True if a step is trained and waits for the previous publish."""
        self._waves: Iterator[list[SharedReplica]] = iter(())
        self._done: list[SimulatedStep] = []

    def run(self, steps: int) -> list[SimulatedStep]:
        """The first `steps` optimizer steps."""
        self._ask()
        while len(self._done) < steps:
            assert self._events, f"the simulation stands still: {self._ledger.counts}"
            at, _, happens, arguments = heapq.heappop(self._events)
            self._pass(at - self._work)
            happens(*arguments)
        return self._done

    # -- the clock -----------------------------------------------------------------------------------------------

    def _pass(self, seconds: float) -> None:
        # Split the interval where the rollouter or the other processes run out of work: the slowdown changes there.
        while seconds > 0:
            working = [left for left in self._left_s if left > 0]
            passed = min([seconds, *working])
            wall = passed * self._slowdown(len(working))
            self._left_s = [max(0.0, left - passed) for left in self._left_s]
            self._work += passed
            self._wall += wall
            self._busy_s += wall * self._busy
            seconds -= passed

    def _slowdown(self, others: int = 0) -> float:
        """Wall seconds per second of work. `others`: how many of rollouter and other processes have work."""
        if self._costs.cores is None:
            return 1.0
        training = self._training_cores if self._training else 0
        return max(1.0, (self._busy + training + others) / self._costs.cores)

    def _after(self, seconds: float, happens: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (self._work + max(0.0, seconds), next(self._numbers), happens, arguments))

    # -- the trainer ---------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        self._asks, self._puts_needed = True, 0
        self._draft = {"asked": self._wall}
        self._pacing.asked(self._wall)
        self._settle()

    def _lease(self) -> None:
        """Leases if possible; a lease that must wait is retried when enough groups have become ready."""
        if not self._asks or self._puts_needed > 0:
            return
        if (missing := self._groups_per_step - self._ledger.counts.ready) > 0:
            self._puts_needed = missing
            return
        step = self._ledger.step
        selection = self._ledger.lease(step, self._oldest_trained)
        if not selection.chosen:
            self._puts_needed = max(selection.missing, selection.overdue, 1)
            return
        self._asks = False
        self._pacing.leased(selection.chosen, self._wall)
        tokens, prompts = self._book([self._stored[o] for o in selection.chosen], step)
        self._draft["leased"] = self._wall
        self._training = True
        self._after(self._workload.training_s(step, tokens + prompts), self._trained)

    def _book(self, groups: Sequence[SimulatedGroup], step: int) -> tuple[float, float]:
        """Records the lags of a lease; returns its response tokens, including masked ones, and its prompt tokens."""
        oldest = self._ledger.policy.oldest_trainable(step)
        parts = [(step - version, count) for group in groups for version, count in group.parts.items()]
        trained = [(lag, count) for lag, count in parts if step - lag >= oldest]
        tokens = sum(group.tokens for group in groups)
        self._draft |= {
            "tokens": sum(count for _, count in trained),
            "masked": sum(count for lag, count in parts if step - lag < oldest),
            "lag_sum": sum(lag * count for lag, count in trained),
            "lag_max": max((lag for lag, _ in trained), default=0),
        }
        return tokens, self._costs.generation.prompt_tokens * self._recipe.batch.group_size * len(groups)

    def _oldest_trained(self, ordinal: int, version: int) -> int | None:
        return min((v for v in self._stored[ordinal].parts if v >= version), default=None)

    def _trained(self) -> None:
        self._training = False
        self._draft["computed"] = self._wall
        self._commits_later = bool(self._publishing)
        if not self._commits_later:
            self._commit_step()

    def _commit_step(self) -> None:
        self._commits_later = False
        self._ledger.commit(self._ledger.step)
        self._draft["trained"] = self._wall
        if self._ledger.step % self._recipe.staleness.publish_every_steps:
            self._draft |= {"published_from": self._wall, "publish_s": 0.0, "paused_s": 0.0}
            self._after(self._costs.loop_s, self._end)
        else:
            self._drains = self._recipe.empties_queue
            if not self._drains:
                self._publish()
            if self._recipe.overlaps_publish:
                self._after(self._costs.loop_s, self._end)
        self._settle()

    def _end(self) -> None:
        self._draft |= {"ended": self._wall, "busy_s": self._busy_s}
        self._finish(self._draft)
        self._ask()

    def _finish(self, step: dict[str, Any]) -> None:
        if step.keys() >= {"ended", "publish_s"}:
            self._done.append(SimulatedStep(**step))

    # -- publishes -----------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        self._drains = False
        size = self._wave
        self._draft |= {"published_from": self._wall, "paused_s": 0.0}
        self._publishing = self._draft
        self._waves = (self._replicas[i : i + size] for i in range(0, len(self._replicas), size))
        self._next_wave()

    def _next_wave(self) -> None:
        wave = next(self._waves, None)
        if wave is None:
            self._published()
            return
        if self._recipe.rolls_publish:
            for replica in wave:
                self._router.put(replica.replica_id, held=True)
        running_s = min(self._costs.publish.running_s, self._costs.publish.seconds(len(wave)))
        self._after(running_s, self._hold, wave, running_s)

    def _published(self) -> None:
        step, self._publishing = self._publishing, {}
        step["publish_s"] = self._wall - step["published_from"]
        self._ledger.published(self._ledger.step)
        if not self._recipe.overlaps_publish:
            self._after(self._costs.loop_s, self._end)
        else:
            self._finish(step)
            if self._commits_later:
                self._commit_step()
        self._settle()

    def _hold(self, wave: list[SharedReplica], running_s: float) -> None:
        """Pauses the replicas of a wave; under `drain` once their requests have ended."""
        self._publishing.setdefault("held", self._wall)
        if self._recipe.interrupt == "drain" and any(replica.running for replica in wave):
            for replica in wave:
                replica.closed = True
            # Nothing changes before the next end of a request: look again then.
            ends = [at for replica in wave if (at := replica.next_end()) is not None]
            for replica in wave:
                self._reschedule(replica)
            self._after(max(LEAST_WAIT_S, min(ends) - self._work), self._hold, wave, running_s)
            return
        for replica in wave:
            replica.pause(self._work)
            self._reschedule(replica)
        self._after(self._costs.publish.seconds(len(wave)) - running_s, self._commit, wave)

    def _commit(self, wave: list[SharedReplica]) -> None:
        version, rolls = self._ledger.step, self._recipe.rolls_publish
        for replica in wave:
            replica.commit(
                version,
                self._work,
                prefills_again=self._recipe.interrupt == "abort_resume",
                prefill_tokens_per_s=self._costs.generation.prefill_tokens_per_s,
            )
            self._reschedule(replica)
            if rolls:
                self._router.put(replica.replica_id, version, held=False)
        held_s = self._wall - self._publishing.pop("held")
        self._publishing["paused_s"] += held_s * len(wave) / len(self._replicas)
        self._next_wave()

    # -- groups --------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Makes the queue's decisions after a change: lease, cancel, admit, publish once the queue is empty."""
        expired = self._ledger.counts.expired
        self._lease()
        reissues = self._ledger.counts.expired > expired
        while reissues or self._ledger.admissible >= 1:
            short = shortfall(self._pacing, self._wall, self._ledger.counts, self._filtered.share)
            if short < 1 and not reissues:
                break
            tickets = self._ledger.admit(self._groups_per_step, short)
            for ticket in self._ledger.take_cancelled():
                self._cancel(ticket)
            if not tickets:
                break
            self._begin(tickets)
        if self._drains and self._ledger.counts.running == 0 and self._ledger.admissible == 0:
            self._publish()
        self._wake_for_pacing()

    def _wake_for_pacing(self) -> None:
        at = self._pacing.next_change(self._wall)
        if at is None or self._ledger.admissible == 0:
            return
        if self._wakes_at is None or not self._wall < self._wakes_at <= at:
            self._wakes_at = at
            self._after(max(LEAST_WAIT_S, (at - self._wall) / self._slowdown()), self._woken)

    def _woken(self) -> None:
        self._wakes_at = None
        self._settle()

    def _begin(self, tickets: Sequence[Ticket]) -> None:
        touched: dict[int, SharedReplica] = {}
        for ticket in tickets:
            self._pacing.begun(ticket.ordinal, self._wall)
            group = SimulatedGroup(ticket.ordinal, ticket.attempt, ticket.version)
            self._groups[ticket.ordinal, ticket.attempt] = group
            for tokens in self._workload.lengths(ticket.ordinal, self._recipe.batch.group_size):
                request = SimulatedRequest(group, tokens)
                group.requests.append(request)
                replica = self._replicas[self._router.pick(f"group-{ticket.ordinal}")]
                replica.send(request, self._work)
                touched[replica.replica_id] = replica
            group.left = len(group.requests)
        for replica in touched.values():
            self._reschedule(replica)

    def _reschedule(self, replica: SharedReplica) -> None:
        if replica.busy != replica.counted_busy:
            self._busy += 1 if replica.busy else -1
            replica.counted_busy = replica.busy
        if (at := replica.next_end()) is not None:
            self._after(at - self._work, self._replica_ends, replica, replica.stamp)

    def _replica_ends(self, replica: SharedReplica, stamp: int) -> None:
        if stamp != replica.stamp:
            return  # outdated: a later change has scheduled another event
        for request in replica.ended(self._work):
            self._router.done(replica.replica_id)
            self._after(self._costs.generation.latency_s, self._collect, request.group)
        self._reschedule(replica)

    def _collect(self, group: SimulatedGroup) -> None:
        """The rollouter has collected a response of the group."""
        self._left_s[0] += self._costs.rollouter_s
        self._left_s[1] += self._costs.beside_s
        group.left -= 1
        if group.left == 0:
            self._after(self._left_s[0] + self._costs.reward_s, self._put, group)

    def _put(self, group: SimulatedGroup) -> None:
        if self._groups.pop((group.ordinal, group.attempt), None) is None:
            return  # it was cancelled
        ticket = Ticket(group.ordinal, group.attempt, group.version)
        self._stored[group.ordinal] = group
        if self._ledger.put(ticket, min(group.parts), has_signal=not self._workload.is_filtered(group.ordinal)):
            self._puts_needed -= 1
        self._pacing.ready(group.ordinal, self._wall)
        self._settle()

    def _cancel(self, ticket: Ticket) -> None:
        group = self._groups.pop((ticket.ordinal, ticket.attempt), None)
        for request in () if group is None else group.requests:
            if not request.ended:
                replica = self._replicas[request.replica_id]
                replica.cancel(request, self._work)
                self._router.done(replica.replica_id)
                self._reschedule(replica)

    def _changed(self, event: GroupChanged) -> None:
        if event.transition in ("requeued", "filtered", "expired", "failed"):
            self._pacing.gone(event.ordinal)
        if event.transition in ("trained", "filtered", "expired", "failed"):
            self._filtered.add(event.transition == "filtered")
            self._stored.pop(event.ordinal, None)
