"""Which layers of a vLLM model the tensors of a publish fill, as vLLM's own loader does it, and what it ignores."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import wraps
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from asyncrl.errors import WeightTransferError, explain

_NUMBER = re.compile(r"\d+")
_QUANTIZATION = "vllm.model_executor.layers.quantization."
"""Where vLLM's methods of quantised layers are."""


class FilledLayers:
    """Tensor of a publish -> the layers that it filled when it was last loaded."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._filled: dict[str, set[str]] = {}
        self._loading: set[str] = set()
        """The layers of the tensor that is being loaded."""
        self.ignored: dict[str, torch.Tensor] = {}
        """The tensors that no loader took, of the last load."""
        self.taken: set[str] = set()
        """The layers that took some."""
        modules = dict(model.named_modules())
        self.quantises = any(map(_quantises_itself, modules.values()))
        """Whether vLLM itself quantises some layers."""
        fixed = ((prefix, _quantised_checkpoint(module)) for prefix, module in modules.items())
        self._fixed = next((f"{prefix} ({method})" for prefix, method in fixed if method), None)
        """A layer that cannot take published weights because its checkpoint is quantised; None: no such layer."""

    def require_loadable(self) -> None:
        """Raises WeightTransferError naming a layer that cannot take a trainer's weights."""
        if self._fixed is not None:
            do = "serve a model.path without quantisation, and let vLLM quantise it (rollout.vllm.quantization)"
            found = f"vLLM serves {self._fixed}, which takes weights that are quantised already"
            raise WeightTransferError(explain("a publish of the trainer's weights", found, do))

    def watch(self, path: str, layer: torch.nn.Module) -> None:
        """Notes from now on which tensors the loaders of `layer` take, until vLLM unwraps them."""
        for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
            if loader := getattr(tensor, "weight_loader", None):
                tensor.weight_loader = self._noting(path, loader)  # type: ignore[attr-defined]

    def noted(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """`tensors`, as the watched loaders take them."""
        self.ignored = {}
        self.taken = set()
        for name, tensor in tensors:
            self._loading = self._filled[name] = set()
            yield name, tensor
            self.taken |= self._loading
            if not self._loading:
                self.ignored[name] = tensor
        self._loading = set()

    def of_no_layer(self) -> str | None:
        """One of the `ignored` tensors, if no tensor that differs in numbers only was taken. Otherwise it is of an
        expert that another worker holds."""
        taken = {_NUMBER.sub("", name) for name, layers in self._filled.items() if layers}
        return next((name for name in self.ignored if _NUMBER.sub("", name) not in taken), None)

    def layers_of(self, names: Collection[str]) -> list[str]:
        """Paths of the layers that these tensors fill."""
        return sorted(set[str]().union(*(self._filled.get(name, ()) for name in names)))

    def loaded_together(self, names: Collection[str], every: Collection[str]) -> Collection[str]:
        """The tensors of `every` that fill the layers of `names`; all if one of `names` was never loaded."""
        if not all(self._filled.get(name) for name in names):
            return every
        layers = set(self.layers_of(names))
        return [name for name in every if not layers.isdisjoint(self._filled.get(name, ()))]

    def _noting(self, path: str, loader: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(loader)  # vLLM knows the loaders that it has to unwrap by their name
        def noting(*args: Any, **kwargs: Any) -> Any:
            self._loading.add(path)
            return loader(*args, **kwargs)

        return noting


def _quantises_itself(module: torch.nn.Module) -> bool:
    """Whether vLLM loads unquantised weights into the layer and then quantises them."""
    method = getattr(module, "quant_method", None)
    if isinstance(method, OnlineLinearBase):
        return method.requantization_source is None
    return isinstance(method, OnlineMoEMethodBase)


def _quantised_checkpoint(module: torch.nn.Module) -> str | None:
    """The quantisation method of a layer whose checkpoint is quantised; None for other layers."""
    method = getattr(module, "quant_method", None)
    if not isinstance(module, LinearBase | RoutedExperts | VocabParallelEmbedding) or _quantises_itself(module):
        return None
    kind = type(method)
    return kind.__name__ if kind.__module__.startswith(_QUANTIZATION) else None
