"""Images of datasets: their bytes, and the tokens that the model's processor makes of them."""

from __future__ import annotations

import base64
import io
import re
import urllib.request
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncrl.config.model import ModelConfig
from asyncrl.errors import ConfigError, DataError, explain
from asyncrl.types.images import KEY_TOKENS, ImageStore, image_ids

if TYPE_CHECKING:
    from PIL.Image import Image

FETCH_S = 30.0
"""Longest wait for an image of the web."""
LOOK_AHEAD = ("gemma3", "gemma4", "paligemma", "step3p7", "deepseek_ocr2")
"""How the types of models begin whose attention over an image goes both ways."""
_DATA = re.compile(r"data:image/[\w.+-]+;base64,")


def image_bytes(source: Any, origin: str) -> bytes:
    """The file of an image: bytes, a path (also next to the dataset), a URL, `data:image/...;base64,...`, an object of
    one of them (`bytes`, `path`, `url`), or an image of PIL. Raises DataError, of the row `origin`: no image."""
    asked, do = f"an image of the row at {origin}", "give its file's bytes, its path or its URL"
    if isinstance(source, Mapping):
        source = next((source[name] for name in ("bytes", "path", "url", "image") if source.get(name)), None)
    try:
        if isinstance(source, str):
            source = _named(source, origin)
        elif hasattr(source, "save"):
            file = io.BytesIO()
            source.convert("RGB").save(file, "png")
            source = file.getvalue()
        if not isinstance(source, bytes):
            raise DataError(explain(asked, f"{type(source).__name__} {str(source)[:60]!r}", do))
        opened(source)
    except (OSError, ValueError) as error:
        raise DataError(explain(asked, str(error), do)) from error
    return source


def opened(data: bytes) -> Image:
    """Raises OSError: the bytes are no image."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return image.convert("RGB")


def _named(source: str, origin: str) -> bytes:
    if found := _DATA.match(source):
        return base64.b64decode(source[found.end() :], validate=True)
    if source.startswith(("http://", "https://")):
        with urllib.request.urlopen(source, timeout=FETCH_S) as answer:
            return answer.read()
    beside = Path(origin.rpartition(":")[0]).parent / source
    return (beside if beside.exists() else Path(source).expanduser()).read_bytes()


class ImageTokens:
    """The token ids of images in prompts, by the processor of a model. `mark`: the token that stands for an image in a
    text, and for the tokens of all images."""

    def __init__(self, model: ModelConfig) -> None:
        """`model.image_directory` is set. Raises ConfigError: the model has no processor, or none for images, or layers
        that look ahead within an image."""
        from transformers import AutoConfig, AutoProcessor

        assert model.image_directory is not None
        self.store = ImageStore(model.image_directory)
        hub = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
        try:
            config = AutoConfig.from_pretrained(model.path, **hub)
            self.processor: Any = AutoProcessor.from_pretrained(model.path, **hub)
        except (OSError, ValueError, ImportError) as error:
            do = "name a model that reads images; processors with videos need the package torchvision"
            raise ConfigError(explain(f"images for {model.path}", str(error).split("\n")[0], do)) from error
        if getattr(self.processor, "image_processor", None) is None:
            do = "name a model that reads images, or leave data.image_directory out"
            raise ConfigError(explain(f"images for {model.path}", "its files have no image processor", do))
        if config.model_type.startswith(LOOK_AHEAD) or not hasattr(config, "image_token_id"):
            looks = "its layers look ahead within an image, and rows of the trainer do not"
            found = looks if hasattr(config, "image_token_id") else "its config.json names no image_token_id"
            raise ConfigError(explain(f"images for {model.path}", found, "train it on rows of text"))
        tokenizer = self.processor.tokenizer
        self.mark: str = getattr(self.processor, "boi_token", None) or self.processor.image_token
        self.mark_id: int = tokenizer.convert_tokens_to_ids(self.mark)
        self.token_id: int = tokenizer.convert_tokens_to_ids(self.processor.image_token)
        self._of = lru_cache(maxsize=4096)(self._made)

    def of(self, key: str) -> np.ndarray:
        """[n] int32: the ids of a stored image, image tokens as `image_ids` makes them."""
        return self._of(key)

    def _made(self, key: str) -> np.ndarray:
        images = self.store.open([key])
        made = self.processor(text=[self.mark], images=images, add_special_tokens=False)["input_ids"][0]
        ids = np.asarray(made, np.int32)
        at = np.flatnonzero(ids == self.token_id)
        if len(at) < KEY_TOKENS:
            found = f"{len(at)} tokens, and an image needs {KEY_TOKENS}"
            raise DataError(explain(f"the image {self.store.directory / key}", found, "take a larger image"))
        ids[at] = image_ids(key, len(at))
        return ids


def with_images(ids: np.ndarray, keys: list[str], tokens: ImageTokens) -> np.ndarray:
    """[n] int32: the ids of a text with the tokens of its images, one for each mark, in order."""
    places = np.flatnonzero(ids == tokens.mark_id)
    head, *rest = np.split(ids, places)
    return np.concatenate(
        [head, *(x for key, part in zip(keys, rest, strict=True) for x in (tokens.of(key), part[1:]))]
    )
