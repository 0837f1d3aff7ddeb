"""A user's reward function, sync or async, with its result checked."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

from asyncrl.data.rows import PromptRow
from asyncrl.errors import explain
from asyncrl.rewards.reward import RewardResult

if TYPE_CHECKING:
    import asyncio


class Awaiter:
    """Awaits results of async functions in one event loop, so that their clients can be reused."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def value(self, given: Any) -> Any:
        """`given`, or its result if it is awaitable."""
        if not inspect.isawaitable(given):
            return given
        import asyncio

        if self._runner is None:
            self._runner = asyncio.Runner()

        async def wait() -> Any:
            return await given

        return self._runner.run(wait())


class CustomReward:
    """Calls the function. An async function always runs in the same event loop."""

    def __init__(self, name: str, function: Callable[[str, PromptRow], Any]) -> None:
        self.name = name
        self._function = function
        self._awaiter = Awaiter()

    def __call__(self, response: str, row: PromptRow) -> RewardResult:
        """Raises TypeError, ValueError: the result is no reward, or has an invalid number or part."""
        given = self._awaiter.value(self._function(response, row))
        return checked_result(given, f"the reward {self.name} of {row.origin}")


def checked_result(given: Any, asked: str) -> RewardResult:
    """The result of a user's function as a reward. Raises TypeError, ValueError, as `CustomReward.__call__`."""
    result = RewardResult(float(given)) if isinstance(given, Real) else given
    if not isinstance(result, RewardResult):
        found = f"{type(result).__name__} instead of RewardResult or a number"
        raise TypeError(explain(asked, found, "return asyncrl.rewards.RewardResult(reward=...)"))
    reward = _finite(result.reward)
    if reward is None:
        raise ValueError(explain(asked, f"{result.reward!r:.100}", "return a finite number"))
    return RewardResult(reward, _parts(result.parts, asked))


def _parts(parts: Any, asked: str) -> tuple[tuple[str, float], ...]:
    """The parts, checked. Raises TypeError, ValueError."""
    do = 'return parts=(("style", 0.5), ...): a tuple of pairs of a name and a finite number'
    try:
        pairs = None if isinstance(parts, Mapping) else [(name, value) for name, value in parts]
    except (TypeError, ValueError):
        pairs = None
    if pairs is None or not all(isinstance(name, str) for name, _ in pairs):
        raise TypeError(explain(asked, f"parts={parts!r:.100}", do))
    checked = []
    for name, value in pairs:
        number = _finite(value)
        if number is None:
            raise ValueError(explain(asked, f"part {name}={value!r:.100}", do))
        checked.append((name, number))
    return tuple(checked)


def _finite(value: Any) -> float | None:
    """`value` as a finite float (numpy's and torch's scalars too); None for texts and everything else."""
    if isinstance(value, str | bytes):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
