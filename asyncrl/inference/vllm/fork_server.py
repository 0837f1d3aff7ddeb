"""vLLM's EngineCore on a CPU: a fork of a process that has imported vLLM already.

vLLM starts it when its front end has been imported and configured, and it then imports the same again: six seconds of
CPU time. The fork server imports while the front end does. It is no fork of the front end's process, whose threads
could hold a lock: those of Ray do. Where that process is itself a fork of one that has imported vLLM, it forks its fork
server before it has threads, and both import nothing. With several workers EngineCore starts them as vLLM does, each
with its own imports.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any
from unittest.mock import patch

from asyncrl.inference.shared.orphan_guard import when_ended
from asyncrl.inference.shared.priority import yield_to_others
from asyncrl.workers.sandbox.confine import die_with_parent

_PRELOAD = "asyncrl.inference.vllm.preload"
_ASKED = "vllm.v1.engine.utils.get_mp_context"
"""The name by which vLLM looks up how to start EngineCore. It has no setting for a fork server."""


def start_fork_server() -> None:
    """Begins the imports, unless this process has a fork server. Returns at once. The server ends with this process."""
    forkserver.set_forkserver_preload([_PRELOAD])
    forkserver.ensure_running()


def become_fork_server_too() -> None:
    """Makes a fork of this process its fork server: both have imported vLLM. Call it while there is one thread."""
    if (users := sys.modules.get("vllm.v1.executor.ray_utils")) is not None:
        importlib.reload(users)  # it has not found Ray, which is imported after the fork
    resource_tracker.ensure_running()
    with patch("multiprocessing.util.spawnv_passfds", _fork):
        forkserver.ensure_running()


def _fork(executable: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """In place of a new interpreter for the fork server, with the same descriptors open."""
    if pid := os.fork():
        return pid
    try:
        for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *descriptors}:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(descriptor)
        listener, alive = descriptors
        forkserver.main(listener, alive, [])
    except SystemExit:  # how it ends
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - the end of a process: as the interpreter does
        sys.excepthook(type(error), error, error.__traceback__)
    os._exit(1)


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Inside, vLLM's EngineCore is a fork of the server. One thread at a time."""
    with _one_at_a_time, patch(_ASKED, _Context):
        yield


class _Process(ForkServerProcess):
    """Ends with the process that made it and with the server. Its priority is lower than that of its maker. Has its
    maker's environment, for what is read from now on: what the imports have read, or the loader (LD_PRELOAD), was that
    of the server's start."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._maker = os.getpid()
        self._environment = dict(os.environ)

    def run(self) -> None:
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        os.environ.update({n: v for n, v in self._environment.items() if os.environ.get(n) != v})
        yield_to_others()
        die_with_parent()
        when_ended(self._maker, lambda: os.kill(os.getpid(), signal.SIGKILL))
        super().run()


class _Context(ForkServerContext):
    Process = _Process  # type: ignore[assignment]


_one_at_a_time = threading.Lock()
