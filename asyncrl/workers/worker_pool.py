"""Runs calls of user code in worker processes, so that a call that hangs or crashes ends alone."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import AsyncRLError, DeadlineExceeded, Process, ProcessDied, explain
from asyncrl.workers.messages import Raised, WorkerSpec, packed
from asyncrl.workers.orphan_reaper import OrphanReaper
from asyncrl.workers.worker_process import WorkerProcess, error_of

logger = logging.getLogger(__name__)

MAX_STARTS = 3
"""Starts of a worker that may fail in a row while no other one serves."""
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.2, 30.0
_GRACE_S = 0.5
"""Time for an idle worker to end by itself when the pool is closed."""
_AHEAD_S = 0.01
"""Calls that are sent ahead together take about this long, by what the last ones took."""
_WAKE_S = 0.001
"""Calls that take no longer than this together are not divided among workers."""
_GATHER_S = 0.005
"""Quick calls go out so far apart at least, those that come meanwhile together: a write wakes a process, which costs
this event loop more than all else about a short call."""
_SMOOTHING = 0.2
"""Weight of the last call in what a call takes."""


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
    Unblocked by: an answer; the replacement of a worker that died or was killed.
    Stops when: `close` is called, or no worker can be started any more; every call then raises ProcessDied.

    Counts: `answered` calls, workers `killed` at the deadline of a call, workers that `died` by themselves.

    A worker and the processes that it starts are one process group. The group is killed at a deadline, when the worker
    dies, when the pool is closed, and when this process is killed. Processes in a session of their own are killed in
    the first and third case; in the others the janitor kills them.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        """Workers have the working directory, environment and `sys.path` of this process."""
        self.answered = self.killed = self.died = 0
        self._spec = spec
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._turn = asyncio.Lock()
        """Of the worker that takes the next calls."""
        self._sent_at = -math.inf
        """When calls were last taken, by the monotonic clock."""
        self._processes: set[WorkerProcess] = set()
        self._seats: set[asyncio.Task[None]] = set()
        self._reaper: OrphanReaper | None = None
        self._closed = False
        self._call_s = math.inf
        """What a call takes, smoothed; it is not known before the first."""
        self._refusal: str | None = f"the {spec.name}es have not been started"
        self._cause: BaseException | None = None

    @property
    def refuses(self) -> bool:
        """True before the start, after `close`, and once no worker can be started any more."""
        return self._refusal is not None

    async def start(self) -> None:
        """Starts the workers.

        Raises:
            ConfigError: what they should run cannot be built there.
            ProcessDied, DeadlineExceeded: a worker ended, or was not ready in time.
        """
        self._reaper = OrphanReaper()
        starts = [asyncio.create_task(self._started()) for _ in range(self._spec.num_workers)]
        try:
            processes = await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
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
        """The answer to a request. Calls are begun in order as workers get free.

        With n calls before it and w workers it begins after at most n / w + 1 times `timeout_s`, plus the starts that
        fall in between. Where quick calls are sent ahead (`WorkerSpec.ahead`), those before it in its process may
        take longer than such calls did, each at most its `timeout_s`; the first that misses it leaves the others to all
        workers. When a caller is cancelled its call still runs, at most until its deadline.

        Args:
            asked: names the call in messages.
        Raises:
            DeadlineExceeded: it took longer than `timeout_s`; the worker was killed.
            ProcessDied: the call killed the worker, or the pool refuses calls (`refuses`).
            Exception: what the called code raised, as its own type where that can be made here, else as RuntimeError;
                with the traceback in the worker as a note.
        """
        if self._refusal is not None:
            raise self._refused(asked)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._jobs.put_nowait(_Job(packed(request), asked, answer))
        return await answer

    async def close(self) -> None:
        """Ends all workers within about 2 s; calls that wait raise ProcessDied. Idempotent."""
        self._closed = True
        self._refuse(f"the {self._spec.name}es were ended", None)
        for seat in self._seats:
            seat.cancel()
        await asyncio.gather(*self._seats, return_exceptions=True)
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
                if not current.alive:  # it died while it was idle
                    self._give_back(taken)
                    await self._lost(current, "while it was idle")
                    current = await self._next()
                elif not await self._serve(taken, current):
                    self._give_back(taken)
                    current = await self._next()
        finally:
            self._give_back(taken)

    def _give_back(self, taken: deque[_Job]) -> None:
        """Leaves calls that are not begun to whichever worker is free next: a replacement may never start."""
        while taken:
            job = taken.popleft()
            if self._refusal is None:
                self._jobs.put_nowait(job)
            else:
                _settle(job, self._refused(job.asked))

    async def _take(self, taken: deque[_Job]) -> None:
        """The next call, and those that may be sent together with it while they are quick: a worker's share of them,
        or as many as are done before another worker would have woken."""
        async with self._turn:
            taken.append(await self._jobs.get())
            ahead = self._together(_AHEAD_S)
            wait_s = self._sent_at + _GATHER_S - time.monotonic()
            if ahead > 1 and wait_s > 0 and self._jobs.empty():
                await asyncio.sleep(wait_s)
            self._sent_at = time.monotonic()
            waiting = self._jobs.qsize()
            share = max(waiting // self._spec.num_workers, self._together(_WAKE_S) - 1)
            taken.extend(self._jobs.get_nowait() for _ in range(min(waiting, share, ahead - 1)))

    def _together(self, seconds: float) -> int:
        """Calls that may be sent at once and take so long together, by what the last ones took; at least one."""
        return max(1, min(self._spec.ahead, int(seconds / max(self._call_s, 1e-9))))

    async def _serve(self, taken: deque[_Job], process: WorkerProcess) -> bool:
        """Settles the calls; False when one of them ended the process: those after it are still to be served."""
        jobs = [job for job in taken if not job.answer.done()]  # the callers of the others were cancelled
        taken.clear()
        taken.extend(jobs)
        for job, answer in zip(jobs, process.send([job.request for job in jobs]), strict=True):
            usable = await self._settle_one(job, answer, process)
            taken.popleft()
            if not usable:
                return False
        return True

    async def _settle_one(self, job: _Job, sent: asyncio.Future[bytes], process: WorkerProcess) -> bool:
        """Settles one call; False when it ended the process."""
        spec = self._spec
        outcome: object = self._refused(job.asked)  # unless it comes to more: the pool is closed
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
            self._call_s = max(self._call_s, spec.timeout_s)  # more of them may hang: each worker gets one
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
        """A new process in place of one that ended; None when none can be started any more, and calls are refused."""
        failures = 0
        while self._refusal is None:
            try:
                return await self._started()
            except AsyncRLError as error:
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
        """Fails the calls that wait and those to come."""
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
