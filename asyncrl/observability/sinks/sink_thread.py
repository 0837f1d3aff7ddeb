"""Runs a metrics sink (W&B, TensorBoard) in its own thread: neither its errors nor its delays affect the run."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from asyncrl.types.metrics import Record

logger = logging.getLogger(__name__)

BACKLOG = 64
"""Largest number of waiting records; further records are dropped and counted as failed."""
CLOSE_TIMEOUT_S = 20.0
"""Time for a sink to write the waiting records at the end of the run."""


class Sink(Protocol):
    """A sink may raise and block: `SinkFeed` calls it in its own thread."""

    def write(self, step: int, record: Record) -> None: ...

    def close(self) -> None: ...

    def abandon(self) -> None:
        """Releases whatever keeps the process from exiting. Called in another thread if `close` does not return."""
        ...


class SinkFeed:
    """Owns one sink, its thread and the records that wait for it.

    Consumes: the records of a run.
    Produces: one call of the sink per record, in order. A failed record is logged (the first one), counted in `failed`
    and not retried; the next record is tried again.
    Waits for: the next record; the sink, as long as it takes.
    Unblocked by: `write`, `close`.
    Stops when: `close` is called or the process ends.
    """

    def __init__(self, name: str, sink: Sink) -> None:
        self.failed = 0
        self._name, self._sink = name, sink
        self._records: queue.Queue[tuple[int, Record] | None] = queue.Queue(BACKLOG)
        self._thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)
        self._thread.start()

    def write(self, step: int, record: Record) -> None:
        """Returns immediately."""
        try:
            self._records.put_nowait((step, record))
        except queue.Full:
            self._fail(f"it is {BACKLOG} records behind")

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Returns when the sink has written everything and is closed, after `timeout_s` at the latest."""
        deadline = time.monotonic() + timeout_s
        with suppress(queue.Full):
            self._records.put(None, timeout=timeout_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            logger.warning("sink %s does not end within %g s: what it has not written is lost", self._name, timeout_s)
            threading.Thread(target=self._end, args=(self._sink.abandon,), name="abandon", daemon=True).start()
        if self.failed:
            logger.warning("sink %s: %d records are missing there; metrics.jsonl has them", self._name, self.failed)

    def _work(self) -> None:
        while (item := self._records.get()) is not None:
            try:
                self._sink.write(*item)
            except BaseException as error:  # noqa: BLE001 - task boundary: counted and logged; W&B may raise SystemExit
                self._fail(f"{type(error).__name__}: {error}")
            self._records.task_done()
        self._end(self._sink.close)

    def _end(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - task boundary: nothing is left to be done with it
            logger.warning("sink %s did not end well: %s: %s", self._name, type(error).__name__, error)

    def _fail(self, found: str) -> None:
        self.failed += 1
        if self.failed == 1:
            logger.warning("sink %s has failed, and is tried again with every step: %s", self._name, found)
