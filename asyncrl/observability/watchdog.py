"""Notices that a run makes no progress, even when the event loop itself hangs: it runs in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable

SLEPT_S = 5.0
"""A pause that lasts this much longer than asked means that the whole process did not run: no stall is counted then."""


class Watchdog:
    """Owns the thread that watches, and the time of the last progress."""

    def __init__(self, timeout_s: float, on_stall: Callable[[float], None]) -> None:
        """`on_stall`: called once, in the watchdog's thread, with the seconds since the last progress."""
        self._timeout_s = timeout_s
        self._on_stall = on_stall
        self._marks: dict[str, Hashable] = {}
        self._last = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def saw(self, name: str, mark: Hashable) -> None:
        """Counts as progress when `mark` differs from the last one under this name."""
        if self._marks.get(name, self) != mark:
            self._marks[name] = mark
            self._last = time.monotonic()

    def close(self) -> None:
        """Ends it. Idempotent; may be called from `on_stall`."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def _watch(self) -> None:
        """Calls `on_stall` when there was no progress for `timeout_s`.

        Consumes: marks of progress.
        Produces: one call of `on_stall`, which writes the stacks of all processes and ends the run.
        Waits for: time only.
        Unblocked by: nothing; it needs no other thread.
        Stops when: `close` is called, or `on_stall` has returned.
        """
        pause_s = min(1.0, self._timeout_s / 4)
        while True:
            asked = time.monotonic()
            if self._closed.wait(pause_s):
                return
            if time.monotonic() - asked > pause_s + SLEPT_S:
                self._last = time.monotonic()  # the whole process was stopped, or the machine slept
            quiet_s = time.monotonic() - self._last
            if quiet_s > self._timeout_s:
                self._on_stall(quiet_s)
                return
