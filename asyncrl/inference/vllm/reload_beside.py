"""Loads new weights beside the model that vLLM serves on a CPU, and packs them there: what is left for a pause is to
exchange the packed copies, and the memory of the other weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, get_layerwise_info
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
from vllm.platforms import current_platform

from asyncrl.inference.shared.kept_memory import release_freed_memory
from asyncrl.inference.vllm.layerwise_reload import Reload
from asyncrl.inference.vllm.packed_layers import backed


class ReloadBeside(Reload):
    """A `LoaderBeside`: reloads twins of the served modules, which share all but their weights with them."""

    def __init__(self, served: torch.nn.Module, model_config: Any) -> None:
        """`served`: a model that `of` has found fit."""
        twins: dict[torch.nn.Module, Any] = {}
        super().__init__(_twin(served, twins, {}), model_config)
        self._pairs: list[tuple[Any, Any]] = list(twins.items())
        self._names: Collection[str] | None = None
        """The tensors of the last load; None: all of the model."""
        self._exchanged = self._has_leftovers = False
        """The first packed copies have been exchanged, and are not yet replaced."""

    @classmethod
    def of(cls, served: torch.nn.Module, model_config: Any) -> ReloadBeside | None:
        """None: the model computes with more than its weights and their packed copies, or not on one CPU."""
        if not current_platform.is_cpu():
            return None
        beside = cls(served, model_config)
        known = beside.expected.is_complete and not beside.expected.quantises
        return beside if known and all(beside._can_exchange(twin) for _, twin in beside._pairs) else None

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], names: Collection[str] | None) -> None:
        super().load(tensors, names)
        self._names = names
        if self._has_leftovers:
            self._has_leftovers = False
            release_freed_memory()  # the thread that made them has it, and this thread takes none of another's

    def exchange(self) -> None:
        """As `LoaderBeside.exchange`. The twins have what was served until now, in memory for the next load."""
        self._has_leftovers = not self._exchanged
        self._exchanged = True
        came = None if self._names is None else self._parameters(self.expected.layers_of(self._names))
        exchanged: set[int] = set()
        for served, twin in self._pairs:
            own = {id(parameter) for parameter in twin.parameters(recurse=False)}
            if not own or (came is not None and came.isdisjoint(own)):
                continue
            for name, parameter in served.named_parameters(recurse=False):
                if id(parameter) not in exchanged:  # a tied one has been
                    exchanged.add(id(parameter))
                    other = twin.get_parameter(name)
                    parameter.data, other.data = other.data, parameter.data
            if hasattr(served, "cpu_linear"):
                served.cpu_linear, twin.cpu_linear = twin.cpu_linear, served.cpu_linear

    def _open(self, modules: list[torch.nn.Module]) -> None:
        """They are loaded where they are: nothing computes with them."""

    def _parameters(self, layers: Collection[str]) -> set[int]:
        """The ids of the parameters of these layers of the twin."""
        return {id(p) for layer in layers for p in self._model.get_submodule(layer).parameters(recurse=False)}

    def _can_exchange(self, twin: Any) -> bool:
        if self._packed.loads(twin):
            return True
        parameters = list(twin.parameters(recurse=False))
        if isinstance(twin, VocabParallelEmbedding):
            return type(twin.quant_method) is UnquantizedEmbeddingMethod and not hasattr(twin, "cpu_linear")
        if hasattr(twin, "process_weights_after_loading"):
            return type(twin) is Attention and not parameters
        return not parameters or (not hasattr(twin, "quant_method") and all(p.ndim == 1 for p in parameters))


def _twin(module: torch.nn.Module, twins: dict[torch.nn.Module, Any], memory: dict[int, torch.Tensor]) -> Any:
    """The module with memory of its own for its parameters, and so for what is inside of it."""
    if module in twins:
        return twins[module]
    twin: Any = object.__new__(type(module))
    twins[module] = twin
    twin.__dict__.update(module.__dict__)
    own = {name: None if p is None else _own(p, memory) for name, p in module._parameters.items()}
    inner = {name: None if m is None else _twin(m, twins, memory) for name, m in module._modules.items()}
    twin.__dict__.update(_parameters=own, _buffers=module._buffers.copy(), _modules=inner)
    if hasattr(module, "cpu_linear"):
        twin.cpu_linear = None
    info = get_layerwise_info(module)
    LAYERWISE_INFO[twin] = LayerReloadingInfo(info.restore_metadata, info.restore_device)
    return twin


def _own(parameter: torch.nn.Parameter, memory: dict[int, torch.Tensor]) -> torch.Tensor:
    """A parameter like this one; of one that is tied the same for all."""
    if id(parameter) not in memory:
        memory[id(parameter)] = backed(parameter, torch.empty(parameter.nbytes, dtype=torch.uint8))
    return memory[id(parameter)]
