"""Python runs this at start where the directory is on PYTHONPATH. SGLang imports torchvision; the one on PyPI is built
for CUDA and needs two operators at its import that only its CUDA library defines."""

import importlib.abc
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


_KEPT: dict[str, Any] = {}
sys.meta_path.insert(0, _DefineOperators())
