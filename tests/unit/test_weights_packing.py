"""Packing, unpacking and assembling without a transport in between."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import WeightTransferError
from asyncrl.weights.packing import Packer, Unpacker, check_fits, spec_of
from asyncrl.weights.plan import make_manifest, make_spec
from asyncrl.weights.sinks import AssemblingSink

pytestmark = pytest.mark.unit

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


@pytest.mark.parametrize("writes", [[(16, 16)], [(0, 16), (32, 16)], [(0, 16), (0, 16)], [(0, 48)], [(0, 0), (16, 16)]])
def test_slices_out_of_order_are_refused(writes):
    spec = make_spec("a", (32,), "uint8")
    sink = AssemblingSink(lambda *_: pytest.fail("the tensor is not complete"))

    def write_all():
        for offset, size in writes:
            sink.write(spec, offset, torch.zeros(size, dtype=torch.uint8))

    with pytest.raises(WeightTransferError, match="manifest order"):
        write_all()


def test_another_tensor_before_the_first_is_complete_is_refused():
    sink = AssemblingSink(lambda *_: pytest.fail("the tensor is not complete"))
    sink.write(make_spec("a", (32,), "uint8"), 0, torch.zeros(16, dtype=torch.uint8))
    with pytest.raises(WeightTransferError, match="of b"):
        sink.write(make_spec("b", (32,), "uint8"), 16, torch.zeros(16, dtype=torch.uint8))
