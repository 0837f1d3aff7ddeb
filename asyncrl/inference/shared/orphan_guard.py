"""Ends the processes of an engine when the process that runs the engine ends, however it ends. Linux."""

from __future__ import annotations

import os
import select
import signal
import threading

from asyncrl.sandbox.confine import die_with_parent


def die_with(owner_pid: int) -> None:
    """Ties this process, and the one above it unless that is the owner, to the process `owner_pid`.

    The kernel kills this process when the thread that created it ends. A thread here also watches the owner and kills
    the parent: with several workers vLLM's EngineCore runs none of our code, so its workers must end it. Returns at
    once.
    """
    die_with_parent()
    parent = os.getppid()
    try:
        owner = os.pidfd_open(owner_pid)
    except ProcessLookupError:  # it died while this process started
        _kill(parent, owner_pid)
        return
    threading.Thread(target=_watch, args=(owner, parent, owner_pid), name="owner-watch", daemon=True).start()


def _watch(owner: int, parent: int, owner_pid: int) -> None:
    poll = select.poll()
    poll.register(owner, select.POLLIN)
    poll.poll()  # no deadline: it ends with this process
    _kill(parent, owner_pid)


def _kill(parent: int, owner_pid: int) -> None:
    """Kills the parent as long as it is still the parent and not the owner, then this process."""
    if parent not in (owner_pid, 1) and os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
