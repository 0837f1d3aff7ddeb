"""The thoughts in a model's responses. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model marks its thoughts. `begun`: the chat template ends prompts with the opening mark."""

    opening: str = "<think>"
    closing: str = "</think>"
    begun: bool = False

    def is_open(self, text: str) -> bool:
        """Whether the text ends inside a thought."""
        return text.rfind(self.opening) > text.rfind(self.closing)

    def after(self, response: str, *, begun: bool) -> str:
        """The text after the last thought; empty if that has no end. `begun`: the prompt ends inside a thought."""
        is_unfinished = self.is_open(response) or (begun and self.closing not in response)
        return "" if is_unfinished else response.rpartition(self.closing)[2]
