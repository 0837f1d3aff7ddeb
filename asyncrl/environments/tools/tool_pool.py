"""Tools in processes of their own, so that one that hangs or crashes ends alone.

Consumes: `call`s.   Produces: one `ToolResult` for each, in which errors are text for the policy.
Waits for: a free process (as long as the caller does), then its answer (`tool_timeout_s`); a new process until it is
ready (`start_timeout_s`).
Unblocked by: an answer; a call whose process died or was killed: the next caller starts another one.
Stops when: `close` is called; calls that wait raise ProcessDied.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
from collections.abc import Mapping
from typing import Any

import psutil

from asyncrl.config.environments import ToolUseConfig
from asyncrl.environments.tools.frames import LENGTH, CallFrame, Start, ToolResult, packed
from asyncrl.errors import ConfigError, DeadlineExceeded, ProcessDied, explain
from asyncrl.rewards.orphan_reaper import Guard

TOOL_PROCESS = "tool process"
_REAP_S = 2.0


class ToolPool:
    """Belongs to one event loop; its thread must live as long as the pool. Counts processes `killed` at a deadline and
    those that `died` of a call.

    A process and what it has started are one process group, which goes when this process does.
    """

    def __init__(self, config: ToolUseConfig, *, start_timeout_s: float = 60.0) -> None:
        self.killed = self.died = 0
        self._config = config
        self._start_timeout_s = start_timeout_s
        self._seats: asyncio.Queue[_ToolProcess | None] = asyncio.Queue()
        self._processes: set[_ToolProcess] = set()
        self._guard: Guard | None = None
        self._closed = False

    async def start(self) -> None:
        """Raises ConfigError: a tool cannot be started there; ProcessDied, DeadlineExceeded."""
        self._guard = Guard()
        starts = [asyncio.create_task(self._started()) for _ in range(self._config.tool_workers)]
        try:
            for process in await asyncio.gather(*starts):
                self._seats.put_nowait(process)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self.close()
            raise

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Raises ProcessDied, DeadlineExceeded, ConfigError: no process can be had, or the pool was closed."""
        process = await self._seats.get()
        usable = False
        try:
            if process is not None and not process.alive:
                self._end(process)
                process = None
            if process is None or self._closed:
                process = await self._started()
            result = await process.ask(CallFrame(name, arguments), self._config.tool_timeout_s)
            usable = True
        except DeadlineExceeded:
            raise
        except TimeoutError:
            self.killed += 1
            result = ToolResult(f"Error: {name} took more than {self._config.tool_timeout_s:g} s", failed=True)
        except EOFError:
            if self._closed:
                raise self._refused() from None
            self.died += 1
            result = ToolResult(f"Error: {name} ended without a result", failed=True)
        finally:
            if process is not None and not usable:
                self._end(process)
            self._seats.put_nowait(process if usable else None)
        return result

    async def close(self) -> None:
        """Ends all processes. Idempotent."""
        self._closed = True
        self._seats.put_nowait(None)  # whoever waits is refused, one after another
        ended = [self._end(process) for process in list(self._processes)]
        await asyncio.gather(*(process.reap() for process in ended))
        if self._guard is not None:
            self._guard.close()

    async def _started(self) -> _ToolProcess:
        if self._closed or self._guard is None:
            raise self._refused()
        process = _ToolProcess()
        self._processes.add(process)
        try:
            await process.start(self._config, self._start_timeout_s, self._guard)
        except BaseException:
            self._end(process)
            raise
        return process

    def _end(self, process: _ToolProcess) -> _ToolProcess:
        process.kill()
        self._processes.discard(process)
        if self._guard is not None and process.pid is not None:
            self._guard.forget(process.pid)
        return process

    def _refused(self) -> ProcessDied:
        found = "the tool processes were ended" if self._closed else "they have not been started"
        return ProcessDied(explain("call a tool", found, "see the log of the run")).of(TOOL_PROCESS)


class _ToolProcess:
    """One tool process; leads a process group of its own."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, config: ToolUseConfig, timeout_s: float, guard: Guard) -> None:
        asked = f"a process for rollout.tool_use.tools={config.tools}"
        command = [sys.executable, "-m", "asyncrl.environments.tools.tool_worker"]
        pipe = asyncio.subprocess.PIPE
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, start_new_session=True
            )
            guard.watch(self._process.pid)
            ready = await self.ask(Start(tuple(sys.path), config), timeout_s)
        except OSError as error:
            if isinstance(error, TimeoutError):
                found, do = f"it was not ready within {timeout_s:g} s", "let the tool load less"
                raise DeadlineExceeded(explain(asked, found, do)).of(TOOL_PROCESS) from None
            do = "free memory, processes or file descriptors"
            raise ProcessDied(explain(asked, str(error), do)).of(TOOL_PROCESS) from error
        except EOFError:
            do = "see its output in the log"
            raise ProcessDied(explain(asked, "it ended while it started", do)).of(TOOL_PROCESS) from None
        if ready.failed:
            raise ConfigError(explain(asked, ready.text, "correct the tool or its settings"))

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def alive(self) -> bool:
        """Asks the system: a process that has just died is not reaped yet."""
        if self._process is None or self._process.returncode is not None:
            return False
        try:
            return psutil.Process(self._process.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    async def ask(self, frame: Start | CallFrame, timeout_s: float) -> ToolResult:
        """Raises TimeoutError: no answer in time. EOFError: it died. After either it must be killed."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        async with asyncio.timeout(timeout_s):
            try:
                process.stdin.write(packed(frame))
                await process.stdin.drain()
                length = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))[0]
                answer = pickle.loads(await process.stdout.readexactly(length))
            except (ConnectionError, pickle.UnpicklingError) as error:
                raise EOFError(str(error)) from error
        if not isinstance(answer, ToolResult):
            raise EOFError("it sent what is no answer")
        return answer

    def kill(self) -> None:
        """It, its group, and those below it that have a group of their own."""
        if self._process is None or self._process.returncode is not None:
            return
        try:
            below = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.Error:
            below = []
        for victim in below:
            try:
                victim.kill()
            except psutil.Error:
                pass  # it has ended
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except OSError:
            pass  # all of it has ended

    async def reap(self) -> None:
        if self._process is not None:
            try:
                async with asyncio.timeout(_REAP_S):
                    await self._process.wait()
            except TimeoutError:
                pass  # it cannot be killed: the system keeps it
