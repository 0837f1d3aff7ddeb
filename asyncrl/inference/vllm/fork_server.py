"""vLLM's EngineCore on a CPU: a fork of a process that has imported vLLM already.

vLLM starts it when its front end has been imported and configured, and it then imports the same again: six seconds of
CPU time. The fork server imports while the front end does. It is no fork of the front end's process, whose threads
could hold a lock: those of Ray do. With several workers EngineCore starts them as vLLM does, each with its own imports.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any
from unittest.mock import patch

from asyncrl.inference.shared.orphan_guard import when_ended
from asyncrl.sandbox.confine import die_with_parent

_PRELOAD = "asyncrl.inference.vllm.preload"
_ASKED = "vllm.v1.engine.utils.get_mp_context"
"""The name by which vLLM looks up how to start EngineCore. It has no setting for a fork server."""


def start_fork_server() -> None:
    """Begins the imports, unless this process has a fork server. Returns at once. The server ends with this process."""
    forkserver.set_forkserver_preload([_PRELOAD])
    forkserver.ensure_running()


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Inside, vLLM's EngineCore is a fork of the server. One thread at a time."""
    with _one_at_a_time, patch(_ASKED, _Context):
        yield


class _Process(ForkServerProcess):
    """Ends with the process that made it and with the server. Has its maker's environment, for what is read from now
    on: what the imports have read, or the loader (LD_PRELOAD), was that of the server's start."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._maker = os.getpid()
        self._environment = dict(os.environ)

    def run(self) -> None:
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        os.environ.update({n: v for n, v in self._environment.items() if os.environ.get(n) != v})
        die_with_parent()
        when_ended(self._maker, lambda: os.kill(os.getpid(), signal.SIGKILL))
        super().run()


class _Context(ForkServerContext):
    Process = _Process  # type: ignore[assignment]


_one_at_a_time = threading.Lock()
