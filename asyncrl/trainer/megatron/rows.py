"""Packed rows for Megatron-core's layers: this rank's part of a row, attention over it, and the way from this rank's
predicted tokens to all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from asyncrl.trainer.megatron.context import SplitRow, split_row
from asyncrl.trainer.megatron.names import Coordinates
from asyncrl.trainer.megatron.routing import RowRouting, WatchedRouters
from asyncrl.trainer.packed_attention import packed_attention, split_attention
from asyncrl.trainer.step.batch import PackedTokens


@dataclass
class PackedRow(PackedSeqParams):
    """A packed row as layers read it. `split` is for `PackedAttention` and `RowAngles`; `routing` and `experts`, of the
    tokens that this rank routes, are for `RouterHooks`. Megatron-core's own fields stay empty for
    its own layers, which then take the angles as they are."""

    split: SplitRow | None = None
    routing: RowRouting | None = None
    experts: torch.Tensor | None = None


def packed_row(
    tokens: PackedTokens,
    at: Coordinates,
    context: dist.ProcessGroup,
    *,
    sequence_parallel: bool,
    by_engine: bool = False,
    watched: WatchedRouters | None = None,
) -> tuple[torch.Tensor, torch.Tensor, PackedRow]:
    """This rank's token ids and positions, [1, n], and the row. Padding tokens are predicted by nothing.

    Args:
        at: this rank's.
        context: the context-parallel ranks.
        sequence_parallel: n is a multiple of the tensor-parallel ranks.
        by_engine: layers are TransformerEngine's, which cut rows at their boundaries.
        watched: the routers, if they are hooked.

    Raises:
        ValueError: the recorded experts are of another model.
    """
    multiple = at.num_tensor if sequence_parallel else 1
    split = split_row(tokens.layout, ranks=context.size(), rank=context.rank(), multiple=multiple)
    real = split.tokens >= 0
    ids = tokens.input_ids[:, split.tokens.clamp(min=0)] * real
    row = PackedRow(qkv_format="thd", split=split)
    if by_engine:
        row.cu_seqlens_q = row.cu_seqlens_kv = split.whole.boundaries
        row.max_seqlen_q = row.max_seqlen_kv = split.whole.max_length
    # Under sequence parallelism a rank routes only its slice of the row.
    routed = split.tokens.chunk(multiple)[at.tensor] if sequence_parallel else split.tokens
    if watched is not None and watched.balances:
        row.routing = RowRouting.begin(watched.routers, routed >= 0, tokens.balance)
    if watched is not None and watched.replays and tokens.experts is not None:
        watched.routers.require(tokens.experts)
        found = tokens.experts[routed.clamp(min=0)]
        row.experts = found.masked_fill_((routed < 0)[:, None, None], -1)
    return ids, split.positions[None], row


class RowAngles(nn.Module):
    """Rotary angles of a packed row, once for all layers, where Megatron-core expects its rotary embedding. That would
    read the lengths of a row's sequences from the device for the queries and for the keys of each layer and pass."""

    def __init__(self, frequencies: torch.Tensor) -> None:
        super().__init__()
        self._frequencies = frequencies

    def get_rotary_seq_len(self, *args: Any) -> torch.Tensor:
        """[n]: the positions of this rank's tokens, of which Megatron-core's embedding needs the number."""
        row = args[-1]
        assert isinstance(row, PackedRow), "rows come from `packed_row`"
        assert row.split is not None, "rows come from `packed_row`"
        return row.split.positions

    def forward(self, positions: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """[n, 1, head size]. `kwargs`: how others cut the row."""
        self._frequencies = self._frequencies.to(positions.device)
        angles = torch.outer(positions.to(self._frequencies.dtype), self._frequencies)
        return torch.cat((angles, angles), dim=-1)[:, None]


def on_predictors(
    tokens: PackedTokens, row: PackedRow, group: dist.ProcessGroup, compute: Callable[[PackedTokens], torch.Tensor]
) -> torch.Tensor:
    """[rows, n]: results of `compute` for all predicted tokens, the same on every context-parallel rank of `group`.

    Args:
        compute: returns [rows, own] for the given tokens: this rank's, whose predictors are places in its part of the
            row.
    """
    assert row.split is not None, "rows come from `packed_row`"
    chosen, places = row.split.of_this_rank(tokens.predictors)
    own = compute(replace(tokens, predictors=places, targets=tokens.targets[chosen]))
    if group.size() == 1:
        return own
    whole = own.new_zeros(len(own), len(tokens.targets)).index_copy(1, chosen, own)
    # Every rank has the gradient of the whole; the entries of its own predictions are its share.
    return reduce_from_tensor_model_parallel_region(whole, group=group)


class PackedAttention(nn.Module):
    """`packed_attention` where Megatron-core expects its core attention."""

    def __init__(
        self, config: TransformerConfig, *, pg_collection: Any, softmax_scale: float | None = None, **kwargs: Any
    ) -> None:
        """`kwargs`: for other implementations; causal self-attention needs none of them."""
        super().__init__()
        self._scaling, self._context = softmax_scale, pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: PackedRow,
        **kwargs: Any,
    ) -> torch.Tensor:
        """[n, heads * head size]; query [n, heads, head size], key and value with their own heads. Context-parallel
        ranks gather keys and values, whose gradient is summed over all queries."""
        split = packed_seq_params.split
        assert split is not None, "rows come from `packed_row`"
        if self._context.size() == 1:
            return packed_attention(query, key, value, split.own, scaling=self._scaling).flatten(1)
        key, value = (
            gather_from_sequence_parallel_region(x, group=self._context).index_select(0, split.order)
            for x in (key, value)
        )
        found = split_attention(query, key, value, split.own, split.whole, split.positions, scaling=self._scaling)
        return found.flatten(1)
