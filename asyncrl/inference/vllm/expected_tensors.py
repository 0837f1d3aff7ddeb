"""The tensors that a vLLM model expects from a publish: names and full shapes, before stacking and sharding."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from asyncrl.errors import WeightTransferError, explain
from asyncrl.types import TensorSpec

_DO = "train and serve the same model.path"
_QUANTIZATION = "vllm.model_executor.layers.quantization."
"""Where vLLM's methods of quantised layers are."""


class ExpectedTensors:
    """The expected tensors of one model. Known for dense models and mixtures of experts, even if vLLM quantises their
    layers. For other layouts (duplicated experts) vLLM's loader must find errors, and only a missing whole parameter is
    detected here."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._shapes: dict[str, tuple[int, ...] | None] = {}
        self._layers: dict[str, str] = {}
        """Tensor -> path of the layer that it fills, partly or entirely."""
        self._unknown: set[str] = set()
        """vLLM's parameters with unknown checkpoint tensors."""
        packed = getattr(model, "packed_modules_mapping", None) or {}
        self._fixed: str | None = None
        """A layer that cannot take published weights because its checkpoint is quantised; None: no such layer."""
        self.quantises = False
        """Whether vLLM itself quantises some layers."""
        # Phase 1: the tensors of every layer, by layer type.
        for prefix, module in model.named_modules():
            self.quantises = self.quantises or _quantises_itself(module)
            if self._fixed is None and (method := _quantised_checkpoint(module)) is not None:
                self._fixed = f"{prefix} ({method})"
            for name, parameter in _loaded_parameters(prefix, module):
                parts = dict(_parts(name, prefix, module, parameter, packed))
                if parts:
                    self._shapes |= parts
                    self._layers |= dict.fromkeys(parts, prefix)
                else:
                    self._unknown.add(name)
        # Phase 2: tied parameters. Their first name is required, the others are optional.
        first = {id(p): name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
        self._aliases = {
            name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if first[id(p)] != name
        }
        for alias in self._aliases:
            self._shapes.pop(alias, None)
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._rename = (lambda name: name) if mapper is None else mapper.get_rename_mapper().map_name

    def check(self, spec: TensorSpec) -> None:
        """Raises WeightTransferError: no such tensor in the model, or a different shape."""
        name = self._renamed(spec.name)
        name = self._aliases.get(name, name)
        asked = f"tensor {spec.name!r} {spec.shape} {spec.dtype}"
        if name not in self._shapes:
            if self._unknown:
                return
            raise WeightTransferError(explain(asked, "the model has no tensor of that name", _DO))
        shape = self._shapes[name]
        # A convolution is [N, 1, K] in the files and [N, K] in vLLM, whose loader knows.
        if shape is not None and [n for n in shape if n != 1] != [n for n in spec.shape if n != 1]:
            raise WeightTransferError(explain(asked, f"the model's has shape {shape}", _DO))

    def require_loadable(self) -> None:
        """Raises WeightTransferError naming a layer that cannot take a trainer's weights."""
        if self._fixed is not None:
            do = "serve a model.path without quantisation, and let vLLM quantise it (rollout.vllm.quantization)"
            found = f"vLLM serves {self._fixed}, which takes weights that are quantised already"
            raise WeightTransferError(explain("a publish of the trainer's weights", found, do))

    def layers_of(self, names: Collection[str]) -> list[str]:
        """Paths of the layers that these checkpoint tensors fill; unknown tensors are skipped."""
        return sorted({layer for name in names if (layer := self._layers.get(self._renamed(name))) is not None})

    def loaded_together(self, names: Collection[str], every: Collection[str]) -> Collection[str]:
        """The tensors of `every` that fill the layers of `names`; all if one of `names` is unknown."""
        layers = {self._layers.get(self._renamed(name)) for name in names}
        return every if None in layers else [n for n in every if self._layers.get(self._renamed(n)) in layers]

    def require_all(self, published: set[str], loaded: set[str] | None, wanted: Collection[str] | None = None) -> None:
        """Raises WeightTransferError naming a tensor that is missing.

        Args:
            published: names of the received tensors.
            loaded: vLLM's parameters returned by `load_weights`, or None.
            wanted: the required tensors; None: all of the model.
        """
        renamed = {self._renamed(name) for name in published}
        layers = None if wanted is None else set(self.layers_of(wanted))
        asked = [name for name in self._shapes if layers is None or self._layers[name] in layers]
        missing = [name for name in asked if name not in renamed]
        if loaded is not None:
            missing += sorted(self._unknown - loaded)
        if missing:
            found = f"{len(missing)} did not come, the first is {missing[0]!r}"
            raise WeightTransferError(explain("all tensors of the model", found, "publish all of named_weights()"))

    def _renamed(self, name: str) -> str:
        """vLLM's name of a checkpoint tensor."""
        return self._rename(name) or name


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


def _loaded_parameters(prefix: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The layer's own parameters as a checkpoint fills them, before quantisation replaces them and adds scales."""
    now = dict(module.named_parameters(recurse=False))
    if _quantises_itself(module):
        loaded = get_layerwise_info(module).restore_metadata[0]
        now = loaded | {name: now[name] for name in ("bias",) if name in now}  # vLLM keeps no record of biases
    for name, parameter in now.items():
        yield f"{prefix}.{name}" if prefix else name, parameter


def _parts(
    name: str, prefix: str, module: torch.nn.Module, parameter: torch.Tensor, packed: dict[str, list[str]]
) -> Iterator[tuple[str, tuple[int, ...] | None]]:
    """The checkpoint tensors that fill one parameter, with full shapes (None: unknown); empty if the layout is
    unknown."""
    kind = name.rsplit(".", 1)[-1]
    if isinstance(module, LinearBase):
        if not (isinstance(module.quant_method, UnquantizedLinearMethod) or _quantises_itself(module)):
            return
        if kind not in ("weight", "bias"):
            return
        path, _, last = prefix.rpartition(".")
        names, sizes = packed.get(last), _part_sizes(module)
        if names is None:
            if sizes is None:
                yield name, _linear_shape(kind, module.output_size, module.input_size)
        elif sizes is not None and len(sizes) == len(names):
            for part, size in zip(names, sizes, strict=True):
                yield f"{path}.{part}.{kind}", _linear_shape(kind, size, module.input_size)
    elif isinstance(module, RoutedExperts):
        yield from _expert_parts(kind, prefix, module)
    elif isinstance(module, VocabParallelEmbedding):
        if kind == "weight":
            yield name, (module.org_vocab_size, module.embedding_dim)
    elif parameter.ndim == 1:  # norms; if they are sharded, vLLM's loader checks them
        yield name, tuple(parameter.shape) if get_tensor_model_parallel_world_size() == 1 else None


def _expert_parts(kind: str, prefix: str, module: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """One tensor per expert and projection, over all ranks: vLLM itself would treat a missing one as padding."""
    config = module.moe_config
    single = len(module.get_expert_mapping()) == 3 * config.num_logical_experts
    if not (single and (isinstance(module.quant_method, UnquantizedFusedMoEMethod) or _quantises_itself(module))):
        return
    width, hidden = config.intermediate_size_per_partition_unpadded * config.tp_size, config.hidden_dim_unpadded
    projections = {
        "w13_weight": {module.ckpt_gate_proj_name: (width, hidden), module.ckpt_up_proj_name: (width, hidden)},
        "w2_weight": {module.ckpt_down_proj_name: (hidden, width)},
    }
    for name, shape in projections.get(kind, {}).items():
        for expert in range(config.num_logical_experts):
            yield f"{prefix.removesuffix('.routed_experts')}.{expert}.{name}.weight", shape


def _part_sizes(module: Any) -> list[int] | None:
    """Output sizes, over all ranks, of the projections stacked in one layer; None if it is a single projection."""
    if isinstance(module, QKVParallelLinear):
        kv = module.total_num_kv_heads
        return [module.total_num_heads * module.head_size, kv * module.head_size, kv * module.v_head_size]
    if isinstance(module, MergedColumnParallelLinear):
        return list(module.output_sizes)
    return None


def _linear_shape(kind: str, output_size: int, input_size: int) -> tuple[int, ...]:
    return (output_size,) if kind == "bias" else (output_size, input_size)
