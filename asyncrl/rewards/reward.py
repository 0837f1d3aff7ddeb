"""The protocol of reward functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncrl.config.rewards import RewardConfig
from asyncrl.data.rows import PromptRow, Thinking


@dataclass(frozen=True, slots=True)
class RewardResult:
    """`reward` is trained on; `parts`, its named components, are for metrics."""

    reward: float
    parts: tuple[tuple[str, float], ...] = ()


class RewardFunction(Protocol):
    """Judges a response. Pure: the same text and row give the same result, in any process."""

    def __call__(self, response: str, row: PromptRow) -> RewardResult: ...


# Messages between a rollouter and its reward processes.


Response = str | bytes
"""Text, or token ids as int32 bytes, which the process decodes without numpy."""


@dataclass(frozen=True, slots=True)
class RewardSettings:
    """`decoder`: the JSON of the tokenizer that decodes token ids, without the `ends` at their end; None: responses are
    texts. `thinking`: the marks of the policy's thoughts."""

    config: RewardConfig
    decoder: str | None = None
    ends: frozenset[int] = frozenset()
    thinking: Thinking = field(default_factory=Thinking)


@dataclass(frozen=True, slots=True)
class RewardRequest:
    response: Response
    row: PromptRow

    def __reduce__(self) -> tuple[Any, ...]:
        return RewardRequest, (self.response, self.row)


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A whole group: its responses, in order, and their row. The answer is a tuple with the reward of each."""

    responses: tuple[Response, ...]
    row: PromptRow
