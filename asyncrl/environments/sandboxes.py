"""Sandboxes for agents that edit and run code: one for each trajectory, of a backend, lent by a pool.

A backend makes a `Sandbox` from the recipe's `rollout.agent.sandbox`. Files come in and go out
as tar archives through commands, so that a sandbox elsewhere (a container, a machine, a service) has to run commands
and nothing else.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import posixpath
import secrets
import shutil
import subprocess
import tarfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from asyncrl.config.environments import AgentConfig, SandboxConfig
from asyncrl.data.rows import PromptRow
from asyncrl.environments.agent_program import end_of, send, started
from asyncrl.errors import ConfigError, Process, ProcessDied, explain
from asyncrl.registry import resolve
from asyncrl.remote.tasks import kept
from asyncrl.workers.sandbox import READABLE, confined, empty, locked_directory

logger = logging.getLogger(__name__)

KEY, SANDBOX = "rollout.agent.sandbox.backend", Process("sandbox")
WORKSPACE = "/workspace"
"""Working directory of commands in a container."""
MAX_FILES_BYTES = 1 << 26
"""Most that is taken out of a sandbox, and longest output of a command."""
_SHOWN_BYTES = 4000
_LEAVE_S = 5.0
_PROBE_S = 30.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended. `exit_code` is not 0 if it failed. Of longer outputs the ends."""

    exit_code: int
    stdout: bytes
    stderr: bytes


class Sandbox(Protocol):
    """A working directory that nothing outside of it depends on, and commands in it. Of one trajectory."""

    async def run(
        self, command: Sequence[str], stdin: bytes = b"", variables: Mapping[str, str] | None = None
    ) -> Ended:
        """Runs a command in the working directory. Once it is cancelled, or has been, the sandbox is reset or closed
        next.

        Args:
            variables: of its environment, among them the address of the agents' endpoint, if it may ask that.

        Raises ProcessDied: the sandbox is lost, or could not run anything.
        """
        ...

    async def reset(self) -> None:
        """An empty working directory and no process; the first call opens the sandbox. Raises ProcessDied."""
        ...

    async def close(self) -> None:
        """Ends its processes and removes its files, also if it was not opened. Idempotent."""
        ...


class _Commands:
    """Child processes of this one, such as a client of Docker. Owns them."""

    def __init__(self) -> None:
        self._running: set[asyncio.subprocess.Process] = set()

    async def start(self, command: Sequence[str], variables: Mapping[str, str]) -> asyncio.subprocess.Process:
        process = await started(command, variables)
        self._running.add(process)
        return process

    async def run(self, command: Sequence[str], variables: Mapping[str, str], stdin: bytes = b"") -> Ended:
        process = await self.start(command, variables)
        stdout, stderr, _ = await asyncio.gather(
            end_of(process.stdout, MAX_FILES_BYTES), end_of(process.stderr, _SHOWN_BYTES), send(process.stdin, stdin)
        )
        code = await process.wait()
        self._running.discard(process)
        return Ended(code, stdout, stderr)

    async def end(self) -> None:
        """Ends those that still run; returns once they have ended."""
        for end in (asyncio.subprocess.Process.terminate, asyncio.subprocess.Process.kill):
            for process in self._running:
                with suppress(ProcessLookupError):
                    end(process)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    # not `wait`, which up to Python 3.12 also waits until their output is read
                    while any(process.returncode is None for process in self._running):  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                    break
        self._running.clear()


