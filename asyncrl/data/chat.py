"""The model's chat format over token ids: prompts, and the turns that an environment adds.

In texts an image stands as `rows.IMAGE`, by its key in `data.image_directory`, or `rows.SENT_IMAGE`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.config.model import ModelConfig
from asyncrl.data.chat_template import ChatTemplate, Message
from asyncrl.data.images import ImageTokens, image_bytes, require_text_last
from asyncrl.data.rows import SENT_IMAGE, Thinking
from asyncrl.data.tokenizer import stop_token_ids
from asyncrl.data.tool_calls import ToolPrompt
from asyncrl.errors import DataError, explain
from asyncrl.types.images import FIRST_ID, image_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Chat:
    """The chat format of one tokenizer. The policy's tokens are never rendered again: a new turn is tokenized alone and
    appended to the token ids.

    Args:
        parser: name of a format of tool calls, for `parser_for`; earlier calls are written in it if the template does
            not support them.
        skip_special_tokens: `decode` leaves them out.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model: ModelConfig,
        parser: str = "auto",
        *,
        skip_special_tokens: bool = False,
    ) -> None:
        self.ends = frozenset(stop_token_ids(tokenizer, model, ()))
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, model, parser)
        self._skips = skip_special_tokens
        specials = sorted((t.content for t in tokenizer.added_tokens_decoder.values() if t.special), key=len)
        self.specials = re.compile("|".join(map(re.escape, reversed(specials))) or "(?!)")
        """Finds special tokens in a text."""
        self._images = None if model.image_directory is None else ImageTokens(model, self._template.image_text)

    def thinking(self, prompt_ids: np.ndarray | None = None, start: str = "") -> Thinking | None:
        """The marks of thoughts in a reply to this prompt, `begun` if it ends inside one. None where several marks
        close one (gpt-oss): thoughts stay text.

        `start`: of the reply, in the prompt."""
        marks = self._template.thinking
        if prompt_ids is not None:
            text = self._spelled(prompt_ids[-32:], skip=False).rstrip()
            marks = replace(marks, begun=marks.is_open(start) if start else text.endswith(marks.opening))
        return None if marks.closing.count("<") > 1 else marks

    @property
    def sees_images(self) -> bool:
        return self._images is not None

    def image(self, source: object) -> str:
        """Stores an image and returns it as messages hold it. `source`: bytes of a file, a path, a URL, an image of
        PIL. Raises DataError: it is none, or the model reads none."""
        if self._images is None:
            raise DataError(explain("an image in a message", "the model reads text alone", "set data.image_directory"))
        return f"\ufffc{self._images.store.put(image_bytes(source, ''))}"

    def stored(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with their images stored."""

        def stored(value: object) -> object:
            has_images = isinstance(value, str) and "\ufffc" in value
            return SENT_IMAGE.sub(lambda found: self.image(json.loads(found[1])), str(value)) if has_images else value

        return [{name: stored(value) for name, value in message.items()} for message in messages]

    @property
    def template(self) -> str:
        return self._template.text

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
        before, whole = self.encode(head), self._seen(head + text)
        joined = len(whole) > len(before) and np.array_equal(whole[: len(before)], before)
        return whole[len(before) :] if joined else self._seen(text)

    def _seen(self, text: str) -> np.ndarray:
        """[n] int32: the text with its images. Raises DataError."""
        if self._images is None or "\ufffc" not in text:
            return self.encode(text)
        return self._images.encoded(text, self.encode, "a message")

    def decode(self, token_ids: np.ndarray) -> str:
        """What rewards and environments read of a response: what the tokens spell, character for character, without
        the token that ends it, and without images."""
        return self._spelled(token_ids, skip=self._skips, marks=False)

    def decode_shown(self, token_ids: np.ndarray) -> str:
        """As `decode`, with images as messages hold them."""
        return self._spelled(token_ids, skip=self._skips)

    def decode_turn(self, token_ids: np.ndarray) -> str:
        """As `decode_shown`, always with special tokens, which some formats use in tool calls."""
        return self._spelled(token_ids, skip=False)

    def decode_text(self, token_ids: np.ndarray) -> str:
        """As `decode`, never with special tokens, for people and other programs."""
        return self._spelled(token_ids, skip=True)

    def _spelled(self, token_ids: np.ndarray, *, skip: bool, marks: bool = True) -> str:
        size = len(token_ids)
        while size and int(token_ids[size - 1]) in self.ends:
            size -= 1
        kept = np.asarray(token_ids[:size])  # an array decodes faster than a list
        parts = [kept]
        if size and kept.max() >= FIRST_ID:  # an environment has written an image
            parts = np.split(kept, np.flatnonzero(np.diff(kept >= FIRST_ID)) + 1)
        decode = partial(self._tokenizer.decode, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        told = image_text if marks else lambda _: ""
        return "".join(told(p) if len(p) and p[0] >= FIRST_ID else str(decode(p)) for p in parts)

    @property
    def plain_decoder(self) -> str | None:
        """A decoder equivalent to `decode`, as JSON for the tokenizers library, so that a process that only decodes
        starts faster, without transformers. None: part of this tokenizer is Python code, or its file does not describe
        it fully."""
        from transformers import PreTrainedTokenizerFast

        known, kind = self._tokenizer, PreTrainedTokenizerFast
        if not isinstance(known, kind) or (type(known).decode, type(known)._decode) != (kind.decode, kind._decode):
            return None
        try:
            return known.backend_tokenizer.to_str()
        except Exception:  # noqa: BLE001 - tokenizers raises a bare one if a part is not serialisable
            return None

    def harmless(self, text: str) -> str:
        """As `ChatTemplate.harmless`."""
        return self._template.harmless(text)

    def prompt(self, messages: Sequence[Message], tools: ToolPrompt | None = None) -> np.ndarray:
        """[P] int32: a whole conversation, up to the start of the assistant's next turn.

        Raises DataError: the template refuses the messages, or renders nothing.
        """
        text = self._template.render(self.stored(messages), tools, asked="a conversation")
        return require_text_last(self._seen(text), "a conversation")

    def next_turn(
        self, response_ids: np.ndarray, messages: Sequence[Message], *, with_tools: bool = False
    ) -> np.ndarray:
        """[n] int32: the tokens of `messages` after the policy's `response_ids`, up to the start of its next turn.

        An end token that the response already has is not repeated. `with_tools`: the prompt was rendered with tools.

        Raises DataError: the template refuses the messages, or leaves one out.
        """
        head, tail = self._template.turn(self.stored(messages), with_tools=with_tools, asked="the messages of a turn")
        ids = self.encode_after(head, tail)
        if len(ids):  # a template of the texts alone writes nothing for an empty result
            require_text_last(ids, "the messages of a turn")
        return self._after_end(ids) if len(response_ids) and int(response_ids[-1]) in self.ends else ids

    def _after_end(self, ids: np.ndarray) -> np.ndarray:
        """`ids` without what ends the last turn: up to the last end token before other text."""
        added, after = self._tokenizer.added_tokens_decoder, 0
        ends = self.ends.union(self._tokenizer.encode(self._template.inner_end, add_special_tokens=False))
        for number, token in enumerate(ids.tolist()):
            if token in ends:
                after = number + 1
            elif token not in added and self._tokenizer.decode(token).strip():
                break
        return ids[after:]
