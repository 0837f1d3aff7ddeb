"""The waits of replicas and trainer for their turn on shared devices. `inference.device_turns` decides the turns."""

from __future__ import annotations

import asyncio

from asyncrl.driver.fleet.device_turns import DeviceTurns


class SharedDevices:
    """Owns the turns of the run on devices that the replicas share with the trainer, and wakes who waits for one."""

    def __init__(self) -> None:
        self.turns = DeviceTurns()
        self._changed = asyncio.Event()

    async def turn_to_load(self, replica_id: int) -> None:
        """Returns when a new process of this replica may load its engine, and books that it does.

        Waits for: the exit of the former process and the end of the trainer's turn; the exit, the step and the publish
        have deadlines of their own, and end the run when they miss them.
        Unblocked by: `changed`.
        """
        while not self.turns.may_load(replica_id):
            self._changed.clear()
            await self._changed.wait()
        self.turns.loads(replica_id)

    async def change(self, timeout_s: float) -> None:
        """Returns at the next change, or after this time."""
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def changed(self) -> None:
        """Wakes all who wait: the phase is another, or an engine has come up, gone to sleep or exited."""
        self._changed.set()
