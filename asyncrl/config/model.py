from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.config.checks import require


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    path: str = "???"
    """Directory in Hugging Face format, or a hub name such as Qwen/Qwen2.5-7B."""
    revision: str | None = None
    """Hub revision; None takes the default branch."""
    trust_remote_code: bool = False
    """Run model code that ships with the checkpoint."""
    chat_template: str | None = None
    """Path of a Jinja chat template that replaces the tokenizer's own."""
    enable_thinking: bool | None = None
    """Passed to chat templates that know it (Qwen3); None leaves it out."""
    inference_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Weights and compute of the replicas; also what a publish sends."""

    def __post_init__(self) -> None:
        require(
            bool(self.path), asked="model.path=''", found="no model", do="set model.path to a directory or hub name"
        )
