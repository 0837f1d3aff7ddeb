"""The model's chat format over token ids: prompts, and the turns that an environment adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from asyncrl.config.model import ModelConfig
from asyncrl.data.tokenizer import stop_token_ids, template_options
from asyncrl.data.tool_calls import CallParser, ToolPrompt, parser_for, template_text, with_tools, written
from asyncrl.errors import DataError, explain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
"""A message of OpenAI's API and chat templates: role, content, optionally tool_calls, tool_call_id, name."""

_CLEANS_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
"""Attribute of tokenizers: BPE models clean up spaces only if it is set."""

_QUESTION, _REPLY, _RESULT = "question7391", "reply7391", "result7391"


class Chat:
    """The chat format of one tokenizer. The policy's tokens are never rendered again: a new turn is tokenized alone and
    appended to the token ids.

    Args:
        parser: name of a format of tool calls, for `parser_for`; earlier calls are written in it if the template does
            not support them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: ModelConfig, parser: str = "auto") -> None:
        self._tokenizer = tokenizer
        self._parser: CallParser = parser_for(parser, template_text(tokenizer))
        self._knows_calls = "tool_calls" in template_text(tokenizer)
        self._options = template_options(model)
        self._ends = frozenset(stop_token_ids(tokenizer, model, ()))
        self._specials = tuple(
            token.content
            for token in tokenizer.added_tokens_decoder.values()
            if token.special and len(token.content) > 1
        )
        self._knows_results: bool | None = None

    @property
    def template(self) -> str:
        return template_text(self._tokenizer)

    def encode(self, text: str) -> np.ndarray:
        """[n] int32, without surrounding special tokens. Unpaired surrogates, which agents may send, become question
        marks."""
        whole = text.encode(errors="replace").decode()
        return np.asarray(self._tokenizer.encode(whole, add_special_tokens=False), np.int32)

    def encode_after(self, head: str, text: str) -> np.ndarray:
        """[n] int32: `text` as encoded after `head`.

        Some tokenizers encode the first token of a text differently, so the whole is encoded and then cut. If a token
        would span both, `text` is encoded alone.
        """
        before, whole = self.encode(head), self.encode(head + text)
        joined = len(whole) > len(before) and np.array_equal(whole[: len(before)], before)
        return whole[len(before) :] if joined else self.encode(text)

    def decode(self, token_ids: np.ndarray) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))  # an array decodes faster than a list

    @property
    def plain_decoder(self) -> str | None:
        """A decoder equivalent to `decode`, as JSON for the tokenizers library, so that a process that only decodes
        starts faster, without transformers. None: part of this tokenizer is Python code, or its file does not describe
        it fully."""
        from transformers import PreTrainedTokenizerFast

        known, kind = self._tokenizer, PreTrainedTokenizerFast
        if (
            not isinstance(known, kind)
            or type(known).decode is not kind.decode
            or type(known)._decode is not kind._decode
        ):
            return None
        # Only the library's own decoding is reproduced by the file; spaces cleaned up in Python are not.
        backend = known.backend_tokenizer
        spares = type(backend.model).__name__ == "BPE" and not getattr(known, _CLEANS_BPE, True)
        if known.clean_up_tokenization_spaces and not spares:
            return None
        try:
            return backend.to_str()
        except Exception:  # noqa: BLE001 - tokenizers raises a bare one if a part is not serialisable
            return None

    def harmless(self, text: str) -> str:
        """`text` with a space inserted into every special token, so that a tool's result cannot end its turn."""
        for token in self._specials:
            if token in text:
                text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def decode_turn(self, token_ids: np.ndarray) -> str:
        """Text of one response without its end token. Keeps other special tokens, which some formats use in tool
        calls."""
        ids = token_ids.tolist()
        while ids and ids[-1] in self._ends:
            ids.pop()
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def prompt(self, messages: Sequence[Message], tools: ToolPrompt | None = None) -> np.ndarray:
        """[P] int32: a whole conversation, up to the start of the assistant's next turn.

        Raises DataError: the template refuses the messages, or renders nothing.
        """
        plain, options = with_tools(self._tokenizer, [self._speakable(message) for message in messages], tools)
        ids = self.encode(self._render(plain, options))
        if len(ids) == 0:
            raise DataError(explain("a conversation", "it renders to no token", "check the chat template"))
        return ids

    def next_turn(self, response_ids: np.ndarray, messages: Sequence[Message]) -> np.ndarray:
        """[n] int32: the tokens of `messages` after the policy's `response_ids`, up to the start of its next turn.

        The template renders a short dummy conversation, of which only the part after the assistant's reply is used. An
        end token that the response already has is not repeated.

        Raises DataError: the template refuses the messages.
        """
        # Render a dummy conversation and keep what follows its reply: templates offer no rendering of a suffix.
        before = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _REPLY}]
        text = self._render([*before, *map(self._speakable, messages)], {})
        at = text.index(_REPLY) + len(_REPLY)
        ids = self.encode_after(text[:at], text[at:])
        return self._after_end(ids) if len(response_ids) and int(response_ids[-1]) in self._ends else ids

    def _after_end(self, ids: np.ndarray) -> np.ndarray:
        """`ids` without a leading end token (blanks may precede it)."""
        for number, token in enumerate(ids.tolist()):
            if token in self._ends:
                return ids[number + 1 :]
            if self._tokenizer.decode([token]).strip():
                break
        return ids

    def _speakable(self, message: Message) -> dict[str, Any]:
        """Converts tool calls to text and tool results to user messages if the template does not support them."""
        if message.get("tool_calls") and not self._knows_calls:
            functions = [call["function"] for call in message["tool_calls"]]
            calls = [written(function["name"], function["arguments"], self._parser) for function in functions]
            said = {name: value for name, value in message.items() if name != "tool_calls"}
            return said | {"content": "\n".join([*filter(None, [message.get("content")]), *calls])}
        if message.get("role") != "tool":
            return dict(message)
        if self._knows_results is None:
            self._knows_results = self._renders_results()
        if self._knows_results:
            return dict(message)
        return {"role": "user", "content": f"Result of {message.get('name', 'the tool')}:\n{message.get('content')}"}

    def _renders_results(self) -> bool:
        said = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _REPLY}]
        try:
            return _RESULT in self._render([*said, {"role": "tool", "name": "tool", "content": _RESULT}], {})
        except DataError:
            return False

    def _render(self, messages: Sequence[Message], options: dict[str, Any]) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(m) for m in messages], add_generation_prompt=True, tokenize=False, **self._options, **options
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
            roles = [message.get("role") for message in messages]
            do = "correct the roles of the messages or the chat template"
            raise DataError(explain(f"a conversation of {roles}", f"the chat template fails: {error}", do)) from error
        return str(text)
