"""Calls user code in worker processes, so that a call that hangs or crashes ends alone."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import AsyncRLError, DeadlineExceeded, Process, ProcessDied, explain
from asyncrl.remote.tasks import cancel
from asyncrl.workers.messages import Raised, WorkerSpec, packed
from asyncrl.workers.orphan_reaper import OrphanReaper
from asyncrl.workers.worker_process import WorkerProcess, error_of

logger = logging.getLogger(__name__)

MAX_STARTS = 3
"""Failed starts in a row, with no other worker alive, after which the pool gives up."""
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.2, 30.0
_GRACE_S = 0.5
"""Time for an idle worker to exit by itself when the pool closes."""
_AHEAD_S = 0.01
"""Target duration of the calls sent ahead together, estimated from recent calls."""
_WAKE_S = 0.001
"""Calls that take less than this together go to one worker."""
_GATHER_S = 0.005
"""Shortest time between two writes of quick calls; calls in between are sent together. A write wakes a process, the
main cost of a short call for this event loop."""
_SMOOTHING = 0.2
"""Weight of the newest call in the smoothed call time."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    request: bytes
    asked: str
    answer: asyncio.Future[Any]


class WorkerPool:
    """Owns the worker processes of one kind. Belongs to one event loop; its thread must live as long as the pool.

    Consumes: `call`s.
    Produces: one answer or one error for each call.
    Waits for: a free worker, then its answer (`timeout_s`); a new worker until it is ready (`start_timeout_s`).
    Unblocked by: an answer; the replacement of a dead worker.
    Stops when: `close` is called, or no worker can be started; every call then raises ProcessDied.

    Counts: calls `answered`, workers `killed` at a call's deadline, workers that `died` by themselves.

    A worker and its children are one process group. The group is killed at a deadline, when the worker dies, when the
    pool closes, and when this process is killed. Children in their own session are killed at a deadline and at `close`;
    otherwise the janitor kills them.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        """Workers have the working directory, environment and `sys.path` of this process."""
        self.answered = self.killed = self.died = 0
        self._spec = spec
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._turn = asyncio.Lock()
        """Held by the worker that takes the next calls."""
        self._sent_at = -math.inf
        """Monotonic time of the last `_take`."""
        self._processes: set[WorkerProcess] = set()
        self._seats: set[asyncio.Task[None]] = set()
        self._reaper: OrphanReaper | None = None
        self._closed = False
        self._call_s = math.inf
        """Smoothed seconds per call; infinite before the first."""
        self._refusal: str | None = f"the {spec.name}es have not been started"
        self._cause: BaseException | None = None

    @property
    def refuses(self) -> bool:
        """True before the start, after `close`, and once no worker can be started."""
        return self._refusal is not None

    async def start(self) -> None:
        """Starts the workers.

        Raises:
            ConfigError: the function cannot be built in a worker.
            ProcessDied, DeadlineExceeded: a worker died, or was not ready in time.
        """
        self._reaper = OrphanReaper()
        starts = [asyncio.create_task(self._started()) for _ in range(self._spec.num_workers)]
        try:
            processes = await asyncio.gather(*starts)
        except BaseException:
            await cancel(*starts)
            await self.close()
            raise
        if self._closed:
            await self.close()
            raise self._refused(self._spec.asked)
        self._refusal = None
        for number, process in enumerate(processes):
            seat = asyncio.create_task(self._work(process), name=f"{self._spec.name} {number}")
            self._seats.add(seat)
            seat.add_done_callback(self._seat_ended)

    async def call(self, request: object, asked: str) -> Any:
        """Sends a request and returns its answer. Calls begin in order as workers become free.

        With n calls before it and w workers, a call begins within (n / w + 1) * `timeout_s` plus restarts. Calls sent
        ahead (`WorkerSpec.ahead`) wait for the calls before them in their process, each at most `timeout_s`; if one
        misses its deadline, the rest go back to all workers. A cancelled caller's call still runs, until its deadline.

        Args:
            asked: names the call in messages.
        Raises:
            DeadlineExceeded: the call took longer than `timeout_s`; the worker was killed.
            ProcessDied: the call killed the worker, or the pool refuses calls (`refuses`).
            Exception: raised by the called code; its own type if it can be unpickled here, else RuntimeError. The
                worker's traceback is a note.
        """
        if self._refusal is not None:
            raise self._refused(asked)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._jobs.put_nowait(_Job(packed(request), asked, answer))
        return await answer

    async def close(self) -> None:
        """Ends all workers within about 2 s; pending calls raise ProcessDied. Idempotent."""
        self._closed = True
        self._refuse(f"the {self._spec.name}es were ended", None)
        await cancel(*self._seats)
        await asyncio.gather(*(process.end(_GRACE_S) for process in self._processes))
        self._processes.clear()
        if self._reaper is not None:
            self._reaper.close()

    # -- inside --------------------------------------------------------------------------------------------------

    async def _work(self, process: WorkerProcess) -> None:
        """Serves calls with one process after another."""
        current: WorkerProcess | None = process
        taken: deque[_Job] = deque()
        try:
            while current is not None:
                await self._take(taken)
                if not current.alive:  # died while idle
                    self._give_back(taken)
                    await self._lost(current, "while it was idle")
                    current = await self._next()
                elif not await self._serve(taken, current):
                    self._give_back(taken)
                    current = await self._next()
        finally:
            self._give_back(taken)

    def _give_back(self, taken: deque[_Job]) -> None:
        """Requeues calls that have not begun, for any worker: a replacement may never start."""
        while taken:
            job = taken.popleft()
            if self._refusal is None:
                self._jobs.put_nowait(job)
            else:
                _settle(job, self._refused(job.asked))

    async def _take(self, taken: deque[_Job]) -> None:
        """Takes the next call and, while calls are quick, more to send with it: a worker's share, or as many as finish
        before another worker would wake."""
        async with self._turn:
            taken.append(await self._jobs.get())
            ahead = self._together(_AHEAD_S)
            # Batch quick calls: wait for more unless some are queued already.
            wait_s = self._sent_at + _GATHER_S - time.monotonic()
            if ahead > 1 and wait_s > 0 and self._jobs.empty():
                await asyncio.sleep(wait_s)
            self._sent_at = time.monotonic()
            waiting = self._jobs.qsize()
            # Leave the other workers their share, unless the calls are too short to wake them.
            share = max(waiting // self._spec.num_workers, self._together(_WAKE_S) - 1)
            taken.extend(self._jobs.get_nowait() for _ in range(min(waiting, share, ahead - 1)))

    def _together(self, seconds: float) -> int:
        """Number of queued calls to send together, estimated from recent call times; at least one."""
        return max(1, min(self._spec.ahead, int(seconds / max(self._call_s, 1e-9))))

    async def _serve(self, taken: deque[_Job], process: WorkerProcess) -> bool:
        """Settles the calls; False if one ended the process, leaving the calls after it in `taken`."""
        jobs = [job for job in taken if not job.answer.done()]  # without the calls of cancelled callers
        taken.clear()
        taken.extend(jobs)
        for job, answer in zip(jobs, process.send([job.request for job in jobs]), strict=True):
            usable = await self._settle_one(job, answer, process)
            taken.popleft()
            if not usable:
                return False
        return True

    async def _settle_one(self, job: _Job, sent: asyncio.Future[bytes], process: WorkerProcess) -> bool:
        """Settles one call; False if it ended the process."""
        spec = self._spec
        outcome: object = self._refused(job.asked)  # stands if `close` cancels this wait
        usable = False
        try:
            seconds, answer = await process.answer(sent, spec.timeout_s)
            self._call_s = seconds if math.isinf(self._call_s) else self._call_s + _SMOOTHING * (seconds - self._call_s)
            if isinstance(answer, Raised):
                outcome, usable = error_of(answer, spec.name), True
            elif isinstance(answer, spec.answer):
                self.answered += 1
                outcome, usable = answer, True
            else:
                raise EOFError("it sent what is no answer")
        except TimeoutError:
            self.killed += 1
            self._call_s = max(self._call_s, spec.timeout_s)  # more calls may hang: send them singly
            await self._end(process)
            found = f"no result within {spec.timeout_s:g} s; the process that computed it was killed"
            outcome = DeadlineExceeded(explain(job.asked, found, spec.advice)).of(Process(spec.name))
        except EOFError:
            await self._lost(process, f"while it computed {job.asked}")
            outcome = process.died(job.asked, "the process that computed it ended")
        finally:
            _settle(job, outcome)
        return usable

    async def _next(self) -> WorkerProcess | None:
        """Starts a replacement; None if none can be started, and calls are refused."""
        failures = 0
        while self._refusal is None:
            try:
                return await self._started()
            except AsyncRLError as error:
                # Back off and retry; give up only if nothing else serves, so one bad start does not end the pool.
                failures += 1
                logger.warning("a %s could not be started: %s", self._spec.name, error)
                if failures >= MAX_STARTS and not any(process.alive for process in self._processes):
                    why = f"{failures} {self._spec.name}es in a row could not be started; the last: {error}"
                    self._refuse(why, error)
                    break
                await asyncio.sleep(min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2**failures))
        return None

    async def _started(self) -> WorkerProcess:
        assert self._reaper is not None
        process = WorkerProcess(self._spec, self._reaper)
        self._processes.add(process)
        try:
            await process.start()
        except BaseException:
            await self._end(process)
            raise
        return process

    async def _lost(self, process: WorkerProcess, when: str) -> None:
        self.died += 1
        await self._end(process)
        logger.warning("%s", process.died(f"{self._spec.name} {process.pid}", f"it ended {when}"))

    async def _end(self, process: WorkerProcess) -> None:
        await process.end()
        self._processes.discard(process)

    def _seat_ended(self, seat: asyncio.Task[None]) -> None:
        if not seat.cancelled() and (error := seat.exception()) is not None:
            logger.error("the loop of a %s has ended", self._spec.name, exc_info=error)
            self._refuse(f"the loop of a {self._spec.name} has ended: {error!r}", error)

    def _refuse(self, why: str, cause: BaseException | None) -> None:
        """Fails queued and later calls."""
        if self._refusal is None:
            self._refusal, self._cause = why, cause
        while not self._jobs.empty():
            job = self._jobs.get_nowait()
            _settle(job, self._refused(job.asked))

    def _refused(self, asked: str) -> ProcessDied:
        found = self._refusal or f"the {self._spec.name}es were ended"
        error = ProcessDied(explain(asked, found, "see the log of the run")).of(Process(self._spec.name))
        error.__cause__ = self._cause
        return error


def _settle(job: _Job, outcome: object) -> None:
    if job.answer.done():
        return  # its caller was cancelled
    if isinstance(outcome, Exception):
        job.answer.set_exception(outcome)
    else:
        job.answer.set_result(outcome)
