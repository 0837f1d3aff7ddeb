"""Products of float32 matrices that oneDNN makes: the same as torch's, whatever lies how in memory."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.kernels import cpu_products

pytestmark = pytest.mark.unit

LAYOUTS = {
    "rows": lambda m, n: torch.randn(m, n),
    "columns": lambda m, n: torch.randn(n, m).t(),
    "part of rows": lambda m, n: torch.randn(m, n + 3)[:, 1 : n + 1],
    "part of columns": lambda m, n: torch.randn(n, m + 3).t()[2 : m + 2],
    "every second": lambda m, n: torch.randn(m, 2 * n)[:, ::2],
    "one row for all": lambda m, n: torch.randn(1, n).expand(m, n),
    "one number for all": lambda m, n: torch.randn(1, 1).expand(m, n),
}


def near(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)


@pytest.fixture(autouse=True)
def always_worth_it(monkeypatch):
    monkeypatch.setattr(cpu_products, "_WORTH_IT", 1)


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 70),
    k=st.one_of(st.integers(1, 70), st.just(2100)),
    n=st.integers(1, 70),
    layouts=st.tuples(st.sampled_from(sorted(LAYOUTS)), st.sampled_from(sorted(LAYOUTS))),
    seed=st.integers(0, 99),
)
def test_products_are_those_of_the_numbers(m, k, n, layouts, seed):
    torch.manual_seed(seed)
    a, b, bias = LAYOUTS[layouts[0]](m, k), LAYOUTS[layouts[1]](k, n), torch.randn(n)
    near(cpu_products._mm(a, b), a.double() @ b.double())
    near(cpu_products._addmm(bias, a, b), bias.double() + a.double() @ b.double())
    near(cpu_products._addmm(bias, a, b, beta=2, alpha=3), 2 * bias.double() + 3 * (a.double() @ b.double()))
    whole = torch.randn(m, n)
    near(cpu_products._addmm(whole, a, b), whole.double() + a.double() @ b.double())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.float32])
@pytest.mark.parametrize("rows", [0, 4])
def test_other_numbers_and_nothing_at_all_are_torchs_affair(rows, dtype):
    a, b = torch.ones(rows, 3).to(dtype), torch.ones(3, 5).to(dtype)
    found = cpu_products._mm(a, b)
    assert (found.shape, found.dtype) == ((rows, 5), dtype)
    assert torch.equal(found, torch.full((rows, 5), 3).to(dtype))


@pytest.mark.parametrize("b", [torch.ones(4, 5), torch.ones(3, 5).double()])
def test_what_does_not_fit_has_torchs_own_error(b):
    a = torch.ones(2, 3)
    with pytest.raises(RuntimeError) as expected:
        torch.mm(a, b)
    with pytest.raises(RuntimeError) as found:
        cpu_products._mm(a, b)
    assert str(found.value) == str(expected.value)


def test_only_an_amd_processor_with_avx512_gets_it(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    for vendor, expected in (("AuthenticAMD", True), ("GenuineIntel", False)):
        info = tmp_path / vendor
        info.write_text(f"vendor_id\t: {vendor}\n")
        monkeypatch.setattr(cpu_products, "Path", lambda _, info=info: info)
        cpu_products.mkl_is_slow.cache_clear()
        assert cpu_products.mkl_is_slow() is expected
    monkeypatch.setattr(cpu_products, "Path", lambda _: tmp_path / "none")
    cpu_products.mkl_is_slow.cache_clear()
    assert not cpu_products.mkl_is_slow()
    monkeypatch.undo()
    cpu_products.mkl_is_slow.cache_clear()


PROGRAM = """
import torch
from asyncrl.kernels import cpu_products

def gradients():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(96, 200), torch.nn.SiLU(), torch.nn.Linear(200, 64, bias=False))
    x = torch.randn(3, 900, 96, requires_grad=True)
    model(x).square().mean().backward()
    return [x.grad, *(p.grad for p in model.parameters())]

before = gradients()
cpu_products.mkl_is_slow = lambda: True
calls = []
linear = cpu_products._linear
cpu_products._linear = lambda *a: calls.append(a) or linear(*a)
assert cpu_products.use_onednn(num_shapes=8) and cpu_products.use_onednn(num_shapes=9)
for old, new in zip(before, gradients(), strict=True):
    torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-7)
with torch.inference_mode():
    torch.mm(torch.ones(200, 200), torch.ones(200, 200))
assert len(calls) == 7, len(calls)
"""


def test_a_process_that_uses_it_does_so_forwards_and_backwards():
    done = subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr[-2000:]
