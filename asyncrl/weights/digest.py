"""A position-sensitive 64-bit digest of tensor bytes, fast enough to run on every publish.

Two functions, because neither is fast everywhere. Sender and receivers must use the same one; results do not depend on
the machine. Both end in the finaliser of splitmix64 over (hash of the bytes, offset in the tensor, length).

`xxh3`, for host memory: XXH3-64, at memory speed. Blocks are hashed separately and added like slices, so that
`copy_with_digest` can copy each while it is in the CPU's cache.

`words`, for tensors on a GPU: exact integer arithmetic in torch operations. Bytes are read as little-endian 64-bit
words in rows of `_ROW_WORDS`. With column weights c_j (odd): digest = sum over rows i of mix(i, sum_j c_j *
fold(w_ij)), fold(w) = w ^ (w >>> 29). Without the fold, exchanged words that differ only in high bits (signs,
exponents) would go undetected: (w - w') (c - c') vanishes modulo 2**64. The shift is odd so that the sign bits of
neighbouring elements do not cancel. Wrapping int64 arithmetic is exact and independent of the order of summation, hence
the same on CPU and GPU.

The digests detect transport errors (flipped bits, exchanged words, rows or slices, wrong offsets, missing parts, stale
data), not deliberate collisions. Source: XXH3 (Collet, xxHash 0.8); multilinear hashing (Lemire and Kaser,
arXiv:1202.4961) inside a row; the finaliser of splitmix64 (Steele, Lea, Flood 2014) over rows and slices.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import xxhash

from asyncrl.types import DigestKind
from asyncrl.types.splitmix import GOLDEN, MASK, MIX_1, MIX_2, mix

_FOLD = 29
_ROW_WORDS = 4096
_CHUNK_ROWS = 64
"""Rows per pass: 2 MiB, so that the scratch of a large slice stays in the last-level cache."""
_BLOCK_BYTES = 512 << 10
"""Bytes hashed and then copied at a time: source and destination fit together into a core's L2 cache."""


def digest_for(device: torch.device | str) -> DigestKind:
    """The faster function for tensors on `device`."""
    return "xxh3" if torch.device(device).type == "cpu" else "words"


def make_scratch(device: torch.device | str = "cpu") -> torch.Tensor:
    """Working memory of `words`, [rows, words] int64, 2 MiB. Callers reuse it, because fresh pages cost more than the
    arithmetic. Not thread-safe."""
    return torch.empty(_CHUNK_ROWS, _ROW_WORDS, dtype=torch.int64, device=device)


def slice_digest(data: torch.Tensor, tensor_offset: int, kind: DigestKind, scratch: torch.Tensor | None = None) -> int:
    """The digest of one slice of a tensor, in `[0, 2**64)`.

    A tensor's digest is the sum of its slices' digests modulo 2**64 (`combine`). It depends on the cuts: compare only
    digests over the same slices.

    Args:
        data: [n] uint8, contiguous, on any device. `xxh3` copies device data to the host.
        tensor_offset: where the slice begins in its tensor, in bytes.
        scratch: for `words`, from `make_scratch` on the device of `data`; None allocates it.
    """
    size = data.numel()
    if size == 0:
        return 0
    if kind == "xxh3":
        return _xxh3(data.cpu().numpy(), tensor_offset, None)
    return _placed(_words(data, make_scratch(data.device) if scratch is None else scratch), tensor_offset, size)


def copy_with_digest(out: torch.Tensor, data: torch.Tensor, tensor_offset: int) -> int:
    """Copies `data` into `out`, both [n] uint8 in host memory; returns the `xxh3` digest of `data`."""
    return _xxh3(data.numpy(), tensor_offset, out.numpy())


def combine(digest: int, slice_value: int) -> int:
    """The tensor digest `digest` with one more slice added."""
    return (digest + slice_value) & MASK


def _placed(value: int, tensor_offset: int, size: int) -> int:
    """Makes a hash depend on the offset and the length of its bytes."""
    return mix(value + mix(tensor_offset * GOLDEN + size))


def _xxh3(data: np.ndarray, tensor_offset: int, out: np.ndarray | None) -> int:
    """The sum of the blocks' digests; copies each block to `out` while it is in the cache."""
    total = 0
    for start in range(0, data.size, _BLOCK_BYTES):
        block = data[start : start + _BLOCK_BYTES]
        total = combine(total, _placed(xxhash.xxh3_64_intdigest(block.data), tensor_offset + start, block.size))
        if out is not None:
            out[start : start + block.size] = block
    return total


def _words(data: torch.Tensor, scratch: torch.Tensor) -> int:
    """The sum of the mixed rows, as a signed integer; `data` is not empty."""
    size = data.numel()
    # A view as int64 needs 8-byte alignment.
    if data.storage_offset() % 8 or data.data_ptr() % 8:
        data = data.clone()
    body_bytes = size - size % (8 * _ROW_WORDS)
    body = data[:body_bytes].view(torch.int64).view(-1, _ROW_WORDS)
    row_sums = [_row_sums(chunk, scratch) for chunk in body.split(_CHUNK_ROWS)] if body_bytes else []
    if body_bytes < size:
        # The tail is one shorter row, padded with zeros; `_placed` adds the length.
        tail = torch.nn.functional.pad(data[body_bytes:], (0, -size % 8))
        row_sums.append(_row_sums(tail.view(torch.int64).view(1, -1), scratch))
    return int(_mix_rows(torch.cat(row_sums)).sum().item())


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
    mixed = (torch.arange(1, rows.numel() + 1, device=rows.device) * _signed(GOLDEN)).add_(rows)
    for factor in (MIX_1, MIX_2):
        mixed ^= mixed >> 30
        mixed *= _signed(factor)
    return mixed.bitwise_xor_(mixed >> 31)


@lru_cache(maxsize=16)
def _column_weights(device: torch.device) -> torch.Tensor:
    """[_ROW_WORDS] int64: the numbers of splitmix64 seeded with 0, made odd."""
    return torch.tensor([_signed(mix((c + 1) * GOLDEN) | 1) for c in range(_ROW_WORDS)], device=device)


def _signed(value: int) -> int:
    """The int64 that has the bits of a 64-bit word."""
    return value - (1 << 64) if value >> 63 else value
