"""Runs untrusted Python programs: `run_python`. docs/rewards.md says what each level guarantees. Confines commands that
keep their files and start others: `confined`.

Runs in: reward processes, tool processes, rollouter.

Blocking: a call runs one program in its own processes, all of which have ended on return.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import selectors
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from asyncrl.errors import ConfigError, ProcessDied, explain
from asyncrl.workers.sandbox.process_tree import kill_tree

logger = logging.getLogger(__name__)

_LAUNCHER = Path(__file__).with_name("launcher.py")
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
_NAMES = ("/etc/hosts", "/etc/nsswitch.conf", "/etc/passwd", "/etc/group", "/etc/ssl", "/etc/gitconfig")
_PYTHON = (sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.realpath(sys.executable))
READABLE = (*_SYSTEM, *_NAMES, *_PYTHON)
"""What commands may read in any case."""
_CHUNK_BYTES = 1 << 16
_LEAVE_S = 2.0
"""Longest wait for killed processes to end."""
_TOLD_CHARS = 500
_PREFIX = "asyncrl-sandbox-"
_TOTAL_FILES = 16
"""Number of largest-size files that fit into a working directory in memory."""

Level = Literal["namespaces", "seccomp", "basic"]
Limit = Literal["", "time", "cpu", "memory", "output", "file", "processes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """`timeout_s`: wall time. `cpu_s`, `memory_bytes` (address space): per process. `file_bytes`: per file.
    `output_bytes`: for standard output and standard error each. `max_processes`: includes threads."""

    timeout_s: float = 6.0
    cpu_s: int = 5
    memory_bytes: int = 1 << 29
    file_bytes: int = 1 << 20
    output_bytes: int = 1 << 18
    max_processes: int = 16


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """How a program ended.

    `exit_code`: as in subprocess (-signal); None if it was killed for a limit from outside, or did not report. `limit`:
    the limit that it hit, if known; "memory", "file" and "processes" include an exception of that kind. `held`: its
    confinement, of "namespaces", "landlock" (or "mounts"), "seccomp"; "basic": no filter of system calls.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    limit: Limit
    held: tuple[str, ...]

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0 and not self.limit


def run_python(
    program: str, stdin: str = "", limits: SandboxLimits | None = None, *, level: Level = "namespaces"
) -> SandboxResult:
    """Runs a program; returns once it and its children have ended.

    Args:
        stdin: its whole standard input.
        level: the strongest confinement to try; weaker if the kernel refuses it (`SandboxResult.held`).

    Raises:
        OSError: the system gives no process, pipe or directory.
        ProcessDied: the program could not be started under confinement.
    """
    limits = limits or SandboxLimits()
    started = time.monotonic()
    with locked_directory() as directory:
        Path(directory, "program.py").write_bytes(program.encode(errors="surrogatepass"))
        report, reports = os.pipe()
        os.set_blocking(report, False)
        with open(report, "rb", buffering=0) as pipe:
            try:
                process = _launch(directory, limits, level, reports)
            finally:
                os.close(reports)
            try:
                streams, met = _communicate(process, stdin.encode(errors="replace"), limits, started)
            finally:
                _end(process)
            # All processes have ended, so the pipe holds every report; None if one that cannot be killed still has it.
            outcome: dict[str, Any] = {}
            for line in (pipe.read(_CHUNK_BYTES) or b"").splitlines():
                outcome |= json.loads(line)
    return _result(streams, met, outcome)


def protection(level: Level = "namespaces") -> tuple[str, ...]:
    """What confines programs on this machine, as `SandboxResult.held`."""
    return run_python("", level=level).held


