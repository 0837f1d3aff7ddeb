"""A user's reward function, sync or async, with its result checked."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
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
    number = None if isinstance(given, RewardResult) else _number(given)
    result = given if number is None else RewardResult(number)
    if not isinstance(result, RewardResult):
        found = f"{type(result).__name__} instead of RewardResult or a number"
        raise TypeError(explain(asked, found, "return asyncrl.rewards.RewardResult(reward=...)"))
    reward = _number(result.reward)
    if reward is None or not math.isfinite(reward):
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
        number = _number(value)
        if number is None or not math.isfinite(number):
            raise ValueError(explain(asked, f"part {name}={value!r:.100}", do))
        checked.append((name, number))
    return tuple(checked)


def _number(value: Any) -> float | None:
    """`value` as a float (booleans, and scalars of numpy and torch too); None for texts and everything else."""
    if isinstance(value, str | bytes):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


# Reward functions of other systems, by the names of their parameters.


def as_reward(function: Callable[..., Any]) -> Callable[[str, PromptRow], Any]:
    """A function of (response, row) that calls `function` as it was written.

    verl's `compute_score(data_source, solution_str, ground_truth, extra_info)` returns a number, or an object with
    `score`, whose other numbers become parts. TRL's `f(prompts, completions, **columns)` gets lists of one, and returns
    such a list; None in it is a reward of 0. Prompts and completions are messages where the dataset's prompt is.

    Raises TypeError: `function` cannot be called with a response and a row, and is none of these.
    """
    try:
        signature = inspect.signature(function)
    except ValueError as error:  # a builtin such as max
        raise TypeError(str(error)) from error
    names = signature.parameters.keys()
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    if "solution_str" in names:
        arguments, result = _of_verl, _from_verl
    elif "completions" in names:
        arguments, result = _of_trl, _from_trl
    else:
        signature.bind("", None)
        return function

    def call(response: str, row: PromptRow) -> Any:
        given = arguments(response, row)
        made = function(**{name: value for name, value in given.items() if takes_all or name in names})
        return _later(made, result) if inspect.isawaitable(made) else result(made)

    return call


async def _later(made: Awaitable[Any], result: Callable[[Any], Any]) -> Any:
    return result(await made)


def _of_verl(response: str, row: PromptRow) -> dict[str, Any]:
    told = {"data_source": row.data_source, "ground_truth": row.truth(), "extra_info": row.values()}
    return {"solution_str": response, **told}


def _from_verl(made: Any) -> Any:
    if not isinstance(made, Mapping) or "score" not in made:
        return made
    parts = ((str(k), number) for k, v in made.items() if k != "score" and (number := _number(v)) is not None)
    return RewardResult(made["score"], tuple(parts))


def _of_trl(response: str, row: PromptRow) -> dict[str, Any]:
    is_chat = row.is_chat
    prompt = row.conversation() if is_chat else row.messages[-1].content
    completion = [{"role": "assistant", "content": response}] if is_chat else response
    truth = row.truth()
    columns = {"data_source": row.data_source, "ground_truth": truth, "answer": truth, **row.values()}
    return {"prompts": [prompt], "completions": [completion], **{name: [value] for name, value in columns.items()}}


def _from_trl(made: Any) -> Any:
    if isinstance(made, str | bytes | Mapping) or not hasattr(made, "__len__") or len(made) != 1:
        return made  # refused as no reward
    return 0.0 if made[0] is None else made[0]
