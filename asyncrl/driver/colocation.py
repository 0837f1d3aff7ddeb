"""Colocated runs: replicas and trainer ranks take turns on the same devices.

    generate -> every engine sleeps -> train -> publish, which wakes the engines -> generate

`inference.device_turns` has the rules, the replica pool calls the engines, and the coordinator and the publisher say
when: this is what they share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from asyncrl.config.checks import require
from asyncrl.config.recipe import Recipe
from asyncrl.driver.interfaces import Parts
from asyncrl.driver.step_record import StepClock
from asyncrl.inference.engines import require_sleep
from asyncrl.types import ReplicaStats
from asyncrl.types.events import EnginesSlept
from asyncrl.types.metrics import Metric

HALF_GPU = 0.5
"""What a replica and a rank reserve of the GPU that they share: memory is not divided, they take turns."""


class Turns:
    """Gives the devices to the trainer before a step and to the engines before a publish; does nothing in a run whose
    parts have devices of their own. Knows how long the engines of this run have slept."""

    def __init__(self, recipe: Recipe, parts: Parts, clock: Callable[[], StepClock]) -> None:
        """`clock`: returns the clock of the run; the time that training waits is booked there."""
        self._is_colocated = recipe.is_colocated
        self._parts = parts
        self._clock = clock
        self._begin_s = 0.0
        self._before: dict[tuple[int, int], tuple[float, float]] = {}
        """Seconds asleep and waking of each replica process at the last line of metrics."""

    async def take(self, step: int) -> None:
        """Returns when the trainer has the devices for this step. Raises what `ReplicaPool.sleep` raises."""
        if not self._is_colocated:
            return
        began = time.monotonic()
        with self._clock().time.during(Metric.TRAINER_SLEEP):
            await self._parts.replicas.sleep()
        self._begin_s += time.monotonic() - began
        up = self._parts.replicas.table.those("newcomer", "serving")
        asleep = [i for i, row in up.items() if row.asleep]
        self._parts.events.write(EnginesSlept(step, replicas=tuple(sorted(asleep)), begin_s=self._begin_s))

    async def give(self) -> None:
        """A publish to all replicas begins: the engines may take their memory back."""
        if self._is_colocated:
            await self._parts.replicas.wake()

    def take_metrics(self, stats: Sequence[ReplicaStats]) -> dict[str, float]:
        """The metrics `sleep/` since the last call; empty in a run whose parts have devices of their own."""
        if not self._is_colocated:
            return {}
        now = {(s.replica_id, s.pid): (s.asleep_s, s.waking_s) for s in stats}
        since = [
            (asleep_s - before[0], waking_s - before[1])
            for key, (asleep_s, waking_s) in now.items()
            for before in [self._before.get(key, (0.0, 0.0))]
        ]
        begin_s, self._before, self._begin_s = self._begin_s, now, 0.0
        return {
            Metric.SLEEP_BEGIN: begin_s,
            Metric.SLEEP_ASLEEP: sum(asleep_s for asleep_s, _ in since) / max(1, len(since)),
            Metric.SLEEP_WAKING: max((waking_s for _, waking_s in since), default=0.0),
        }


def shared_gpus(recipe: Recipe, total_gpus: float) -> float:
    """GPUs that each replica and each trainer rank of a colocated run reserve; 0 on CPUs.

    Ray packs parts of GPUs as tightly as it can: of several ranks it would put two on one GPU. More than one rank and
    one replica need a placement group with a bundle for each GPU, half of it for a replica and half for a rank.

    Raises ConfigError: the engine sleeps on GPUs only and there is none; the transport or the number of processes does
    not go with a shared GPU.
    """
    trainer, rollout, transport = recipe.trainer, recipe.rollout, recipe.weights.transport
    if not total_gpus or trainer.device == "cpu":
        require_sleep(rollout.engine)
        return 0.0
    require(
        transport in ("ipc", "disk"),
        asked=f"placement=colocated with weights.transport={transport} on GPUs",
        found="NCCL connects no two processes of one GPU, and a rank shares its GPU with a replica",
        do="set weights.transport=ipc (or disk), or placement=separate",
    )
    require(
        trainer.num_ranks == rollout.num_replicas == 1,
        asked=f"placement=colocated with trainer.num_ranks={trainer.num_ranks} and rollout.num_replicas="
        f"{rollout.num_replicas} on GPUs",
        found="nothing places one rank and one replica on each GPU",
        do="set both to 1, or placement=separate",
    )
    return HALF_GPU
