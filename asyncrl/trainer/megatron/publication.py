"""The tensors of a publish: the whole policy under Hugging Face names in the replicas' dtype.

Every rank learns once which blocks of which tensors the others hold. Of each block the first rank that holds it is the
owner. The tensors are then produced bucket by bucket: each owner packs its blocks of a bucket into one buffer and sends
that to all ranks. So pipeline, tensor and expert parallelism are one case. A rank needs two buckets of extra memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from asyncrl.trainer.megatron.names import Block, LocalTensor, order
from asyncrl.types import TensorSpec

BUCKET_BYTES = 1 << 27
"""Tensors are produced together up to this size; a larger one is produced alone."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A block on its owner. `shape`: of the block."""

    owner: int
    parameter: str
    block: Block
    shape: tuple[int, ...]


class BlockPublication:
    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter, LocalTensor]], dtype_name: str) -> None:
        """Collective. `parameters`: (name, parameter, contents) of this rank. `dtype_name`: the replicas'."""
        self._parameters = {name: parameter for name, parameter, _ in parameters}
        self._dtype_name = dtype_name
        self._dtype: torch.dtype = getattr(torch, dtype_name)
        own = [
            _Held(dist.get_rank(), name, block, tuple(parameter.narrow(block.dim, block.local, block.length).shape))
            for name, parameter, contents in parameters
            for block in contents.blocks
        ]
        everyone: list[list[_Held]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, own)
        self._plan: dict[str, dict[int, _Held]] = {}
        for held in (held for held_by_one in everyone for held in held_by_one):
            self._plan.setdefault(held.block.name, {}).setdefault(held.block.start, held)
        self._plan = {name: self._plan[name] for name in sorted(self._plan, key=order)}

    def specs(self) -> tuple[TensorSpec, ...]:
        shapes = {name: self._shape(name) for name in self._plan}
        itemsize = self._dtype.itemsize
        return tuple(
            TensorSpec(name, tuple(shape), self._dtype_name, shape.numel() * itemsize) for name, shape in shapes.items()
        )

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Collective: every rank must exhaust the iterator. All ranks get whole tensors."""
        device = next(iter(self._parameters.values())).device
        for names in self._buckets():
            whole = {name: torch.empty(self._shape(name), dtype=self._dtype, device=device) for name in names}
            held = [held for name in names for held in self._plan[name].values()]
            for owner in sorted({h.owner for h in held}):
                self._move(owner, [h for h in held if h.owner == owner], whole)
            yield from whole.items()

    def _move(self, owner: int, held: Sequence[_Held], whole: dict[str, torch.Tensor]) -> None:
        """Copies the blocks of one owner into the whole tensors of every rank."""
        mine = owner == dist.get_rank()
        sizes = [torch.Size(h.shape).numel() for h in held]
        buffer = torch.empty(sum(sizes), dtype=self._dtype, device=next(iter(whole.values())).device)
        parts = list(zip(held, buffer.split(sizes), strict=True))
        if mine:
            for h, part in parts:
                block = h.block
                part.copy_(self._parameters[h.parameter].narrow(block.dim, block.local, block.length).flatten())
        if dist.get_world_size() > 1:
            dist.broadcast(buffer, src=owner)
        for h, part in parts:
            whole[h.block.name].narrow(h.block.dim, h.block.start, h.block.length).copy_(part.view(h.shape))

    def _shape(self, name: str) -> torch.Size:
        """Of the whole tensor."""
        found = list(self._plan[name].values())
        shape = list(found[0].shape)
        shape[found[0].block.dim] = max(h.block.start + h.block.length for h in found)
        return torch.Size(shape)

    def _buckets(self) -> Iterator[list[str]]:
        bucket, size = [], 0
        for spec in self.specs():
            if bucket and size + spec.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(spec.name)
            size += spec.nbytes
        yield bucket
