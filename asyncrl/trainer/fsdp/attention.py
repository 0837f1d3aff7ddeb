"""Attention implementations for transformers that keep the sequences of a packed row apart: `packed_attention`, and
torch's kernel for sequences of different lengths."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from transformers import AttentionInterface

from asyncrl.trainer.fsdp.context import HeadExchange
from asyncrl.trainer.packed_attention import packed_attention
from asyncrl.trainer.step.batch import PackedLayout

PACKED_SDPA, VARLEN = "packed_sdpa", "varlen"
PACKED_ROWS = "packed_rows"
"""PACKED_SDPA as transformers knows it: where a name has sdpa in it, it asks the model for that, and models with sinks
refuse."""

Attend = Callable[..., torch.Tensor]
"""(query [N, H, D], key and value [N, K, D], layout, dropout=, scaling=, sliding_window=) -> [N, H, D]; see
`packed_attention`."""


def register_packed_attention() -> None:
    """Makes `attn_implementation` "packed_rows" and "varlen" known to transformers. Idempotent."""
    # Compiled layers call it; tracing would recompile for each number of classes.
    AttentionInterface.register(PACKED_ROWS, torch.compiler.disable(RowAttention(PACKED_SDPA, packed_attention)))
    if (kernel := varlen_kernel()) is not None:
        AttentionInterface.register(VARLEN, torch.compiler.disable(RowAttention(VARLEN, VarlenAttention(kernel))))


def varlen_kernel() -> Callable[..., Any] | None:
    """Torch's `varlen_attn`; None if torch has no such kernel with windows."""
    try:
        kernel = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        return None
    return kernel if {"window_size", "scale"} <= inspect.signature(kernel).parameters.keys() else None


def has_flash_attention_4(capability: tuple[int, int] | None) -> bool:
    """Whether FlashAttention 4 is installed, torch can take it for its own kernels, and it has some for the GPU."""
    if capability is None or capability[0] not in (9, 10) or find_spec("flash_attn") is None:
        return False
    return find_spec("flash_attn.cute") is not None and hasattr(torch.nn.attention, "activate_flash_attention_impl")


class RowAttention:
    """Adapts `attend` to transformers' signature, and exchanges tokens for heads where ranks share a row."""

    def __init__(self, name: str, attend: Attend) -> None:
        """`name`: for errors."""
        self._name, self._attend = name, attend

    def __call__(  # noqa: PLR0913 the signature is that of transformers' interface
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_layout: PackedLayout,
        exchange: HeadExchange | None = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        s_aux: torch.Tensor | None = None,
        **features: Any,
    ) -> tuple[torch.Tensor, None]:
        """Causal attention inside each sequence of a packed row.

        Legend: H query heads, K key heads, N packed tokens, D head size.

        Args:
            query: [1, H, N, D]; key, value: [1, K, N, D], H a multiple of K.
            attention_mask: None; the layout determines the mask.
            packed_layout: of the row. With `exchange` it covers all ranks that share the row, and N counts this rank's
                tokens.
            sliding_window: a token sees itself and the `sliding_window - 1` before it.
            s_aux: [H], sinks; see `packed_attention`.

        Returns:
            [1, N, H, D], and None for the weights, which are never formed.

        Raises:
            ValueError: the model uses an attention feature that this implementation lacks.
        """
        unknown = sorted(name for name in ("softcap", "position_bias") if features.get(name) is not None)
        unknown += ["sinks"] * (s_aux is not None and (self._name != PACKED_SDPA or exchange is not None))
        if unknown or attention_mask is not None:
            raise ValueError(f"{self._name} supports neither an attention mask nor {unknown or 'other features'}")
        q_NHD, k_NKD, v_NKD = (x[0].transpose(0, 1) for x in (query, key, value))
        if exchange is not None:
            q_NHD, k_NKD, v_NKD = exchange.to_heads(q_NHD, k_NKD, v_NKD)
        settings: dict[str, Any] = {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
        settings |= {} if s_aux is None else {"sinks": s_aux}
        out_NHD = self._attend(q_NHD, k_NKD, v_NKD, packed_layout, **settings)
        if exchange is not None:
            out_NHD = exchange.to_tokens(out_NHD)
        return out_NHD.unsqueeze(0), None


class VarlenAttention:
    """`packed_attention` by one call of a varlen kernel: nothing is padded."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        """`kernel`: has the signature of `torch.nn.attention.varlen.varlen_attn`, of torch 2.11 or later."""
        self._kernel = kernel
        self._groups_heads = "enable_gqa" in inspect.signature(kernel).parameters  # since torch 2.13

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: PackedLayout,
        *,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        """[N, H, D]; see `packed_attention`. Raises ValueError: the model uses attention dropout in training."""
        if dropout:
            raise ValueError(
                f"trainer.fsdp.attention={VARLEN} has no dropout; set trainer.fsdp.attention={PACKED_SDPA}"
            )
        order, places, ends = layout.order, layout.places, layout.boundaries
        if order is None or places is None or len(order) == len(places):
            order = places = None  # sequences lie one behind the other
        else:  # sequences with a prompt in common get their own copies of its keys
            query, key, value = (x.index_select(0, order) for x in (query, key, value))
            ends = layout.class_boundaries
        grouped = {"enable_gqa": query.shape[1] != key.shape[1]} if self._groups_heads else {}
        if not self._groups_heads:
            copies = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
        out = self._kernel(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            ends,
            ends,
            layout.max_length,
            layout.max_length,
            scale=scaling,
            window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
            **grouped,
        )
        return out if places is None else out.index_select(0, places)
