"""The digest of tensor bytes finds every kind of fault that a transport can make."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.weights.digest import combine, make_scratch, slice_digest

pytestmark = pytest.mark.unit

ROW_BYTES = 8 * 4096
SCRATCH = make_scratch()


def data_of(raw):
    return torch.tensor(list(raw), dtype=torch.uint8)


def random_bytes(size, seed=0):
    return torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@given(st.binary(min_size=1, max_size=200), st.integers(0, 2**40), st.data())
@settings(max_examples=100, deadline=None)
def test_any_single_changed_byte_is_found(raw, offset, data):
    at = data.draw(st.integers(0, len(raw) - 1))
    changed = bytearray(raw)
    changed[at] ^= data.draw(st.integers(1, 255))
    assert slice_digest(data_of(raw), offset, SCRATCH) != slice_digest(data_of(changed), offset, SCRATCH)


@given(st.binary(max_size=200), st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_equal_bytes_and_only_they_have_equal_digests(first, second):
    assert (slice_digest(data_of(first), 16) == slice_digest(data_of(second), 16)) == (first == second)


@given(st.lists(st.sampled_from([1.0, -1.0, 0.0, -0.0, 2.0, -2.0]), min_size=2, max_size=40), st.data())
@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_exchanged_values_that_differ_in_few_high_bits_are_found(dtype, values, data):
    # the hard case for a multilinear sum: differences that are multiples of a high power of two
    indices = st.integers(0, len(values) - 1)
    i, j = data.draw(indices), data.draw(indices)
    exchanged = list(values)
    exchanged[i], exchanged[j] = values[j], values[i]
    before, after = (torch.tensor(v, dtype=dtype).view(torch.uint8) for v in (values, exchanged))
    assert (slice_digest(before, 0) == slice_digest(after, 0)) == torch.equal(before, after)


@pytest.mark.parametrize("step", [8, 64, 4096, ROW_BYTES, 2 * ROW_BYTES])
def test_exchanged_blocks_are_found(step):
    data = random_bytes(5 * ROW_BYTES + 40)
    exchanged = data.clone()
    exchanged[:step], exchanged[step : 2 * step] = data[step : 2 * step], data[:step]
    assert slice_digest(data, 0) != slice_digest(exchanged, 0)


def test_exchanged_rows_with_the_same_words_in_another_order_are_found():
    row = random_bytes(ROW_BYTES).view(torch.int64)
    first, second = torch.cat([row, row.flip(0)]), torch.cat([row.flip(0), row])
    assert slice_digest(first.view(torch.uint8), 0) != slice_digest(second.view(torch.uint8), 0)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 4096, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 3, 70 * ROW_BYTES + 5])
def test_flips_at_both_ends_are_found_at_every_length(size):
    data = random_bytes(size)
    reference = slice_digest(data, 0)
    for at in {0, size // 2, size - 1}:
        for mask in (1, 128):
            flipped = data.clone()
            flipped[at] ^= mask
            assert slice_digest(flipped, 0) != reference


@pytest.mark.parametrize("size", [8, 4096, ROW_BYTES])
def test_length_and_place_count_even_where_all_bytes_are_zero(size):
    zeros = torch.zeros(size, dtype=torch.uint8)
    digests = {slice_digest(zeros, 0), slice_digest(zeros, 16), slice_digest(zeros[:-1], 0), slice_digest(zeros[:0], 0)}
    assert len(digests) == 4


def test_slices_that_change_places_are_found():
    first, second = random_bytes(256, 1), random_bytes(256, 2)
    right = combine(slice_digest(first, 0), slice_digest(second, 256))
    wrong = combine(slice_digest(second, 0), slice_digest(first, 256))
    assert right != wrong
    assert right == combine(slice_digest(second, 256), slice_digest(first, 0))


@given(st.integers(0, 4 * ROW_BYTES), st.integers(0, 15))
@settings(max_examples=40, deadline=None)
def test_memory_alignment_and_scratch_do_not_matter(size, shift):
    data = random_bytes(size + 16)
    shifted = torch.cat([torch.zeros(shift, dtype=torch.uint8), data])[shift:]
    reference = slice_digest(data[:size].clone(), 32)
    assert slice_digest(shifted[:size], 32, SCRATCH) == reference
    assert 0 <= reference < 2**64


def test_the_digest_is_the_documented_function():
    """Against a plain-integer model: both ends may run different builds of torch."""
    ones, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(v):
        v &= ones
        v = ((v ^ (v >> 30)) * 0xBF58476D1CE4E5B9) & ones
        v = ((v ^ (v >> 27)) * 0x94D049BB133111EB) & ones
        return v ^ (v >> 31)

    def signed(v):
        v &= ones
        return v - 2**64 if v >> 63 else v

    data = random_bytes(2 * ROW_BYTES + 21)
    words = torch.nn.functional.pad(data, (0, 3)).view(torch.int64).tolist()
    total = 0
    for row in range(3):
        row_sum = 0
        for column, word in enumerate(words[row * 4096 : (row + 1) * 4096]):
            row_sum += (word ^ ((word & ones) >> 29)) * (mix((column + 1) * golden) | 1)
        mixed = signed(row_sum + (row + 1) * golden)
        for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
            mixed = signed((mixed ^ (mixed >> 30)) * factor)
        total += mixed ^ (mixed >> 31)
    assert slice_digest(data, 48) == mix(total + mix(48 * golden + data.numel()))
