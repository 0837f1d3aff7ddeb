"""The digest of tensor bytes finds every kind of fault that a transport can make."""

import threading
import time

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.weights.digest import combine, copy_with_digest, digest_for, make_scratch, slice_digest

ROW_BYTES = 8 * 4096
BLOCK_BYTES = 512 << 10
SCRATCH = make_scratch()

ONES, GOLDEN = 2**64 - 1, 0x9E3779B97F4A7C15


def mix(v):
    """The finaliser of splitmix64 in plain integers."""
    v &= ONES
    v = ((v ^ (v >> 30)) * 0xBF58476D1CE4E5B9) & ONES
    v = ((v ^ (v >> 27)) * 0x94D049BB133111EB) & ONES
    return v ^ (v >> 31)


both_kinds = pytest.mark.parametrize("kind", ["xxh3", "words"])


def data_of(raw):
    return torch.tensor(list(raw), dtype=torch.uint8)


def random_bytes(size, seed=0):
    return torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@both_kinds
@given(st.binary(min_size=1, max_size=200), st.integers(0, 2**40), st.data())
def test_any_single_changed_byte_is_found(kind, raw, offset, data):
    at = data.draw(st.integers(0, len(raw) - 1))
    changed = bytearray(raw)
    changed[at] ^= data.draw(st.integers(1, 255))
    assert slice_digest(data_of(raw), offset, kind, SCRATCH) != slice_digest(data_of(changed), offset, kind, SCRATCH)


@both_kinds
@given(st.binary(max_size=200), st.binary(max_size=200))
def test_equal_bytes_and_only_they_have_equal_digests(kind, first, second):
    assert (slice_digest(data_of(first), 16, kind) == slice_digest(data_of(second), 16, kind)) == (first == second)


@both_kinds
@given(st.lists(st.sampled_from([1.0, -1.0, 0.0, -0.0, 2.0, -2.0]), min_size=2, max_size=40), st.data())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_exchanged_values_that_differ_in_few_high_bits_are_found(kind, dtype, values, data):
    # the hard case for a multilinear sum: differences that are multiples of a high power of two
    indices = st.integers(0, len(values) - 1)
    i, j = data.draw(indices), data.draw(indices)
    exchanged = list(values)
    exchanged[i], exchanged[j] = values[j], values[i]
    before, after = (torch.tensor(v, dtype=dtype).view(torch.uint8) for v in (values, exchanged))
    assert (slice_digest(before, 0, kind) == slice_digest(after, 0, kind)) == torch.equal(before, after)


@both_kinds
@pytest.mark.parametrize("step", [8, 64, 4096, ROW_BYTES, 2 * ROW_BYTES, BLOCK_BYTES])
def test_exchanged_blocks_are_found(kind, step):
    data = random_bytes(2 * BLOCK_BYTES + 40)
    exchanged = data.clone()
    exchanged[:step], exchanged[step : 2 * step] = data[step : 2 * step], data[:step]
    assert slice_digest(data, 0, kind) != slice_digest(exchanged, 0, kind)


@both_kinds
def test_exchanged_rows_with_the_same_words_in_another_order_are_found(kind):
    row = random_bytes(ROW_BYTES).view(torch.int64)
    first, second = torch.cat([row, row.flip(0)]), torch.cat([row.flip(0), row])
    assert slice_digest(first.view(torch.uint8), 0, kind) != slice_digest(second.view(torch.uint8), 0, kind)