class DirectorySandbox:
    """A directory of this machine, in which each command is confined on its own: by our sandbox, or by Apptainer."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config, self._commands, self._owned = config, _Commands(), ExitStack()
        self._directory = ""

    async def run(
        self, command: Sequence[str], stdin: bytes = b"", variables: Mapping[str, str] | None = None
    ) -> Ended:
        told = dict(variables or {})
        inside = self._in_apptainer if self._config.backend == "apptainer" else self._in_our_own
        return await self._commands.run(*inside(command, told), stdin)

    def _in_our_own(self, command: Sequence[str], told: dict[str, str]) -> tuple[list[str], dict[str, str]]:
        """The command line and its environment, of which nothing is the rollouter's but the names of programs."""
        config, home = self._config, f"{self._directory}/home"
        line = confined(
            command,
            self._directory,
            port=urlsplit(told.get("OPENAI_BASE_URL", "")).port or 0,
            readable=config.readable,
            memory_bytes=config.memory_bytes,
            max_processes=config.max_processes,
        )
        roots = [*READABLE, *config.readable]
        found = [path for path in os.get_exec_path() if any(Path(path).is_relative_to(root) for root in roots)]
        own = {"PATH": os.pathsep.join(found), "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8"}
        return line, own | {"ASYNCRL_RUN": os.environ.get("ASYNCRL_RUN", "")} | told  # the janitor knows it by that

    def _in_apptainer(self, command: Sequence[str], told: dict[str, str]) -> tuple[list[str], dict[str, str]]:
        config, binds = self._config, [f"{self._directory}/work:{WORKSPACE}"]
        binds += [f"{path}:{path}:ro" for path in config.readable]
        line = ["apptainer", "exec", "--containall", f"--pwd={WORKSPACE}", *(f"--bind={bind}" for bind in binds)]
        variables = {f"APPTAINERENV_{name}": value for name, value in told.items()}
        line = confined([*line, *config.options, config.image, *command], self._directory, level="none")
        return line, {**os.environ, **variables}

    async def reset(self) -> None:
        await self._commands.end()
        if not self._directory:
            self._directory = await asyncio.to_thread(self._owned.enter_context, locked_directory())
        await asyncio.to_thread(empty, self._directory)
        for name in ("work", "home"):
            Path(self._directory, name).mkdir()

    async def close(self) -> None:
        await self._commands.end()
        await asyncio.to_thread(self._owned.close)


