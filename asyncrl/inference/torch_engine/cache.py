"""The state of all slots: keys and values with the attention over them, and the states of recurrent layers.

Recurrent layers keep theirs in transformers' own cache layers, whose tensors are views of the slots during a pass.

Shape letters: N rows that decode, S query tokens, H query heads, K key-value heads, D head size, L max_model_len.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache

from asyncrl.inference.torch_engine.slots import Moves

ATTENTION_NAME = "asyncrl_slot"


def slot_attention(  # noqa: PLR0913 the signature is that of transformers' interface
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers; returns [rows, S, H, D] and no attention weights.

    A single query token is laid out as [rows, K, H/K, D]: query heads that share keys become a sequence, so that no key
    is repeated in memory.

    Args:
        query: [rows, H, S, D]. key, value: [rows, K, kv, D]. attention_mask: additive, [rows or 1, 1, S, kv], causal.
        sliding_window: a token sees itself and the `sliding_window - 1` before it.
        softcap: of the scores. s_aux: [H], a logit of each head that takes weight and gives no value.
    """
    rows, heads, length, head_size = query.shape
    scale = head_size**-0.5 if scaling is None else scaling
    if sliding_window is not None and sliding_window < key.shape[2]:
        newest = (attention_mask == 0).sum(-1, keepdim=True) - 1
        outside = torch.arange(key.shape[2], device=key.device) <= newest - sliding_window
        attention_mask = attention_mask.masked_fill(outside, float("-inf"))
    if softcap is not None or s_aux is not None:
        shared = heads // key.shape[1]
        scores = query @ key.repeat_interleave(shared, 1).transpose(2, 3) * scale
        scores = scores if softcap is None else softcap * (scores / softcap).tanh()
        scores = scores + attention_mask
        if s_aux is not None:
            scores = torch.cat([scores, s_aux[:, None, None].expand(rows, heads, length, 1)], -1)
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)[..., : key.shape[2]]
        return (weights @ value.repeat_interleave(shared, 1)).transpose(1, 2), None
    attend = torch.nn.functional.scaled_dot_product_attention
    if length == 1:
        # No causal mask is needed within the "sequence": all its heads are at the same position.
        query = query.reshape(rows, key.shape[1], -1, head_size)
        out = attend(query, key, value, attn_mask=attention_mask, scale=scale)
        return out.reshape(rows, 1, heads, -1), None
    out = attend(query, key, value, attn_mask=attention_mask, scale=scale, enable_gqa=key.shape[1] != heads)
    return out.transpose(1, 2), None


def recurrent_states(cache: DynamicCache) -> Iterator[tuple[dict[int, Any], int]]:
    """(states, index) of each state that a recurrent layer of `cache` has had so far, in a fixed order."""
    for layer in cache.layers:
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name, {})
            yield from ((states, index) for index, state in states.items() if state is not None)


class SlotCache(DynamicCache):
    """Keys and values of the running requests, dense: row r of layer l is `_keys[l][r, :, :length]`; and the states of
    recurrent layers, `_states[i][r]`.

    Passed to transformers as its cache: `update` stores one token per row and returns views for the attention. A
    layer's memory is allocated at its first update, from the shapes that the model produces.
    """

    def __init__(self, config: Any, num_slots: int, max_model_len: int) -> None:
        """`config`: of the Hugging Face model."""
        super().__init__(config=config)
        self._states: list[torch.Tensor] = []
        self.shifts = torch.zeros(num_slots, dtype=torch.int64)
        """Of positions, per row: `ImageInputs.shifts`."""
        self._num_slots = num_slots
        self._max_model_len = max_model_len
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._rows = torch.zeros(0, dtype=torch.int64)
        self._positions = self._rows
        self._kv_len = 0

    def aim(self, rows: torch.Tensor, positions: torch.Tensor, kv_len: int) -> None:
        """Sets the write positions of the next forward pass: `rows` are 0..N-1, `positions` [N] int64 < `kv_len`."""
        self._rows, self._positions, self._kv_len = rows, positions, kv_len
        for (states, index), whole in zip(recurrent_states(self), self._stored(), strict=True):
            states[index] = whole[: len(rows)]

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """key, value: [N, K, 1, D]. Returns views [N, K, kv_len, D]."""
        if layer_idx not in self._keys:
            self._keys[layer_idx] = self._allocate(key)
            self._values[layer_idx] = self._allocate(value)
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[self._rows, :, self._positions] = key[:, :, 0]
        values[self._rows, :, self._positions] = value[:, :, 0]
        n = len(self._rows)
        return keys[:n, :, : self._kv_len], values[:n, :, : self._kv_len]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._kv_len

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Keys and values of every layer, [num_slots, K, L, D], and states, [num_slots, ...]."""
        return [*self._keys.values(), *self._values.values(), *self._states]

    def move(self, moves: Moves) -> None:
        """Moves rows as a `SlotTable` did."""
        if len(moves.source) == 0:
            return
        source, target = torch.from_numpy(moves.source), torch.from_numpy(moves.target)
        for store in (*self.tensors, self.shifts):
            store[target.to(store.device)] = store[source.to(store.device)]

    def clear(self, rows: torch.Tensor) -> None:
        """Rows of requests that nothing was prefilled for."""
        for whole in (*self._stored(), self.shifts):
            whole[rows.to(whole.device)] = 0

    def fill(self, rows: torch.Tensor, prompts: PromptCache, prompt_rows: torch.Tensor) -> None:
        """Copies prompt `prompt_rows[i]` to slot `rows[i]`."""
        self.shifts[rows.cpu()] = prompts.shifts[prompt_rows.cpu()]
        for (states, index), whole in zip(recurrent_states(prompts), self._stored(), strict=True):
            whole[rows] = states[index][prompt_rows]
        for layer_idx, (keys, values) in prompts.attended.items():
            width = keys.shape[2]
            self._keys[layer_idx][rows, :, :width] = keys[prompt_rows]
            self._values[layer_idx][rows, :, :width] = values[prompt_rows]

    def _stored(self) -> list[torch.Tensor]:
        """States of all slots; the first pass, of one row, showed their shapes."""
        if not self._states:
            shown = [states[index] for states, index in recurrent_states(self)]
            self._states = [like.new_zeros(self._num_slots, *like.shape[1:]) for like in shown]
        return self._states

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        shape = (self._num_slots, like.shape[1], self._max_model_len, like.shape[3])
        # Zeros, not empty: masked positions enter a product with weight 0, and 0 * nan is nan.
        return torch.zeros(shape, dtype=like.dtype, device=like.device)


class PromptCache(DynamicCache):
    """Keys and values of prompts during prefill, in chunks at the same positions of every prompt; and states.

    Attributes:
        attended: keys and values by layer.
    """

    def __init__(self, config: Any, num_prompts: int, width: int) -> None:
        super().__init__(config=config)
        self.attended: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.shifts = torch.zeros(num_prompts, dtype=torch.int64)
        self._num_prompts = num_prompts
        self._width = width
        self._start = 0

    def aim(self, start: int) -> None:
        self._start = start

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """key, value: [prompts, K, S, D]. Returns views [prompts, K, start + S, D]."""
        if layer_idx not in self.attended:
            self.attended[layer_idx] = (self._allocate(key), self._allocate(value))
        keys, values = self.attended[layer_idx]
        stop = self._start + key.shape[2]
        keys[:, :, self._start : stop] = key
        values[:, :, self._start : stop] = value
        return keys[:, :, :stop], values[:, :, :stop]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._start

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty((self._num_prompts, like.shape[1], self._width, like.shape[3]))