@both_kinds
@pytest.mark.parametrize(
    "size", [1, 7, 8, 9, 4096, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 3, 70 * ROW_BYTES + 5, BLOCK_BYTES]
)
def test_flips_at_both_ends_are_found_at_every_length(kind, size):
    data = random_bytes(size)
    reference = slice_digest(data, 0, kind)
    for at in {0, size // 2, size - 1}:
        for mask in (1, 128):
            flipped = data.clone()
            flipped[at] ^= mask
            assert slice_digest(flipped, 0, kind) != reference


@both_kinds
@pytest.mark.parametrize("size", [8, 4096, ROW_BYTES])
def test_length_and_place_count_even_where_all_bytes_are_zero(kind, size):
    zeros = torch.zeros(size, dtype=torch.uint8)
    digests = {
        slice_digest(zeros, 0, kind),
        slice_digest(zeros, 16, kind),
        slice_digest(zeros[:-1], 0, kind),
        slice_digest(zeros[:0], 0, kind),
    }
    assert len(digests) == 4


@both_kinds
def test_slices_that_change_places_are_found(kind):
    first, second = random_bytes(256, 1), random_bytes(256, 2)
    right = combine(slice_digest(first, 0, kind), slice_digest(second, 256, kind))
    wrong = combine(slice_digest(second, 0, kind), slice_digest(first, 256, kind))
    assert right != wrong
    assert right == combine(slice_digest(second, 256, kind), slice_digest(first, 0, kind))


@both_kinds
@given(st.integers(0, 4 * ROW_BYTES), st.integers(0, 15))
@settings(max_examples=40, deadline=None)
def test_memory_alignment_and_scratch_do_not_matter(kind, size, shift):
    data = random_bytes(size + 16)
    shifted = torch.cat([torch.zeros(shift, dtype=torch.uint8), data])[shift:]
    reference = slice_digest(data[:size].clone(), 32, kind)
    assert slice_digest(shifted[:size], 32, kind, SCRATCH) == reference
    assert 0 <= reference < 2**64


def test_words_is_the_documented_function():
    """Against a plain-integer model: both ends may run different builds of torch."""

    def signed(v):
        v &= ONES
        return v - 2**64 if v >> 63 else v

    data = random_bytes(2 * ROW_BYTES + 21)
    words = torch.nn.functional.pad(data, (0, 3)).view(torch.int64).tolist()
    total = 0
    for row in range(3):
        row_sum = 0
        for column, word in enumerate(words[row * 4096 : (row + 1) * 4096]):
            row_sum += (word ^ ((word & ONES) >> 29)) * (mix((column + 1) * GOLDEN) | 1)
        mixed = signed(row_sum + (row + 1) * GOLDEN)
        for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
            mixed = signed((mixed ^ (mixed >> 30)) * factor)
        total += mixed ^ (mixed >> 31)
    assert slice_digest(data, 48, "words") == mix(total + mix(48 * GOLDEN + data.numel()))


def test_xxh3_is_the_documented_function():
    """Against a model that hashes block by block: both ends may run different versions."""
    data = random_bytes(2 * BLOCK_BYTES + 21)
    total = 0
    for start in range(0, data.numel(), BLOCK_BYTES):
        block = bytes(data[start : start + BLOCK_BYTES].numpy())
        total += mix(xxhash.xxh3_64_intdigest(block) + mix((48 + start) * GOLDEN + len(block)))
    assert slice_digest(data, 48, "xxh3") == total % 2**64


@pytest.mark.parametrize("size", [0, 1, 4096, BLOCK_BYTES, 2 * BLOCK_BYTES + 7])
def test_a_copy_with_a_digest_is_both(size):
    data = random_bytes(size)
    out = torch.full((size + 1,), 0xA5, dtype=torch.uint8)
    assert copy_with_digest(out[:size], data, 32) == slice_digest(data, 32, "xxh3")
    assert torch.equal(out[:size], data)
    assert out[size] == 0xA5


def test_the_device_chooses_the_function():
    assert digest_for("cpu") == "xxh3"
    assert digest_for(torch.device("cuda", 1)) == "words"


def test_other_threads_run_while_bytes_are_hashed():
    """A replica hashes in a thread beside its engine's. Were the interpreter's lock held, no stamp of the other thread
    could fall into the middle of a hash; of ten hashes one is enough, because the machine may be busy."""
    data, stamps, stop = torch.ones(128 << 20, dtype=torch.uint8).numpy().data, [], threading.Event()

    def stamp():
        while not stop.wait(0.0005):
            stamps.append(time.perf_counter())

    def middle_of_a_hash():
        begin = time.perf_counter()
        xxhash.xxh3_64_intdigest(data)
        end = time.perf_counter()
        return begin + (end - begin) / 4, end - (end - begin) / 4

    thread = threading.Thread(target=stamp)
    thread.start()
    try:
        middles = [middle_of_a_hash() for _ in range(10)]
    finally:
        stop.set()
        thread.join(10)
    assert any(begin < at < end for begin, end in middles for at in stamps)
