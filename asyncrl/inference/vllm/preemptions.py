"""How often vLLM takes a running request out of its KV cache to make room, and computes it again later.

vLLM tells it only with all of its statistics, which cost its front end a share of every token. Here its scheduler adds
to a number in memory that the owner reads. This module imports vLLM only when it is imported in vLLM's own process.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

VARIABLE = "ASYNCRL_VLLM_PREEMPTIONS"
"""Environment variable of vLLM's processes: the file with the number."""
_BYTES = 8


class PreemptionCount:
    """The owner's end: a file of 8 bytes, which has no name any more once vLLM has started."""

    def __init__(self) -> None:
        descriptor, name = tempfile.mkstemp(prefix="asyncrl-preemptions-")
        try:
            os.truncate(descriptor, _BYTES)
            self._memory = mmap.mmap(descriptor, _BYTES)
        finally:
            os.close(descriptor)
        self.path = Path(name)

    @property
    def value(self) -> int:
        return int.from_bytes(self._memory[:], "little")

    def unlink(self) -> None:
        self.path.unlink(missing_ok=True)


def scheduler_class(*, asynchronous: bool) -> str:
    """The name that vLLM imports its scheduler by."""
    return f"{__name__}.{'CountingAsyncScheduler' if asynchronous else 'CountingScheduler'}"


def hide_warning() -> None:
    """In vLLM's process: it warns of schedulers that are not its own, which may be slower than this one."""
    logging.getLogger("vllm.config.scheduler").addFilter(lambda record: __name__ not in record.getMessage())


def _counting(base: Any) -> Any:
    class Counting(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._resets = 0
            with Path(os.environ[VARIABLE]).open("r+b") as file:
                self._count = mmap.mmap(file.fileno(), _BYTES)

        def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
            self._resets += 1  # what is taken out now is not for want of room
            try:
                return super().reset_prefix_cache(*args, **kwargs)
            finally:
                self._resets -= 1

        def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
            super()._preempt_request(*args, **kwargs)
            if not self._resets:
                self._count[:] = (int.from_bytes(self._count[:], "little") + 1).to_bytes(_BYTES, "little")

    return Counting


def __getattr__(name: str) -> Any:
    """The classes are made when vLLM asks for them, in its process: it may be a fork of one that imported this."""
    if name == "CountingScheduler":
        from vllm.v1.core.sched.scheduler import Scheduler

        return _counting(Scheduler)
    if name == "CountingAsyncScheduler":
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler

        return _counting(AsyncScheduler)
    raise AttributeError(name)
