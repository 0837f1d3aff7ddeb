"""Applies the parity gate and the off-policy guard to a run: reads the metrics of each step and carries out the
decisions. `LiveFindings` tells what goes wrong with its learning."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.recipe import Recipe
from asyncrl.errors import NoParity, RunFailed, explain
from asyncrl.observability.events import EventLog
from asyncrl.queue.guard import LEVELS, GuardDecision, OffPolicyGuard, Parity
from asyncrl.queue.message_queue import MessageQueue
from asyncrl.remote.actor_client import CALL_TIMEOUT_S, ActorClient
from asyncrl.report.findings import of_learning
from asyncrl.report.run_files import RunFiles
from asyncrl.types import LedgerCounts
from asyncrl.types.events import GuardChanged
from asyncrl.types.guard import SUSPECTS, GuardState
from asyncrl.types.metrics import Metric, Record

logger = logging.getLogger(__name__)


MIN_PARITY_SHARE = 0.1
"""Share of a step's tokens that must have lag 0 for them to be judged: a few prove nothing."""


class GuardLoop:
    """Owns the guard's state between steps. With `staleness.guard=off` it only watches the parity."""

    def __init__(self, recipe: Recipe, queue: ActorClient[MessageQueue], events: EventLog) -> None:
        self._config, self._acts = recipe.staleness.guard_rules, recipe.staleness.guard == "act"
        self._queue, self._events, self._max_lag = queue, events, recipe.max_lag
        self._rules = OffPolicyGuard.of(recipe)
        self._parity, self._may_stop = Parity.of(recipe), recipe.staleness.parity == "stop"
        self._judges_all = recipe.rollout.is_native
        """Every step may end the run, not only the first: nobody digests the weights in the servers, and a server that
        came later has its first tokens in a later step."""
        self._had_parity: bool | None = None
        """Of the last step with tokens of lag 0; None before the first."""
        self.state = None if recipe.staleness.guard == "off" else self._rules.begin()
        """Saved in checkpoints. With `watch`: the state as if the guard had acted."""
        self.stopped: RunFailed | None = None
        """Why the run must end after this step, with a checkpoint; None: it goes on."""

    @property
    def limit(self) -> int:
        """The present limit on the lag."""
        return self.state.limit if self._acts and self.state is not None else self._max_lag

    @property
    def correction_bounds(self) -> float:
        """See `RankPlan`."""
        raised = self._acts and self.state is not None and self.state.is_raised
        return self._config.raised_bounds if raised else 1.0

    async def resume(self, saved: GuardState | None, step: int) -> None:
        """Continues with a checkpoint's state; until now the queue has the recipe's limit."""
        if self.state is None:
            return
        self.state = self._rules.begin(saved)
        if self.state.limit < self._max_lag or self.state.is_raised:
            await self._carry_out(step, GuardDecision("resumed", self.state.limit, "the checkpoint has this limit"))

    async def after_step(self, step: int, record: Record) -> tuple[dict[str, float], LedgerCounts | None]:
        """Reads the metrics of the committed `step`, and acts. Returns the guard's metrics, and the ledger's counts if
        the queue was called."""
        self._check_parity(step, record)
        if self.state is None:
            return {}, None
        reading = self._rules.read(record)
        self.state, decision = self._rules.step(self.state, reading)
        counts = None if decision is None else await self._carry_out(step, decision)
        stops = decision is not None and decision.action == "stopped"
        metrics: dict[str, float] = {
            Metric.GUARD_LIMIT: self.state.limit,
            Metric.GUARD_STATE: LEVELS.index("stopped") if stops else self._rules.level(self.state),
            Metric.GUARD_SEVERITY: reading.severity,
        }
        return metrics, counts

    def compare(self, step: int, theirs: Sequence[np.ndarray], ours: Sequence[np.ndarray]) -> None:
        """Judges log-probabilities of one version, of the replicas and of the trainer. Raises NoParity."""
        apart = np.concatenate(theirs).astype(np.float64) - np.concatenate(ours)
        if not len(apart):  # no token of them is trained
            return
        tails = float(np.mean(np.abs(apart) > math.log(2)))
        logger.info("replicas and trainer differ by %.2g nats a token on %d stored tokens", apart.mean(), len(apart))
        seen = {Metric.LAG_TOKENS: 1.0, Metric.LAG_KL: float(apart.mean()), Metric.LAG_TAILS: tails}
        self._check_parity(step, {family.of("0"): value for family, value in seen.items()})
        if self.stopped is not None:
            raise self.stopped

    def _check_parity(self, step: int, record: Record) -> None:
        if self._parity is None or record.get(Metric.LAG_TOKENS.of("0"), 0.0) < MIN_PARITY_SHARE:
            return
        found, before = self._parity.misfit(record), self._had_parity
        self._had_parity = found is None
        if found and self._may_stop and (before is None or self._judges_all):
            asked = "replicas and a trainer that compute the same policy (staleness.parity=stop)"
            self.stopped = NoParity(explain(asked, f"in step {step}, {found}", SUSPECTS))
        elif found and before is not False:
            logger.warning("replicas and trainer compute different policies: in step %d, %s; %s", step, found, SUSPECTS)

    async def _carry_out(self, step: int, decision: GuardDecision) -> LedgerCounts | None:
        """Records the decision, and with `act` carries it out. The event comes first because it explains what the queue
        then does."""
        self._events.write(GuardChanged(step, decision.action, decision.limit, self._acts, decision.reason))
        told = f"{decision.action}, limit on the lag {decision.limit}: {decision.reason}"
        logger.warning(
            "off-policy guard after step %d: %s", step, told + " (watch: nothing is done)" * (not self._acts)
        )
        if not self._acts:
            return None
        if decision.action == "stopped":
            done = "; the corrections are raised" if self.correction_bounds < 1 else ""
            asked = "a policy close enough to the one that sampled (staleness.guard=act)"
            found = f"after step {step}: {decision.reason}; the limit on the lag is {decision.limit}, the lowest{done}"
            do = "lower trainer.lr, or take another algorithm.loss or algorithm.corrections, then go on from an "
            do += f"earlier checkpoint or from that of step {step} (resume=auto)"
            self.stopped = RunFailed(explain(asked, found, do))
            return None
        return await self._queue.call(CALL_TIMEOUT_S, MessageQueue.limit_lag, decision.limit)


# What asyncrl-report would find of the learning of a run, while it runs.

WINDOW = 20
LEAST = 5
"""Steps after which a run is judged: the first ones fill the queue."""


class LiveFindings:
    """Logs a warning with cause and key the first time that the last steps show a finding."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings`: key of the recipe -> value."""
        self._settings = settings
        self._last: deque[Record] = deque(maxlen=WINDOW)
        self._said: set[str] = set()

    def stepped(self, record: Record) -> None:
        self._last.append(record)
        if len(self._last) < LEAST:
            return
        run = RunFiles("", Path(), self._settings, tuple(dict(line) for line in self._last), (), (), (), {})
        for found in of_learning(run):
            if found.title not in self._said:
                self._said.add(found.title)
                logger.warning("%s. %s %s", found.title, found.evidence, found.remedy)
