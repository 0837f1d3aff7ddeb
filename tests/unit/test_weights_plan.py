"""Bucket plans: every byte of every tensor once, aligned, in order."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import ConfigError, WeightTransferError
from asyncrl.types import TensorSpec
from asyncrl.weights.plan import ALIGNMENT, DTYPE_BYTES, make_manifest, make_spec, part_manifests, plan_buckets

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@st.composite
def spec_lists(draw):
    drawn = draw(st.lists(st.tuples(shapes, st.sampled_from(sorted(DTYPE_BYTES))), max_size=20))
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
