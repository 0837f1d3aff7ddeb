"""Packing, unpacking and assembling without a transport in between."""

import itertools
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import ConfigError, WeightTransferError
from asyncrl.inference.torch_engine.parameter_sink import ParameterSink
from asyncrl.types import TensorSpec
from asyncrl.weights.assembling_sink import AssemblingSink
from asyncrl.weights.packing import Packer, Unpacker, byte_view, separate, spec_of
from asyncrl.weights.plan import (
    ALIGNMENT,
    DTYPE_BYTES,
    check_fits,
    make_manifest,
    make_spec,
    part_manifests,
    plan_buckets,
)
from asyncrl.weights.transport import DirectSink

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
shapes = st.lists(st.integers(0, 12), max_size=3)


@given(st.lists(st.tuples(shapes, dtypes), max_size=8), st.integers(16, 600), st.booleans(), st.booleans())
@settings(max_examples=80, deadline=None)
def test_what_is_packed_is_unpacked(drawn, bucket_bytes, transpose, verify):
    torch.manual_seed(0)
    weights = [(f"t{i}", torch.randint(-100, 100, shape).to(dtype)) for i, (shape, dtype) in enumerate(drawn)]
    if transpose:
        weights = [(name, t.transpose(0, -1) if t.dim() else t) for name, t in weights]
    manifest = make_manifest(1, 1, [spec_of(name, t) for name, t in weights], bucket_bytes, verify=verify)
    received = []
    packer, unpacker = Packer(manifest, weights), Unpacker(manifest, AssemblingSink(lambda *t: received.append(t)))
    buffer = torch.empty(bucket_bytes, dtype=torch.uint8)
    for bucket in manifest.buckets:
        packer.pack(bucket, buffer)
        unpacker.unpack(bucket, buffer)
        buffer.fill_(0xA5)  # what the sink kept must not be the buffer
    assert packer.finish() == unpacker.finish()
    assert [name for name, _ in received] == [name for name, _ in weights]
    for (_, sent), (_, got) in zip(weights, received, strict=True):
        assert got.dtype == sent.dtype
        assert torch.equal(got, sent)


@pytest.mark.parametrize("at", [0, 3000, 8191])
def test_a_byte_that_changes_on_the_way_changes_the_digest_of_its_tensor_alone(at):
    weights = [("a", torch.ones(700)), ("b", torch.ones(2048)), ("c", torch.ones(5))]
    manifest = make_manifest(1, 1, [spec_of(*w) for w in weights], 4096)
    packer, unpacker = Packer(manifest, weights), Unpacker(manifest, AssemblingSink(lambda *_: None))
    buffer = torch.empty(4096, dtype=torch.uint8)
    for bucket in manifest.buckets:
        packer.pack(bucket, buffer)
        for piece in bucket.slices:
            if piece.tensor == 1 and piece.offset <= at < piece.offset + piece.nbytes:
                buffer[piece.bucket_offset + at - piece.offset] ^= 4
        unpacker.unpack(bucket, buffer)
    sent, received = packer.finish(), unpacker.finish()
    assert [s == r for s, r in zip(sent, received, strict=True)] == [True, False, True]


def test_the_packer_takes_one_tensor_at_a_time():
    taken = []

    def weights():
        for i in range(4):
            taken.append(i)
            yield f"t{i}", torch.zeros(64)

    manifest = make_manifest(1, 1, [make_spec(f"t{i}", (64,), "float32") for i in range(4)], 256)
    packer = Packer(manifest, weights())
    for bucket in manifest.buckets:
        packer.pack(bucket, torch.empty(256, dtype=torch.uint8))
        assert taken == list(range(bucket.index + 1))


def test_an_extra_tensor_is_known_before_the_last_bucket_leaves():
    manifest = make_manifest(1, 1, [make_spec("a", (8,), "float32")], 64)
    packer = Packer(manifest, [("a", torch.zeros(8)), ("b", torch.zeros(1))])
    with pytest.raises(WeightTransferError, match="one more: b"):
        packer.pack(manifest.buckets[0], torch.empty(64, dtype=torch.uint8))


def test_an_error_names_what_was_expected_and_what_came():
    manifest = make_manifest(1, 1, [make_spec("a", (8,), "float32")], 64)
    with pytest.raises(WeightTransferError, match=r"tensor 0: a, float32 \(8,\)\nfound: a, float32 \(4, 2\)"):
        Packer(manifest, [("a", torch.zeros(4, 2))]).finish()


