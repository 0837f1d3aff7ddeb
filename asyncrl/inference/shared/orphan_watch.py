"""Kills an engine's processes when the owning process ends for any reason. Linux."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Callable

from asyncrl.workers.sandbox.confine import die_with_parent


def die_with(owner_pid: int) -> None:
    """Ties this process, and its parent unless that is the owner, to the process `owner_pid`.

    The kernel kills this process when the thread that created it ends. A thread here also watches the owner and kills
    the parent: with several workers vLLM's EngineCore runs none of our code, so its workers must kill it. Returns
    immediately.
    """
    die_with_parent()
    parent = os.getppid()
    when_ended(owner_pid, lambda: _kill(parent, owner_pid))


def when_ended(pid: int, then: Callable[[], None]) -> None:
    """Calls `then` in a thread when the process ends, or directly if it has ended already."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        then()
        return
    threading.Thread(target=_watch, args=(descriptor, then), name="owner-watch", daemon=True).start()


def when_closed(connection: socket.socket, then: Callable[[], None]) -> None:
    """Calls `then` in a thread when the other end of a connection closes."""
    arguments = connection.fileno(), then, select.POLLRDHUP
    threading.Thread(target=_watch, args=arguments, name="connection-watch", daemon=True).start()


def _watch(descriptor: int, then: Callable[[], None], events: int = select.POLLIN) -> None:
    poll = select.poll()
    poll.register(descriptor, events)
    poll.poll()  # no deadline: it ends with this process
    then()


def _kill(parent: int, owner_pid: int) -> None:
    """Kills the parent, if it is unchanged and not the owner, then this process."""
    if parent not in (owner_pid, 1) and os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
