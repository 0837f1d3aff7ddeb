"""Counts vLLM's model passes, and its preemptions of running requests for lack of KV cache.

vLLM reports these only with all of its statistics, which cost its front end time per token. Here a subclass of its
scheduler counts in shared memory that the owner reads. Only vLLM's own process imports vLLM through this module.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

VARIABLE = "ASYNCRL_VLLM_COUNTS"
"""Environment variable of vLLM's processes: path of the counters' file."""
_PREEMPTIONS, _STEPS = slice(0, 8), slice(8, 16)
_BYTES = 16


class SchedulerCounts:
    """The owner's side: a file of 16 bytes, unlinked once vLLM has started."""

    def __init__(self) -> None:
        descriptor, name = tempfile.mkstemp(prefix="asyncrl-vllm-counts-")
        try:
            os.truncate(descriptor, _BYTES)
            self._memory = mmap.mmap(descriptor, _BYTES)
        finally:
            os.close(descriptor)
        self.path = Path(name)

    @property
    def preemptions(self) -> int:
        return _read(self._memory, _PREEMPTIONS)

    @property
    def decode_steps(self) -> int:
        return _read(self._memory, _STEPS)

    def unlink(self) -> None:
        self.path.unlink(missing_ok=True)


def scheduler_class(*, asynchronous: bool) -> str:
    """The import path of the scheduler for vLLM."""
    return f"{__name__}.{'CountingAsyncScheduler' if asynchronous else 'CountingScheduler'}"


def hide_warning() -> None:
    """Hides vLLM's warning about custom schedulers, in vLLM's process."""
    logging.getLogger("vllm.config.scheduler").addFilter(lambda record: __name__ not in record.getMessage())


def _read(memory: mmap.mmap, place: slice) -> int:
    return int.from_bytes(memory[place], "little")


def _add_one(memory: mmap.mmap, place: slice) -> None:
    memory[place] = (_read(memory, place) + 1).to_bytes(8, "little")


def _counting(base: Any) -> Any:
    class Counting(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._resets = 0
            with Path(os.environ[VARIABLE]).open("r+b") as file:
                self._counts = mmap.mmap(file.fileno(), _BYTES)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            scheduled = super().schedule(*args, **kwargs)
            if scheduled.total_num_scheduled_tokens:
                _add_one(self._counts, _STEPS)
            return scheduled

        def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
            self._resets += 1  # preemptions by a cache reset are not for lack of room
            try:
                return super().reset_prefix_cache(*args, **kwargs)
            finally:
                self._resets -= 1

        def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
            super()._preempt_request(*args, **kwargs)
            if not self._resets:
                _add_one(self._counts, _PREEMPTIONS)

    return Counting


def __getattr__(name: str) -> Any:
    """Creates the classes on demand, in vLLM's process, so that the owner does not import vLLM."""
    if name == "CountingScheduler":
        from vllm.v1.core.sched.scheduler import Scheduler

        return _counting(Scheduler)
    if name == "CountingAsyncScheduler":
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler

        return _counting(AsyncScheduler)
    raise AttributeError(name)
