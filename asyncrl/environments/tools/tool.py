"""The protocol of a tool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the policy reads. `failed`: it is an error."""

    text: str
    failed: bool = False


class ToolDescription(Protocol):
    """What the policy is told of a tool."""

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


class Tool(ToolDescription, Protocol):
    """Instantiated in the rollouter for its description, and in each tool process to be called, one call at a time.

    If a tool has a method `start()`, each process calls it once before the first call: the place to load data.
    """

    @property
    def call(self) -> Callable[..., str]:
        """A method that takes the arguments by name and returns the result. The policy also reads its exceptions."""
        ...


def schema_of(tool: ToolDescription) -> dict[str, Any]:
    """OpenAI's function schema, which chat templates take too."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def no_such_tool(name: str, known: Iterable[str]) -> ToolResult:
    """What the policy reads when it calls a tool that is not there."""
    return ToolResult(f"Error: there is no tool {name!r}; the tools are {', '.join(sorted(known))}", failed=True)
