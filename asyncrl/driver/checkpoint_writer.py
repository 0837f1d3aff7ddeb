"""Writes checkpoints in the background: captures the state between two steps and writes it while training continues."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.checkpoint.digests import FileDigest
from asyncrl.checkpoint.store import RunState
from asyncrl.config.run import CheckpointConfig
from asyncrl.errors import DeadlineExceeded, ProcessDied, StorageError, explain
from asyncrl.queue.message_queue import MessageQueue
from asyncrl.remote.actor_client import CALL_TIMEOUT_S
from asyncrl.remote.tasks import cancel
from asyncrl.types.events import CheckpointFailed, CheckpointLate, CheckpointSaved

if TYPE_CHECKING:  # the writer is tested without Ray
    from asyncrl.driver.interfaces import Parts

logger = logging.getLogger(__name__)

CAPTURE_TIMEOUT_S = 60.0
"""Longest time for the rollouters to return their partial trajectories. A checkpoint without them is complete too."""

FINISH_TIMEOUT_S = 60.0
"""Longest wait for the thread of a cancelled checkpoint. The thread may continue flushing but does not rename the
directory."""

GRACE_S = 10.0
"""Allowance for sealing and renaming after both parts are written, and for calls beyond the last tolerated delay."""

PING_S = 20.0
"""Longest wait for the ping of a process whose part is late."""


class CheckpointWriter:
    """Owns the one checkpoint write in progress and the count of consecutive failures.

    Consumes: the state of rollouter, queue and trainers, captured in memory at one moment between two steps.
    Produces: complete checkpoints; one event per checkpoint and one per failure.
    Waits for: the captures; the previous write. A write that exceeds `checkpoint.timeout_s` continues as long as queue
    and ranks answer; each timeout counts as a failure.
    Unblocked by: the queue and the trainer ranks, when they have written their parts.
    Stops when: `last` has written the final checkpoint. `failed` raises after more than `checkpoint.max_failures`
    consecutive failures.
    """

    def __init__(self, config: CheckpointConfig, parts: Parts) -> None:
        self._config = config
        self._store, self._events = parts.checkpoints, parts.events
        self._rollouter, self._queue, self._trainers = parts.rollouter, parts.queue, parts.trainers
        self._writing: asyncio.Task[None] | None = None
        self._failures = 0
        self.last_step = -1
        """Step of the newest captured checkpoint."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def save(self, state: RunState) -> None:
        """Captures the run between two steps; returns when training may continue. Raises the error of a part."""
        await self.settle()
        started = time.monotonic()
        partials = await self._rollouter.partials(CAPTURE_TIMEOUT_S)
        await self._queue.call(CALL_TIMEOUT_S, MessageQueue.capture, partials)
        await self._trainers.capture()
        self.last_step = state.global_steps
        capture_s = time.monotonic() - started
        self._writing = asyncio.create_task(self._write(state, started, capture_s), name="checkpoint")
        self._writing.add_done_callback(self._ended)
        if not self._config.background:
            await self.settle()

    async def settle(self) -> None:
        """Waits for the write in progress. Raises StorageError: too many consecutive failures; ProcessDied."""
        if self._writing is not None:
            await asyncio.shield(self._writing)
            self._writing = None

    async def last(self, state: RunState) -> None:
        """Writes the final checkpoint of the run; unlike the others it must not fail. Raises its error."""
        if self.last_step != state.global_steps:
            await self.settle()  # a failure of an earlier write still counts against the budget
        self._failures = self._config.max_failures
        if self.last_step != state.global_steps:
            await self.save(state)
        await self.settle()

    async def close(self) -> None:
        """Cancels the write in progress."""
        if self._writing is not None:
            await cancel(self._writing)

    async def _write(self, state: RunState, started: float, capture_s: float) -> None:
        temporary: Path | None = None
        try:
            temporary = self._store.begin(state.global_steps)
            of_trainer = await self._written(temporary, state)
            async with asyncio.timeout(GRACE_S + self._config.timeout_s):
                path = await self._finish(temporary, state, of_trainer)
        except (ProcessDied, DeadlineExceeded):
            raise
        except Exception as error:  # task boundary: counted, and raised when too many
            self._events.write(CheckpointFailed(state.global_steps, f"{type(error).__name__}: {error}"))
            # The failure is tolerated until the budget of consecutive failures is spent.
            logger.warning("checkpoint of step %d was not written: %s", state.global_steps, error)
            self._failures += 1
            if self._failures > self._config.max_failures:
                found = f"{self._failures} time(s) in a row: {type(error).__name__}: {error}"
                do = "make room, or raise checkpoint.max_failures; then go on with resume=auto"
                raise StorageError(explain(f"a checkpoint of step {state.global_steps}", found, do)) from error
            if self.last_step == state.global_steps:
                self.last_step = -1
        else:
            self._failures = 0
            took_s = time.monotonic() - started
            self._events.write(CheckpointSaved(state.global_steps, path.name, save_s=took_s, capture_s=capture_s))
        finally:
            if temporary is not None:
                self._store.discard(temporary)  # unless it was renamed

    async def _written(self, temporary: Path, state: RunState) -> Mapping[str, FileDigest]:
        """Has both parts written; returns the digests of the trainer's. Raises the error of a part, or of a process
        that does not answer when its part is late."""
        timeout_s = self._config.timeout_s
        longest_s = (timeout_s + PING_S) * (1 + self._config.max_failures) + GRACE_S
        # Enough for every tolerated delay with its pings, so these calls never expire before the loop gives up.
        parts = asyncio.gather(
            self._queue.call(longest_s, MessageQueue.save, temporary / "queue"),
            self._trainers.save(temporary / "trainer", longest_s),
            return_exceptions=True,  # both have ended before a failure removes the directory
        )
        try:
            while not (await asyncio.wait([parts], timeout=timeout_s))[0]:
                queue = self._queue.call(PING_S, MessageQueue.ping)
                pings = asyncio.gather(queue, self._trainers.ping(PING_S), return_exceptions=True)
                # Late: go on waiting only while all processes answer and the budget of failures lasts.
                lost = [answer for answer in await pings if isinstance(answer, BaseException)]
                if parts.done():
                    break
                if lost:
                    raise lost[0]
                do = "use faster storage, or raise checkpoint.timeout_s"
                asked, found = f"it within {timeout_s:g} s", "queue and ranks answer, and go on writing"
                late = TimeoutError(explain(asked, found, do))
                if self._failures >= self._config.max_failures:
                    raise late
                self._failures += 1
                self._events.write(CheckpointLate(state.global_steps, f"{type(late).__name__}: {late}"))
                logger.warning("checkpoint of step %d is late: %s", state.global_steps, late)
        finally:
            await cancel(parts)
        of_queue, of_trainer = parts.result()
        if isinstance(of_queue, BaseException):
            raise of_queue
        if isinstance(of_trainer, BaseException):
            raise of_trainer
        return of_trainer

    async def _finish(self, temporary: Path, state: RunState, of_trainer: Mapping[str, FileDigest]) -> Path:
        """Completes and renames the directory. A cancelled checkpoint is never renamed: by then the run may continue
        from another checkpoint. Raises StorageError."""
        given_up = threading.Event()
        written = {f"trainer/{name}": digest for name, digest in of_trainer.items()}
        finishing = asyncio.ensure_future(
            asyncio.to_thread(self._store.finish, temporary, state, given_up, written=written)
        )
        try:
            return await asyncio.shield(finishing)
        except asyncio.CancelledError:
            given_up.set()
            await asyncio.wait([finishing], timeout=FINISH_TIMEOUT_S)
            raise

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # marks it as retrieved: the run may end before anybody awaits it
