import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.inference.shared.kept_memory import LEAST_BYTES, KeptMemory
from asyncrl.types import TensorSpec
from asyncrl.weights.assembling_sink import AssemblingSink
from asyncrl.weights.plan import make_spec

pytestmark = pytest.mark.unit

SIZES = (LEAST_BYTES // 4, LEAST_BYTES, LEAST_BYTES + 4)


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["take", "half", "whole", "forget"])), max_size=30))
def test_memory_is_lent_to_one_at_a_time_and_again_once_all_of_it_was_used(calls):
    memory, held, free = KeptMemory(), {}, set()
    """Held: by address, the tensor and the bytes that are still of use. Free: by size and address."""
    for which, call in calls:
        size = SIZES[which]
        of_size = [address for address, (tensor, _) in held.items() if tensor.nbytes == size]
        if call == "take":
            tensor = memory.take(size)
            address = tensor.data_ptr()
            assert (tensor.shape, tensor.dtype) == ((size,), torch.uint8)
            assert address not in held
            if kept := {a for s, a in free if s == size}:
                assert address in kept
            free.discard((size, address))
            held[address] = tensor, size
        elif call == "forget":
            memory.forget_lent()
            held = {}
        elif of_size:
            tensor, left = held[of_size[0]]
            part = tensor[: size // 2] if call == "half" else tensor
            memory.used(part.view(torch.float32))
            if size >= LEAST_BYTES:
                held[of_size[0]] = tensor, left - part.nbytes
                if left - part.nbytes <= 0:
                    del held[of_size[0]]
                    free.add((size, of_size[0]))


def test_other_memory_is_passed_over():
    memory = KeptMemory()
    other = torch.zeros(LEAST_BYTES, dtype=torch.uint8)
    memory.used(other)
    assert memory.take(LEAST_BYTES).data_ptr() != other.data_ptr()


def test_whole_tensors_live_in_the_memory_that_a_sink_was_given():
    memory, whole = KeptMemory(), []
    sink = AssemblingSink(lambda name, tensor: whole.append(tensor), memory.take)
    spec: TensorSpec = make_spec("a", (LEAST_BYTES // 4,), "float32")
    for value in (1.0, 2.0):
        data = torch.full(spec.shape, value)
        sink.write(spec, 0, data.view(torch.uint8))
        assert torch.equal(whole[-1], data)
        memory.used(whole[-1])
    assert whole[0].data_ptr() == whole[1].data_ptr()