class ContainerSandbox:
    """A container of Docker or Podman, which lives as long as the standard input of its client: it ends with the
    rollouter, however that ends."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config, self._commands = config, _Commands()
        self._name = ""
        self._client: asyncio.subprocess.Process | None = None

    async def run(
        self, command: Sequence[str], stdin: bytes = b"", variables: Mapping[str, str] | None = None
    ) -> Ended:
        told = dict(variables or {})
        names = [f"--env={name}" for name in told]  # values on a command line could be read by every user
        line = [self._config.backend, "exec", "--interactive", *names, self._name, *command]
        ended = await self._commands.run(line, {**os.environ, **told}, stdin)
        if ended.exit_code and (self._client is None or self._client.returncode is not None):
            raise lost(f"container {self._name}", f"it has ended: {ended.stderr.decode(errors='replace')}")
        return ended

    async def reset(self) -> None:
        await self.close()
        config = self._config
        self._name = f"asyncrl-{secrets.token_hex(8)}"
        mounts = [f"--volume={path}:{path}:ro" for path in config.readable]
        network = [] if any(option.startswith("--net") for option in config.options) else ["--network=host"]
        line = [config.backend, "run", "--rm", "--interactive", "--init", f"--name={self._name}", *network]
        line += ["--security-opt=no-new-privileges", f"--volume={WORKSPACE}", f"--workdir={WORKSPACE}", *mounts]
        line += [*config.options, "--entrypoint=cat", config.image]
        self._client = client = await self._commands.start(line, os.environ)
        assert client.stdin is not None, "it is a pipe"
        assert client.stdout is not None, "it is a pipe"
        said = asyncio.create_task(end_of(client.stderr, _SHOWN_BYTES), name=self._name)
        client.stdin.write(b"\n")
        if await client.stdout.readline() != b"\n":
            raise lost(" ".join(line), (await said).decode(errors="replace").strip() or "it ended")

    async def close(self) -> None:
        if self._client is not None:
            remove = [self._config.backend, "rm", "--force", "--volumes", self._name]
            await self._commands.run(remove, os.environ)
            self._client = None
        await self._commands.end()


BACKENDS: dict[str, Callable[[SandboxConfig], Sandbox]] = {
    **dict.fromkeys(("local", "apptainer"), DirectorySandbox),
    **dict.fromkeys(("docker", "podman"), ContainerSandbox),
}


def lost(what: str, found: str) -> ProcessDied:
    do = "try its command by hand; docs/environments.md says what a sandbox needs"
    return ProcessDied(explain(f"a sandbox: {what}", found, do)).of(SANDBOX)


class SandboxPool:
    """Opens a sandbox for each trajectory, with its files, and closes it. Owns them: none is left after `close`."""

    def __init__(self, config: AgentConfig) -> None:
        self.command = [os.path.abspath(part) if os.path.isfile(part) else part for part in config.command]
        """The agent's command, as it is run inside: in another directory than this."""
        self._config = replace(config.sandbox, readable=_readable(config.sandbox, self.command))
        self._made = resolve(KEY, config.sandbox.backend, BACKENDS)
        self._places = asyncio.Semaphore(config.max_programs)
        self._work: set[asyncio.Task[Any]] = set()
        self.counts = Counter(live=0, opened=0, closed=0, failed=0)
        """Sandboxes that live now; since the start: opened, closed, and failed ones, in whose place the next attempt
        has another."""

    @asynccontextmanager
    async def lease(self, row: PromptRow) -> AsyncIterator[Sandbox]:
        """A sandbox with the files of the row. Closed without waiting: the cancellation of a trajectory may take only a
        second. Raises ProcessDied: it did not open in time, or not at all; ValueError: the row's files are none."""
        await self._places.acquire()
        opening = kept(self._work, self._opened(row), "start of a sandbox")
        try:
            yield await asyncio.shield(opening)
        except ProcessDied as error:
            self.counts["failed"] += error.process == SANDBOX
            raise
        finally:
            kept(self._work, self._closed(opening), "end of a sandbox")

    async def check(self, sandbox: Sandbox, row: PromptRow) -> Ended | None:
        """How the check ended in a sandbox that is as it was at first, but for the solution; None: it took too long, as
        did reading the solution, or that is too large. Raises ProcessDied: the sandbox could not be reset."""
        config = self._config
        with suppress(TimeoutError):
            async with asyncio.timeout(config.check_timeout_s):
                found = (await sandbox.run(["tar", "-cf", "-", "--", *config.solution])).stdout
            if len(found) >= MAX_FILES_BYTES:
                logger.warning("a solution has over %d bytes: it fails its check", MAX_FILES_BYTES)
                return None
            async with _in_time(config.start_timeout_s):
                await sandbox.reset()
                await self._put(sandbox, row, found)
            async with asyncio.timeout(config.check_timeout_s):
                return await sandbox.run(config.check)
        return None

    async def close(self) -> None:
        """Returns when the last one is closed."""
        while self._work:
            await asyncio.gather(*self._work, return_exceptions=True)

    async def _opened(self, row: PromptRow) -> Sandbox:
        sandbox = self._made(self._config)
        self.counts.update(live=1, opened=1)
        try:
            async with _in_time(self._config.start_timeout_s):
                await sandbox.reset()
                await self._put(sandbox, row, None)
        except BaseException:
            await self._close(sandbox)
            raise
        return sandbox

    async def _closed(self, opening: asyncio.Task[Sandbox]) -> None:
        try:
            with suppress(Exception):  # its error was the lease's
                await self._close(await opening)
        finally:
            self._places.release()

    async def _close(self, sandbox: Sandbox) -> None:
        try:
            async with _in_time(self._config.start_timeout_s):
                await sandbox.close()
            self.counts.update(live=-1, closed=1)
        except Exception:  # task boundary: what is left stays counted
            logger.warning("a sandbox could not be closed", exc_info=True)

    async def _put(self, sandbox: Sandbox, row: PromptRow, solution: bytes | None) -> None:
        """Copies the row's files in. `solution`: an archive of the paths of the solution, which are taken from it."""
        source, config = source_of(self._config, row), self._config
        without = [] if solution is None else config.solution
        archive = await asyncio.to_thread(_archive, source, without, solution or b"")
        ended = await sandbox.run(["tar", "-xf", "-"], archive)
        if ended.exit_code:
            raise lost("tar -xf -", f"exit code {ended.exit_code}: {ended.stderr.decode(errors='replace').strip()}")


