"""A user's reward function, sync or async, with its result checked."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Any

from asyncrl.data.rows import PromptRow
from asyncrl.errors import explain
from asyncrl.rewards.reward import RewardResult

if TYPE_CHECKING:
    import asyncio


class CustomReward:
    """Calls the function; what it awaits runs in one event loop, so that its clients may live from call to call."""

    def __init__(self, name: str, function: Callable[[str, PromptRow], Any]) -> None:
        self.name = name
        self._function = function
        self._runner: asyncio.Runner | None = None

    def __call__(self, response: str, row: PromptRow) -> RewardResult:
        """Raises TypeError, ValueError: the function gave no reward, or none that is finite."""
        given = self._function(response, row)
        if inspect.isawaitable(given):
            given = self._awaited(given)
        result = RewardResult(float(given)) if isinstance(given, Real) else given
        asked = f"the reward {self.name} of {row.origin}"
        if not isinstance(result, RewardResult):
            found = f"{type(result).__name__} instead of RewardResult or a number"
            raise TypeError(explain(asked, found, "return asyncrl.rewards.RewardResult(reward=...)"))
        if not math.isfinite(result.reward):
            raise ValueError(explain(asked, f"{result.reward}", "return a finite number"))
        return result

    def _awaited(self, given: Any) -> Any:
        import asyncio

        if self._runner is None:
            self._runner = asyncio.Runner()

        async def wait() -> Any:
            return await given

        return self._runner.run(wait())
