"""Loads new weights into a served vLLM model by vLLM's layer-wise reload, and closes the gaps of that reload.

vLLM gathers the tensors of a layer, loads them into fresh memory, processes them (quantisation, packing) and copies the
result over the old tensors, so that CUDA graphs stay valid. It holds references to the tensors until a layer is
complete.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import wraps
from itertools import chain
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.platforms import current_platform

from asyncrl.config.model import ModelConfig
from asyncrl.errors import WeightTransferError, explain
from asyncrl.inference.shared.weight_update import PublishedNames, load_named
from asyncrl.inference.vllm.filled_layers import FilledLayers
from asyncrl.weights.encodings.decoder import Decoder

_DO = "publish all of named_weights()"
_OTHER_ENGINE = "serve this model with another engine (rollout.engine)"


class Reload:
    """A `WeightLoader`. Without a `start`, `finish` and `abandon` do nothing."""

    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        self._model = model
        self._model_config = model_config
        self._reloaded: torch.nn.Module | None = None
        """The model or layers that are being reloaded."""
        self._kernels: list[tuple[Any, Any]] = []
        self.filled = FilledLayers(model)
        self._in_place = {layer: path for path, layer in model.named_modules() if computes_as_stored(layer)}
        """Layers whose loaders write into the tensors that they compute with: the reload's detour costs more than the
        copies where a layer has hundreds of tensors."""
        for layer, path in self._in_place.items():
            self.filled.watch(path, layer)
        trust = model_config.trust_remote_code
        named = ModelConfig(path=model_config.model, revision=model_config.revision, trust_remote_code=trust)
        self.names = PublishedNames(named)
        self.check = self.names.check

    @property
    def computes_together(self) -> bool:
        """Quantisation scales are computed over all shards of a layer."""
        return self.filled.quantises and get_tensor_model_parallel_world_size() > 1

    def start(self, names: Collection[str] | None) -> None:
        """`names`: the tensors to expect, whole layers only; None: all of the model.

        Raises WeightTransferError: the model cannot take published weights."""
        self.filled.require_loadable()
        self._reloaded = self._model if names is None else self._layers_of(names)
        if self._in_place:
            self._reloaded = _Layers(layer for layer in self._reloaded.modules() if layer not in self._in_place)
        self._let_experts_be_packed(self._reloaded)
        _name_loaders(self._reloaded)
        initialize_layerwise_reload(self._reloaded)
        for path, layer in self._model.named_modules():
            if get_layerwise_info(layer).can_load():
                self.filled.watch(path, layer)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], names: Collection[str] | None) -> None:
        """Consumes all of `tensors`; `names` as in `start`.

        Raises WeightTransferError naming a missing or refused tensor, and the errors of `tensors`.
        """
        published = load_named(self._model, self.filled.noted(tensors), "vLLM")[0]
        self.names.require(published, names)
        self._require_whole()
        untouched, ignored = self._untouched(), self.filled.ignored
        if ignored and untouched:
            self._load_in_place(ignored, untouched)
        elif names is None and untouched and not self.names.known:
            found, do = f"nothing came for {len(untouched)} layers, the first is {next(iter(untouched))}", _DO
            raise WeightTransferError(explain("all tensors of the model", found, do))
        elif self.names.known and (unknown := self.filled.of_no_layer()):
            raise WeightTransferError(explain("load a publish", f"vLLM ignores {unknown}", _OTHER_ENGINE))
        self.filled.ignored = {}

    def abandon(self) -> None:
        """Restores the old tensors of every incomplete layer, but of experts in place. The model is then complete,
        although of mixed versions, and the next reload can start."""
        for layer in () if self._reloaded is None else self._reloaded.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        self.finish()

    def _layers_of(self, names: Collection[str]) -> torch.nn.Module:
        """The layers that these tensors fill and layers tied to them, in the model's order, which `repack_tied`
        needs."""
        filled = map(self._model.get_submodule, self.filled.layers_of(names))
        parameters = {id(parameter) for layer in filled for parameter in layer.parameters(recurse=False)}
        return torch.nn.ModuleList(
            module
            for module in self._model.modules()
            if any(id(parameter) in parameters for parameter in module.parameters(recurse=False))
        )

    def _untouched(self) -> dict[str, torch.nn.Module]:
        """The layers with parameters of their own that got nothing, by path."""
        reached, found = set[int](), dict[str, torch.nn.Module]()
        for path, layer in self._model.named_modules():
            info, old = get_layerwise_info(layer), _old_parameters(layer).values()
            is_due = path not in self.filled.taken if layer in self._in_place else info.can_load()
            if not is_due or info.load_numel:
                reached.update(map(id, old))
            elif old and not is_deferred_attention_layer(layer):
                found[path] = layer
        return {p: f for p, f in found.items() if not reached.issuperset(map(id, _old_parameters(f).values()))}

    def _load_in_place(self, tensors: Mapping[str, torch.Tensor], layers: Mapping[str, torch.nn.Module]) -> None:
        """For tensors that vLLM's model copies by itself (gpt-oss: experts, sinks), which the reload's loaders do not
        see: the layers that got nothing get memory, and are processed and copied over the old tensors as the reload
        does it.

        Raises WeightTransferError: a part of such a layer did not come."""
        if lost := [path for path, layer in layers.items() if layer in self._in_place]:
            raise WeightTransferError(explain("load a publish", f"nothing came for {lost[0]}", _OTHER_ENGINE))
        for layer in layers.values():
            materialize_layer(layer, get_layerwise_info(layer))
            for parameter in layer.parameters(recurse=False):
                parameter.data.fill_(torch.nan)
        load_named(self._model, tensors.items(), "vLLM")
        empty = [
            f"{path}.{name}"
            for path, layer in layers.items()
            for name, parameter in layer.named_parameters(recurse=False)
            if parameter.isnan().all()
        ]
        if empty:
            found = f"vLLM ignores some of {', '.join(list(tensors)[:5])}; {', '.join(empty[:3])} stays as it was"
            raise WeightTransferError(explain("load a publish", found, _OTHER_ENGINE))
        for layer in layers.values():
            self._process(layer)

    def _process(self, layer: torch.nn.Module) -> None:
        """Of a layer that was loaded in place; `finish` puts the old tensors back, with the new values."""
        info = get_layerwise_info(layer)
        for parameter in layer.parameters(recurse=False):
            parameter.data.nan_to_num_(0.0)  # padding
        if isinstance(method := getattr(layer, "quant_method", None), QuantizeMethodBase):
            method.process_weights_after_loading(layer)
        for name, old in _old_parameters(layer).items():
            old.data.copy_(getattr(layer, name))
        info.load_numel_total = 0

    def _require_whole(self) -> None:
        """Raises WeightTransferError: the model skipped a part of a layer; vLLM's reload would use uninitialized memory
        for it."""
        assert self._reloaded is not None, "load before start"
        for layer in self._reloaded.modules():
            info = get_layerwise_info(layer)
            if not (isinstance(layer, LinearBase) and isinstance(layer.quant_method, UnquantizedLinearMethod)):
                continue  # other layers may be padded
            if info.load_numel_total is not None and 0 < info.load_numel < info.load_numel_total:
                found = f"{info.load_numel_total - info.load_numel} of its entries did not come"
                raise WeightTransferError(explain(f"the weights of {layer}", found, _DO))

    def finish(self) -> None:
        reloaded, self._reloaded = self._reloaded, None
        if reloaded is None:
            return
        finalize_layerwise_reload(reloaded, self._model_config)
        for method, kernel in self._kernels:
            if method.moe_kernel is None:  # the layer kept its old tensors
                method.moe_kernel = kernel
        repack_tied(reloaded)

    def _let_experts_be_packed(self, reloaded: torch.nn.Module) -> None:
        """On CPU vLLM packs expert weights only when it builds their kernel, and would treat reloaded weights as
        packed. Removing the kernel forces a rebuild, which packs them."""
        self._kernels = []
        for module in reloaded.modules() if current_platform.is_cpu() else ():
            method = getattr(module, "quant_method", None)
            if (kernel := getattr(method, "moe_kernel", None)) is not None:
                self._kernels.append((method, kernel))
                method.moe_kernel = None  # type: ignore[union-attr]


def _name_loaders(reloaded: torch.nn.Module) -> None:
    """vLLM's reload tells its own loaders by their name, which a `partial` (the norms of MiniMax-M2) does not have."""
    for layer in reloaded.modules():
        for tensor in chain.from_iterable(kind.values() for kind in get_layerwise_info(layer).restore_metadata):
            loader = getattr(tensor, "weight_loader", None)
            if loader is not None and not hasattr(loader, "__name__"):
                tensor.weight_loader = _named(loader)  # type: ignore[attr-defined]


