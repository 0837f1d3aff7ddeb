"""float32 matrix products on AMD's processors.

torch gives them to MKL, which takes its AVX2 code there, and gets 100 GFLOP/s of a core that can do 250. oneDNN, which
torch brings along for 16 bits, takes AVX-512 code on every processor that has it.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch

_WORTH_IT = 1 << 21
"""Multiplications of a product that takes longer than the way to oneDNN."""
_LONG_SUM = 2048
_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Environment variables of oneDNN and of torch's part around it. With their 1,024 shapes what is kept lies between the
results that were freed, and memory grows by hundreds of megabytes."""
_installed: list[torch.library.Library] = []


def use_onednn(num_shapes: int) -> None:
    """From now on oneDNN makes the float32 products of this process where MKL is slow. Idempotent.

    Args:
        num_shapes: see `replace_products`.
    """
    if mkl_is_slow():
        replace_products(num_shapes)


def mkl_is_slow(cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """On an AMD processor with AVX-512, where torch has both libraries."""
    try:
        is_amd = "AuthenticAMD" in cpu_info.read_text()
    except OSError:
        return False
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    has_both = has_both and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_both and is_amd and torch.backends.cpu.get_cpu_capability() == "AVX512"


def replace_products(num_shapes: int) -> None:
    """From now on oneDNN is behind `mm` and `addmm` on CPUs, those of linear layers, log-probabilities and backward
    passes; not behind batched products, those that are given their output, and what torch's compiler makes. Idempotent.

    Args:
        num_shapes: for how many shapes oneDNN's code is kept, at 0.6 MB each and 0.3 ms to make it again; it counts in
            the first call, and only before oneDNN was used.
    """
    if _installed:
        return
    for name in _CACHES:
        os.environ.setdefault(name, str(num_shapes))
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a kernel that replaces its own
        library.impl("mm", _mm, "CPU")
        library.impl("addmm", _addmm, "CPU")
    _installed.append(library)


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if not _suits(a, b):
        return torch.ops.aten.mm.out(a, b, out=a.new_empty(0))
    if a.shape[1] >= _LONG_SUM and a.shape[0] > b.shape[1] and a.stride(0) == 1:
        # A gradient of weights: faster the other way round. Collectives and views rely on mm's layout.
        return _linear(b.t(), a, None).t().contiguous()
    return _linear(a, b.t(), None)


def _addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    if beta == 1 and alpha == 1 and _suits(a, b) and bias.dtype == torch.float32 and bias.shape == b.shape[1:]:
        return _linear(a, b.t(), bias.contiguous())
    return torch.ops.aten.addmm.out(bias, a, b, beta=beta, alpha=alpha, out=a.new_empty(0))


def _suits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dim() == 2
        and b.dim() == 2
        and a.dtype == torch.float32
        and b.dtype == torch.float32
        and a.shape[1] == b.shape[0]
        and a.shape[0] * a.shape[1] * b.shape[1] >= _WORTH_IT
        and _is_dense(a)
        and _is_dense(b)
    )


def _is_dense(matrix: torch.Tensor) -> bool:
    """Its rows or its columns lie one behind the other without gaps: for others oneDNN has reference code alone, five
    hundred times slower."""
    return matrix.is_contiguous() or matrix.t().is_contiguous()


def _linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(inputs, weight, bias, "none", [], "")
