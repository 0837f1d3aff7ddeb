"""What goes on beside training, at the end of the run."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

logger = logging.getLogger(__name__)


async def cancel(task: asyncio.Task[Any] | None, *, patience_s: float = 0.0) -> None:
    """Ends the task, after at most `patience_s`, and logs an error of it that nobody has met: the run is at its end,
    for another reason."""
    if task is not None:
        if patience_s:
            await asyncio.wait([task], timeout=patience_s)
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(outcome, Exception):
            logger.error("also: %s: %s", task.get_name(), outcome)
