"""The tensors of a publish: the whole policy, with Hugging Face names and the replicas' dtype.

At start every rank learns which blocks the others hold. A block's owner is the first rank that holds it, so a tied
embedding belongs to the first stage. The first rank of each pipeline stage sends the stage's tensors. It assembles them
bucket by bucket: the other owners of the stage pack their blocks of a bucket into one buffer and send the buffer to it.
Tensor and expert parallelism are the same case, and nothing is gathered across stages. Extra memory: two buckets on a
sending rank, one on other owners, none on a rank that owns nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from asyncrl.trainer.megatron.names import Block, LocalTensor, order
from asyncrl.types import SendingRank, TensorSpec
from asyncrl.weights.plan import runs_of

BUCKET_BYTES = 1 << 27
"""Tensors are assembled together up to this size; a larger tensor alone."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A block on its owner. `shape`: of the block."""

    owner: int
    parameter: str
    block: Block
    shape: tuple[int, ...]


class BlockPublication:
    def __init__(
        self, parameters: Sequence[tuple[str, nn.Parameter, LocalTensor]], dtype_name: str, pipeline_parallel: int
    ) -> None:
        """Collective.

        Args:
            parameters: (name, parameter, contents) of this rank.
            dtype_name: of the replicas.
            pipeline_parallel: number of stages; the ranks of a stage are consecutive.
        """
        self._parameters = {name: parameter for name, parameter, _ in parameters}
        self._dtype_name = dtype_name
        self._dtype: torch.dtype = getattr(torch, dtype_name)
        self._rank, self._of_stage = dist.get_rank(), dist.get_world_size() // pipeline_parallel
        own = [
            _Held(self._rank, name, block, tuple(parameter.narrow(block.dim, block.local, block.length).shape))
            for name, parameter, contents in parameters
            for block in contents.blocks
        ]
        # The lowest rank that holds a block becomes its owner; every rank computes the same plan.
        everyone: list[list[_Held]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, own)
        plan: dict[str, dict[int, _Held]] = {}
        for held in (held for held_by_one in everyone for held in held_by_one):
            plan.setdefault(held.block.name, {}).setdefault(held.block.start, held)
        self._plan = {
            name: plan[name] for name in sorted(plan, key=lambda name: (_only(self._stages(plan[name])), order(name)))
        }

    def specs(self) -> tuple[TensorSpec, ...]:
        """Of all stages, in stage order."""
        shapes = {name: self._shape(name) for name in self._plan}
        itemsize = self._dtype.itemsize
        return tuple(
            TensorSpec(name, tuple(shape), self._dtype_name, shape.numel() * itemsize) for name, shape in shapes.items()
        )

    def senders(self) -> tuple[SendingRank, ...]:
        """The first rank of each stage."""
        stages = [_only(self._stages(held)) for held in self._plan.values()]
        return tuple(SendingRank(stage * self._of_stage, stages.index(stage)) for stage in sorted(set(stages)))

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole tensors of this stage on its sending rank; nothing on others. Collective over the owners of the
        stage: each must exhaust the iterator. They are on the trainer's device and share no memory with the weights."""
        stage = self._rank // self._of_stage
        leader = stage * self._of_stage
        # Reused for every transfer: fresh memory would be zeroed by the system each time.
        transfers = torch.empty(0, dtype=self._dtype, device=next(iter(self._parameters.values())).device)
        for names in self._buckets(stage):
            # Leader and owners walk the same buckets in the same order, so each send meets its receive.
            held = [held for name in names for held in self._plan[name].values()]
            by_owner = {owner: [h for h in held if h.owner == owner] for owner in sorted({h.owner for h in held})}
            if self._rank == leader:
                yield from self._gathered(names, by_owner, transfers).items()
            elif self._rank in by_owner:
                blocks = [self._block(h).flatten() for h in by_owner[self._rank]]
                packed = transfers.resize_(sum(block.numel() for block in blocks))
                dist.send(torch.cat(blocks, out=packed), dst=leader)

    def _gathered(
        self, names: Sequence[str], by_owner: dict[int, list[_Held]], transfers: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The tensors of one bucket from the blocks of all owners."""
        device = next(iter(self._parameters.values())).device
        whole = {name: torch.empty(self._shape(name), dtype=self._dtype, device=device) for name in names}
        for owner, held in by_owner.items():
            if owner == self._rank:
                parts = [self._block(h) for h in held]
            else:
                sizes = [torch.Size(h.shape).numel() for h in held]
                buffer = transfers.resize_(sum(sizes))
                dist.recv(buffer, src=owner)
                parts = [part.view(h.shape) for h, part in zip(held, buffer.split(sizes), strict=True)]
            for h, part in zip(held, parts, strict=True):
                whole[h.block.name].narrow(h.block.dim, h.block.start, h.block.length).copy_(part)
        return whole

    def _block(self, held: _Held) -> torch.Tensor:
        """This rank's block in the replicas' dtype; it may share memory with the weights."""
        block = held.block
        return self._parameters[held.parameter].narrow(block.dim, block.local, block.length).to(self._dtype)

    def _stages(self, blocks: dict[int, _Held]) -> set[int]:
        return {held.owner // self._of_stage for held in blocks.values()}

    def _shape(self, name: str) -> torch.Size:
        """Shape of the whole tensor."""
        found = list(self._plan[name].values())
        shape = list(found[0].shape)
        shape[found[0].block.dim] = max(h.block.start + h.block.length for h in found)
        return torch.Size(shape)

    def _buckets(self, stage: int) -> Iterator[list[str]]:
        """Names of the stage's tensors, bucket by bucket."""
        own = (spec for spec in self.specs() if self._stages(self._plan[spec.name]) == {stage})
        for bucket in runs_of(own, lambda spec: spec.nbytes, BUCKET_BYTES):
            yield [spec.name for spec in bucket]


def _only(stages: set[int]) -> int:
    (stage,) = stages  # a tensor never spans stages
    return stage
