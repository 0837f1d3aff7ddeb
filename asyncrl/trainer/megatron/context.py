"""Context parallelism: which tokens of a packed row each rank holds. Pure; knows no process groups.

Each sequence is padded to a multiple of 2R tokens for R ranks and cut into 2R chunks. Rank r holds chunks r and 2R - 1
- r of every sequence, so causal attention costs all ranks the same; TransformerEngine cuts rows the same way. A token's
target travels with its predictor, so a target on another rank needs no special case.
Legend: N places of the padded row, n = N / R places of a rank, S sequences, including the last one that pads the row.
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
        tokens: [n] int64, index in the packed row of the token in each place of this rank; -1: padding.
        positions: [n] int64, in the sequence.
        whole, own: layouts of the padded row and of this rank's part.
        order: [N] int64, for each place of the padded row its index in the concatenated parts of all ranks.
        places: [tokens] int64, place of each token in the padded row.
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
        """For the entries of `tokens`, [m] int64, that this rank holds: their indices in `tokens`, and their places in
        this rank's part; [own] int64 each."""
        size = self.tokens.numel()
        at = self.order[self.places[tokens]]
        chosen = (at // size == self.rank).nonzero()[:, 0]
        return chosen, at[chosen] % size


def split_row(layout: PackedLayout, *, ranks: int = 1, rank: int = 0, multiple: int = 1) -> SplitRow:
    """Args:
    multiple: divisor of each rank's part, reached by a last sequence of padding tokens that nothing predicts.
    """
    # Pad each sequence to 2R chunks, and the row to `multiple` by one more sequence.
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
    # For each place of the padded row: its sequence, its position and its token.
    sequences = torch.repeat_interleave(torch.arange(len(filled), device=filled.device), filled)
    positions = torch.arange(len(sequences), device=filled.device) - boundaries[sequences]
    tokens = torch.where(positions < lengths[sequences], starts[sequences] + positions, -1)
    # Chunks c and 2R - 1 - c of a sequence go to the same rank.
    holder = torch.zeros_like(positions)
    if ranks > 1:
        chunk = positions // (filled // unit)[sequences]
        holder = torch.minimum(chunk, unit - 1 - chunk)
    order = torch.empty_like(positions)
    order[holder.argsort(stable=True)] = torch.arange(len(order), device=order.device)
    mine = (holder == rank).nonzero()[:, 0]
    # One choice of classes for both layouts: a query attends to keys of the same sequence.
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