def test_buckets_must_fit():
    manifest = make_manifest(1, 1, [make_spec("a", (100,), "uint8")], 112)
    check_fits(manifest, 100)
    with pytest.raises(WeightTransferError, match="bucket of 100 bytes"):
        check_fits(manifest, 99)


CPU = torch.device("cpu")


class PlainSink:
    """Has no memory of its own to offer."""

    def __init__(self, on_tensor):
        self.write = AssemblingSink(on_tensor).write


@given(
    st.lists(st.tuples(shapes, dtypes), max_size=8),
    st.integers(16, 600),
    st.integers(1, 300),
    st.sampled_from(["xxh3", "words"]),
    st.sampled_from([AssemblingSink, PlainSink]),
)
@settings(max_examples=150, deadline=None)
def test_what_is_sent_in_place_two_buckets_ahead_arrives(drawn, bucket_bytes, min_bytes, digest, sink):
    """The order of things in a transport that sends in place: places are asked for ahead of the bytes, and bytes leave
    one bucket later than they were asked for, when the weights may have moved on."""
    torch.manual_seed(0)
    weights = [(f"t{i}", torch.randint(-100, 100, shape).to(dtype)) for i, (shape, dtype) in enumerate(drawn)]
    expected = [(name, t.clone()) for name, t in weights]
    manifest = make_manifest(1, 1, [spec_of(name, t) for name, t in weights], bucket_bytes)
    buckets, received = separate(manifest.buckets, min_bytes), []

    def spoiled_once_taken():
        for name, tensor in weights:
            yield name, tensor
            tensor.view(-1).view(torch.uint8).fill_(0x5A)

    packer = Packer(manifest, spoiled_once_taken(), digest)
    unpacker = Unpacker(manifest, sink(lambda *t: received.append(t)), digest)
    places = [unpacker.destination(b, CPU) for b in buckets[:2]]
    wire, in_place = [], False

    def arrive(bucket, data):
        place = places[bucket.index]
        if place is None:
            unpacker.unpack(bucket, data.clone())
        else:
            place.copy_(data)
            unpacker.landed(bucket, place)
        if bucket.index + 2 < len(buckets):
            places.append(unpacker.destination(buckets[bucket.index + 2], CPU))

    for bucket in buckets:
        while len(wire) > (0 if in_place and packer.moves_on(bucket) else 1):
            arrive(*wire.pop(0))
        data = packer.view(bucket, CPU)
        in_place = data is not None
        if data is None:
            data = torch.empty(bucket.nbytes, dtype=torch.uint8)
            packer.pack(bucket, data)
        wire.append((bucket, data))
    sent = packer.finish()
    for item in wire:
        arrive(*item)
    assert unpacker.finish() == sent
    assert [(n, t.dtype, t.shape) for n, t in received] == [(n, t.dtype, t.shape) for n, t in expected]
    assert all(torch.equal(got, want) for (_, got), (_, want) in zip(received, expected, strict=True))


@given(st.lists(st.integers(0, 500), max_size=12), st.integers(16, 200), st.integers(1, 250))
def test_separated_buckets_hold_the_same_slices_and_large_ones_alone(sizes, bucket_bytes, min_bytes):
    manifest = make_manifest(1, 1, [make_spec(f"t{i}", (n,), "uint8") for i, n in enumerate(sizes)], bucket_bytes)
    separated = separate(manifest.buckets, min_bytes)

    def slices(buckets):
        return [(s.tensor, s.offset, s.nbytes) for b in buckets for s in b.slices]

    assert slices(separated) == slices(manifest.buckets)
    assert [b.index for b in separated] == list(range(len(separated)))
    for bucket in separated:
        assert bucket.nbytes <= bucket_bytes
        assert len(bucket.slices) == 1 or all(s.nbytes < min_bytes for s in bucket.slices)
        ends = [0] + [s.bucket_offset + s.nbytes for s in bucket.slices]
        assert [s.bucket_offset for s in bucket.slices] == [end + -end % 16 for end in ends[:-1]]
        assert ends[-1] == bucket.nbytes


def test_a_slice_alone_in_its_bucket_is_sent_in_place():
    weights = [("a", torch.arange(60, dtype=torch.float32)), ("b", torch.zeros(40))]
    manifest = make_manifest(1, 1, [spec_of(*w) for w in weights], 160)
    packer, places = Packer(manifest, weights), []
    assert [[s.nbytes for s in b.slices] for b in manifest.buckets] == [[160], [80], [160]]
    for bucket in manifest.buckets:
        places.append(packer.view(bucket, CPU))
    assert places[0].data_ptr() == weights[0][1].data_ptr()
    assert places[1].data_ptr() == weights[0][1].data_ptr() + 160
    assert places[2] is None  # before it leaves, the packer looks for a tensor behind it


