"""Images as a Hugging Face model reads them, in training and in the embedded engine. The encoder is frozen: it stays
outside of optimizer, publishes and checkpoints."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoImageProcessor, AutoProcessor, PreTrainedModel

from asyncrl.config.model import ModelConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.types import decoder_of
from asyncrl.types.images import FIRST_ID, ImageStore, image_ids, images_in

_CACHED_BATCHES = 8
_EXAMPLE_PIXELS = (96, 128, 3)
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Largest difference that is rounding, relative to the largest value: of any token in float32, of the mean token in 16
bits, where a router that is near a tie takes another expert."""


class ImageInputs:
    """What a model needs to read images, beside the layers of text."""

    def __init__(self, model: PreTrainedModel, named: ModelConfig, towers: Mapping[str, nn.Module]) -> None:
        """
        Args:
            model: without its encoder.
            named: with `image_directory`.
            towers: the encoder's modules by name; in the model while it reads.
        """
        assert named.image_directory is not None
        self._named, self._towers = named, towers
        self._store = ImageStore(named.image_directory)
        self._token: int = model.config.image_token_id
        self._hub = {"revision": named.revision, "trust_remote_code": named.trust_remote_code}
        self._processor = AutoImageProcessor.from_pretrained(named.path, **self._hub)
        self._pixels = lru_cache(maxsize=_CACHED_BATCHES)(self._made)
        self._dtype = model.dtype
        for tower in towers.values():
            tower.eval().requires_grad_(False)
        self._attend(model, None)

    def _attend(self, model: PreTrainedModel, attention: str | None) -> None:
        """Sets the attention of the model, if given; towers, whose configs are parts of its config, keep theirs."""
        if attention is not None:
            model.set_attn_implementation(attention)
        for tower in self._towers.values():
            if isinstance(tower, PreTrainedModel):
                tower.set_attn_implementation("sdpa")

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        self._dtype = dtype
        for tower in self._towers.values():
            tower.to(device, dtype)

    @torch.no_grad()
    def prove(
        self,
        model: PreTrainedModel,
        read: Callable[[torch.Tensor], torch.Tensor],
        attention: str,
        afterwards: str | None = None,
    ) -> None:
        """Compares with what the model's own class makes of its processor's output, such as attention that looks ahead
        within an image.

        Args:
            read: token ids [n] with an image -> the decoder's last hidden states [n, hidden size].
            attention: of transformers, for `read`.
            afterwards: the model's attention then; None: `attention`.

        Raises:
            ConfigError: `read` gives something else.
        """
        kept = self._store
        try:
            with tempfile.TemporaryDirectory() as directory:
                self._store = ImageStore(directory)
                self._attend(model, "eager")
                ids, expected = self._example(model)
                self._attend(model, attention)
                gaps = (read(ids) - expected).abs().amax(-1).float()
        finally:
            self._store = kept
            self._attend(model, afterwards or attention)
        most = gaps.max() if model.dtype == torch.float32 else gaps[ids >= FIRST_ID].mean()
        apart, bound = float(most) / float(expected.abs().max()), ROUNDING[model.dtype]
        if not apart <= bound:
            asked = f"read images with a {type(model).__name__}"
            found = f"a text with an image differs by {apart:.2g} of the largest value from the model's own class"
            raise ConfigError(explain(asked, f"{found} ({bound:g} is rounding)", "train it on rows of text"))

    def _example(self, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [n] of a text with an image, and the decoder's last hidden states [n, hidden size] by the model's
        own class."""
        from PIL import Image

        processor = AutoProcessor.from_pretrained(self._named.path, **self._hub)
        noise = np.random.default_rng(0).integers(0, 256, _EXAMPLE_PIXELS, np.uint8)
        Image.fromarray(noise).save(file := io.BytesIO(), "png")
        key = self._store.put(file.getvalue())
        mark = getattr(processor, "boi_token", None) or processor.image_token
        made = processor(text=[f"{mark} what?"], images=self._store.open([key]), return_tensors="pt").to(model.device)
        inputs = {n: t.to(self._dtype) if t.is_floating_point() else t for n, t in made.items()}
        with self._attached(model):
            expected = model.model(**inputs, use_cache=False).last_hidden_state[0]
        ids = made["input_ids"][0]
        at = ids == self._token
        return ids.masked_scatter(at, torch.from_numpy(image_ids(key, int(at.sum()))).to(ids)), expected

    def plain(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids that the embedding takes."""
        return torch.where(ids >= FIRST_ID, self._token, ids)

    def read(self, model: PreTrainedModel, ids: torch.Tensor, *, logits: bool = False, **how: Any) -> Any:
        """The output of the decoder, or with `logits` of the model, for token ids [rows, tokens] that may have images.
        `how`: as the decoder takes it."""
        found = images_in(ids.flatten().cpu().numpy())
        if not found:
            return (model if logits else decoder_of(model))(input_ids=self.plain(ids), **how)
        sampled = ids == self._token  # by the policy, where no image is
        plain = self.plain(ids.masked_fill(sampled, 0))
        takes = signature(type(model.model).forward).parameters
        pixels = self._pixels(tuple(image.key for image in found))
        inputs = {n: t.to(ids.device, self._dtype if t.is_floating_point() else None) for n, t in pixels.items()}
        kinds = (plain == self._token).int()
        if "position_ids" in how and hasattr(model.model, "get_rope_index"):
            how["position_ids"] = self._positions(model, plain, kinds, inputs)
        inputs |= {"mm_token_type_ids": kinds}
        with self._attached(model), _restored(model.get_input_embeddings(), sampled, self._token):
            given = {name: value for name, value in inputs.items() if name in takes}
            return (model if logits else model.model)(input_ids=plain, **given, **how)

    def shifts(self, model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
        """[rows] int64: how far the position of the token after ids [rows, tokens] is from their number; images may
        take fewer positions than tokens."""
        found = images_in(ids.flatten().cpu().numpy())
        if not found or not hasattr(model.model, "get_rope_index"):
            return ids.new_zeros(len(ids))
        plain = self.plain(ids)
        pixels = self._pixels(tuple(image.key for image in found))
        positions = self._positions(model, plain, (plain == self._token).int(), pixels)
        return positions.amax((0, 2)) + 1 - ids.shape[1]

    @staticmethod
    def _positions(model: Any, plain: torch.Tensor, kinds: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        """[axes, rows, tokens] int64."""
        grids = {"image_grid_thw": inputs["image_grid_thw"].to(plain.device)}
        return model.model.get_rope_index(plain, mm_token_type_ids=kinds, **grids)[0]

    @contextmanager
    def _attached(self, model: PreTrainedModel) -> Iterator[None]:
        places = [(model.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2], t) for n, t in self._towers.items()]
        for parent, name, tower in places:
            parent.register_module(name, tower)
        try:
            yield
        finally:
            for parent, name, _ in places:
                parent.register_module(name, None)

    def _made(self, keys: tuple[str, ...]) -> Mapping[str, torch.Tensor]:
        return dict(self._processor(images=self._store.open(keys), return_tensors="pt"))


@contextmanager
def _restored(embedding: nn.Module, sampled: torch.Tensor, token: int) -> Iterator[None]:
    """The embedding gives that of `token` at the `sampled` places, where it is asked for another one."""

    def replace(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.where(sampled[..., None], module.weight[token], output)

    handle = embedding.register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()
