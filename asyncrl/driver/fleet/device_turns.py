"""Whose turn it is on devices that engines share with the trainer. Pure: no clock, no process, no call.

    waking --generate--> generating --rest--> settling --train--> training --wake--> waking

* *waking*: engines take their memory back; a publish brings the weights. A run starts here, and all engines load. Later
  one loads only if no other is awake: it measures memory while it loads, and the trainer frees some after sending.
* *generating*: engines serve requests. The trainer computes nothing and keeps only its memory between steps.
* *settling*: engines give their memory back. None may load.
* *training*: the trainer has the devices. Every engine is asleep, or its process has exited.

`rest` is allowed in every phase: after a lost training side the new one gets the devices, whoever had them before.
From settling and training only a wake leads back to generating.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from asyncrl.remote.tasks import wait_event

Phase = Literal["waking", "generating", "settling", "training"]


class DeviceTurns:
    """The phase, and which engines hold device memory. An engine is named by its replica's id; a killed process counts
    until it has exited."""

    def __init__(self) -> None:
        self.phase: Phase = "waking"
        self._is_publish = False
        """The trainer sends weights in the phase waking."""
        self._awake: set[int] = set()
        self._asleep: set[int] = set()
        self._exiting: set[int] = set()

    @property
    def awake(self) -> frozenset[int]:
        """Engines that may hold memory: from the start of loading until they sleep or have exited."""
        return frozenset(self._awake)

    @property
    def asleep(self) -> frozenset[int]:
        """The engines that have given their memory back since the last wake."""
        return frozenset(self._asleep)

    def may_load(self, engine: int) -> bool:
        """True if a new process of this engine may load its model: in the engines' turn, once the old process has
        exited."""
        waits = self._is_publish and bool(self._awake)
        has_turn = self.phase == "generating" or (self.phase == "waking" and not waits)
        return has_turn and engine not in self._awake | self._exiting

    def loads(self, engine: int) -> None:
        """A process of this engine begins to load. Raises ValueError if it may not."""
        if not self.may_load(engine):
            raise ValueError(f"engine {engine} cannot load now: {self}")
        self._asleep.discard(engine)
        self._awake.add(engine)

    def slept(self, engine: int) -> None:
        """The engine has given its memory back. Raises ValueError if it was not asked to."""
        if self.phase != "settling" or engine not in self._awake:
            raise ValueError(f"engine {engine} was not asked to sleep: {self}")
        self._awake.discard(engine)
        self._asleep.add(engine)

    def killed(self, engine: int) -> None:
        """The process of the engine was killed. It holds its memory until it has exited."""
        self._exiting.add(engine)
        self._asleep.discard(engine)

    def exited(self, engine: int) -> None:
        """The killed process of the engine has exited, and its memory with it."""
        self._awake.discard(engine)
        self._exiting.discard(engine)

    def rest(self) -> None:
        """The engines are asked to sleep."""
        self.phase = "settling"

    def train(self) -> None:
        """The trainer takes the devices. Raises ValueError if it is not its turn, or an engine is awake."""
        if self.phase != "settling" or self._awake:
            raise ValueError(f"the trainer cannot have the devices: {self}")
        self.phase = "training"

    def wake(self) -> None:
        """A publish begins: all engines may take their memory back, and count as awake. Raises ValueError if the
        trainer does not have the devices."""
        if self.phase not in ("training", "waking"):
            raise ValueError(f"nobody is to be woken: {self}")
        self.phase, self._is_publish = "waking", True
        self._awake |= self._asleep
        self._asleep.clear()

    def generate(self) -> None:
        """The publish has ended. Raises ValueError if none was in progress."""
        if self.phase != "waking":
            raise ValueError(f"generation follows a wake: {self}")
        self.phase, self._is_publish = "generating", False

    def __str__(self) -> str:
        return f"{self.phase}, awake {sorted(self._awake)}, asleep {sorted(self._asleep)}"


# The waits of replicas and trainer for their turn on shared devices. `DeviceTurns` decides the turns.


class SharedDevices:
    """Owns the turns of a run with shared devices, and wakes the tasks that wait for a turn."""

    def __init__(self) -> None:
        self.turns = DeviceTurns()
        self._changed = asyncio.Event()

    async def turn_to_load(self, replica_id: int) -> None:
        """Returns when a new process of this replica may load its engine, and records that it does.

        Waits for: the exit of the old process and the end of the trainer's turn; the exit, the step and the publish
        have their own deadlines, which end the run.
        Unblocked by: `changed`.
        """
        while not self.turns.may_load(replica_id):
            self._changed.clear()
            await self._changed.wait()
        self.turns.loads(replica_id)

    async def change(self, timeout_s: float) -> None:
        """Returns at the next change, or after this time."""
        self._changed.clear()
        await wait_event(self._changed, timeout_s)

    def changed(self) -> None:
        """Wakes all waiting tasks: the phase has changed, or an engine has come up, gone to sleep or exited."""
        self._changed.set()
