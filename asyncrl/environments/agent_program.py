"""Agents that are programs in any language: one process per trajectory."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress

from asyncrl.environments.environment import Task
from asyncrl.errors import Process, ProcessDied, explain
from asyncrl.remote.tasks import kept
from asyncrl.workers.orphan_reaper import OrphanReaper
from asyncrl.workers.sandbox.process_tree import kill_group

MAX_ANSWER_BYTES = 1 << 20
"""Longest answer: the end of the standard output."""
_SHOWN_BYTES = 4000
"""Bytes at the end of the standard error that messages show."""
_LEAVE_S = 5.0
"""Time to exit after SIGTERM, before SIGKILL to the process group; after an exit, time for the output to end."""
_POLL_S = 0.05
_AFTER_A_LINE = ("/bin/sh", "-c", 'read -r line && exec "$@"', "sh")
"""Waits for a line on standard input, then execs the program that follows. If the rollouter is killed before the reaper
knows the process, the line never comes and the process exits."""


class AgentProgram:
    """Starts the program for each trajectory, with the interface of an agent function. Owns the processes.

    The program gets the task as JSON on its standard input, and OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and
    ANTHROPIC_API_KEY in its environment, which is otherwise that of the rollouter. It leads a process group, which gets
    SIGTERM when its trajectory is cancelled, and SIGKILL 5 s later or when the rollouter dies.
    """

    def __init__(self, command: Sequence[str], max_programs: int) -> None:
        """`max_programs`: that run concurrently; further ones wait."""
        self._command = tuple(command)
        self._places = asyncio.Semaphore(max_programs)
        self._endings: set[asyncio.Task[None]] = set()
        self._running: set[asyncio.subprocess.Process] = set()
        self._reaper: OrphanReaper | None = None

    async def close(self) -> None:
        """Kills the running programs. Idempotent."""
        for process in self._running:
            kill_group(process.pid)
        for ending in self._endings:
            ending.cancel()
        await asyncio.gather(*self._endings, return_exceptions=True)
        if self._reaper is not None:
            self._reaper.close()

    async def __call__(self, base_url: str, api_key: str, task: Task) -> str | None:
        """The standard output, stripped; None if empty.

        Ends when the program exits; the rest of its process group is then killed.

        Raises ProcessDied: the program cannot be started, exited with a code other than 0, or left a process outside
        its group that holds its output open.
        """
        async with self._places:
            process = await self._started(base_url, api_key)
            talk = asyncio.gather(
                end_of(process.stdout, MAX_ANSWER_BYTES),
                end_of(process.stderr, _SHOWN_BYTES),
                send(process.stdin, b"\n" + task_json(task)),
            )
            try:
                # not process.wait(): up to Python 3.12 it also waits for every other holder of the pipes
                while (code := process.returncode) is None:  # noqa: ASYNC110 - asyncio has no event for it
                    await asyncio.sleep(_POLL_S)
                kill_group(process.pid)
                async with asyncio.timeout(_LEAVE_S):
                    answer, said, _ = await talk
            except TimeoutError:
                found = f"exit code {process.returncode}, but a process outside of its group holds its output open"
                raise self._failed(found) from None
            finally:
                talk.cancel()
                self._leave(process)
        return self.answer(code, answer, said)

    def answer(self, code: int, answer: bytes, said: bytes) -> str | None:
        """The standard output of a program that has ended, stripped; None if empty. Raises ProcessDied: it has failed.

        Args:
            said: the end of its standard error.
        """
        if code != 0:
            found = f"exit code {code}; its standard error ends with:\n{said.decode(errors='replace').strip()}"
            raise self._failed(found)
        return answer.decode(errors="replace").strip() or None

    async def _started(self, base_url: str, api_key: str) -> asyncio.subprocess.Process:
        self._reaper = self._reaper or OrphanReaper()
        try:
            process = await started((*_AFTER_A_LINE, *self._command), {**os.environ, **addresses(base_url, api_key)})
        except OSError as error:
            raise self._failed(f"it cannot be started: {error}") from error
        self._running.add(process)
        self._reaper.watch(process.pid)
        return process

    def _leave(self, process: asyncio.subprocess.Process) -> None:
        """Ends the process and its group without waiting: the cancellation of a trajectory may take only a second."""
        kept(self._endings, self._end(process), f"end of agent {process.pid}")

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        try:
            if process.returncode is None:
                with suppress(OSError):
                    os.killpg(process.pid, signal.SIGTERM)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LEAVE_S):
                        await process.wait()
        finally:
            kill_group(process.pid)  # and its children
            self._running.discard(process)
            if self._reaper is not None:
                self._reaper.forget(process.pid)

    def _failed(self, found: str) -> ProcessDied:
        asked = f"rollout.agent.command={list(self._command)}"
        do = "run it by hand; docs/environments.md says what it gets"
        return ProcessDied(explain(asked, found, do)).of(Process("agent"))


def addresses(base_url: str, api_key: str) -> dict[str, str]:
    """Variables from which clients of OpenAI and Anthropic take the endpoint."""
    openai = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
    return openai | {"ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": api_key}


def task_json(task: Task) -> bytes:
    """The program's input, without the ground truth."""
    row = task.row
    messages = row.conversation()
    told = {"messages": messages, "data_source": row.data_source, "extra": dict(row.extra)}
    return json.dumps(told | {"ordinal": task.ordinal, "index": task.index}).encode()


async def started(command: Sequence[str], variables: Mapping[str, str]) -> asyncio.subprocess.Process:
    """A child in a session of its own, with pipes. Raises OSError."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, env=variables, start_new_session=True
    )


async def send(pipe: asyncio.StreamWriter | None, data: bytes) -> None:
    assert pipe is not None
    with suppress(OSError):  # the program may exit without reading its task
        pipe.write(data)
        await pipe.drain()
    pipe.close()


async def end_of(pipe: asyncio.StreamReader | None, limit: int) -> bytes:
    """The last `limit` bytes."""
    assert pipe is not None
    kept = bytearray()
    while part := await pipe.read(1 << 16):
        kept += part
        del kept[:-limit]
    return bytes(kept)
