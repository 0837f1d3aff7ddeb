"""Images as a Hugging Face model reads them, in training and in the embedded engine. The encoder is frozen: it stays
outside of optimizer, publishes and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import AutoImageProcessor, PreTrainedModel

from asyncrl.config.model import ModelConfig
from asyncrl.types import decoder_of
from asyncrl.types.images import FIRST_ID, ImageStore, images_in

_CACHED_BATCHES = 8


class ImageInputs:
    """What a model needs to read images, beside the layers of text."""

    def __init__(
        self, config: Any, named: ModelConfig, towers: Mapping[str, nn.Module], device: torch.device, dtype: torch.dtype
    ) -> None:
        """
        Args:
            config: of the Hugging Face model.
            named: with `image_directory`.
            towers: the encoder's modules by name; in the model while it reads.
        """
        assert named.image_directory is not None
        self._towers, self._dtype = towers, dtype
        self._store = ImageStore(named.image_directory)
        self._token: int = config.image_token_id
        hub = {"revision": named.revision, "trust_remote_code": named.trust_remote_code}
        self._processor = AutoImageProcessor.from_pretrained(named.path, **hub)
        self._pixels = lru_cache(maxsize=_CACHED_BATCHES)(self._made)
        for tower in towers.values():
            tower.to(device, dtype).eval().requires_grad_(False)
            if isinstance(tower, PreTrainedModel):
                tower.set_attn_implementation("sdpa")

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
