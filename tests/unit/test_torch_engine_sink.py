"""Received bytes into parameters: copied, converted, and refused by name."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import WeightTransferError
from asyncrl.inference.torch_engine.parameter_sink import ParameterSink
from asyncrl.types import TensorSpec
from asyncrl.weights.packing import byte_view, spec_of
from asyncrl.weights.transport import DirectSink

CPU = torch.device("cpu")


def sliced(name, tensor, cuts):
    spec = spec_of(name, tensor)
    edges = sorted({0, *(min(c, spec.nbytes) for c in cuts), spec.nbytes})
    return spec, byte_view(tensor), list(itertools.pairwise(edges))


def send(sink, name, tensor, cuts=()):
    spec, data, slices = sliced(name, tensor, cuts)
    for start, stop in slices:
        sink.write(spec, start, data[start:stop].clone())


def land(sink, name, tensor, cuts=()):
    """As `send`, with bytes that arrive in the parameter itself, every place asked for ahead."""
    spec, data, slices = sliced(name, tensor, cuts)
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
    land(sink, "w", sent, cuts)
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


@pytest.mark.parametrize("put", [send, land])
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


@pytest.mark.parametrize("put", [send, land])
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
