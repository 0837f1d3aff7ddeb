"""The priority of engines on CPUs that they share with the rest of a run."""

from __future__ import annotations

import os
import sys

DECODE_NICENESS = 2
"""By this a decode loop has a lower priority than trainer ranks, the queue and rollouters, which may share its cores:
a step waits for these. The server of a run stays below it (`serving.run_server.NICENESS`)."""


def yield_to_others() -> None:
    """Lowers the priority of this thread, and of the threads and processes that it starts from now on. Nothing is done
    elsewhere than on Linux, where it would be that of the process."""
    if sys.platform == "linux":
        os.nice(DECODE_NICENESS)
