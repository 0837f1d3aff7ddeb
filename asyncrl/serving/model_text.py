"""Between the text of clients and the token ids of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from asyncrl.config.model import ModelConfig
from asyncrl.data.rows import ChatMessage, PromptRow
from asyncrl.data.tokenizer import PromptRenderer, stop_token_ids
from asyncrl.errors import DataError
from asyncrl.serving.errors import ApiError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ModelText:
    """The tokenizer and chat template of the served model.

    Args:
        vocab_size: of the model, which may have more ids than its tokenizer; None takes the tokenizer's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: ModelConfig, vocab_size: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._renderer = PromptRenderer(tokenizer, model)
        self._vocab_size = vocab_size or len(tokenizer)
        self.stop_token_ids = stop_token_ids(tokenizer, model, ())

    def chat(self, messages: tuple[ChatMessage, ...]) -> np.ndarray:
        """[P] int32: the messages through the chat template. Raises ApiError: the template refuses them."""
        try:
            return self._renderer.prompt_ids(PromptRow(messages, "", "", (), "this request"))
        except DataError as e:
            raise ApiError(400, str(e), param="messages", code="invalid_value") from e

    def prompt(self, prompt: str | tuple[int, ...]) -> np.ndarray:
        """[P] int32: a text with the special tokens that the tokenizer puts around it, or the given ids.

        Raises ApiError: an id that the model does not have, or a text without tokens.
        """
        if not isinstance(prompt, str):
            if (worst := max(prompt)) >= self._vocab_size:
                found = f"prompt: token id {worst} is not in the vocabulary of {self._vocab_size} ids"
                raise ApiError(
                    400, f"{found}; send ids of this model's tokenizer", param="prompt", code="invalid_value"
                )
            return np.asarray(prompt, np.int32)
        ids = self._tokenizer.encode(prompt)
        if not ids:
            raise ApiError(400, "prompt: the text has no token; send another", param="prompt", code="invalid_value")
        return np.asarray(ids, np.int32)

    def decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def decode_with_special_tokens(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
