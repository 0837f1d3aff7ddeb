"""Engines that take turns with the trainer on the same devices. `inference.device_turns` has the rules."""

from __future__ import annotations

import asyncio

from asyncrl.driver.fleet.device_turns import SharedDevices
from asyncrl.driver.fleet.membership import ASK_AGAIN_S, EXIT_S, SLEEP_S
from asyncrl.driver.fleet.replica_pool import ReplicaPool
from asyncrl.errors import DeadlineExceeded, explain
from asyncrl.inference.replica import Replica
from asyncrl.inference.replica_actor import ReplicaControl


class EngineTurns:
    """Puts the engines to sleep and lets them wake, on devices that they share with the trainer."""

    def __init__(self, pool: ReplicaPool, devices: SharedDevices, *, start_timeout_s: float) -> None:
        """`devices`: those of the pool."""
        self._pool, self._devices = pool, devices
        self._limit_s = start_timeout_s + SLEEP_S + EXIT_S

    async def sleep(self) -> None:
        """Returns when the trainer may have the devices: every engine that was up sleeps, and every other process has
        exited. Requests in flight end with the tokens that they have, and wait for the next publish.

        A replica that loads is waited for. One that is late, or cannot sleep, is killed; it is replaced after the next
        `wake`. Raises RunFailed; DeadlineExceeded: an engine still holds memory; what the listener of the pool raises.
        """
        turns, loop = self._devices.turns, asyncio.get_running_loop()
        turns.rest()
        deadline = loop.time() + self._limit_s
        while awake := turns.awake:
            if self._pool.failure is not None:
                raise self._pool.failure
            if loop.time() > deadline:
                asked, found = "the trainer's turn on the devices", f"replicas {sorted(awake)} hold memory of them"
                do = "see the log of the run for why they neither sleep nor exit"
                raise DeadlineExceeded(explain(asked, f"{found} after {self._limit_s:g} s", do))
            for replica_id, control in self._pool.those("suspended").items():
                if replica_id in awake:
                    self._pool.fail(replica_id, control, "it answers late, and the trainer needs its turn")
            up = {i: control for i, control in self._pool.members.items() if i in awake}
            await asyncio.gather(*(self._put_to_sleep(i, control) for i, control in up.items()))
            if turns.awake:
                await self._devices.change(ASK_AGAIN_S)
        turns.train()
        await self._pool.retell()

    async def wake(self) -> None:
        """The engines have the devices again: a publish follows, which wakes them. Replacements may load. Does nothing
        while the engines generate: they are awake.

        Raises what the listener of the pool raises.
        """
        if self._devices.turns.phase != "generating":
            self._devices.turns.wake()
            self._devices.changed()
            await self._pool.retell()

    async def _put_to_sleep(self, replica_id: int, control: ReplicaControl) -> None:
        """One that does not sleep in time is killed: it would keep its memory."""
        try:
            await control.call(SLEEP_S, Replica.sleep)
        except Exception as error:  # noqa: BLE001 - task boundary: it becomes the failure of this replica
            self._pool.fail(replica_id, control, f"it does not sleep: {type(error).__name__}: {error}")
        else:
            if self._pool.members.get(replica_id) is control:
                self._devices.turns.slept(replica_id)
