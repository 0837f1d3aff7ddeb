"""vLLM's processes on a CPU: forks of a process that has imported vLLM already.

vLLM starts them when its front end has been imported and configured, and each then imports the same again: six seconds
of CPU time. The fork server imports while the front end does. It is no fork of the front end's process, whose threads
could hold a lock: those of Ray do.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any
from unittest.mock import patch

from asyncrl.inference.shared.orphan_guard import when_ended

_PRELOAD = "asyncrl.inference.vllm.preload"
_ASK = "get_mp_context"
_ASKING = ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor")
"""Modules of vLLM that start processes."""


def start_fork_server() -> None:
    """Begins the imports, unless this process has a fork server. Returns at once. The server ends with this process."""
    forkserver.set_forkserver_preload([_PRELOAD])
    forkserver.ensure_running()


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Inside, vLLM's processes are forks of the server."""
    with contextlib.ExitStack() as stack:
        for module in _ASKING:
            stack.enter_context(patch(f"{module}.{_ASK}", _Context))
        yield


class _Process(ForkServerProcess):
    """Has the environment of the process that made it, as one that is spawned, and ends with that process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._maker = os.getpid()
        self._environment = dict(os.environ)

    def run(self) -> None:
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        os.environ.update({n: v for n, v in self._environment.items() if os.environ.get(n) != v})
        when_ended(self._maker, lambda: os.kill(os.getpid(), signal.SIGKILL))
        with forked():
            super().run()


class _Context(ForkServerContext):
    Process = _Process  # type: ignore[assignment]