def _named(loader: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(loader)
    def load(*args: Any, **kwargs: Any) -> Any:
        return loader(*args, **kwargs)

    return load


def _old_parameters(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that a layer computes with, also while it is being reloaded."""
    info = get_layerwise_info(layer)
    tensors = info.kernel_tensors if info.can_load() else None
    return dict(layer.named_parameters(recurse=False)) if tensors is None else tensors[0]


def computes_as_stored(layer: torch.nn.Module) -> bool:
    """Whether the layer computes with its experts as a checkpoint has them: Triton's kernels on NVIDIA's GPUs, which
    vLLM takes on Hopper."""
    backend = getattr(getattr(layer, "quant_method", None), "unquantized_backend", None)
    return current_platform.is_cuda() and backend is UnquantizedMoeBackend.TRITON


class _Layers(torch.nn.Module):
    """These layers alone, for vLLM's reload, which asks a model for its modules."""

    def __init__(self, layers: Iterable[torch.nn.Module]) -> None:
        super().__init__()
        self._layers = tuple(layers)

    def modules(self, remove_duplicate: bool = True) -> Iterator[torch.nn.Module]:
        return iter(self._layers)


def reload_of(model: torch.nn.Module, config: Any) -> tuple[Reload, Decoder]:
    """The loader of publishes into a served model, and their decoder. `config`: vLLM's of the model."""
    reload = Reload(model, config)
    return reload, Decoder(
        config.model,
        config.revision,
        config.dtype,
        publishes=reload.names.knows,
        loaded_together=reload.filled.loaded_together,
    )


def repack_tied(reloaded: torch.nn.Module) -> None:
    """On CPU a linear layer computes with a packed copy of its weight. The reload skips a layer whose weight belongs to
    an earlier layer, such as an output layer tied to the embeddings, so its packed copy would be outdated. Reuses the
    earlier layer's packed copy if it has one of the same kind, else packs again."""
    owners: dict[int, Any] = {}
    for module in reloaded.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor):
            continue
        owner = owners.setdefault(id(weight), module)
        if owner is module or not hasattr(module, "cpu_linear"):
            continue
        method: Any = module.quant_method
        if hasattr(owner, "cpu_linear") and type(owner.quant_method) is type(method):
            module.cpu_linear = owner.cpu_linear
        else:
            method.process_weights_after_loading(module)
