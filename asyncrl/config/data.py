from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from asyncrl.config.checks import require, require_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    train: str = "???"
    """JSONL or parquet file, a directory of one of them, or a hub name (`org/name` or `org/name/config`, with
    `:split`)."""
    eval: dict[str, str] = field(default_factory=dict)
    """Held-out sets: name -> file or hub name."""
    shuffle: bool = True
    """Each epoch is a permutation drawn from (run.seed, epoch); False keeps the order of the file."""
    max_prompt_tokens: int = 1024
    """Longest prompt after the chat template, in tokens."""
    on_long_prompt: Literal["error", "drop"] = "error"
    """A longer prompt stops the run before it starts, or is left out and counted."""

    def __post_init__(self) -> None:
        require(bool(self.train), asked="data.train=''", found="no training data", do="set data.train")
        require_at_least("data.max_prompt_tokens", self.max_prompt_tokens, 1)
