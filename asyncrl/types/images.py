"""Images of prompts: as token ids that name them, and their bytes by hash.

An image stands in a prompt as the tokens that the model's processor makes of it. Its image tokens are ids beyond every
vocabulary, whose first `KEY_TOKENS` carry the image's key. So requests, turns, trajectories, checkpoints and samples
refer to images without a field of their own; prompts that differ in an image differ in their ids, for prefix caches
and prompts that are computed once; and what does not know of images refuses these ids. The bytes lie in the directory
`model.image_directory`, which all nodes share, each image once.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncrl.types.generation import GenerationRequest

if TYPE_CHECKING:
    from PIL.Image import Image

FIRST_ID = 1 << 30
"""Ids from here on are image tokens: FIRST_ID + kind * 2**28 + 28 bits of the key."""
_BITS, _DIGITS = 28, 7
_BEGIN, _KEY, _REST = range(3)
KEY_TOKENS = 4
"""Image tokens that an image has at least. They carry the 112 bits of its key."""


IN_TEXT = re.compile(f"\ufffc([0-9a-f]{{{KEY_TOKENS * _DIGITS}}})")
"""An image in a text, by its key; as `rows.IMAGE`."""


class ImageRun(NamedTuple):
    """An image in token ids: `at` are the indices of its image tokens, ascending."""

    key: str
    at: np.ndarray


def image_ids(key: str, count: int) -> np.ndarray:
    """[count] int32: the ids of the image tokens of the image `key`. `count` >= KEY_TOKENS."""
    parts = [int(key[i * _DIGITS : (i + 1) * _DIGITS], 16) for i in range(KEY_TOKENS)]
    kinds = np.full(count, _REST, np.int32)
    kinds[:KEY_TOKENS] = [_BEGIN, *[_KEY] * (KEY_TOKENS - 1)]
    bits = np.zeros(count, np.int32)
    bits[:KEY_TOKENS] = parts
    return FIRST_ID + (kinds << _BITS) + bits


def images_in(ids: np.ndarray) -> list[ImageRun]:
    """The images in token ids [n], in order. Raises ValueError: the ids end within the key of one, or begin there."""
    at = np.flatnonzero(ids >= FIRST_ID)
    if not len(at):
        return []
    kinds, bits = (ids[at] - FIRST_ID) >> _BITS, (ids[at] - FIRST_ID) & ((1 << _BITS) - 1)
    runs = np.split(np.arange(len(at)), np.flatnonzero(kinds == _BEGIN))
    if len(runs[0]) or any((kinds[run[1:KEY_TOKENS]] != _KEY).any() or len(run) < KEY_TOKENS for run in runs[1:]):
        raise ValueError("token ids hold a part of an image")
    return [ImageRun("".join(f"{b:07x}" for b in bits[run[:KEY_TOKENS]]), at[run]) for run in runs[1:]]


def image_text(ids: np.ndarray) -> str:
    """What image tokens [n] spell, token by token: a whole image is U+FFFC and its key."""
    kinds, bits = (ids - FIRST_ID) >> _BITS, (ids - FIRST_ID) & ((1 << _BITS) - 1)
    named = zip(kinds.tolist(), bits.tolist(), strict=True)
    return "".join("" if kind == _REST else "\ufffc" * (kind == _BEGIN) + f"{digits:07x}" for kind, digits in named)


def as_model_ids(ids: np.ndarray, image_token: int) -> np.ndarray:
    """[n]: the ids that the model's embedding takes."""
    return np.where(ids >= FIRST_ID, image_token, ids)


def without_images(request: GenerationRequest) -> GenerationRequest:
    """The request with ids of the vocabulary alone, to check it."""
    return replace(request, prompt_ids=as_model_ids(request.prompt_ids, 0))


class ImageStore:
    """The images of a run, one file each, named by key. Files are never changed."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def put(self, data: bytes) -> str:
        """Stores the bytes of an image file; returns its key."""
        key = hashlib.sha256(data).hexdigest()[: KEY_TOKENS * _DIGITS]
        path = self.directory / key
        if not path.exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.directory, delete=False) as file:
                file.write(data)
            os.replace(file.name, path)
        return key

    def open(self, keys: Sequence[str]) -> list[Image]:
        """The images, in RGB. Raises FileNotFoundError: one is not there."""
        return [_opened(self.directory / key) for key in keys]


@lru_cache(maxsize=16)
def _opened(path: Path) -> Image:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except OSError as error:
        do = "share data.image_directory over all nodes, and keep it as long as the run's checkpoints"
        raise FileNotFoundError(f"the image {path}: {error}; {do}") from error
