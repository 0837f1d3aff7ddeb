"""The lossless difference of two tensors, as bytes. Pure numpy.

Elements are compared as unsigned integers, so NaN, -0.0 and denormals are ordinary bit patterns. A tensor is cut into
blocks of `_BLOCK` elements; each takes one of these forms:

    same     nothing has changed: only the header
    sparse   the gaps between changed elements, and their changes
    planes   the changes of all elements: their lowest bytes, then the next bytes, and so on
    raw      the new elements

A change is (new - old) modulo 2**bits, zigzag-coded: a float that moved by few units in its last place gives a small
number. Gaps and changes below 255 take one byte; 255 refers to a second stream of full-width numbers. Every stream but
raw is deflated (zlib, level 1), which adds an Adler-32 checksum. The numbers behind these choices are in
docs/adr/0034-delta-publishes.md.

Layout of a block, little-endian: form uint8, number of streams uint8, 2 bytes of zero, count of changed elements
uint32, the length of each stream uint32; then the streams.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

_BLOCK = 1 << 20
_SAME, _SPARSE, _PLANES, _RAW = range(4)
_HEADER = struct.Struct("<BBxxI")
_LENGTH = np.dtype("<u4")
_GAP = np.dtype("<u4")
_LEVEL = 1
_ESCAPE = 255
_SPARSE_BELOW = 3
"""Sparse form if fewer than 1/`_SPARSE_BELOW` of the elements changed."""

Elements = np.ndarray
"""[n] unsigned integers, little-endian."""


def elements(data: np.ndarray, width: int) -> Elements:
    """[n * width] uint8, contiguous -> [n] unsigned integers of `width` bytes; a view."""
    return data.view(np.dtype(f"<u{width}"))


def encode(old: Elements, new: Elements) -> np.ndarray:
    """[m] uint8 from which `apply` turns `old` into `new`, both [n] of one dtype; empty if equal. m <= new.nbytes + 8 *
    blocks."""
    assert old.dtype == new.dtype, "they are of one dtype"
    assert old.shape == new.shape, "they are of one length"
    blocks, changed = [], False
    for start in range(0, new.size, _BLOCK):
        block = _encode_block(old[start : start + _BLOCK], new[start : start + _BLOCK])
        changed = changed or block[0] != _SAME
        blocks.append(block)
    return np.frombuffer(b"".join(blocks), np.uint8) if changed else np.empty(0, np.uint8)


def apply(base: Elements, data: np.ndarray) -> None:
    """Applies `data`, [m] uint8 from `encode`, to `base`, [n], in place. Raises ValueError, leaving `base` undefined:
    `data` is damaged or of another size."""
    if not data.size:
        return
    rest = np.ascontiguousarray(data).data
    for start in range(0, base.size, _BLOCK):
        rest = _apply_block(base[start : start + _BLOCK], rest)
    if rest:
        raise ValueError(f"{len(rest)} bytes follow the last block")


def _encode_block(old: Elements, new: Elements) -> bytes:
    changed = np.flatnonzero(old != new)
    if not changed.size:
        return _HEADER.pack(_SAME, 0, 0)
    if _SPARSE_BELOW * changed.size < new.size:
        gaps = np.diff(changed, prepend=-1) - 1
        moved = _zigzag(new[changed] - old[changed])
        form, streams = _SPARSE, [*_escaped(gaps.astype(_GAP)), *_escaped(moved)]
    else:
        form, streams = _PLANES, list(_planes(_zigzag(new - old)).T)
    # Deflate may not pay (random changes): raw is the upper bound.
    packed = [zlib.compress(np.ascontiguousarray(stream).data, _LEVEL) for stream in streams]
    if sum(map(len, packed)) + _LENGTH.itemsize * len(packed) >= new.nbytes:
        return _HEADER.pack(_RAW, 0, changed.size) + new.tobytes()
    lengths = np.array([len(stream) for stream in packed], _LENGTH)
    return b"".join([_HEADER.pack(form, len(packed), changed.size), lengths.tobytes(), *packed])


def _apply_block(base: Elements, data: memoryview) -> memoryview:
    """Applies one block; returns the bytes after it. Raises ValueError."""
    form, num_streams, count = _HEADER.unpack(_taken(data, _HEADER.size))
    data = data[_HEADER.size :]
    if form == _SAME:
        return data
    if form == _RAW:
        base[:] = np.frombuffer(_taken(data, base.nbytes), base.dtype)
        return data[base.nbytes :]
    width = base.dtype.itemsize
    # Validate before use: the data came over a network.
    if (form, num_streams) not in ((_SPARSE, 4), (_PLANES, width)) or not 0 < count <= base.size:
        raise ValueError(f"form {form} with {num_streams} streams and {count} changes of {base.size} elements")
    lengths = np.frombuffer(_taken(data, _LENGTH.itemsize * num_streams), _LENGTH).tolist()
    data, streams = data[_LENGTH.itemsize * num_streams :], []
    for length in lengths:
        streams.append(_taken(data, length))
        data = data[length:]
    if form == _PLANES:
        planes = np.stack([_inflated(stream, base.size) for stream in streams], axis=1)
        base += _unzigzag(elements(planes.reshape(-1), width))
        return data
    gaps = _unescaped(streams[0], streams[1], count, _GAP)
    moved = _unescaped(streams[2], streams[3], count, base.dtype)
    changed = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if changed[-1] >= base.size:
        raise ValueError(f"a change of element {changed[-1]} of {base.size}")
    base[changed] += _unzigzag(moved)
    return data


def _taken(data: memoryview, nbytes: int) -> memoryview:
    if len(data) < nbytes:
        raise ValueError(f"it ends {nbytes - len(data)} bytes too early")
    return data[:nbytes]


def _zigzag(change: Elements) -> Elements:
    """0, -1, 1, -2, ... modulo 2**bits -> 0, 1, 2, 3, ..."""
    signed = change.view(change.dtype.str.replace("u", "i"))
    return ((signed << 1) ^ (signed >> (8 * change.dtype.itemsize - 1))).view(change.dtype)


def _unzigzag(values: Elements) -> Elements:
    return (values >> 1) ^ (0 - (values & 1))


def _planes(values: Elements) -> np.ndarray:
    """[n, width] uint8."""
    return values.view(np.uint8).reshape(-1, values.dtype.itemsize)


def _escaped(values: Elements) -> tuple[np.ndarray, Elements]:
    """(values capped at 255, [n] uint8; the values >= 255 at full width)."""
    return np.minimum(values, _ESCAPE).astype(np.uint8), values[values >= _ESCAPE]


def _unescaped(small: memoryview, large: memoryview, count: int, dtype: np.dtype) -> Elements:
    """[count] of `dtype`. Raises ValueError."""
    values = _inflated(small, count).astype(dtype)
    escaped = values == _ESCAPE
    values[escaped] = _inflated(large, int(escaped.sum()) * dtype.itemsize).view(dtype)
    return values


def _inflated(data: memoryview, nbytes: int) -> np.ndarray:
    """[nbytes] uint8. Raises ValueError: damaged, or of another size."""
    inflater = zlib.decompressobj()
    try:
        found = inflater.decompress(data, nbytes + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(found) != nbytes or not inflater.eof or inflater.unused_data:
        raise ValueError(f"a stream of {len(found)} bytes or more, not {nbytes}")
    return np.frombuffer(found, np.uint8)
