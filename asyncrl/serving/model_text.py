"""Converts between clients' text and the model's token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncrl.chat.fields import ApiError, bad_field
from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import RolloutConfig
from asyncrl.data.chat import Chat
from asyncrl.data.rows import SENT_IMAGE, Thinking
from asyncrl.data.tokenizer import load_tokenizer, stop_token_ids
from asyncrl.data.tool_calls import CallParser, parser_for, template_text, tools_for
from asyncrl.errors import DataError
from asyncrl.types.images import KEY_TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ModelText:
    """The tokenizer and chat template of the served model. `chat` and `prompt` are slow for long texts and thread-safe.

    Args:
        vocab_size: of the model, which may exceed its tokenizer's; None: the tokenizer's.
        max_model_len: prompt plus answer, in tokens.
        parser: format of tool calls, for `parser_for`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model: ModelConfig,
        vocab_size: int | None = None,
        *,
        max_model_len: int,
        parser: str = "auto",
    ) -> None:
        self._tokenizer = tokenizer
        self._chat = Chat(tokenizer, model, parser)
        self.parser: CallParser = parser_for(parser, template_text(tokenizer))
        self._specials = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        self.vocab_size = vocab_size or len(tokenizer)
        self.max_model_len = max_model_len
        self._max_characters = max_model_len * max(map(len, tokenizer.get_vocab()))
        self.stop_token_ids = stop_token_ids(tokenizer, model, ())
        tokenizer.encode("a")  # clears a saved truncation now, which would be a race between threads later

    @classmethod
    def of(cls, model: ModelConfig, rollout: RolloutConfig, vocab_size: int | None) -> ModelText:
        """Raises ConfigError, as `load_tokenizer`."""
        length, parser = rollout.max_model_len, rollout.tool_use.parser
        return cls(load_tokenizer(model), model, vocab_size, max_model_len=length, parser=parser)

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        """[P] int32: the messages and the descriptions of the tools through the chat template.

        Raises ApiError: too long, or refused by the template.
        """
        self._require_short("messages", _written_size(messages))
        self._require_few_images(messages)
        self._require_short("tools", _written_size(tools))
        try:
            return self._chat.prompt(messages, tools_for(tools, self.parser, self._chat.template))
        except DataError as e:
            raise ApiError(400, str(e), param="messages", code="invalid_value") from e

    def prompt(self, prompt: str | Sequence[int]) -> np.ndarray:
        """[P] int32: the given ids, or the text with the tokenizer's special tokens around it.

        Raises ApiError: an id that the model does not have, a text without tokens, or a text that is far too long.
        """
        if not isinstance(prompt, str):
            if (worst := max(prompt)) >= self.vocab_size:
                found = f"token id {worst} is not in the vocabulary of {self.vocab_size} ids"
                raise bad_field("prompt", found, "send ids of this model's tokenizer")
            return np.asarray(prompt, np.int32)
        self._require_short("prompt", len(prompt))
        ids = self._tokenizer.encode(prompt)
        if not ids:
            raise bad_field("prompt", "the text has no token", "send another")
        return np.asarray(ids, np.int32)

    def _require_few_images(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Refuses images, before any is read, that could not fit however small they were."""
        images = sum(len(SENT_IMAGE.findall(str(m.get("content") or ""))) for m in messages if m.get("content"))
        if images * KEY_TOKENS > self.max_model_len:
            found = f"{images} images for a context of {self.max_model_len} tokens"
            raise ApiError(400, f"messages: {found}; send fewer", param="messages", code="context_length_exceeded")

    def _require_short(self, param: str, num_characters: int) -> None:
        """Refuses a text, before tokenization, that would not fit even if all its tokens had the longest text."""
        if num_characters > self._max_characters:
            found = f"{param}: {num_characters} characters, the model's context holds {self.max_model_len} tokens"
            found += f", at most {self._max_characters} characters"
            raise ApiError(400, f"{found}; shorten the text", param=param, code="context_length_exceeded")

    def thinking(self, prompt_ids: np.ndarray, start: str) -> Thinking | None:
        """As `Chat.thinking`."""
        return self._chat.thinking(prompt_ids, start)

    def hides(self, texts: Iterable[str]) -> bool:
        """Whether one of these texts has a special token, which `decode` omits."""
        return any(special in text for text in texts for special in self._specials)

    def decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def decode_with_special_tokens(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _written_size(value: object) -> int:
    """Characters of a JSON value with each key and value on its own line, indented by depth, as in some templates.
    Images have none."""
    found, depth, level = 0, 0, [value]
    while level:
        deeper: list[object] = []
        found += depth * len(level)
        for item in level:
            match item:
                case str():
                    found += len(SENT_IMAGE.sub("", item) if "\ufffc" in item else item)
                case dict():
                    deeper += [*item, *item.values()]
                case list() | tuple():
                    deeper += item
                case _:
                    found += len(str(item))
        depth, level = depth + 1, deeper
    return found
