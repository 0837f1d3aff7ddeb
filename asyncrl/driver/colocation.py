"""Colocated runs: replicas and trainer ranks take turns on the same devices.

    generate -> every engine sleeps -> train -> publish, which wakes the engines -> generate

`fleet.device_turns` has the rules, `fleet.engine_turns` calls the engines; the coordinator and publisher say when.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from asyncrl.driver.interfaces import Parts
from asyncrl.driver.step_record import StepClock
from asyncrl.types import ReplicaStats
from asyncrl.types.events import EnginesSlept
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
