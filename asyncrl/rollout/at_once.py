"""Awaits several coroutines at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def all_at_once(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Awaits all. The first exception cancels the others, and is raised once they have ended."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