def require_protection(asked: str, *, basic_allowed: bool, level: Level = "namespaces") -> tuple[str, ...]:
    """What confines programs on this machine, as `SandboxResult.held`.

    Args:
        asked: the recipe's section that runs programs, with a key `allow_basic_sandbox`.
        basic_allowed: accept less than Landlock and seccomp.

    Raises ConfigError: the confinement is too weak, or no program can be run.
    """
    try:
        held = protection(level)
    except (OSError, ProcessDied) as error:
        found = f"no program can be run in the sandbox here: {error}"
        raise ConfigError(explain(asked, found, "see that a temporary directory can be written")) from error
    if not basic_allowed and not {"landlock", "seccomp"} <= set(held):
        found = f"programs are confined by {', '.join(held)} alone, which a program can get around"
        do = f"use Linux 5.13 or newer with Landlock (docs/rewards.md), or set {asked}.allow_basic_sandbox=true"
        raise ConfigError(explain(asked, found, do))
    return held


def remove_stale_sandboxes() -> None:
    """Removes the directories of programs whose owners were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        lock = _locked(path)
        if lock is not None:
            _remove(str(path))
            os.close(lock)


def confined(
    command: Sequence[str],
    directory: str,
    *,
    port: int = 0,
    readable: Iterable[str] = (),
    memory_bytes: int = 1 << 32,
    max_processes: int = 256,
    level: Level | Literal["none"] = "namespaces",
) -> list[str]:
    """The command line that runs `command` in `directory`/work, the only place that it may write to with its sibling
    directories. It exits as the command does, once all that the command started has ended; SIGTERM ends it.

    Args:
        port: of 127.0.0.1, the only address that can be reached; without namespaces of any address. 0: none.
        readable: files and directories that may be read, in addition to the system's and Python's.
        memory_bytes: private memory of each process.
        level: as `run_python`; "none" confines nothing, and ends what was started all the same.
    """
    request = {
        "command": list(command),
        "directory": directory,
        "work": os.path.join(directory, "work"),
        "readable": sorted({*READABLE, *readable}),
        "port": port,
        "memory_bytes": memory_bytes,
        "max_processes": max_processes,
        "level": level,
        "parent": os.getpid(),
    }
    return [sys.executable, "-I", "-S", str(_LAUNCHER), json.dumps(request)]


@contextmanager
def locked_directory() -> Iterator[str]:
    """A temporary directory. Its lock shows that the owner is alive; the kernel drops it however the owner exits."""
    remove_stale_sandboxes()
    while (lock := _locked(Path(directory := tempfile.mkdtemp(prefix=_PREFIX)))) is None:
        pass  # another process removed it as abandoned between creation and lock
    try:
        yield directory
    finally:
        _remove(directory)
        os.close(lock)


def empty(directory: str) -> None:
    """Removes all in it, whatever depth and file modes a program made. Raises OSError."""
    os.chmod(directory, stat.S_IRWXU)
    while _flatten(directory):
        pass


# -- inside ------------------------------------------------------------------------------------------------------------


def _locked(directory: Path) -> int | None:
    """A descriptor that locks `directory`; None if it is locked, another user's, or gone."""
    try:
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(directory)):
            return lock
    os.close(lock)
    return None


def _remove(directory: str) -> None:
    try:
        empty(directory)
        os.rmdir(directory)
    except OSError as error:
        logger.warning("the sandbox directory %s cannot be removed: %s", directory, error)


def _flatten(directory: str) -> bool:
    """Removes files and moves subdirectories' entries up, so that no path grows too long; False once empty."""
    with os.scandir(directory) as entries:
        found = list(entries)
    for entry in found:
        if not entry.is_dir(follow_symlinks=False):
            os.unlink(entry.path)
            continue
        os.chmod(entry.path, stat.S_IRWXU)
        with os.scandir(entry.path) as inside:
            for inner in list(inside):
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner.path, stat.S_IRWXU)  # moving a directory rewrites its `..` entry
                os.rename(inner.path, os.path.join(directory, secrets.token_hex(8)))
        os.rmdir(entry.path)
    return bool(found)


