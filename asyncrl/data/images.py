"""Images of datasets, environments and requests: their bytes, and the tokens that the model's processor makes of
them."""

from __future__ import annotations

import base64
import io
import re
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.model import ModelConfig
from asyncrl.errors import ConfigError, DataError, explain
from asyncrl.types.images import FIRST_ID, IN_TEXT, KEY_TOKENS, ImageStore, image_ids

MAX_PIXELS = 1 << 26
FETCH_S = 30.0
"""Longest wait for an image of the web."""
_DATA = re.compile(r"data:image/[\w.+-]+;base64,")


def image_bytes(source: Any, origin: str) -> bytes:
    """The file of an image: bytes, a path (also next to the dataset), a URL, `data:image/...;base64,...`, an object of
    one of them (`bytes`, `path`, `url`), or an image of PIL. `origin`: of its row; empty: of none. Raises DataError:
    no image."""
    asked = f"an image of the row at {origin}" if origin else "an image"
    do = "give its file's bytes, its path or its URL"
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
        _require_image(source)
    except DataError:
        raise
    except Exception as error:  # Pillow raises many kinds for broken files
        raise DataError(explain(asked, f"{type(error).__name__}: {error}", do)) from error
    return source


def _require_image(data: bytes) -> None:
    """Raises what Pillow does, or ValueError: the bytes are no image, or one of more than `MAX_PIXELS`."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        if (pixels := image.width * image.height) > MAX_PIXELS:
            raise ValueError(f"{pixels / 1e6:.0f} million pixels, {MAX_PIXELS / 1e6:.0f} allowed")
        image.load()


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

    def __init__(self, model: ModelConfig, text_of: Callable[[str], str]) -> None:
        """`model.image_directory` is set. `text_of`: `ChatTemplate.image_text` of the model. Raises ConfigError: the
        model has no processor, or none for images."""
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
        if not hasattr(config, "image_token_id"):
            found = "its config.json names no image_token_id"
            raise ConfigError(explain(f"images for {model.path}", found, "train it on rows of text"))
        tokenizer = self.processor.tokenizer
        self.mark: str = getattr(self.processor, "boi_token", None) or self.processor.image_token
        self.mark_id: int = tokenizer.convert_tokens_to_ids(self.mark)
        self.token_id: int = config.image_token_id
        self._shown = text_of(self.mark)
        self._of = lru_cache(maxsize=4096)(self._made)

    def encoded(self, text: str, encode: Callable[[str], np.ndarray], asked: str) -> np.ndarray:
        """[n] int32: the ids of a text with images as `IN_TEXT` finds them. `encode`: of texts without.

        Raises DataError, of `asked`: the text has other places for images than these.
        """
        keys, ids = IN_TEXT.findall(text), encode(IN_TEXT.sub(lambda _: self._shown, text))
        places = np.flatnonzero(ids == self.mark_id)
        if len(places) != len(keys):
            do = f"take the text {self.mark} out of it, or set model.chat_template to one with images"
            raise DataError(explain(asked, f"{len(places)} places for {len(keys)} images", do))
        head, *rest = np.split(ids, places)
        shown = (part for key, after in zip(keys, rest, strict=True) for part in (self.of(key), after[1:]))
        return np.concatenate([head, *shown])

    def of(self, key: str) -> np.ndarray:
        """[n] int32: the ids of a stored image, image tokens as `image_ids` makes them."""
        return self._of(key)

    def _made(self, key: str) -> np.ndarray:
        try:
            images = self.store.open([key])
            made = self.processor(text=[self.mark], images=images, add_special_tokens=False)["input_ids"][0]
        except Exception as error:  # processors raise many kinds, such as for an image of extreme sides
            found, do = f"{type(error).__name__}: {error}", "take another image"
            raise DataError(explain(f"the image {self.store.directory / key}", found, do)) from error
        ids = np.asarray(made, np.int32)
        at = np.flatnonzero(ids == self.token_id)
        if len(at) < KEY_TOKENS:
            found = f"{len(at)} tokens, and an image needs {KEY_TOKENS}"
            raise DataError(explain(f"the image {self.store.directory / key}", found, "take a larger image"))
        ids[at] = image_ids(key, len(at))
        return ids


def require_text_last(ids: np.ndarray, asked: str) -> np.ndarray:
    """Raises DataError, of `asked`: nothing, or an image at the end; engines compute the last token by itself."""
    if len(ids) == 0:
        raise DataError(explain(asked, "it renders to no token", "check the chat template"))
    if ids[-1] >= FIRST_ID:
        raise DataError(explain(asked, "it ends with an image", "put text behind the image"))
    return ids


Shown = str | tuple[str | bytes, ...]
"""What an environment or a tool shows the policy: text, and images as the bytes of their files."""


def shown(value: Any, text: Callable[[Any], str] = str) -> Shown:
    """`value` for the policy. `text`: of what is no image.

    Images are bytes, pixels (uint8 [height, width, 1, 3 or 4]), an image of PIL, a text `data:image/...;base64,...`,
    and parts of messages in the forms of OpenAI, Anthropic and MCP; also in lists, tuples and mappings.
    """
    parts = list(_parts(value, text))
    if not any(isinstance(part, bytes) for part in parts):
        return text(value)
    return tuple(parts)


def _parts(value: Any, text: Callable[[Any], str]) -> Iterator[str | bytes]:
    if isinstance(value, Mapping) and (url := image_url(value)) is not None:
        value = url
    if is_pixels(value):
        from PIL import Image

        pixels: Any = value
        value = Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels)
    is_image = hasattr(value, "save") and hasattr(value, "convert")
    is_image = is_image or (isinstance(value, str) and _DATA.match(value) is not None)
    if is_image or isinstance(value, bytes):
        try:
            yield image_bytes(value, "")
            return
        except DataError:  # bytes of something else, a text that only begins like an image
            pass
    if isinstance(value, Mapping) and value.get("type") == "text" and isinstance(value.get("text"), str):
        yield value["text"]
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from (f"{name}: ", *_parts(inner, text), "\n")
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _parts(inner, text)
    else:
        yield text(value)


def is_pixels(value: Any) -> bool:
    """True for uint8 [height, width, 1, 3 or 4]."""
    return getattr(value, "dtype", None) == np.uint8 and value.ndim == 3 and value.shape[-1] in (1, 3, 4)


def image_url(part: Mapping[str, Any]) -> str | None:
    """The image in a part of a message, as `data:image/...;base64,...`: in OpenAI's form (`image_url`, `input_image`),
    Anthropic's and MCP's (`image`). None: it has no image, or one that would have to be fetched."""
    found: Any = part.get("image_url") if part.get("type") in ("image_url", "input_image") else None
    found = found.get("url") if isinstance(found, Mapping) else found
    if part.get("type") == "image":
        own: Any = part.get("source") if isinstance(part.get("source"), Mapping) else part
        kind = own.get("media_type") or own.get("mimeType") or own.get("mime_type")
        found = f"data:{kind};base64,{own.get('data')}"
    return found if isinstance(found, str) and _DATA.match(found) else None
