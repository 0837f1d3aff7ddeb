"""float32 matrix products on AMD's processors.

torch uses MKL, which selects AVX2 code on AMD and reaches 100 of a core's 250 GFLOP/s. oneDNN, which torch ships for
16-bit types, selects AVX-512 code on every processor that has it.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch

_WORTH_IT = 1 << 21
"""Smallest product (in multiplications) that is worth the overhead of calling oneDNN."""
_LONG_SUM = 2048
_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Cache sizes (in shapes) of oneDNN and of torch's wrapper. At the default of 1,024 the caches fragment the heap, which
grows by hundreds of MB."""
_installed: list[torch.library.Library] = []


def use_onednn(num_shapes: int) -> None:
    """Routes this process's float32 products to oneDNN if MKL is slow. Idempotent.

    Args:
        num_shapes: see `replace_products`.
    """
    if mkl_is_slow():
        replace_products(num_shapes)


def mkl_is_slow(cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """True on an AMD processor with AVX-512, if torch has both libraries."""
    try:
        is_amd = "AuthenticAMD" in cpu_info.read_text()
    except OSError:
        return False
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    has_both = has_both and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_both and is_amd and torch.backends.cpu.get_cpu_capability() == "AVX512"


def replace_products(num_shapes: int) -> None:
    """Replaces `mm` and `addmm` on CPUs, used by linear layers, log-probabilities and backward passes. Batched
    products, `out=` variants and compiled code are unchanged. Idempotent.

    Args:
        num_shapes: shapes whose oneDNN code is cached, 0.6 MB each; a miss costs 0.3 ms. Effective only in the first
            call, before any use of oneDNN.
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
        # `out=` reaches torch's own kernel: `mm` itself would come back here.
        return torch.ops.aten.mm.out(a, b, out=a.new_empty(0))
    if a.shape[1] >= _LONG_SUM and a.shape[0] > b.shape[1] and a.stride(0) == 1:
        # A weight gradient is faster transposed. `contiguous` restores mm's layout, which collectives and views rely
        # on.
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
    """Row-major or column-major without gaps. For other layouts oneDNN only has reference code, 500 times slower."""
    return matrix.is_contiguous() or matrix.t().is_contiguous()


def _linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(inputs, weight, bias, "none", [], "")