def _launch(directory: str, limits: SandboxLimits, level: Level, report: int) -> subprocess.Popen[bytes]:
    request = {
        "directory": directory,
        "readable": sorted({*_SYSTEM, *_PYTHON}),
        "needed": [sys.executable, os.__file__, str(_LAUNCHER)],
        "report": report,
        "level": level,
        "total_bytes": _TOTAL_FILES * limits.file_bytes,
        **asdict(limits),
    }
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_LAUNCHER), json.dumps(request)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        cwd="/",
        env={
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": directory,
            "TMPDIR": directory,
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        },
        pass_fds=(report,),
        start_new_session=True,
    )


def _communicate(
    process: subprocess.Popen[bytes], stdin: bytes, limits: SandboxLimits, started: float
) -> tuple[tuple[bytes, bytes], Limit]:
    """Its outputs, cut at the limit, and the limit that ends it from outside, if any."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    stdout, stderr = bytearray(), bytearray()
    met: Limit = ""
    left = memoryview(stdin)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, stdout)
        selector.register(process.stderr, selectors.EVENT_READ, stderr)
        os.set_blocking(process.stdin.fileno(), False)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        # Feed and read together: a program that blocks on a full pipe would otherwise never end.
        while selector.get_map() and not met:
            remaining = started + limits.timeout_s - time.monotonic()
            if remaining <= 0:
                met = "time"
                break
            for key, _ in selector.select(remaining):
                if key.fileobj is process.stdin:
                    left = _feed(key.fd, left)
                    if len(left) == 0:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                chunk = os.read(key.fd, _CHUNK_BYTES)
                if not chunk:
                    selector.unregister(key.fileobj)
                key.data.extend(chunk)
                if len(key.data) > limits.output_bytes:
                    met = "output"
    try:
        process.wait(0 if met else max(0.0, started + limits.timeout_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        met = met or "time"
    return (bytes(stdout[: limits.output_bytes]), bytes(stderr[: limits.output_bytes])), met


def _feed(pipe: int, left: memoryview) -> memoryview:
    """Writes as much as the pipe takes; returns the rest, which is empty if the reading end is closed."""
    try:
        return left[os.write(pipe, left[:_CHUNK_BYTES]) :] if len(left) else left
    except BlockingIOError:
        return left
    except OSError:
        return left[len(left) :]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills remaining processes. With namespaces the kernel does; with seccomp nothing can leave the group; at level
    basic, descendants outside the group are killed too."""
    kill_tree(process, _LEAVE_S)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _result(streams: tuple[bytes, bytes], met: Limit, outcome: dict[str, Any]) -> SandboxResult:
    stdout, stderr = (stream.decode(errors="replace") for stream in streams)
    status = outcome.get("status")
    exit_code = None if met or status is None else os.waitstatus_to_exitcode(status)
    limit = met or outcome.get("limit", "")
    if not limit and status is None and "held" not in outcome:
        found = f"its processes ended before it did: {stderr[-_TOLD_CHARS:].strip() or 'no word of it'}"
        raise ProcessDied(explain("a program in the sandbox", found, "free memory, or see the log of the kernel"))
    if not limit and exit_code:
        limit = _limit_of(exit_code, stderr)
    return SandboxResult(stdout, stderr, exit_code, limit, tuple(outcome.get("held", ())))


_EXCEPTIONS: dict[str, Limit] = {
    "MemoryError": "memory",
    "numpy._core._exceptions._ArrayMemoryError": "memory",
    "OSError: [Errno 27]": "file",
    "OSError: [Errno 28]": "file",
    "BlockingIOError: [Errno 11]": "processes",
    "RuntimeError: can't start new thread": "processes",
}


def _limit_of(exit_code: int, stderr: str) -> Limit:
    if exit_code in (-signal.SIGXCPU, -signal.SIGKILL):
        return "cpu"
    if exit_code == -signal.SIGXFSZ:
        return "file"
    last = stderr.rstrip().rpartition("\n")[2]
    met: list[Limit] = [limit for start, limit in _EXCEPTIONS.items() if last.startswith(start)]
    return met[0] if met else ""
