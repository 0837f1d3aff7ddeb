"""Pinned host memory, with a driver that only writes down what it is asked."""

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.trainer.host_copies import HostCopies, HostState, Slot
from asyncrl.weights.pinned_memory import pin, pinned_empty, unpin
from asyncrl_testing.cuda_driver import FakeDriver

GPU = torch.device("cuda", 3)


@pytest.fixture
def driver(monkeypatch):
    return FakeDriver(monkeypatch)


def test_a_tensor_takes_its_own_size_and_is_pinned_until_nobody_has_it(driver):
    tensor = pinned_empty((5, 1000), torch.bfloat16, GPU)
    assert (tensor.shape, tensor.dtype, tensor.device.type) == ((5, 1000), torch.bfloat16, "cpu")
    assert driver.pinned == {tensor.data_ptr(): 10_000}, "not the next power of two"
    assert driver.devices == [GPU], "no context on another GPU"
    tensor.copy_(torch.arange(5000).view(5, 1000))
    part = tensor[4]
    del tensor
    gc.collect()
    assert len(driver.pinned) == 1
    assert part[-1] == torch.tensor(4999).bfloat16()
    del part
    gc.collect()
    assert driver.pinned == {}


def test_what_has_no_bytes_is_not_pinned(driver):
    assert pinned_empty((0, 4), torch.float32, GPU).shape == (0, 4)
    assert driver.pinned == {}
    scalar = pinned_empty((), torch.float32, GPU)
    assert (scalar.shape, list(driver.pinned.values())) == ((), [4])


def test_memory_that_exists_is_pinned_and_let_go(driver):
    data = torch.zeros(4096, dtype=torch.uint8)
    assert pin(data, GPU)
    assert driver.pinned == {data.data_ptr(): 4096}
    unpin(data, GPU)
    assert driver.pinned == {}
    assert driver.devices == [GPU, GPU]


def test_a_driver_that_refuses_costs_speed_only(driver, caplog):
    driver.error = 2
    tensor = pinned_empty((3,), torch.float32, GPU)
    tensor.fill_(1)
    del tensor
    gc.collect()
    assert caplog.messages == ["12 bytes are not pinned: cudaHostRegister returned 2"]


def test_the_state_of_an_optimizer_beside_a_gpu_is_pinned(driver, monkeypatch):
    """Its buffer is made for a tensor that says that it is on a GPU."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    class OnGpu(torch.Tensor):
        device = GPU

    moment = torch.ones(3).as_subclass(OnGpu)
    state = HostState([Slot(lambda: moment, lambda tensor: None)])
    assert list(driver.pinned.values()) == [12]
    del state


# -- copies of a state -------------------------------------------------------------------------------------------------


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
