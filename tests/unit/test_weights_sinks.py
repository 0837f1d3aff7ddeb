"""Slices into whole tensors: in order, each once, and never a half tensor."""

import pytest
import torch

from asyncrl.errors import WeightTransferError
from asyncrl.weights.assembling_sink import AssemblingSink
from asyncrl.weights.plan import make_spec
from asyncrl.weights.transport import DirectSink

CPU = torch.device("cpu")


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
