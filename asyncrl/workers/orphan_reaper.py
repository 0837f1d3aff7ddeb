"""Kills worker processes and their children when their owner is killed.

`OrphanReaper` is the owner's side. The other side is this file, run by path: it imports only the standard library and
detaches from its owner, whose end may kill its children. It reads a pipe that only the owner holds; at the end of the
pipe it kills every watched process group and exits.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

_LEAVE_S = 2.0


class OrphanReaper:
    """Kills the watched groups however this process ends."""

    def __init__(self) -> None:
        self._launcher = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        assert self._launcher.stdin is not None
        self._pipe = self._launcher.stdin
        os.set_blocking(self._pipe.fileno(), False)

    def watch(self, group: int) -> None:
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """Ends the reaper; groups still watched are killed. Idempotent."""
        if not self._pipe.closed:
            self._pipe.close()
            self._launcher.wait(_LEAVE_S)

    def _tell(self, line: str) -> None:
        with suppress(OSError, ValueError):  # killed or closed: the owner still ends its groups itself
            os.write(self._pipe.fileno(), line.encode())


def main() -> None:
    if os.fork():
        os._exit(0)
    groups: set[int] = set()
    for line in sys.stdin:
        if line[0] == "+":
            groups.add(int(line[1:]))
        else:
            groups.discard(int(line[1:]))
    for group in groups:
        with suppress(OSError):  # the group has ended
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
