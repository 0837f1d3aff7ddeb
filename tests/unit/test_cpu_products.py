"""Products of float32 matrices that oneDNN makes: the same as torch's, whatever lies how in memory."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.kernels import cpu_products

pytestmark = pytest.mark.usefixtures("one_thread")

MATRICES = {
    "rows": lambda m, n: torch.randn(m, n),
    "columns": lambda m, n: torch.randn(n, m).t(),
    "part of rows": lambda m, n: torch.randn(m, n + 3)[:, 1 : n + 1],
    "part of columns": lambda m, n: torch.randn(n, m + 3).t()[2 : m + 2],
    "every second": lambda m, n: torch.randn(m, 2 * n)[:, ::2],
    "one row for all": lambda m, n: torch.randn(1, n).expand(m, n),
    "one number for all": lambda m, n: torch.randn(1, 1).expand(m, n),
}
BIASES = {
    "one each": lambda m, n: torch.randn(n),
    "every second": lambda m, n: torch.randn(2 * n)[::2],
    "one number for all": lambda m, n: torch.randn(1).expand(n),
    "one": lambda m, n: torch.randn(1),
    "a matrix": lambda m, n: torch.randn(m, n),
}
LARGE = st.integers(130, 190)
"""More than two million multiplications: oneDNN gets them."""


def near(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=2e-3)
    assert found.is_contiguous(), "as torch's: collectives and views rely on it"


@settings(max_examples=60, deadline=None)
@given(
    m=LARGE,
    k=st.one_of(LARGE, st.just(2100)),
    n=LARGE,
    layouts=st.tuples(st.sampled_from(sorted(MATRICES)), st.sampled_from(sorted(MATRICES))),
    of_bias=st.sampled_from(sorted(BIASES)),
    seed=st.integers(0, 99),
)
def test_products_are_those_of_the_numbers(m, k, n, layouts, of_bias, seed):
    torch.manual_seed(seed)
    a, b, bias = MATRICES[layouts[0]](m, k), MATRICES[layouts[1]](k, n), BIASES[of_bias](m, n)
    expected = a.double() @ b.double()
    near(cpu_products._mm(a, b), expected)
    near(cpu_products._addmm(bias, a, b), bias.double() + expected)
    near(cpu_products._addmm(bias, a, b, beta=2, alpha=3), 2 * bias.double() + 3 * expected)


@pytest.mark.parametrize("layout", ["rows", "columns", "one row for all"])
def test_a_single_row_or_column_has_strides_that_mean_nothing(layout):
    wide, row = torch.randn(2100, 1100), MATRICES[layout](1, 2100)
    near(cpu_products._mm(row, wide), row.double() @ wide.double())
    near(cpu_products._mm(wide.t(), row.t()), wide.t().double() @ row.t().double())


def test_matrices_with_gaps_are_torchs_affair():
    """oneDNN's code for them is five hundred times slower."""
    dense = {"rows", "columns"}
    taken = {
        (left, right)
        for left, one in MATRICES.items()
        for right, other in MATRICES.items()
        if cpu_products._suits(one(150, 160), other(160, 170))
    }
    assert taken == {(left, right) for left in dense for right in dense}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.float32])
@pytest.mark.parametrize("rows", [0, 4])
def test_other_numbers_and_nothing_at_all_are_torchs_affair(rows, dtype):
    a, b = torch.ones(rows, 3).to(dtype), torch.ones(3, 5).to(dtype)
    found = cpu_products._mm(a, b)
    assert (found.shape, found.dtype) == ((rows, 5), dtype)
    assert torch.equal(found, torch.full((rows, 5), 3).to(dtype))


ONES = torch.ones(200, 200)


@pytest.mark.parametrize(
    ("name", "given_tensors"),
    [
        ("mm", (ONES, torch.ones(201, 200))),
        ("mm", (ONES, ONES.double())),
        ("mm", (ONES, torch.ones(()))),
        ("mm", (torch.ones(200), ONES)),
        ("mm", (ONES, torch.ones(2, 200, 200))),
        ("addmm", (torch.ones(201), ONES, ONES)),
        ("addmm", (torch.ones(200), torch.ones(200), ONES)),
    ],
)
def test_what_does_not_fit_has_torchs_own_error(name, given_tensors):
    ours = {"mm": cpu_products._mm, "addmm": cpu_products._addmm}[name]
    with pytest.raises(RuntimeError) as expected:
        getattr(torch, name)(*given_tensors)
    with pytest.raises(RuntimeError) as found:
        ours(*given_tensors)
    assert str(found.value) == str(expected.value)


def test_only_an_amd_processor_with_avx512_gets_it(monkeypatch, tmp_path):
    amd, intel = tmp_path / "amd", tmp_path / "intel"
    amd.write_text("vendor_id\t: AuthenticAMD\n")
    intel.write_text("vendor_id\t: GenuineIntel\n")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert [cpu_products.mkl_is_slow(path) for path in (amd, intel, tmp_path / "none")] == [True, False, False]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not cpu_products.mkl_is_slow(amd)


PROGRAM = """
import torch
torch.set_num_threads(1)
from asyncrl.kernels.cpu_products import replace_products

def gradients():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(96, 200), torch.nn.SiLU(), torch.nn.Linear(200, 64, bias=False))
    x = torch.randn(3, 900, 96, requires_grad=True)
    model(x).square().mean().backward()
    return [x.grad, *(p.grad for p in model.parameters())]

before = gradients()
replace_products(num_shapes=8)
replace_products(num_shapes=9)
with torch.profiler.profile() as profile:
    after = gradients()
    with torch.inference_mode():
        torch.mm(torch.ones(200, 200), torch.ones(200, 200))
for old, new in zip(before, after, strict=True):
    torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-7)
made = [event for event in profile.events() if event.name == "mkldnn::_linear_pointwise"]
assert len(made) == 7, len(made)
"""


def test_a_process_that_uses_it_does_so_forwards_and_backwards():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr[-2000:]
    assert "Warning" not in done.stderr
