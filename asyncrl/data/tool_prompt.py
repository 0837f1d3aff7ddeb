"""Tells the policy which tools it has: through the chat template where that knows tools, else in a system message."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class ToolPrompt:
    """`schemas`: one object per tool as the template's `tools` takes them (OpenAI's function schema). `text`: the same
    in words, for a template that does not take any. `in_words`: the template is not asked; it would teach calls of
    another form."""

    schemas: tuple[Mapping[str, Any], ...]
    text: str
    in_words: bool = False


def takes_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True when the chat template renders the tools that it gets."""
    templates = tokenizer.chat_template
    if isinstance(templates, dict):
        return "tool_use" in templates or any(_names_tools(t) for t in templates.values())
    return _names_tools(str(templates))


def with_tools(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], tools: ToolPrompt | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and options for `apply_chat_template` that make the prompt name the tools."""
    plain = [dict(message) for message in messages]
    if tools is None or not tools.schemas:
        return plain, {}
    if takes_tools(tokenizer) and not tools.in_words:
        return plain, {"tools": [dict(schema) for schema in tools.schemas]}
    if plain and plain[0].get("role") == "system":
        plain[0]["content"] = f"{plain[0]['content']}\n\n{tools.text}"
        return plain, {}
    return [{"role": "system", "content": tools.text}, *plain], {}


def _names_tools(template: str) -> bool:
    return re.search(r"\btools\b", template) is not None
