"""Loads new weights beside the model that vLLM serves on a CPU, and packs them there: what is left for a pause is to
exchange the packed copies, and the memory of the other weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, get_layerwise_info
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
from vllm.platforms import current_platform

from asyncrl.errors import WeightTransferError, explain
from asyncrl.inference.shared.kept_memory import release_freed_memory
from asyncrl.inference.vllm.layerwise_reload import Reload
from asyncrl.inference.vllm.packed_layers import backed


class ReloadBeside(Reload):
    """A `LoaderBeside`: reloads twins of the served modules, which share all but their weights with them."""

    def __init__(self, served: torch.nn.Module, model_config: Any) -> None:
        """`served`: a model that `fits`."""
        twins: dict[torch.nn.Module, Any] = {}
        super().__init__(_twin(served, twins, {}), model_config)
        self._pairs: list[tuple[Any, Any]] = list(twins.items())
        self._names: Collection[str] | None = None
        """The tensors of the last load; None: all of the model."""

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], names: Collection[str] | None) -> None:
        super().load(tensors, names)
        self._names = names

    def finish(self) -> None:
        super().finish()
        if self._names is None:
            release_freed_memory()  # several threads have freed what others made, and take none of it

    def exchange(self) -> None:
        """As `LoaderBeside.exchange`. The twins have what was served until now, in memory for the next load."""
        came = None if self._names is None else self._of_layers(self._names)
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

    def _require(self, published: set[str], loaded: set[str] | None, names: Collection[str] | None) -> None:
        """A `Reload` leaves what the model passes over as it is; here it would be older, or nothing."""
        super()._require(published, loaded, names)
        self._packed.require_whole(every=True)
        if loaded is None:
            return
        came = None if names is None else self._of_layers(names)
        for name, parameter in self._model.named_parameters():
            layer, _, kind = name.rpartition(".")
            is_packed = kind == "weight" and isinstance(self._model.get_submodule(layer), LinearBase)
            if name not in loaded and not is_packed and (came is None or id(parameter) in came):
                do = "report this: vLLM passes over a tensor of this model"
                raise WeightTransferError(explain(f"load {name!r}", "vLLM took nothing of it", do))

    def _of_layers(self, names: Collection[str]) -> set[int]:
        """The ids of all parameters of the twins that these tensors of a checkpoint fill."""
        layers = self.expected.layers_of(names)
        return {id(p) for layer in layers for p in self._model.get_submodule(layer).parameters(recurse=False)}


def fits(served: torch.nn.Module, reload: Reload) -> bool:
    """False: the model computes with more than its weights and their packed copies, or not on one CPU. `reload`: its
    own."""
    if not current_platform.is_cpu() or not reload.expected.is_complete or reload.expected.quantises:
        return False
    return all(reload.packs(module) or _is_plain(module) for module in served.modules())


def _is_plain(module: Any) -> bool:
    """What it computes with are its parameters as they are loaded, and nothing that is made of them."""
    if isinstance(module, VocabParallelEmbedding):
        return type(module.quant_method) is UnquantizedEmbeddingMethod and not hasattr(module, "cpu_linear")
    parameters = list(module.parameters(recurse=False))
    if type(module) is Attention:  # what else it computes with may be made of parameters of others
        return not parameters and not any(isinstance(value, torch.Tensor) for value in vars(module.impl).values())
    if hasattr(module, "process_weights_after_loading") or hasattr(module, "quant_method"):
        return not parameters and not hasattr(module, "process_weights_after_loading")
    return all(parameter.ndim == 1 for parameter in parameters)


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
