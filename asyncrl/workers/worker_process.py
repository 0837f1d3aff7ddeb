"""The owner's side of one worker process."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from asyncrl.errors import DeadlineExceeded, Process, ProcessDied, explain
from asyncrl.workers.messages import LENGTH, Raised, Start, WorkerSpec, packed
from asyncrl.workers.orphan_reaper import OrphanReaper
from asyncrl.workers.sandbox.process_tree import kill_group, kill_tree

logger = logging.getLogger(__name__)

_REAP_S = 2.0
"""Longest wait for a killed process to end."""


class WorkerProcess:
    """Leads its own session and process group. The caller must `end` it, even if `start` failed.

    `end` also ends its children, except daemons (which left both parent and group).
    """

    def __init__(self, spec: WorkerSpec, reaper: OrphanReaper) -> None:
        """Raises ProcessDied: the system cannot start a process."""
        self._spec = spec
        self._reaper = reaper
        self._answers = _Answers()
        self._writer: asyncio.WriteTransport | None = None
        self._reader: asyncio.ReadTransport | None = None
        self._exit_fd: int | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._end: asyncio.Task[None] | None = None
        self._ready = False
        # Start it from the event loop's thread: the kernel treats the end of the starting thread as the end of the
        # parent.
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", spec.module, *spec.labels],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            do = "free memory, processes or file descriptors"
            raise ProcessDied(explain(f"a process for {spec.asked}", str(error), do)).of(Process(spec.name)) from error
        reaper.watch(self.pid)

    async def start(self) -> None:
        """Returns once the process is ready for requests.

        Raises:
            ConfigError: the function cannot be built there.
            ProcessDied, DeadlineExceeded: it died, or was not ready in time.
        """
        spec = self._spec
        try:
            # Shielded: the event loop owns a pipe that it connects, and closes it if it is cancelled in between.
            self._connecting = asyncio.create_task(self._connect(), name=f"pipes of {spec.name} {self.pid}")
            await asyncio.shield(self._connecting)
            (sent,) = self.send([packed(Start(tuple(sys.path), spec.asked, spec.settings))])
            _, answer = await self.answer(sent, spec.start_timeout_s)
        except TimeoutError:
            found = f"its process was not ready within {spec.start_timeout_s:g} s"
            do = "let its module import or load less, or wait longer for it"
            raise DeadlineExceeded(explain(spec.asked, found, do)).of(Process(spec.name)) from None
        except EOFError:
            await self.end()
            raise self.died(spec.asked, "its process ended while it started") from None
        if isinstance(answer, Raised):
            raise error_of(answer, spec.name)
        self._ready = True

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True from `start` until the event loop or the system sees the process end."""
        return self._ready and not self._answers.ended and self._end is None and self._process.poll() is None

    def send(self, requests: Sequence[bytes]) -> list[asyncio.Future[bytes]]:
        """Sends frames once all former ones are answered; returns futures of their answers, in order. The process works
        on one at a time."""
        assert self._writer is not None
        answers = [self._answers.expect() for _ in requests]
        self._writer.write(b"".join(requests))
        return answers

    async def answer(self, answer: asyncio.Future[bytes], timeout_s: float) -> tuple[float, Any]:
        """The answer, and the seconds that the process worked on it.

        Raises TimeoutError: no answer in time. EOFError: the process died, or sent something other than an answer.
        After either, call `end`.
        """
        # An answer that arrived before the timeout was handled counts: the event loop was late.
        if not answer.done():
            await asyncio.wait([answer], timeout=timeout_s)
        if not answer.done():
            raise TimeoutError
        try:
            seconds, value = pickle.loads(answer.result())
            return float(seconds), value
        except Exception as error:
            raise EOFError("it sent what is no answer") from error

    def died(self, asked: str, found: str) -> ProcessDied:
        """The error for its death; call after `end`."""
        code = self._process.returncode
        if code is None:
            how = "and cannot be killed"
        elif code < 0:
            how = f"killed by {_signal_name(-code)}"
        else:
            how = f"exit code {code}"
        do = "see its output in the log; SIGKILL is often the system, out of memory"
        return ProcessDied(explain(asked, f"{found}: {how}", do)).of(Process(self._spec.name))

    async def end(self, grace_s: float = 0.0) -> None:
        """Ends the process and its children: an idle one may exit within `grace_s` seconds, then it is killed.
        Idempotent; continues if the caller is cancelled."""
        if self._end is None:
            self._end = asyncio.create_task(self._ending(grace_s), name=f"end of {self._spec.name} {self.pid}")
        await asyncio.shield(self._end)

    async def _ending(self, grace_s: float) -> None:
        if self._connecting is not None:
            await asyncio.wait([self._connecting])
        self._forget_exit()
        writer = self._writer or self._process.stdin
        if writer is not None:
            writer.close()
        if not await asyncio.to_thread(_end_tree, self._process, grace_s):
            logger.critical("%s %d does not end although it was killed", self._spec.name, self.pid)
        reader = self._reader or self._process.stdout
        if reader is not None:
            reader.close()
        self._reaper.forget(self.pid)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        self._reader, _ = await loop.connect_read_pipe(lambda: self._answers, self._process.stdout)
        self._writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, self._process.stdin)
        if sys.platform == "linux":
            try:
                self._exit_fd = os.pidfd_open(self.pid)
            except OSError:
                return  # old kernel: rely on the end of the pipe, which a child process may delay
            loop.add_reader(self._exit_fd, self._exited)

    def _exited(self) -> None:
        """Called when the process has exited. A forked child may still hold its pipe open."""
        self._forget_exit()
        kill_group(self.pid)

    def _forget_exit(self) -> None:
        if self._exit_fd is not None:
            asyncio.get_running_loop().remove_reader(self._exit_fd)
            os.close(self._exit_fd)
            self._exit_fd = None


class _Answers(asyncio.Protocol):
    """Assembles frames from the process's output."""

    def __init__(self) -> None:
        self.ended = False
        self._received = bytearray()
        self._expected: deque[asyncio.Future[bytes]] = deque()

    def expect(self) -> asyncio.Future[bytes]:
        """The future of the next frame not yet expected; EOFError if the process has ended."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._expected.append(answer)
        if self.ended:
            self._end_all()
        return answer

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            frame = bytes(self._received[LENGTH.size : end])
            del self._received[:end]
            if self._expected and not (answer := self._expected.popleft()).done():
                answer.set_result(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True
        self._end_all()

    def _end_all(self) -> None:
        while self._expected:
            if not (answer := self._expected.popleft()).done():
                answer.set_exception(EOFError())
                answer.exception()  # marks it as retrieved: the caller may have been cancelled


def error_of(raised: Raised, process: str) -> Exception:
    """The exception in its own type if it can be unpickled, else RuntimeError; the process's traceback is a note."""
    error: Any = None
    try:
        error = pickle.loads(raised.error) if raised.error is not None else None
    except BaseException:  # unpickling a user's exception runs its code, which may raise anything
        logger.debug("an exception of a %s cannot be made again here", process, exc_info=True)
    if not isinstance(error, Exception):
        error = RuntimeError(raised.summary)
    error.add_note(f"In the {process}:\n{raised.trace}")
    return error


def _end_tree(process: subprocess.Popen[bytes], grace_s: float) -> bool:
    """Blocks for at most `grace_s` and `_REAP_S` seconds."""
    if grace_s > 0:
        with suppress(subprocess.TimeoutExpired):  # busy with a request, or has running threads
            process.wait(grace_s)
    return kill_tree(process, _REAP_S)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
