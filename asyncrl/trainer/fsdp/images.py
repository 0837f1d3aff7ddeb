"""Images in training: the frozen encoder of a model, which stays outside of optimizer, publishes and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoImageProcessor, PreTrainedModel

from asyncrl.config.model import ModelConfig
from asyncrl.types import decoder_of
from asyncrl.types.images import FIRST_ID, ImageStore, images_in

_CACHED_BATCHES = 8


class ImageInputs:
    """What a model needs to read images. Each rank has the whole encoder, in the dtype of the passes."""

    def __init__(
        self, towers: Mapping[str, nn.Module], config: Any, named: ModelConfig, mesh: DeviceMesh, dtype: torch.dtype
    ) -> None:
        """Collective: the encoder's weights are the first rank's.

        Args:
            towers: as `drop_towers` removed them.
            config: of the Hugging Face model.
            named: with `image_directory`.
        """
        assert named.image_directory is not None
        self._towers, self._dtype = towers, dtype
        self._store = ImageStore(named.image_directory)
        self._token: int = config.image_token_id
        hub = {"revision": named.revision, "trust_remote_code": named.trust_remote_code}
        self._processor = AutoImageProcessor.from_pretrained(named.path, **hub)
        self._pixels = lru_cache(maxsize=_CACHED_BATCHES)(self._made)
        for tower in towers.values():
            tower.to(mesh.device_type, dtype).eval().requires_grad_(False)
            if isinstance(tower, PreTrainedModel):
                tower.set_attn_implementation("sdpa")
            for tensor in (*tower.parameters(), *tower.buffers()) if dist.get_world_size() > 1 else ():
                dist.broadcast(tensor, src=0)

    def plain(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids that the embedding takes."""
        return torch.where(ids >= FIRST_ID, self._token, ids)

    def read(self, model: PreTrainedModel, ids: torch.Tensor, **how: Any) -> Any:
        """The decoder's output for token ids [rows, tokens] that may have images. `how`: as the decoder takes it."""
        found = images_in(ids.flatten().cpu().numpy())
        if not found:
            return decoder_of(model)(input_ids=self.plain(ids), **how)
        sampled = ids == self._token  # by the policy, where no image is
        plain = self.plain(ids.masked_fill(sampled, 0))
        embedding: Any = model.get_input_embeddings()
        with self._attached(model), _restored(embedding, sampled, self._token):
            takes, whole = signature(type(model.model).forward).parameters, model.model
            kinds = {"mm_token_type_ids": (plain == self._token).int()} if "mm_token_type_ids" in takes else {}
            pixels = {name: t for name, t in self._pixels(tuple(i.key for i in found)).items() if name in takes}
            on = {name: t.to(ids.device, self._dtype if t.is_floating_point() else None) for name, t in pixels.items()}
            return whole(input_ids=plain, **on, **kinds, **how)

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

    def _made(self, keys: Sequence[str]) -> Mapping[str, torch.Tensor]:
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