@asynccontextmanager
async def _in_time(limit_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise lost("its start, reset or end", f"not done within {KEY[:-7]}start_timeout_s={limit_s:g}") from None


def source_of(config: SandboxConfig, row: PromptRow) -> Path | None:
    """The directory that a workspace is a copy of: below `files` what the row names as `files` in its extra fields.
    Raises ValueError: it names another place, or no directory."""
    if not config.files:
        return None
    root = Path(config.files).resolve()
    found = (root / dict(row.extra).get("files", "")).resolve()
    if not (found.is_relative_to(root) and found.is_dir()):
        asked = f"files={dict(row.extra).get('files')!r} of {row.origin}"
        raise ValueError(explain(asked, f"no directory below {root}", "name one, relative to it"))
    return found


def _archive(source: Path | None, without: Sequence[str], solution: bytes) -> bytes:
    """The files of `source`, with those `without` taken from the archive `solution` instead: regular files alone, since
    whoever wrote it may not be trusted."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as new:
        for path in sorted(source.iterdir()) if source else ():
            new.add(path, path.name, filter=lambda member: None if _within(member.name, without) else member)
        with suppress(tarfile.TarError, EOFError), tarfile.open(fileobj=io.BytesIO(solution), mode="r:") as old:
            for member in old:
                if member.isreg() and not member.issparse() and _within(member.name, without):
                    clean = tarfile.TarInfo(posixpath.normpath(member.name))
                    clean.size, clean.mode, clean.mtime = member.size, member.mode & 0o777, member.mtime
                    new.addfile(clean, old.extractfile(member))
    return made.getvalue()


def _within(name: str, paths: Iterable[str]) -> bool:
    name = posixpath.normpath(name)
    return any(name == path or name.startswith(f"{path}/") for path in map(posixpath.normpath, paths))


def _readable(config: SandboxConfig, command: Sequence[str]) -> list[str]:
    """What a sandbox may read of this machine: what the recipe names, files in the command, its Python environment."""
    found = {os.path.abspath(path) for path in config.readable} | {p for p in command if os.path.isfile(p)}
    home = Path(shutil.which(command[0]) or command[0]).absolute().parent.parent
    return sorted(found | ({str(home)} if (home / "pyvenv.cfg").is_file() else set()))


def check_sandbox(config: AgentConfig) -> None:
    """Raises ConfigError: no such backend, or it cannot be used here; settings that it lacks. Blocks while it tries."""
    sandbox, name = config.sandbox, config.sandbox.backend
    resolve(KEY, name, BACKENDS)
    asked, do = f"{KEY}={name}", "install it where the rollouters run, or choose another"
    if not config.command:
        raise ConfigError(explain(asked, "no rollout.agent.command", "set it: functions run in the rollouter"))
    if sandbox.files and not Path(sandbox.files).is_dir():
        raise ConfigError(explain(f"{KEY[:-7]}files={sandbox.files}", "no directory", "name one on this machine"))
    if name == "local":
        if config.advertise or config.host != "127.0.0.1":
            found = f"host={config.host}, advertise={config.advertise!r}; a program reaches 127.0.0.1 alone"
            raise ConfigError(explain(asked, found, "leave both out, or choose a backend of containers"))
        do = "choose docker, podman or apptainer"
        with locked_directory() as directory:
            Path(directory, "work").mkdir()
            tried = subprocess.run(confined(["true"], directory), capture_output=True, timeout=_PROBE_S)
    elif name in BACKENDS:
        if shutil.which(name) is None:
            raise ConfigError(explain(asked, f"there is no program {name} here", do))
        if not sandbox.image:
            raise ConfigError(explain(asked, "no image", f"set {KEY[:-7]}image"))
        tried = subprocess.run([name, "version"], capture_output=True, timeout=_PROBE_S)
    else:
        return
    if tried.returncode:
        raise ConfigError(explain(asked, tried.stderr.decode(errors="replace").strip(), do))
