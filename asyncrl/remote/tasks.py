"""An event that is waited for with a limit."""

from __future__ import annotations

import asyncio


class Bell:
    """One task at a time waits for it to ring. `asyncio.Event` within `asyncio.timeout` does the same for three times
    the CPU time, which counts where each response of a fleet waits a few times."""

    __slots__ = ("_waiting", "rung")

    def __init__(self) -> None:
        self.rung = False
        self._waiting: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """Has no effect when it has rung already."""
        self.rung = True
        self._wake()

    async def wait(self, limit_s: float) -> None:
        """Returns once it has rung (`rung`), or after `limit_s`."""
        if self.rung:
            return
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        timer = loop.call_later(limit_s, self._wake)
        try:
            await self._waiting
        finally:
            timer.cancel()
            self._waiting = None

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
