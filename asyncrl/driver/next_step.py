"""Prepares the next step while the present one trains: its plan, and its groups in the memory of the trainer ranks.

Only the lease decides what a step trains. If it differs from the prepared groups, the plan is recomputed and the ranks
fetch the missing groups.
"""

from __future__ import annotations

import asyncio

from asyncrl.driver.interfaces import Parts
from asyncrl.queue.message_queue import MessageQueue
from asyncrl.remote.actor_client import CALL_TIMEOUT_S
from asyncrl.remote.tasks import end
from asyncrl.trainer.planner import StepPlanner
from asyncrl.types import LeaseManifest, RankPlan

POLL_S = 1.0
POLL_TIMEOUT_S = POLL_S + CALL_TIMEOUT_S


class NextStep:
    """Owns the plan of the next step, and the task that makes it."""

    def __init__(self, parts: Parts, planner: StepPlanner) -> None:
        self._parts, self._planner = parts, planner
        self._task: asyncio.Task[None] | None = None
        self._foreseen: tuple[LeaseManifest, float, tuple[RankPlan, ...]] | None = None

    def begin(self, step: int, correction_bounds: float) -> None:
        """Begins the preparation while the previous step trains, after `end`.

        Args:
            step: `global_steps` when the foreseen step starts.
            correction_bounds: see `RankPlan`.
        """
        assert self._task is None, "one step is foreseen at a time"
        self._task = asyncio.create_task(self._prepare(step, correction_bounds), name=f"preparing step {step + 1}")

    async def end(self) -> None:
        """Ends the wait for groups that are not ready. Raises the error of the preparation: the queue or a rank is
        gone."""
        if (task := self._task) is not None:
            task.cancel()
            await asyncio.wait([task])
            self._task = None
            if not task.cancelled():
                await task

    async def close(self) -> None:
        await end(self._task)

    def plans(self, manifest: LeaseManifest, correction_bounds: float) -> tuple[RankPlan, ...]:
        """The plans of the leased step: the prepared ones if they match, else of `StepPlanner.plan`."""
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is not None:
            before, bounds, plans = foreseen
            if (before.step, before.groups, bounds) == (manifest.step, manifest.groups, correction_bounds):
                return plans
        return self._planner.plan(manifest, correction_bounds=correction_bounds)

    async def _prepare(self, step: int, correction_bounds: float) -> None:
        """Consumes: the groups that `step` would lease now.
        Produces: its plan; its groups in the memory of the ranks that would train them.
        Waits for: the groups, in long polls; the ranks, each for the queue.
        Unblocked by: puts of the rollouter.
        Stops when: the preparation is done, or the present step has been trained.
        """
        while not (groups := await self._parts.queue.call(POLL_TIMEOUT_S, MessageQueue.foresee, step, POLL_S)):
            pass
        manifest = LeaseManifest(step, groups)
        plans = self._planner.plan(manifest, correction_bounds=correction_bounds)
        self._foreseen = manifest, correction_bounds, plans
        await self._parts.trainers.fetch_ahead(plans)
