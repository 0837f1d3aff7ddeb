"""The commands `asyncrl-train`, `asyncrl-serve`, `asyncrl-eval`, `asyncrl-export`, `asyncrl-plan` and others; here is
what they share.

Runs in: driver.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from asyncrl.errors import AsyncRLError

EXIT_PROGRAM_ERROR = 1
EXIT_SIGNAL_BASE = 128


def plain_console(*, stderr: bool = False) -> Console:
    """Prints texts as they are: paths and messages may hold what looks like markup, and are not broken into lines."""
    return Console(stderr=stderr, soft_wrap=True, highlight=False, markup=False)


def refuse(text: str, error: AsyncRLError) -> int:
    """Says why a command does nothing; returns its exit code."""
    plain_console(stderr=True).print(text)
    return error.exit_code


def log_failure(logger: logging.Logger, what: str, error: Exception) -> int:
    """The end of a command: a named error is self-explanatory, any other is logged with its traceback. Returns the exit
    code."""
    named = isinstance(error, AsyncRLError)
    logger.log(logging.ERROR, "%s: %s: %s", what, type(error).__name__, error, exc_info=None if named else error)
    return error.exit_code if named else EXIT_PROGRAM_ERROR


def new_log(command: str) -> Path:
    """A new file that only this user can read; `mkstemp` excludes a file prepared by another user."""
    descriptor, path = tempfile.mkstemp(prefix=f"{command}-", suffix=".log")
    os.close(descriptor)
    return Path(path)


def at_signals(stop: Callable[[], object]) -> list[int]:
    """Has SIGINT and SIGTERM call `stop` in the running event loop; the list gets their numbers."""
    numbers: list[int] = []

    def on_signal(number: int) -> None:
        numbers.append(number)
        stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    return numbers
