"""Context parallelism: several ranks share the tokens of each packed row, so that long rows fit in memory.

Rank r of R holds the r-th of R equal runs of the row's tokens. Every layer except attention computes its own tokens.
Around attention the ranks exchange tokens for heads: each has all tokens of a share of the heads inside, and its own
tokens again afterwards. Attention itself runs as on one rank, with any layout of the row, shared prompts included, and
the same work on all ranks. A prediction belongs to the rank that holds its predictor. The values of all ranks are
combined, so that each rank computes the loss of the whole row and differentiates its own part.
Source: DeepSpeed Ulysses (arXiv:2309.14509).
Legend: N tokens of the row, n = ceil(N / R) tokens of a rank, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.trainer.step.batch import PackedTokens


@dataclass(frozen=True, slots=True, eq=False)
class HeadExchange:
    """The exchange of tokens for heads around attention. `num_tokens`: N; the last runs are padded."""

    group: dist.ProcessGroup
    num_tokens: int

    def to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[N, H / R, D] and twice [N, K / R, D] (at least one key head): all tokens of this rank's heads. Query heads
        keep their key heads. Collective.

        Args:
            query: [n, H, D] of this rank's tokens; key, value: [n, K, D]. R divides H; R divides K or K divides R.
        """
        ranks = self.group.size()
        copies = max(1, ranks // key.shape[1])
        if copies > 1:
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        shares = [x.unflatten(1, (ranks, -1)) for x in (query, key, value)]
        sent = torch.cat([share.flatten(2) for share in shares], -1).transpose(0, 1)
        found = _Exchange.apply(sent, self.group).flatten(0, 1)[: self.num_tokens]  # pyright: ignore[reportGeneralTypeIssues]
        sizes = [share.shape[2:] for share in shares]
        parts = found.split([heads * size for heads, size in sizes], -1)
        q, k, v = (part.unflatten(1, tuple(size)) for part, size in zip(parts, sizes, strict=True))
        return q, k, v

    def to_tokens(self, out: torch.Tensor) -> torch.Tensor:
        """[n, H, D] of this rank's tokens, from [N, H / R, D] of its heads. Collective."""
        ranks, (heads, size) = self.group.size(), out.shape[1:]
        rows = out.flatten(1)
        filled = torch.cat([rows, rows.new_zeros(-len(rows) % ranks, rows.shape[1])])
        found = _Exchange.apply(filled.unflatten(0, (ranks, -1)), self.group)  # pyright: ignore[reportGeneralTypeIssues]
        return found.transpose(0, 1).unflatten(2, (heads, size)).flatten(1, 2)


@dataclass(frozen=True, slots=True, eq=False)
class RowPart:
    """The part of a packed row that a rank computes.

    Attributes:
        tokens: the rank's own, with the layout of the whole row; its predictions are the ones whose predictors it
            holds.
        num_real: how many of its tokens belong to the row. The others are padding that nothing reads.
        own: [m] int64, indices of its own predictions in the row; None: all of them.
        num_predictions: of the row.
        exchange: for attention; None where the rank has the whole row.
    """

    tokens: PackedTokens
    num_real: int
    num_predictions: int
    own: torch.Tensor | None = None
    exchange: HeadExchange | None = None

    def of_row(self, values: torch.Tensor) -> torch.Tensor:
        """[predictions of the row, ...] from [m, ...] of this rank's predictions; the same on every rank that shares
        the row. Collective."""
        if self.own is None or self.exchange is None:
            return values
        whole = values.new_zeros(self.num_predictions, *values.shape[1:]).index_copy(0, self.own, values)
        return self.summed(whole)

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of `values` over the ranks that share the row; each rank differentiates its own summand. Collective."""
        if self.exchange is None:
            return values
        return _Sum.apply(values, self.exchange.group)  # pyright: ignore[reportReturnType]


class ContextRanks:
    """The ranks that share the tokens of a row, including this rank."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """`group`: in the order of the tokens; None: this rank has whole rows."""
        self._group = group if group is not None and group.size() > 1 else None

    def part_of(self, tokens: PackedTokens) -> RowPart:
        """This rank's part of the row. Local; the same `tokens` on all ranks of the group."""
        num_tokens, group = tokens.input_ids.shape[1], self._group
        if group is None:
            return RowPart(tokens, num_tokens, len(tokens.targets))
        # This rank's run of tokens, and the predictions whose predictors lie in it.
        size = -(-num_tokens // group.size())
        start = group.rank() * size
        own = ((tokens.predictors >= start) & (tokens.predictors < start + size)).nonzero()[:, 0]

        def run(row: torch.Tensor, filling: int) -> torch.Tensor:
            """This rank's entries of [N, ...], padded with `filling`."""
            held = row[start : start + size]
            return torch.cat([held, held.new_full((size - len(held), *row.shape[1:]), filling)])

        part = replace(
            tokens,
            input_ids=run(tokens.input_ids[0], 0)[None],
            position_ids=run(tokens.position_ids[0], 0)[None],
            predictors=tokens.predictors[own] - start,
            targets=tokens.targets[own],
            others=None if tokens.others is None else tokens.others[own],
            experts=None if tokens.experts is None else run(tokens.experts, -1),
            kept=None if tokens.kept is None else tokens.kept[own],
        )
        num_real = min(max(num_tokens - start, 0), size)
        return RowPart(part, num_real, len(tokens.targets), own, HeadExchange(group, num_tokens))


class _Exchange(torch.autograd.Function):
    """[R, ...] -> [R, ...]: rank i's entry j becomes rank j's entry i. The gradient takes the same exchange."""

    @staticmethod
    def forward(ctx: Any, sent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchanged(sent, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchanged(grads[0], ctx.group), None


def _exchanged(sent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    sent = sent.contiguous()
    found = torch.empty_like(sent)
    dist.all_to_all_single(found, sent, group=group)
    return found


class _Sum(torch.autograd.Function):
    """Sum over ranks. All ranks compute the same from it, so each passes the gradient to its own summand unchanged."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        whole = values.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None
