"""From rows to token ids: the tokenizer, the chat template and the tokens that end a response."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from asyncrl.config.model import ModelConfig
from asyncrl.config.paths import check_path
from asyncrl.data.chat_template import TEXT_ALONE, ChatTemplate
from asyncrl.data.images import ImageTokens, require_text_last
from asyncrl.data.row_table import RenderedPrompts
from asyncrl.data.rows import IMAGE, PromptRow
from asyncrl.data.stop_strings import StopTexts
from asyncrl.data.tool_calls import ToolPrompt, tools_for
from asyncrl.errors import ConfigError, DataError, explain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(model: ModelConfig, section: str = "model") -> PreTrainedTokenizerBase:
    """The model's tokenizer, with the chat template of `model.chat_template`, if set. `section`: of the recipe, for
    messages.

    Raises ConfigError: no tokenizer, no such template file, or no chat template.
    """
    tokenizer = _read(model.path, model.revision, model.trust_remote_code)
    if model.chat_template is not None:
        tokenizer.chat_template = _read_template(model.chat_template)
    if not tokenizer.chat_template:
        do = f"set {section}.chat_template to a Jinja file, or to none: prompts are then the messages' text alone"
        raise ConfigError(explain(f"the chat template of {section}.path={model.path}", "its tokenizer has none", do))
    return tokenizer


def vocabulary(path: str, *, revision: str | None = None, trust_remote_code: bool) -> dict[str, int]:
    """Token -> id of the model at `path`. Raises ConfigError: no tokenizer."""
    return _read(path, revision, trust_remote_code).get_vocab()


def _read(path: str, revision: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    check_path(path)
    try:
        return _tokenizer_class(path).from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        do = "name a directory that holds a tokenizer, or a hub name that this machine can reach or has in its cache"
        raise ConfigError(explain(f"the tokenizer of the model {path}", str(error).split("\n")[0], do)) from error


def _tokenizer_class(path: str) -> Any:
    """AutoTokenizer, or the generic class if the files name it: it does not import torch."""
    import transformers

    try:
        named = json.loads((Path(path) / "tokenizer_config.json").read_text(encoding="utf-8"))["tokenizer_class"]
    except (OSError, ValueError, KeyError):
        named = None
    generic = named in ("PreTrainedTokenizerFast", "TokenizersBackend")
    return transformers.PreTrainedTokenizerFast if generic else transformers.AutoTokenizer


class PromptRenderer:
    """Renders a row's messages to the token ids that the policy continues. `tools`: in every prompt."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model: ModelConfig,
        tools: ToolPrompt | None = None,
        *,
        parser: str = "auto",
        continues: bool = True,
    ) -> None:
        """`parser`: as rollout.tool_use.parser. `continues`: as data.continue_final_message."""
        self.template = ChatTemplate(tokenizer, model, parser)
        self._tokenizer = tokenizer
        self._tools = tools
        self._continues = continues
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)  # fast tokenizers only
        self._normalizer: Any = None if backend is None else backend.normalizer
        added = {} if backend is None else backend.get_added_tokens_decoder()
        self._bounds_bytes = backend is not None and all(len(t.content.encode()) > 1 for t in added.values())
        # Other models make one token of an unknown word.
        splits = type(getattr(backend, "model", None)).__name__ == "BPE"
        self._longest = max(map(len, tokenizer.get_vocab())) if splits else 0
        self._images = None if model.image_directory is None else ImageTokens(model, self.template.image_text)

    def prompt_ids(self, row: PromptRow) -> np.ndarray:
        """[P] int32: the row through the chat template, up to where the policy begins.

        Raises DataError naming the row: the template refuses its messages, leaves one out, or renders nothing.
        """
        return self._ids(row, self.text(row))

    def text(self, row: PromptRow) -> str:
        """The text that `prompt_ids` tokenizes. Raises DataError naming the row, as `prompt_ids`."""
        asked = f"the prompt of {row.origin}"
        tools = self._tools
        if own := row.tools():
            if tools is None and self.template.text != TEXT_ALONE:
                tools = tools_for(own, self.template.parser, self.template.text)
            else:
                self.template.unused.add("tools (the prompts have those of the environment, if any)")
        text = self.template.render(row.conversation(), tools, asked=asked, continues=self._continues)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(explain(asked, f"half a character: {error}", "correct the row")) from error
        return text

    def begins_thinking(self, row: PromptRow) -> bool:
        """Whether the row's prompt ends inside a thought of the policy."""
        last, thinking = row.messages[-1], self.template.thinking
        if self.template.text == TEXT_ALONE:
            return thinking.is_open(last.content)
        return thinking.is_open(last.content) if last.role == "assistant" and self._continues else thinking.begun

    def tokens_over(self, row: PromptRow, text: str, limit: int) -> int | None:
        """The number of tokens of the row's `text` if above `limit`, else None; of a huge text a lower bound.

        Short texts are not tokenized: each token of a fast tokenizer covers at least one byte of normalised text, plus
        one for the prefix of pre-tokenizers. Nor are huge ones, which would take minutes: a token covers at most as
        many characters as the longest.

        Raises DataError naming the row: it renders to no token.
        """
        # Fast path: too few bytes to exceed the limit in tokens.
        holds_images = IMAGE.search(text) is not None
        if text and self._bounds_bytes and len(text) < limit and not holds_images:
            normalised = self._normalizer.normalize_str(text) if self._normalizer is not None else text
            if normalised.strip() and len(normalised.encode()) < limit:
                return None
        if self._longest and len(text) > limit * self._longest and not holds_images:
            normalised = self._normalizer.normalize_str(text) if self._normalizer is not None else text
            if (least := len("".join(normalised.split())) // self._longest) > limit:
                return least
        count = len(self._ids(row, text))
        return count if count > limit else None

    def identity(self) -> bytes:
        """The known settings, other than the text, that determine the token ids."""
        return repr(sorted(self._tokenizer.get_vocab().items())).encode(errors="replace")

    def _ids(self, row: PromptRow, text: str) -> np.ndarray:
        asked = f"the prompt of {row.origin}"
        if IMAGE.search(text) is None:
            return require_text_last(self._encode(text), asked)
        if self._images is None:
            raise DataError(explain(asked, "it has images", "set data.image_directory"))
        return require_text_last(self._images.encoded(text, self._encode, asked), asked)

    def _encode(self, text: str) -> np.ndarray:
        tokenizer: Any = self._tokenizer
        return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)


