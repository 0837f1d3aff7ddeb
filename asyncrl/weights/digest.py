"""A position-sensitive 64-bit digest of tensor bytes, fast enough to run on every publish.

Bytes are read as little-endian 64-bit words in rows of `_ROW_WORDS`. Every word is folded, `w ^ (w >>> 29)`, multiplied
by the odd weight of its column, and the row is summed. Without the fold, words that differ only in high bits (signs,
exponents) could change places unseen: the difference times the difference of two weights would vanish modulo 2**64. The
shift is odd so that the sign bits of neighbouring elements do not cancel. Each row's sum passes a nonlinear mixer
together with its row number, and the mixed rows are added. All of it is wrapping int64 arithmetic: exact, independent
of the order of summation, and so the same on CPU and GPU.

It finds errors of transport (flipped bits, exchanged words, rows or slices, wrong offsets, missing parts, stale
data); it is no defence against somebody who builds collisions on purpose. Source: multilinear hashing (Lemire and
Kaser, arXiv:1202.4961) inside a row; the finaliser of splitmix64 (Steele, Lea, Flood 2014) over rows and slices.
"""

from __future__ import annotations

from functools import lru_cache

import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_FOLD = 29
_ROW_WORDS = 4096
_CHUNK_ROWS = 64
"""Rows per pass: 2 MiB, so that the scratch of a large slice stays in the last-level cache."""


def make_scratch(device: torch.device | str = "cpu") -> torch.Tensor:
    """Working memory of `slice_digest`, [rows, words] int64, 2 MiB: kept by callers that digest many slices,
    because fresh pages cost more than the arithmetic. Not to be shared between threads."""
    return torch.empty(_CHUNK_ROWS, _ROW_WORDS, dtype=torch.int64, device=device)


def slice_digest(data: torch.Tensor, tensor_offset: int, scratch: torch.Tensor | None = None) -> int:
    """The digest of one slice of a tensor, in `[0, 2**64)`.

    The digest of a tensor is the sum of those of its slices modulo 2**64 (`combine`). It depends on how the tensor is
    cut: compare only digests made over the same manifest.

    Args:
        data: [n] uint8, contiguous, on any device.
        tensor_offset: where the slice begins in its tensor, in bytes.
        scratch: from `make_scratch` on the device of `data`; None allocates it.
    """
    size = data.numel()
    if size == 0:
        return 0
    if data.storage_offset() % 8 or data.data_ptr() % 8:
        data = data.clone()
    scratch = make_scratch(data.device) if scratch is None else scratch
    body_bytes = size - size % (8 * _ROW_WORDS)
    body = data[:body_bytes].view(torch.int64).view(-1, _ROW_WORDS)
    row_sums = [_row_sums(chunk, scratch) for chunk in body.split(_CHUNK_ROWS)] if body_bytes else []
    if body_bytes < size:
        tail = torch.nn.functional.pad(data[body_bytes:], (0, -size % 8))
        row_sums.append(_row_sums(tail.view(torch.int64).view(1, -1), scratch))
    rows = torch.cat(row_sums)
    return _mix(int(_mix_rows(rows).sum().item()) + _mix(tensor_offset * _GOLDEN + size))


def combine(digest: int, slice_value: int) -> int:
    """The tensor digest `digest` with one more slice added."""
    return (digest + slice_value) & _MASK


def _row_sums(words: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """[rows, columns] int64 -> [rows] int64.

    Folded with xor, not with addition: torch's integer addition runs at a third of its speed.
    """
    rows, columns = words.shape
    folded = scratch[:rows, :columns]
    torch.bitwise_right_shift(words, _FOLD, out=folded)
    folded &= (1 << (64 - _FOLD)) - 1  # the shift copies the sign
    folded ^= words
    folded *= _column_weights(words.device)[:columns]
    return folded.sum(1)


def _mix_rows(rows: torch.Tensor) -> torch.Tensor:
    """[rows] int64 -> [rows] int64, nonlinear in the sum and in the row number."""
    mixed = (torch.arange(1, rows.numel() + 1, device=rows.device) * _signed(_GOLDEN)).add_(rows)
    for factor in (_MIX_1, _MIX_2):
        mixed ^= mixed >> 30
        mixed *= _signed(factor)
    return mixed.bitwise_xor_(mixed >> 31)


@lru_cache(maxsize=16)
def _column_weights(device: torch.device) -> torch.Tensor:
    """[_ROW_WORDS] int64: the numbers of splitmix64 seeded with 0, made odd."""
    return torch.tensor([_signed(_mix((c + 1) * _GOLDEN) | 1) for c in range(_ROW_WORDS)], device=device)


def _mix(value: int) -> int:
    """The finaliser of splitmix64."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    """The int64 that has the bits of a 64-bit word."""
    return value - (1 << 64) if value >> 63 else value
