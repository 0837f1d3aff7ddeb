"""Copies of a state in host memory: a copy in use is not written to, and the memory of others is used again."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.trainer.host_copies import HostCopies

SHAPES = [{"weight": (3, 4), "step": ()}, {"weight": (3, 4), "step": (), "more": (5,)}, {"weight": (4, 3)}]
ACTS = st.lists(st.tuples(st.sampled_from(["copy", "give back first", "give back last"]), st.sampled_from(SHAPES)))


def state(shapes, value):
    return {name: torch.full(shape, float(value)) for name, shape in shapes.items()}


def memory(copies):
    return {tensor.data_ptr() for tensor in copies.values()}


@given(ACTS)
def test_a_copy_in_use_keeps_its_values(acts):
    host, in_use = HostCopies(), []
    for value, (act, shapes) in enumerate(acts):
        if act == "copy":
            live = state(shapes, value)
            copied = host.copy(live.items())
            assert list(copied) == list(live)
            for tensor in live.values():
                tensor.fill_(-1)  # training goes on
            assert not any(memory(copied) & memory(other) for _, other, _ in in_use)
            in_use.append((value, copied, shapes))
        elif in_use:
            _, copied, _ = in_use.pop(0 if act == "give back first" else -1)
            host.give_back(copied)
        for expected, copied, shapes in in_use:
            for name, tensor in state(shapes, expected).items():
                torch.testing.assert_close(copied[name], tensor, rtol=0, atol=0)


def test_memory_is_used_again_where_shape_and_dtype_agree():
    host = HostCopies()
    first = host.copy(state(SHAPES[0], 1).items())
    second = host.copy(state(SHAPES[0], 2).items())  # the first is still being written
    was = memory(first)
    host.give_back(first)
    third = host.copy(state(SHAPES[0], 3).items())
    assert memory(third) == was
    assert not memory(third) & memory(second)
    step = third["step"].data_ptr()
    host.give_back(third)
    other = host.copy({"weight": torch.zeros(3, 4, dtype=torch.float64), "step": torch.tensor(4.0)}.items())
    assert other["weight"].dtype == torch.float64
    assert other["step"].data_ptr() == step
    host.give_back(other)
    transposed = host.copy({"weight": torch.zeros(4, 3, dtype=torch.float64)}.items())
    assert transposed["weight"].shape == (4, 3)
