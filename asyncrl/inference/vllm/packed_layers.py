"""Loads new weights into layers that compute with a packed copy of their weight, as vLLM's do on a CPU.

vLLM's own reload takes new memory for each weight and for each packed copy, and clearing that memory takes longer than
all else (a copy into new memory 1.5 GB/s, into memory in use 12). Here a weight is gathered in memory that is kept, and
the packed copy is released before the next one is made, in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import Full, Queue
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import restore_layer_refs, to_meta_tensor
from vllm.platforms import current_platform

from asyncrl.errors import WeightTransferError, explain
from asyncrl.inference.shared.kept_memory import KeptMemory, keep_freed_memory

_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
_AHEAD = 2
"""So many complete weights wait to be packed."""
_LOOK_S = 1.0
"""Seconds between two looks of the loading thread whether anybody still packs."""


@dataclass(slots=True, eq=False)
class _Filling:
    """A layer whose weight has begun to come."""

    layer: Any
    served: torch.nn.Parameter
    """What `layer.weight` is while the layer computes: empty, where the packed copy is all that it needs."""
    left: int
    """Entries of the weight that have not come."""
    weight: torch.nn.Parameter | None = None


class PackedLayers:
    """The layers of one model that this module loads: not quantised, on one rank, with a packed copy.

    Between `open` and `close` the loaders of their weights fill kept memory, within `load`, which packs each weight
    once all of it has come. `close` leaves every layer with its last whole weight.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._layers = _packed_layers(model) if get_tensor_model_parallel_world_size() == 1 else []
        self._ids = frozenset(map(id, self._layers))
        self._filling: list[_Filling] = []
        self._wrapped: list[tuple[Any, Callable[..., Any]]] = []
        """Weights that are filled where they are served, and their own loaders."""
        self._complete: Queue[Callable[[], None] | None] = Queue(_AHEAD)
        """What is to be packed; None: nothing more will come."""
        self._packs = False
        """Somebody takes from the queue."""
        self.memory = KeptMemory()
        if self._layers:
            keep_freed_memory()

    def open(self, reloaded: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
        """Returns those of `reloaded` that something else has to load."""
        self.close()  # a publish that never ended
        modules = list(reloaded)
        chosen = self._ids.intersection(map(id, modules))
        begun: set[int] = set()
        for layer in self._layers:
            if id(layer) in chosen and id(layer.weight) not in begun:  # a tied layer has the weight of an earlier one
                begun.add(id(layer.weight))
                (self._open_linear if isinstance(layer, LinearBase) else self._open_embedding)(layer)
        return [module for module in modules if id(module) not in chosen]

    @property
    def is_empty(self) -> bool:
        return not self._layers

    def loads(self, layer: torch.nn.Module) -> bool:
        """A tensor of this layer may lie in memory of `memory`."""
        return id(layer) in self._ids

    def load(self, work: Callable[[], Any]) -> Any:
        """Calls `work`, which loads tensors, and packs what is complete meanwhile. This thread packs and another one
        loads: the packed copies of the thread that first made them go where the last ones were. Raises what either
        raises."""
        if not (self._filling or self._wrapped):
            return work()
        self._complete, self._packs = Queue(_AHEAD), True
        failure: Exception | None = None
        with ThreadPoolExecutor(1, "weight-loader") as loader:
            try:
                loaded = loader.submit(self._load, work)
                while (pack := self._complete.get()) is not None:  # the deadline is that of the tensors
                    try:
                        if failure is None:
                            pack()
                    except Exception as error:  # noqa: BLE001 - raised once the other thread has ended
                        failure = error
            finally:
                self._packs = False
            returned = loaded.result()
        if failure is not None:
            raise failure
        return returned

    def require_whole(self, *, every: bool = False) -> None:
        """Raises WeightTransferError: of a weight only a part has come; with `every` also, nothing."""
        for filling in self._filling:
            if every or filling.weight is not None:
                asked, found = f"the weight of {filling.layer}", f"{filling.left} of its entries did not come"
                raise WeightTransferError(explain(asked, found, "publish all of named_weights()"))

    def _load(self, work: Callable[[], Any]) -> Any:
        """In the loading thread."""
        try:
            with torch.no_grad():
                return work()
        finally:
            self._put(None)

    def _put(self, pack: Callable[[], None] | None) -> None:
        while self._packs:
            try:
                return self._complete.put(pack, timeout=_LOOK_S)
            except Full:
                continue

    def close(self) -> None:
        """Whatever has not come is as before."""
        for filling in self._filling:
            filling.layer.weight = filling.served
        for weight, loader in self._wrapped:
            weight.weight_loader = loader
        self._filling, self._wrapped = [], []
        self.memory.settle()
        self.memory.forget_lent()

    def _open_linear(self, layer: Any) -> None:
        described = get_layerwise_info(layer).restore_metadata[0]["weight"]
        loaded: Any = restore_layer_refs(to_meta_tensor(described), layer)
        filling = _Filling(layer, layer.weight, loaded.numel())
        load = loaded.weight_loader

        def fill(expected: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if filling.left <= 0:
                return None
            if filling.weight is None:
                filling.weight = backed(expected, self.memory.take(expected.nbytes))
            returned = load(filling.weight, tensor, *args, **kwargs)
            filling.left -= tensor.numel()
            self.memory.used(tensor)
            if filling.left <= 0:
                self._put(partial(self._pack_linear, filling))
            return returned

        loaded.weight_loader = fill
        layer.weight = loaded
        self._filling.append(filling)

    def _open_embedding(self, layer: Any) -> None:
        weight, load = layer.weight, layer.weight.weight_loader

        def fill(expected: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            returned = load(expected, tensor, *args, **kwargs)
            self.memory.used(tensor)
            self._put(partial(self._pack, [other for other in self._layers if other.weight is weight]))
            return returned

        weight.weight_loader = fill
        self._wrapped.append((weight, load))

    def _pack_linear(self, filling: _Filling) -> None:
        layer, weight = filling.layer, filling.weight
        assert weight is not None, "a part of it has come"
        layer.weight = weight
        self._pack([layer])
        if layer.weight is weight:  # it computes with the weight itself
            filling.served = weight
        else:
            layer.weight = filling.served
            self.memory.used(weight.data)
        self._filling.remove(filling)

    def _pack(self, layers: list[Any]) -> None:
        """Layers of one weight. vLLM packs it anew, and removes it where nothing else needs it."""
        for layer in layers:
            layer.cpu_linear = None  # releases the packed copy
        first, *tied = layers
        first.quant_method.process_weights_after_loading(first)
        for layer in tied:
            layer.cpu_linear = first.cpu_linear


def _packed_layers(model: torch.nn.Module) -> list[Any]:
    """In the model's order. Without layers whose weight is another kind of layer's, too."""
    layers, others = [], set()
    for module in model.modules():
        if _is_packed(module):
            layers.append(module)
        else:
            others |= set(map(id, module.parameters(recurse=False)))
    return [layer for layer in layers if id(layer.weight) not in others]


def _is_packed(layer: Any) -> bool:
    """It is alone in how it is loaded and computed: no scales, no shards, no use of its weight elsewhere."""
    if not isinstance(layer, LinearBase | VocabParallelEmbedding) or type(layer.quant_method) not in _METHODS:
        return False
    skipped = getattr(layer, "_cpu_skip_gemm_dispatch", False) or current_platform.is_zen_cpu()
    return hasattr(layer, "cpu_linear") and not skipped and "weight" in get_layerwise_info(layer).restore_metadata[0]


def backed(loaded: Any, memory: torch.Tensor) -> torch.nn.Parameter:
    """A parameter as vLLM describes it with `loaded`, maybe a tensor without memory, in this memory."""
    weight: Any = memory.view(loaded.dtype).view(loaded.shape)
    weight.__class__ = loaded.__class__
    weight.__dict__ = loaded.__dict__.copy()
    return weight
