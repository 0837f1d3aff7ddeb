"""The APIs served in addition to OpenAI's chat completions and completions, by path."""

from __future__ import annotations

from asyncrl.chat.anthropic import MESSAGES
from asyncrl.chat.reply import Dialect
from asyncrl.chat.responses import RESPONSES

DIALECTS: dict[str, Dialect] = {dialect.path: dialect for dialect in (RESPONSES, MESSAGES)}
