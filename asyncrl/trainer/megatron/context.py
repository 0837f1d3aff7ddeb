"""Context parallelism: which tokens of a packed row each rank holds. Pure; knows no process groups.

Each sequence is filled up to a multiple of 2R tokens for R ranks and cut into 2R chunks. Rank r has the chunks r and
2R - 1 - r of every sequence, so that causal attention costs all ranks the same; TransformerEngine cuts rows like this.
A token's target travels with its predictor, so a target on another rank is no case of its own.
Legend: N places of the filled row, n = N / R places of a rank, S sequences with the last one that fills up the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrl.trainer.length_classes import length_classes, spared_work
from asyncrl.trainer.step.batch import PackedLayout


@dataclass(frozen=True, slots=True, eq=False)
class SplitRow:
    """A rank's part of a packed row.

    Attributes:
        tokens: [n] int64, which token of the packed row is in each place of this rank; -1: none, it fills up.
        positions: [n] int64, in the sequence.
        whole, own: where the sequences of the filled row lie, and those of this rank's part.
        order: [N] int64, where each place of the filled row is in the parts of all ranks, put one behind the other.
        places: [tokens] int64, the place of each token in the filled row.
        rank: this rank.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    whole: PackedLayout
    own: PackedLayout
    order: torch.Tensor
    places: torch.Tensor
    rank: int

    def of_this_rank(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of `tokens`, [m] int64, that this rank holds, as numbers of entries of `tokens`, and their places in
        this rank's part; [own] int64 each."""
        size = self.tokens.numel()
        at = self.order[self.places[tokens]]
        chosen = (at // size == self.rank).nonzero()[:, 0]
        return chosen, at[chosen] % size


def split_row(layout: PackedLayout, *, ranks: int = 1, rank: int = 0, multiple: int = 1) -> SplitRow:
    """Args:
    multiple: of which each rank's part is, by a last sequence of tokens that nothing predicts.
    """
    starts, unit = layout.boundaries[:-1].long(), 2 * ranks if ranks > 1 else 1
    lengths = layout.boundaries.diff().long()
    filled = (lengths + unit - 1) // unit * unit
    fill = -int(filled.sum()) % (unit * multiple)
    if fill:
        lengths, filled, starts = (
            torch.cat([numbers, numbers.new_tensor([last])])
            for numbers, last in ((lengths, 0), (filled, fill), (starts, 0))
        )
    boundaries = torch.cat([filled.new_zeros(1), filled.cumsum(0)])
    sequences = torch.repeat_interleave(torch.arange(len(filled), device=filled.device), filled)
    positions = torch.arange(len(sequences), device=filled.device) - boundaries[sequences]
    tokens = torch.where(positions < lengths[sequences], starts[sequences] + positions, -1)
    holder = torch.zeros_like(positions)
    if ranks > 1:
        chunk = positions // (filled // unit)[sequences]
        holder = torch.minimum(chunk, unit - 1 - chunk)
    order = torch.empty_like(positions)
    order[holder.argsort(stable=True)] = torch.arange(len(order), device=order.device)
    mine = (holder == rank).nonzero()[:, 0]
    # one choice of classes for both: a query attends to keys of the same sequence
    sizes, device = filled.cpu().numpy(), filled.device
    classes = length_classes(sizes, spared=spared_work(device.type))
    return SplitRow(
        tokens=tokens[mine],
        positions=positions[mine],
        whole=PackedLayout.of(sizes, device, classes),
        own=PackedLayout.of(sizes // ranks, device, classes),
        order=order,
        places=(tokens >= 0).nonzero()[:, 0],
        rank=rank,
    )
