"""Publishes the trainer's weights: while training waits, or from a snapshot during the next step.

A publish during training ends before that next step is committed. Every version is therefore published while it is the
newest, and the lag of a token is counted as if training had waited.

In colocated runs replicas and trainer ranks take turns on the same devices:

    generate -> every engine sleeps -> train -> publish, which wakes the engines -> generate

`fleet.device_turns` has the rules, `fleet.engine_turns` calls the engines; the coordinator and publisher say when.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import numpy as np

from asyncrl.config.recipe import Recipe
from asyncrl.driver.interfaces import Parts
from asyncrl.driver.step_record import ReplicaShares, StepClock, tokens_between
from asyncrl.queue.message_queue import MessageQueue
from asyncrl.remote.actor_client import CALL_TIMEOUT_S
from asyncrl.remote.tasks import end
from asyncrl.types import LedgerCounts, PublishReport, ReplicaStats
from asyncrl.types.events import EnginesSlept, WeightsPublished
from asyncrl.types.metrics import Metric


class Colocation:
    """Gives the devices to the trainer before a step and to the engines before a publish; does nothing in a run whose
    parts have their own devices. Measures how long the engines sleep."""

    def __init__(self, parts: Parts, clock: StepClock) -> None:
        """`clock`: where the trainer's waiting is booked."""
        self._parts = parts
        self._engines = parts.engines
        self._clock = clock
        self._begin_s = 0.0
        self._before: dict[tuple[int, int], tuple[float, float]] = {}
        """Seconds asleep and waking of each replica process at the last line of metrics."""

    async def to_trainer(self, step: int) -> None:
        """Returns when the trainer has the devices for the step that starts at `global_steps == step`. Raises like
        `EngineTurns.sleep`."""
        if self._engines is None:
            return
        began = time.monotonic()
        with self._clock.time.during(Metric.TRAINER_SLEEP):
            await self._engines.sleep()
        self._begin_s += time.monotonic() - began
        up = self._parts.replicas.table.those("newcomer", "serving")
        asleep = [i for i, row in up.items() if row.asleep]
        self._parts.events.write(EnginesSlept(step + 1, replicas=tuple(sorted(asleep)), begin_s=self._begin_s))

    async def to_engines(self) -> None:
        """A publish to all replicas begins: the engines may take their memory back."""
        if self._engines is not None:
            await self._engines.wake()

    def take_metrics(self, stats: Sequence[ReplicaStats]) -> dict[str, float]:
        """The metrics `sleep/` since the last call; empty in a run whose parts have their own devices."""
        if self._engines is None:
            return {}
        now = {(s.replica_id, s.pid): (s.asleep_s, s.waking_s) for s in stats}
        since = [np.subtract(spent_s, self._before.get(key, 0)).tolist() for key, spent_s in now.items()]
        begin_s, self._before, self._begin_s = self._begin_s, now, 0.0
        return {
            Metric.SLEEP_BEGIN: begin_s,
            Metric.SLEEP_ASLEEP: sum(asleep_s for asleep_s, _ in since) / max(1, len(since)),
            Metric.SLEEP_WAKING: max((waking_s for _, waking_s in since), default=0.0),
        }


Published = tuple[LedgerCounts, Sequence[ReplicaStats]]
"""Ledger counts and replica statistics after a publish."""


class Publisher:
    """Owns the published version and the publish in progress during training, at most one."""

    def __init__(
        self, recipe: Recipe, parts: Parts, *, clock: StepClock, shares: ReplicaShares, colocation: Colocation
    ) -> None:
        """
        Args:
            clock: where the trainer's waiting is booked.
            shares: is told how long replicas were paused.
            colocation: gives the devices back to the engines.
        """
        self._recipe, self._parts, self._colocation = recipe, parts, colocation
        self._clock, self._shares = clock, shares
        self.version = -1
        """The newest published version; -1: none."""
        self._beside: asyncio.Task[Published] | None = None
        self._reports: list[PublishReport] = []

    async def publish(self, step: int, before: Sequence[ReplicaStats] | None = None) -> Published:
        """Publishes the weights of `step`, the newest, as that version. `before`: present statistics of the replicas.

        Raises like `CheckpointEngine.publish`.
        """
        with self._clock.time.during(Metric.TRAINER_PUBLISH):
            await self._end()
            if self._recipe.sends_snapshots:
                await self._parts.trainers.snapshot_weights()
            return await self._send(step, before)

    def begin(self, step: int) -> None:
        """Begins to publish the trainer's copy of the weights of the committed `step`. Call `settle` before the next
        copy and the next commit."""
        assert self._beside is None, "the publish before it has ended"
        self._beside = asyncio.create_task(self._send(step, None), name=f"publish of version {step}")

    async def settle(self) -> None:
        """Returns when no publish runs during training. Raises its error."""
        with self._clock.time.during(Metric.TRAINER_PUBLISH):
            await self._end()

    def check(self) -> None:
        """Raises the error of a failed publish during training."""
        if self._beside is not None and self._beside.done():
            beside, self._beside = self._beside, None
            beside.result()

    async def catch_up(self, step: int) -> None:
        """Publishes to the newcomers. If the weights of `step` are not published yet, all replicas get them: the
        trainer has no others."""
        await self.settle()
        if self.version != step:
            await self.publish(step)
            return
        with self._clock.time.during(Metric.TRAINER_PUBLISH):
            report = await self._parts.weights.publish(step, newcomers_only=True)
        if report is not None:
            self._record(step, report)

    def take(self) -> list[PublishReport]:
        """Reports of publishes to all replicas that ended since the last call."""
        reports, self._reports = self._reports, []
        return reports

    async def close(self) -> None:
        """Cancels the publish in progress, and logs an error that nobody has seen. The replicas' gates stay closed: the
        run is ending."""
        await end(self._beside)

    async def _end(self) -> None:
        if (beside := self._beside) is not None:
            try:
                await beside
            finally:
                if beside.done():
                    self._beside = None

    async def _send(self, step: int, before: Sequence[ReplicaStats] | None) -> Published:
        parts = self._parts
        if before is None:
            before = await parts.replicas.stats()
        await self._colocation.to_engines()
        report = await parts.weights.publish(step)
        assert report is not None, "only a catch-up can be for nobody"
        published = parts.queue.call(CALL_TIMEOUT_S, MessageQueue.published, step)
        counts, stats = await asyncio.gather(published, parts.replicas.stats())
        self._clock.publish_tokens += tokens_between(before, stats)
        self.version = step
        self._reports.append(report)
        self._record(step, report)
        return counts, stats

    def _record(self, version: int, report: PublishReport) -> None:
        self._parts.events.write(
            WeightsPublished(
                version=version,
                publish_s=report.publish_s,
                pause_s=report.pause_s,
                transfer_s=report.transfer_s,
                bytes=report.sent_bytes,
                verified=report.verified,
                attempts=report.attempts,
                replicas=report.replicas,
            )
        )
        self._shares.paused(report.pause_s)
        self._parts.saw("publish", time.monotonic())
