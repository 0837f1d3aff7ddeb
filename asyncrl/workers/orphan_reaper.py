"""Ends worker processes and what they had started when the process that owns them is killed.

`OrphanReaper` is the owner's side. The other side is this file run by its path: it imports nothing but the standard
library, is no child of its owner (who may take its children along when it ends), and waits for the end of a pipe that
the owner alone holds. Then it kills every process group that it was told to watch, and ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

_LEAVE_S = 2.0


class OrphanReaper:
    """Kills the groups it watches when this process ends in whatever way."""

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
        """Ends it; groups that it still watches are killed. Idempotent."""
        if not self._pipe.closed:
            self._pipe.close()
            self._launcher.wait(_LEAVE_S)

    def _tell(self, line: str) -> None:
        try:
            os.write(self._pipe.fileno(), line.encode())
        except (OSError, ValueError):
            pass  # it was killed, or closed: the groups still end when their owner ends them


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
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:
            pass  # all of it has ended


if __name__ == "__main__":
    main()
