import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.inference.shared.kept_memory import LEAST_BYTES, KeptMemory
from asyncrl.types import TensorSpec
from asyncrl.weights.assembling_sink import AssemblingSink
from asyncrl.weights.plan import make_spec

pytestmark = pytest.mark.unit

SIZES = (LEAST_BYTES // 4, LEAST_BYTES, LEAST_BYTES + 8)
CALLS = ["take", "take", "first half", "second half", "whole", "settle", "settle", "forget"]


@given(st.lists(st.tuples(st.sampled_from(SIZES), st.sampled_from(CALLS)), max_size=60))
def test_memory_is_lent_to_one_at_a_time_and_again_once_all_of_it_was_used(calls):
    memory, held, free = KeptMemory(), {}, set()
    """Held: by address, the tensor and its halves that were used. Free: tuples of size and address."""
    for size, call in calls:
        of_size = [address for address, (tensor, _) in held.items() if tensor.nbytes == size]
        if call == "take":
            tensor = memory.take(size)
            address = tensor.data_ptr()
            assert (tensor.shape, tensor.dtype) == ((size,), torch.uint8)
            assert address not in held, "somebody has it"
            assert not (kept := {a for s, a in free if s == size}) or address in kept
            free.discard((size, address))
            held[address] = tensor, set()
        elif call == "forget":
            memory.forget_lent()
            held = {}
        elif call == "settle":
            memory.settle()
            for address, (tensor, halves) in list(held.items()):
                if len(halves) == 2 and tensor.nbytes >= LEAST_BYTES:
                    del held[address]
                    free.add((tensor.nbytes, address))
        elif of_size:
            tensor, halves = held[of_size[0]]
            parts = {"first half": {0}, "second half": {1}}.get(call, {0, 1})
            part = tensor if len(parts) == 2 else tensor.chunk(2)[parts.pop()]
            memory.used(part.view(torch.float32))
            memory.used(part.view(torch.float32))
            halves |= {"first half": {0}, "second half": {1}}.get(call, {0, 1})


def test_memory_of_which_a_part_is_in_use_is_not_lent_again():
    memory = KeptMemory()
    tensor = memory.take(LEAST_BYTES)
    first, second = tensor.chunk(2)
    memory.used(first)
    memory.settle()
    assert (other := memory.take(LEAST_BYTES)).data_ptr() != tensor.data_ptr()
    memory.used(second)
    assert memory.take(LEAST_BYTES).data_ptr() not in (tensor.data_ptr(), other.data_ptr()), "it is not settled"
    memory.settle()
    assert memory.take(LEAST_BYTES).data_ptr() == tensor.data_ptr()


def test_a_view_that_repeats_entries_uses_nothing_up():
    memory = KeptMemory()
    tensor = memory.take(LEAST_BYTES)
    memory.used(tensor[:8].expand(LEAST_BYTES // 8, 8))
    memory.settle()
    assert memory.take(LEAST_BYTES).data_ptr() != tensor.data_ptr()


def test_threads_never_share_memory():
    memory, lock, held, rounds = KeptMemory(), threading.Lock(), [], []

    def work():
        for _ in range(200):
            tensor = memory.take(LEAST_BYTES)
            with lock:
                held.append(tensor.data_ptr())
                assert len(held) == len(set(held)), "somebody else has it"
            time.sleep(0.0005)  # the other threads take theirs
            with lock:
                held.remove(tensor.data_ptr())
            memory.used(tensor)
            memory.settle()
        rounds.append(200)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert rounds == [200] * 4, "a thread failed, or waits"


def test_other_memory_is_passed_over():
    memory = KeptMemory()
    other = torch.zeros(LEAST_BYTES, dtype=torch.uint8)
    memory.used(other)
    assert memory.take(LEAST_BYTES).data_ptr() != other.data_ptr()


def test_whole_tensors_live_in_the_memory_that_a_sink_was_given():
    memory, whole = KeptMemory(), []
    sink = AssemblingSink(lambda name, tensor: whole.append(tensor), lambda spec: memory.take(spec.nbytes))
    spec: TensorSpec = make_spec("a", (LEAST_BYTES // 4,), "float32")
    for value in (1.0, 2.0):
        data = torch.full(spec.shape, value)
        sink.write(spec, 0, data.view(torch.uint8))
        assert torch.equal(whole[-1], data)
        memory.used(whole[-1])
        memory.settle()
    assert whole[0].data_ptr() == whole[1].data_ptr()
