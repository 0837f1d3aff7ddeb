"""Lets engines take turns with the trainer on the same devices. `fleet.device_turns` has the rules."""

from __future__ import annotations

import asyncio

from asyncrl.driver.fleet.device_turns import SharedDevices
from asyncrl.driver.fleet.membership import ASK_AGAIN_S, EXIT_S, SLEEP_S
from asyncrl.driver.fleet.replica_pool import ReplicaPool
from asyncrl.errors import DeadlineExceeded, explain
from asyncrl.inference.replica import Replica
from asyncrl.inference.replica_actor import ReplicaControl


class EngineTurns:
    """Puts engines to sleep and wakes them, on devices that they share with the trainer."""

    def __init__(self, pool: ReplicaPool, devices: SharedDevices, *, start_timeout_s: float) -> None:
        """`devices`: the devices of `pool`."""
        self._pool, self._devices = pool, devices
        self._limit_s = start_timeout_s + SLEEP_S + EXIT_S

    async def sleep(self) -> None:
        """Returns when the trainer may have the devices: every engine that was up sleeps, and every other process has
        exited. Requests in flight stop with their tokens so far and wait for the next publish.

        Waits for loading replicas. Kills a replica that is late or cannot sleep; it is replaced after the next `wake`.
        Raises RunFailed; DeadlineExceeded if an engine still holds memory; the errors of the pool's listener.
        """
        turns, loop = self._devices.turns, asyncio.get_running_loop()
        turns.rest()
        deadline = loop.time() + self._limit_s
        # Repeat: a replica that was loading comes up, and then has to sleep too.
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
        """Gives the devices to the engines. The publish that follows wakes them; replacements may load. Does nothing
        while the engines generate.

        Raises the errors of the pool's listener.
        """
        if self._devices.turns.phase != "generating":
            self._devices.turns.wake()
            self._devices.changed()
            await self._pool.retell()

    async def _put_to_sleep(self, replica_id: int, control: ReplicaControl) -> None:
        """Kills the replica if it does not sleep in time: it would keep its memory."""
        try:
            await control.call(SLEEP_S, Replica.sleep)
        except Exception as error:  # noqa: BLE001 - task boundary: it becomes the failure of this replica
            self._pool.fail(replica_id, control, f"it does not sleep: {type(error).__name__}: {error}")
        else:
            if self._pool.members.get(replica_id) is control:
                self._devices.turns.slept(replica_id)
