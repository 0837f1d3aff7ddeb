"""Logging of all processes of a run into its `log.txt`."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from asyncrl.config.hidden import Hidden
from asyncrl.observability import stacks
from asyncrl.remote.garbage import collect_seldom

LOG_PATH_VARIABLE = "ASYNCRL_LOG_PATH"
"""Set by the launch code for the processes of a run."""
HIDDEN_VARIABLE = "ASYNCRL_HIDDEN"
"""Names of environment variables, separated by blanks, whose values no log may show. Set by the launch code too."""

_FORMAT = "%(asctime)s %(processName)s[%(process)d] %(levelname)s %(name)s: %(message)s"


class _Formatter(logging.Formatter):
    """Hides secrets from the environment, also in tracebacks."""

    def __init__(self, hide: Hidden, fmt: str | None = None, datefmt: str | None = None) -> None:
        super().__init__(fmt, datefmt)
        self._hide = hide

    def format(self, record: logging.LogRecord) -> str:
        return self._hide(super().format(record))


def configure_driver(path: Path, console: Console, hide: Hidden) -> None:
    """Logs this process to the console and to `path`, which the actors' logs share."""
    file = logging.FileHandler(path)
    file.setFormatter(_Formatter(hide, _FORMAT))
    screen: logging.Handler
    if console.is_terminal:
        screen = RichHandler(console=console, show_path=False, show_level=False, omit_repeated_times=False)
        screen.setFormatter(_Formatter(hide))
    else:
        screen = logging.StreamHandler(sys.stdout)
        screen.setFormatter(_Formatter(hide, "%(asctime)s %(message)s", "%H:%M:%S"))
    screen.setLevel(logging.INFO)
    screen.addFilter(logging.Filter("asyncrl"))
    stacks.install()
    root = logging.getLogger()
    root.handlers = [file, screen]
    root.setLevel(logging.WARNING)
    logging.getLogger("asyncrl").setLevel(logging.INFO)


def configure_worker() -> None:
    """Logs this actor's process to the run's `log.txt`, and makes garbage collections rare. Ray calls it before it
    imports the actor's class."""
    stacks.install()
    collect_seldom()
    path = os.environ.get(LOG_PATH_VARIABLE)
    if path is None:
        return
    file: logging.Handler
    try:
        file = logging.FileHandler(path)
    except OSError as error:  # the run directory is not shared with this machine: the preflight names it
        file = logging.StreamHandler()  # into Ray's own log of the process
        logging.getLogger("asyncrl").warning("no log in %s: %s", path, error)
    file.setFormatter(_Formatter(Hidden.named(os.environ.get(HIDDEN_VARIABLE, "").split(), os.environ), _FORMAT))
    logging.getLogger("asyncrl").setLevel(logging.INFO)
    for name in ("asyncrl", "asyncio"):  # asyncio logs exceptions of tasks that were never retrieved
        logging.getLogger(name).addHandler(file)