def test_the_packer_says_when_it_moves_on():
    def moves(*sizes):
        weights = [(f"t{i}", torch.zeros(n)) for i, n in enumerate(sizes)]
        manifest = make_manifest(1, 1, [spec_of(*w) for w in weights], 64)
        packer = Packer(manifest, weights)
        for bucket in manifest.buckets:
            yield packer.moves_on(bucket)
            packer.pack(bucket, torch.empty(64, dtype=torch.uint8))

    # a is cut into 16 and 4 elements; the rest of a and b share a bucket, and so do c and d
    assert list(moves(20, 12, 4, 4)) == [True, True, True]
    assert list(moves(48)) == [True, False, True]  # the first takes a; behind the last it looks for another


def test_a_tensor_on_another_device_is_packed():
    manifest = make_manifest(1, 1, [make_spec("a", (100,), "float32")], 160)
    assert Packer(manifest, [("a", torch.ones(100))]).view(manifest.buckets[0], torch.device("meta")) is None


# -- whole tensors -----------------------------------------------------------------------------------------------------


def bytes_of(size, value=0):
    return torch.full((size,), value, dtype=torch.uint8)


def unfinished():
    return AssemblingSink(lambda *_: pytest.fail("the tensor is not complete"))


def write(sink, spec, offset, size, value=0):
    sink.write(spec, offset, bytes_of(size, value))


def land(sink, spec, offset, size, value=0):
    sink.destination(spec, offset, size, CPU).fill_(value)
    sink.wrote(spec, offset, size)


both_ways = pytest.mark.parametrize("put", [write, land])


@both_ways
@pytest.mark.parametrize("slices", [[(16, 16)], [(0, 16), (32, 16)], [(0, 16), (0, 16)], [(0, 48)], [(0, 0), (16, 16)]])
def test_slices_out_of_order_are_refused(put, slices):
    spec, sink = make_spec("a", (32,), "uint8"), unfinished()

    def put_all():
        for offset, size in slices:
            put(sink, spec, offset, size)

    with pytest.raises(WeightTransferError, match="manifest order"):
        put_all()


@both_ways
def test_another_tensor_before_the_first_is_complete_is_refused(put):
    sink = unfinished()
    put(sink, make_spec("a", (32,), "uint8"), 0, 16)
    with pytest.raises(WeightTransferError, match="of b"):
        put(sink, make_spec("b", (32,), "uint8"), 16, 16)


def test_it_is_a_sink_with_memory_of_its_own():
    assert isinstance(unfinished(), DirectSink)


def test_places_may_be_asked_for_ahead_and_mixed_with_writes():
    a, b = make_spec("a", (32,), "uint8"), make_spec("b", (8,), "int16")
    received = []
    sink = AssemblingSink(lambda *t: received.append(t))
    second_of_a = sink.destination(a, 16, 16, CPU)
    first_of_b = sink.destination(b, 0, 8, CPU)
    first_of_b.fill_(3)
    write(sink, a, 0, 16, 1)
    assert received == []
    second_of_a.fill_(2)
    sink.wrote(a, 16, 16)
    assert [name for name, _ in received] == ["a"]
    sink.wrote(b, 0, 8)
    write(sink, b, 8, 8, 4)
    (_, got_a), (_, got_b) = received
    assert got_a.tolist() == [1] * 16 + [2] * 16
    assert got_b.tolist() == [0x0303] * 4 + [0x0404] * 4
    assert (got_b.dtype, got_b.shape) == (torch.int16, (8,))


def test_a_place_beyond_the_tensor_is_refused():
    with pytest.raises(WeightTransferError, match=r"bytes \[16, 48\) of a"):
        unfinished().destination(make_spec("a", (32,), "uint8"), 16, 32, CPU)


# -- plans of buckets --------------------------------------------------------------------------------------------------


