"""Waits of tests, each with an end, and what some of them wait for."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import psutil


def is_alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def until(condition: Callable[[], Any], what: str = "what is waited for", within_s: float = 60.0) -> None:
    """Returns when `condition` gives something true, and fails when it has not within that time."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        await asyncio.sleep(0.001)


def wait_until(condition: Callable[[], Any], what: str = "what is waited for", within_s: float = 60.0) -> None:
    """As `until`, where there is no event loop."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)
