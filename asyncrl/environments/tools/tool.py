"""The protocol of a tool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from asyncrl.data.images import Shown


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Text for the policy, perhaps with images. `failed`: it is an error."""

    text: Shown
    failed: bool = False


class ToolDescription(Protocol):
    """The description of a tool for the policy."""

    @property
    def name(self) -> str:
        """Letters, digits and underscores."""
        ...

    @property
    def description(self) -> str:
        """What the tool does, for the policy."""
        ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of the arguments: an object with `properties`."""
        ...


class Tool(ToolDescription, Protocol):
    """Instantiated in the rollouter for its description, and in each tool process for calls, one at a time.

    If a tool has a method `start()`, each process calls it once before the first call: the place to load data.
    """

    @property
    def call(self) -> Callable[..., Any]:
        """A method that takes the arguments by name and returns the result: text, or images too (`images.shown`). The
        policy also reads its exceptions."""
        ...


def schema_of(tool: ToolDescription) -> dict[str, Any]:
    """OpenAI's function schema, also accepted by chat templates."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def one_text(name: str, meaning: str) -> dict[str, Any]:
    """The parameters of a tool that takes a text."""
    return {"type": "object", "properties": {name: {"type": "string", "description": meaning}}, "required": [name]}


def no_such_tool(name: str, known: Iterable[str]) -> ToolResult:
    """The result for a call of an unknown tool."""
    return ToolResult(f"Error: there is no tool {name!r}; the tools are {', '.join(sorted(known))}", failed=True)