def render_rows(
    rows: Sequence[PromptRow],
    renderer: PromptRenderer,
    max_prompt_tokens: int,
    on_long_prompt: Literal["error", "drop"],
) -> RenderedPrompts:
    """Every row with its prompt of at most `max_prompt_tokens` tokens.

    Raises DataError: a prompt is longer and `on_long_prompt` is "error", or no row is left.
    """
    kept: list[tuple[PromptRow, np.ndarray]] = []
    for row in rows:
        ids = renderer.prompt_ids(row)
        if len(ids) <= max_prompt_tokens:
            kept.append((row, ids))
        elif on_long_prompt == "error":
            raise too_long(row, len(ids), max_prompt_tokens)
    if not kept:
        raise none_short(len(rows), max_prompt_tokens)
    return RenderedPrompts(tuple(row for row, _ in kept), tuple(ids for _, ids in kept), len(rows) - len(kept))


def too_long(row: PromptRow, tokens: int, limit: int) -> DataError:
    """The error of a prompt of more than `data.max_prompt_tokens`."""
    do = f"set data.max_prompt_tokens to {tokens} or more, or data.on_long_prompt=drop"
    found = f"{tokens} tokens, data.max_prompt_tokens={limit}"
    return DataError(explain(f"the prompt of {row.origin}", found, do))


def none_short(number: int, limit: int) -> DataError:
    """The error of a set all of whose prompts are too long."""
    found = f"every one of {number} prompts has more than data.max_prompt_tokens={limit} tokens"
    return DataError(explain("prompts to ask", found, "raise data.max_prompt_tokens"))


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, model: ModelConfig, stop: Sequence[str]) -> tuple[int, ...]:
    """The ids at which an engine ends a response, ascending: the tokenizer's end of sequence, those of the model's
    generation_config.json and config.json, the end of a turn in the chat template, and the `stop` texts that are one
    token.

    Raises ConfigError: nothing at all would end a response.
    """
    ids = set(_configured_ends(model))
    if isinstance(tokenizer.eos_token_id, int):
        ids.add(tokenizer.eos_token_id)
    for text in (*stop, *ChatTemplate(tokenizer, model).ends):
        encoded = tokenizer.encode(text, add_special_tokens=False)
        if len(encoded) == 1 and text in str(tokenizer.decode(encoded)):  # not the token of unknown texts
            ids.add(encoded[0])
    if not ids and not stop:
        found = "neither its tokenizer, its chat template, its config.json nor its generation_config.json names one"
        raise ConfigError(explain(f"a token that ends a response of {model.path}", found, "set rollout.sampling.stop"))
    return tuple(sorted(ids))


def stop_texts(
    tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], *, of_request: bool = False
) -> StopTexts | None:
    """The `stop` texts that are to be found in the text of a response. A special token is not one of them: it ends a
    response as a token, by `stop_token_ids`; a text that only spells it does not. None: there is nothing to find.
    `of_request`: special tokens too, which the recipe's token ids may lack."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    texts = [text for text in dict.fromkeys(stop) if of_request or text not in special]

    def decode(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return StopTexts(texts, decode) if texts else None


def _configured_ends(model: ModelConfig) -> Iterator[int]:
    for name in ("config.json", "generation_config.json"):
        file = file_of(model, name)
        if file is None:
            continue
        try:
            eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except ValueError as error:
            raise ConfigError(explain(f"the model's file {file}", f"not JSON: {error}", "save it again")) from error
        yield from eos if isinstance(eos, list) else () if eos is None else (int(eos),)


def file_of(model: ModelConfig, name: str) -> Path | None:
    """A file of the model, downloaded if it is a hub's; None: it has none of this name."""
    directory = Path(model.path).expanduser()
    if directory.is_dir():
        file = directory / name
        return file if file.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(model.path, name, revision=model.revision))
    except EntryNotFoundError:
        return None  # generation_config.json is optional


def _read_template(path: str) -> str:
    try:
        return TEXT_ALONE if path == "none" else Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(explain(f"model.chat_template={path}", str(error), "name a readable Jinja file")) from error
