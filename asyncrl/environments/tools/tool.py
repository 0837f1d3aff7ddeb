"""The protocol of a tool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the policy reads. `failed`: it is an error."""

    text: str
    failed: bool = False


class Tool(Protocol):
    """Made in the rollouter for its words, and in every tool process to be called there, one call at a time.

    A tool that also has a method `start()` is started once in each process before its first call: the place to load
    what it needs.
    """

    @property
    def name(self) -> str:
        """Letters, digits and underscores."""
        ...

    @property
    def description(self) -> str:
        """What it does, for the policy."""
        ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of its arguments: an object with `properties`."""
        ...

    @property
    def call(self) -> Callable[..., str]:
        """A method that takes the arguments by name and gives the result. What it raises, the policy reads too."""
        ...


def schema_of(tool: Tool) -> dict[str, Any]:
    """OpenAI's function schema, which chat templates take too."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}