plan_shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@st.composite
def spec_lists(draw):
    drawn = draw(st.lists(st.tuples(plan_shapes, st.sampled_from(sorted(DTYPE_BYTES))), max_size=20))
    return [make_spec(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(drawn)]


@given(spec_lists(), st.integers(16, 3000))
@settings(max_examples=60, deadline=None)
def test_every_byte_of_every_tensor_exactly_once_and_in_order(specs, bucket_bytes):
    buckets = plan_buckets(specs, bucket_bytes)
    pieces = [piece for bucket in buckets for piece in bucket.slices]
    joined = [(number, [p for p in pieces if p.tensor == number]) for number in range(len(specs))]
    assert [p for _, own in joined for p in own] == pieces
    for number, own in joined:
        ends = [0, *(p.offset + p.nbytes for p in own)]
        assert [p.offset for p in own] == ends[:-1]
        assert ends[-1] == specs[number].nbytes


@given(spec_lists(), st.integers(16, 3000))
@settings(max_examples=60, deadline=None)
def test_buckets_are_within_their_size_aligned_and_without_overlap(specs, bucket_bytes):
    for index, bucket in enumerate(plan_buckets(specs, bucket_bytes)):
        assert bucket.index == index
        assert 0 < bucket.nbytes <= bucket_bytes
        end = 0
        for piece in bucket.slices:
            assert piece.nbytes > 0
            assert piece.bucket_offset % ALIGNMENT == piece.offset % ALIGNMENT == 0
            assert end <= piece.bucket_offset < end + ALIGNMENT
            end = piece.bucket_offset + piece.nbytes
        assert bucket.nbytes == end


@given(spec_lists(), st.integers(16, 3000))
@settings(max_examples=60, deadline=None)
def test_only_tensors_larger_than_a_bucket_are_cut_and_no_bucket_stays_needlessly_small(specs, bucket_bytes):
    capacity = bucket_bytes - bucket_bytes % ALIGNMENT
    buckets = plan_buckets(specs, bucket_bytes)
    for bucket, following in pairwise(buckets):
        last, first = bucket.slices[-1], following.slices[0]
        if last.tensor == first.tensor:
            assert specs[first.tensor].nbytes > capacity
            assert capacity - ALIGNMENT < bucket.nbytes <= capacity
        elif specs[first.tensor].nbytes <= capacity:
            filled = bucket.nbytes + -bucket.nbytes % ALIGNMENT
            assert filled + specs[first.tensor].nbytes > capacity


def test_a_bucket_below_the_alignment_is_refused():
    with pytest.raises(ConfigError, match="bucket_bytes"):
        plan_buckets([], 15)


def test_a_manifest_names_its_publish_and_counts_its_bytes():
    specs = [make_spec("a", (4, 8), "float32"), make_spec("b", (), "int64")]
    manifest = make_manifest(7, None, specs, 64, verify=False)
    assert (manifest.publish_id, manifest.version, manifest.verify) == (7, None, False)
    assert manifest.nbytes == 136
    assert manifest.buckets == plan_buckets(specs, 64)


@pytest.mark.parametrize(
    ("specs", "match"),
    [
        ([make_spec("a", (1,), "int8")] * 2, "two tensors have this name"),
        ([TensorSpec("a", (2, 3), "float32", 20)], "20 bytes for shape"),
        ([TensorSpec("a", (2,), "complex64", 16)], "dtype complex64"),
    ],
)
def test_a_manifest_refuses_specs_that_contradict_themselves(specs, match):
    with pytest.raises(WeightTransferError, match=match):
        make_manifest(1, 1, specs, 64)


@given(spec_lists(), st.lists(st.integers(0, 20), max_size=3), st.integers(16, 3000))
@settings(max_examples=60, deadline=None)
def test_parts_hold_every_tensor_once_with_buckets_of_their_own(specs, cuts, bucket_bytes):
    firsts = (0, *sorted(cuts))
    whole = make_manifest(3, 7, specs, bucket_bytes)
    parts = part_manifests(whole, firsts, bucket_bytes)
    assert len(parts) == len(firsts)
    assert tuple(spec for part in parts for spec in part.tensors) == whole.tensors
    for part in parts:
        assert (part.publish_id, part.version, part.verify) == (3, 7, whole.verify)
        assert part.buckets == plan_buckets(part.tensors, bucket_bytes)


# -- received bytes into the parameters of the embedded engine ---------------------------------------------------------


def slices_of(name, tensor, cuts):
    spec = spec_of(name, tensor)
    edges = sorted({0, *(min(c, spec.nbytes) for c in cuts), spec.nbytes})
    return spec, byte_view(tensor), list(itertools.pairwise(edges))


def send(sink, name, tensor, cuts=()):
    spec, data, slices = slices_of(name, tensor, cuts)
    for start, stop in slices:
        sink.write(spec, start, data[start:stop].clone())


def land_in_place(sink, name, tensor, cuts=()):
    """As `send`, with bytes that arrive in the parameter itself, every place asked for ahead."""
    spec, data, slices = slices_of(name, tensor, cuts)
    places = [sink.destination(spec, start, stop - start, CPU) for start, stop in slices]
    for (start, stop), place in zip(slices, places, strict=True):
        place.copy_(data[start:stop])
        sink.wrote(spec, start, stop - start)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.lists(st.integers(0, 60), max_size=4),
)
def test_a_tensor_arrives_whole_in_any_slices_and_dtype(sent_dtype, held_dtype, cuts):
    sent = torch.randn(3, 5).to(sent_dtype)
    held = torch.zeros(3, 5, dtype=held_dtype)
    storage = held.data_ptr()
    sink = ParameterSink({"w": held})
    send(sink, "w", sent, cuts)
    sink.finish()
    assert held.data_ptr() == storage
    torch.testing.assert_close(held, sent.to(held_dtype), rtol=0, atol=0)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([torch.float32, torch.bfloat16]), st.lists(st.integers(0, 60), max_size=4))
