"""Python runs this at start where the directory is on PYTHONPATH. It stands in for what machines without a GPU lack:

- SGLang imports torchvision; the one on PyPI is built for CUDA and needs two operators at its import that only its CUDA
  library defines.
- SGLang keeps the experts of tokens in pinned memory, which needs a GPU's allocator: here in plain memory."""

import importlib.abc
import importlib.util
import sys
from typing import Any


class _DefineOperators(importlib.abc.MetaPathFinder):
    library: Any = None

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        self.library = _KEPT["torchvision"] = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class _PlainMemory(importlib.abc.MetaPathFinder):
    """Replaces the allocators of the module that keeps experts."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "sglang.srt.state_capturer.base":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_replace(module: Any) -> None:
            import torch

            execute(module)
            module.ALLOC_MEMORY_FUNCS = {"cpu": lambda dims, dtype, **_: torch.zeros(dims, dtype=dtype)}

        spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


_KEPT: dict[str, Any] = {}
sys.meta_path[:0] = [_DefineOperators(), _PlainMemory()]
