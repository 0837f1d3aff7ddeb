"""The protocol of reward functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from asyncrl.data.rows import PromptRow


@dataclass(frozen=True, slots=True)
class RewardResult:
    """`reward` is what is trained on; `parts` are its named components, for metrics."""

    reward: float
    parts: tuple[tuple[str, float], ...] = ()


class RewardFunction(Protocol):
    """Judges a response. Pure: the same text and row give the same result, in any process."""

    def __call__(self, response: str, row: PromptRow) -> RewardResult: ...
