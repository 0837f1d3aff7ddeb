"""Rewards in processes of their own, so that one that hangs or crashes ends alone.

Consumes: `score` calls.   Produces: one result or one error for each.
Waits for: a free worker, then its answer (`timeout_s`); a new worker until it is ready (`start_timeout_s`).
Unblocked by: an answer; a worker that died or was killed, as soon as another one has taken its place.
Stops when: `close` is called, or no worker can be started any more: every call then raises ProcessDied.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from dataclasses import dataclass

from asyncrl.config.rewards import RewardConfig
from asyncrl.data.rows import PromptRow
from asyncrl.errors import AsyncRLError, DeadlineExceeded, ProcessDied, explain
from asyncrl.rewards.messages import Raised, Scored
from asyncrl.rewards.orphan_reaper import Guard
from asyncrl.rewards.process import REWARD_PROCESS, RewardProcess, error_of
from asyncrl.rewards.reward import RewardResult

logger = logging.getLogger(__name__)

MAX_STARTS = 3
"""Starts of a worker that may fail in a row while no other one serves."""
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.2, 30.0
_GRACE_S = 0.5
"""What an idle worker may take to end by itself when the pool is closed."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    request: bytes
    origin: str
    answer: asyncio.Future[RewardResult]


class RewardPool:
    """Belongs to one event loop; its thread must live as long as the pool.

    Counts: `scored` results, workers `killed` at the deadline of a call, workers that `died` by themselves.

    A worker and what it has started are one process group. It goes with its worker: at a deadline, when the worker
    dies, when the pool is closed, and when this process is killed. What a reward starts in a session of its own is
    found and killed in the first and third case; in the others it is left to whoever cleans up behind the run.

    Args:
        config: `timeout_s` is the longest that one call may take, from when a worker begins with it. Workers have the
            working directory, environment and `sys.path` of this process.
        start_timeout_s: longest that a worker may take to import and build the reward.
    """

    def __init__(self, config: RewardConfig, *, start_timeout_s: float = 60.0) -> None:
        self.scored = self.killed = self.died = 0
        self._config = config
        self._timeout_s = config.timeout_s
        self._start_timeout_s = start_timeout_s
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._processes: set[RewardProcess] = set()
        self._seats: set[asyncio.Task[None]] = set()
        self._guard: Guard | None = None
        self._closed = False
        self._refusal: str | None = "the reward processes have not been started"
        self._cause: BaseException | None = None

    async def start(self) -> None:
        """Starts the workers.

        Raises:
            ConfigError: the reward cannot be built there.
            ProcessDied, DeadlineExceeded: a worker ended, or was not ready in time.
        """
        self._guard = Guard()
        starts = [asyncio.create_task(self._started()) for _ in range(self._config.workers)]
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
            raise self._refused("any row")
        self._refusal = None
        for number, process in enumerate(processes):
            seat = asyncio.create_task(self._work(process), name=f"reward worker {number}")
            self._seats.add(seat)
            seat.add_done_callback(self._seat_ended)

    async def score(self, response: str, row: PromptRow) -> RewardResult:
        """The reward of a response. Calls are begun in order as workers get free.

        With n calls before it and w workers it begins after at most n / w + 1 times `timeout_s`, plus the starts that
        fall in between. A caller that gives up leaves its call to the worker, which ends it by then.

        Raises:
            DeadlineExceeded: it took longer than `timeout_s`; the worker was killed.
            ProcessDied: the worker died of it, no worker can be started, or the pool was closed.
            Exception: what the reward raised, as its own type where that can be made here, else as RuntimeError; with
                the traceback in the worker as a note.
        """
        self._require_open(row.origin)
        answer: asyncio.Future[RewardResult] = asyncio.get_running_loop().create_future()
        self._jobs.put_nowait(_Job(pickle.dumps((response, row)), row.origin, answer))
        return await answer

    async def close(self) -> None:
        """Ends all workers within about 2 s; calls that wait raise ProcessDied. Idempotent."""
        self._closed = True
        self._refuse("the reward processes were ended", None)
        for seat in self._seats:
            seat.cancel()
        await asyncio.gather(*self._seats, return_exceptions=True)
        await asyncio.gather(*(process.end(_GRACE_S) for process in self._processes))
        self._processes.clear()
        if self._guard is not None:
            self._guard.close()

    # -- inside --------------------------------------------------------------------------------------------------

    async def _work(self, process: RewardProcess) -> None:
        """Serves calls with one process after another."""
        current: RewardProcess | None = process
        while current is not None:
            job = await self._jobs.get()
            if not current.alive:  # it died of nothing that was asked
                self._jobs.put_nowait(job)
                await self._lost(current, "while it was idle")
                current = await self._next()
            elif not job.answer.done() and not await self._serve(job, current):
                current = await self._next()

    async def _serve(self, job: _Job, process: RewardProcess) -> bool:
        """Settles one call; False when that has cost the process."""
        asked = f"the reward of {job.origin}"
        outcome: RewardResult | Exception = self._refused(job.origin)  # unless it comes to more: the pool is closed
        usable = False
        try:
            answer = await process.ask(job.request, self._timeout_s)
            if isinstance(answer, Raised):
                outcome, usable = error_of(answer), True
            elif isinstance(answer, Scored):
                self.scored += 1
                outcome, usable = RewardResult(answer.reward, answer.parts), True
        except TimeoutError:
            self.killed += 1
            await self._end(process)
            found = f"no result within {self._timeout_s:g} s; the process that computed it was killed"
            do = "make the reward end on such a response, or raise reward.timeout_s"
            outcome = DeadlineExceeded(explain(asked, found, do)).of(REWARD_PROCESS)
        except EOFError:
            await self._lost(process, f"while it computed {asked}")
            outcome = process.died(asked, "the process that computed it ended")
        finally:
            _settle(job, outcome)
        return usable

    async def _next(self) -> RewardProcess | None:
        """A process in place of one that is gone; None when none can be had any more, and calls are refused."""
        failures = 0
        while self._refusal is None:
            try:
                return await self._started()
            except AsyncRLError as error:
                failures += 1
                logger.warning("a reward process could not be started: %s", error)
                if failures >= MAX_STARTS and not any(process.alive for process in self._processes):
                    self._refuse(f"{failures} reward processes in a row could not be started; the last: {error}", error)
                    break
                await asyncio.sleep(min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2**failures))
        return None

    async def _started(self) -> RewardProcess:
        assert self._guard is not None
        process = RewardProcess(self._config, self._guard)
        self._processes.add(process)
        try:
            await process.start(self._start_timeout_s)
        except BaseException:
            await self._end(process)
            raise
        return process

    async def _lost(self, process: RewardProcess, when: str) -> None:
        self.died += 1
        await self._end(process)
        logger.warning("%s", process.died(f"reward process {process.pid}", f"it ended {when}"))

    async def _end(self, process: RewardProcess) -> None:
        await process.end()
        self._processes.discard(process)

    def _seat_ended(self, seat: asyncio.Task[None]) -> None:
        if not seat.cancelled() and (error := seat.exception()) is not None:
            logger.error("a reward worker's loop has ended", exc_info=error)
            self._refuse(f"a loop of the reward pool has ended: {error!r}", error)

    def _refuse(self, why: str, cause: BaseException | None) -> None:
        """Fails the calls that wait and those to come."""
        if self._refusal is None:
            self._refusal, self._cause = why, cause
        while not self._jobs.empty():
            job = self._jobs.get_nowait()
            _settle(job, self._refused(job.origin))

    def _refused(self, origin: str) -> ProcessDied:
        found = self._refusal or "the reward processes were ended"
        error = ProcessDied(explain(f"the reward of {origin}", found, "see the log of the run")).of(REWARD_PROCESS)
        error.__cause__ = self._cause
        return error

    def _require_open(self, origin: str) -> None:
        if self._refusal is not None:
            raise self._refused(origin)


def _settle(job: _Job, outcome: RewardResult | Exception) -> None:
    if job.answer.done():
        return  # its caller has given up
    if isinstance(outcome, Exception):
        job.answer.set_exception(outcome)
    else:
        job.answer.set_result(outcome)
