"""Logging of all processes of a run into its `log.txt`."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from asyncrl.observability import stacks

LOG_PATH_VARIABLE = "ASYNCRL_LOG_PATH"
"""Set by the launch code for the processes of a run."""

_FORMAT = "%(asctime)s %(processName)s[%(process)d] %(levelname)s %(name)s: %(message)s"


def configure_driver(path: Path, console: Console) -> None:
    """Logs of this process go to the console and, with those of the actors, to `path`."""
    file = logging.FileHandler(path)
    file.setFormatter(logging.Formatter(_FORMAT))
    screen: logging.Handler
    if console.is_terminal:
        screen = RichHandler(console=console, show_path=False, show_level=False, omit_repeated_times=False)
    else:
        screen = logging.StreamHandler(sys.stdout)
        screen.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    screen.setLevel(logging.INFO)
    screen.addFilter(logging.Filter("asyncrl"))
    stacks.install()
    root = logging.getLogger()
    root.handlers = [file, screen]
    root.setLevel(logging.WARNING)
    logging.getLogger("asyncrl").setLevel(logging.INFO)


def configure_worker() -> None:
    """Logs of this actor's process go to the run's `log.txt`. Ray calls it before the actor is created."""
    stacks.install()
    path = os.environ.get(LOG_PATH_VARIABLE)
    if path is None:
        return
    file = logging.FileHandler(path)
    file.setFormatter(logging.Formatter(_FORMAT))
    logging.getLogger("asyncrl").setLevel(logging.INFO)
    for name in ("asyncrl", "asyncio"):  # asyncio's tells of tasks whose exception nobody took
        logging.getLogger(name).addHandler(file)