def test_bytes_may_land_in_the_parameter_itself(dtype, cuts):
    sent, held = torch.randn(3, 5).to(dtype), torch.zeros(3, 5, dtype=dtype)
    sink = ParameterSink({"w": held})
    assert isinstance(sink, DirectSink)
    assert sink.destination(spec_of("w", sent), 4, 8, CPU).data_ptr() == held.data_ptr() + 4
    land_in_place(sink, "w", sent, cuts)
    sink.finish()
    assert torch.equal(held, sent)


def test_nothing_can_land_where_another_dtype_or_device_is_held():
    half, full = torch.zeros(2, 2, dtype=torch.bfloat16), torch.zeros(2, 2)
    assert ParameterSink({"w": half}).destination(spec_of("w", full), 0, 16, CPU) is None
    assert ParameterSink({"w": full}).destination(spec_of("w", full), 0, 16, torch.device("meta")) is None


def test_a_tied_tensor_may_come_under_either_name():
    for name in ("embed", "head"):
        shared = torch.zeros(4, 2)
        sink = ParameterSink({"embed": shared, "head": shared, "without elements": torch.zeros(0, 3)})
        send(sink, name, torch.ones(4, 2))
        sink.finish()
        assert shared.eq(1).all()


@pytest.mark.parametrize("put", [send, land_in_place])
@pytest.mark.parametrize(
    ("name", "shape"), [("stranger", (2, 2)), ("w", (2, 3)), ("w", (4,))], ids=["unknown", "other size", "same size"]
)
def test_a_tensor_that_does_not_fit_is_named(put, name, shape):
    held = torch.zeros(2, 2)
    with pytest.raises(WeightTransferError, match=name):
        put(ParameterSink({"w": held}), name, torch.ones(shape))
    assert held.eq(0).all()


def test_missing_and_incomplete_tensors_are_named():
    sink = ParameterSink({"first": torch.zeros(2), "second": torch.zeros(2)})
    send(sink, "first", torch.ones(2))
    with pytest.raises(WeightTransferError, match="second"):
        sink.finish()
    sink.write(spec_of("second", torch.ones(2)), 0, torch.ones(1).view(torch.uint8))
    with pytest.raises(WeightTransferError, match="second"):
        sink.finish()
    sink.write(spec_of("second", torch.ones(2)), 4, torch.ones(1).view(torch.uint8))
    sink.finish()


@pytest.mark.parametrize("put", [send, land_in_place])
def test_a_slice_beyond_its_tensor_or_sent_twice_is_refused(put):
    one = torch.ones(2)
    with pytest.raises(WeightTransferError, match="bytes"):
        ParameterSink({"w": torch.zeros(2)}).write(spec_of("w", one), 4, one.view(torch.uint8))
    with pytest.raises(WeightTransferError, match="bytes"):
        ParameterSink({"w": torch.zeros(2)}).destination(spec_of("w", one), 4, 8, CPU)
    sink = ParameterSink({"w": torch.zeros(2)})
    put(sink, "w", one)
    with pytest.raises(WeightTransferError, match="once"):
        put(sink, "w", one)


def test_a_dtype_that_torch_does_not_know_is_refused():
    spec = TensorSpec("w", (2,), "float12", 8)
    with pytest.raises(WeightTransferError, match="float12"):
        ParameterSink({"w": torch.zeros(2)}).write(spec, 0, torch.zeros(8, dtype=torch.uint8))
