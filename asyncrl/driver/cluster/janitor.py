"""The janitor: a small process that cleans up after a run, however the driver ends, and outlives it by a few seconds.

The janitor recognises the processes of a run by `ASYNCRL_RUN` in their environment. The launch code sets the variable,
and every child process inherits it: Ray's own processes, the actors, and the processes of engines and rewards. Some of
Ray's processes overwrite the memory that shows their environment. The janitor recognises these by their parents, so it
must see them while the parents are alive.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from asyncrl.weights.lock_files import remove_stale_publishes, remove_stale_segments
from asyncrl.workers.sandbox import remove_stale_sandboxes

logger = logging.getLogger(__name__)

RUN_VARIABLE = "ASYNCRL_RUN"
GRACE_S = 4.0
"""Time that Ray and vLLM get to clean up by themselves after their parent ended."""
FIRST_LOOK_S, LAST_LOOK_S = 1.0, 30.0
"""Shortest and longest pause between two looks at the processes of a living run. Most processes start early."""
SOCKET = "/asyncrl-01234567/ray/session_2026-01-02_03-04-05_678901_1234567/sockets/plasma_store"
MAX_DIRECTORY_LENGTH = 107 - len(SOCKET)
"""Longest path of the temporary directory: the path of a Unix socket has at most 107 bytes."""
KILL_S = 5.0
"""Longest wait for killed processes to end."""


class Janitor:
    """The driver's side: owns the janitor process and the run's directory for temporary files."""

    def __init__(self, run_id: str) -> None:
        """`run_id`: the value of ASYNCRL_RUN in the processes of the run."""
        self.scratch = Path(tempfile.mkdtemp(prefix="asyncrl-", dir=_for_sockets()))
        """Directory for sockets and temporary files of the run, for its user alone (0700); removed at its end."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl.driver.cluster.janitor", run_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C on a terminal reaches the driver, not this
            text=True,
        )
        self.remove_later(self.scratch)

    def remove_later(self, path: Path) -> None:
        """Schedules this file or directory for removal at the end of the run."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the janitor was killed: nothing is cleaned up, which does not harm the run
            self._process.stdin.write(f"{path}\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Makes the janitor clean up, and waits until it has exited."""
        assert self._process.stdin is not None
        if (code := self._process.poll()) is not None:
            logger.warning("the janitor of this run has ended early with %d: nobody cleans up", code)
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(GRACE_S + 2 * KILL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _for_sockets() -> str:
    """The system's temporary directory, or /tmp if it would make the paths of Ray's sockets too long."""
    directory = tempfile.gettempdir()
    return directory if len(directory) <= MAX_DIRECTORY_LENGTH else "/tmp"


def processes_of(run_id: str) -> list[psutil.Process]:
    """The living processes on this machine that belong to a run, except this process and its parent."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended, or belongs to another user
            if process.environ().get(RUN_VARIABLE) == run_id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    own = psutil.Process()
    return [process for process in found if process not in (own, own.parent())]


def children_of(processes: Iterable[psutil.Process]) -> set[psutil.Process]:
    """All descendants of these processes."""
    found: set[psutil.Process] = set()
    for process in processes:
        with suppress(psutil.Error):  # it has ended
            found.update(process.children(recursive=True))
    return found


def clean(run_id: str, seen: Collection[psutil.Process], paths: Iterable[Path]) -> None:
    """Kills the processes that a run left behind, and removes its shared memory, sockets and `paths`.

    Args:
        seen: descendants of the run's processes, found while the run was alive.
    """

    def living() -> list[psutil.Process]:
        marked = processes_of(run_id)
        return [p for p in {*marked, *children_of(marked), *seen} if _lives(p)]

    # Phase 1: let Ray and vLLM end by themselves.
    deadline = time.monotonic() + GRACE_S
    while (left := living()) and time.monotonic() < deadline:
        time.sleep(0.1)
    # Phase 2: kill the rest, repeatedly: a killed process may have started another.
    while left and time.monotonic() < deadline + KILL_S:
        for process in left:
            with suppress(psutil.Error):  # it ended before the kill
                process.kill()
        psutil.wait_procs(left, timeout=1.0)
        left = living()
    # Phase 3: files and shared memory, which no process uses any more.
    remove_stale_segments()
    remove_stale_publishes(Path(tempfile.gettempdir()))
    remove_stale_sandboxes()
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def main() -> None:
    """The janitor's side.

    Consumes: the pipe that only the driver writes to; its lines name files and directories to remove.
    Produces: a clean machine: no process of the run, no shared memory, no socket, no temporary directory.
    Waits for: the driver, as long as it lives; then at most `GRACE_S` for its processes to end by themselves.
    Unblocked by: the end of the pipe, which comes however the driver ends.
    Stops when: it has cleaned up.
    """
    for number in (signal.SIGTERM, signal.SIGINT):  # a signal to the whole group ends the driver, and thereby the pipe
        signal.signal(number, signal.SIG_IGN)
    run_id, text = sys.argv[1], b""
    seen: set[psutil.Process] = set()
    pause_s = FIRST_LOOK_S
    while True:
        # No message from the driver: refresh the descendants, at growing intervals.
        if not select.select([sys.stdin], [], [], pause_s)[0]:
            seen = {process for process in seen if _lives(process)} | children_of(processes_of(run_id))
            pause_s = min(2 * pause_s, LAST_LOOK_S)
        elif read := os.read(sys.stdin.fileno(), 4096):
            text += read
        else:
            break
    clean(run_id, seen, [Path(line) for line in text.decode().splitlines()])


if __name__ == "__main__":
    main()
