"""Hugging Face models for training: loads, checks, compiles and shards policy, critic and reference."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import is_flash_attn_2_available

from asyncrl.config.model import ModelConfig
from asyncrl.config.paths import check_path
from asyncrl.config.trainer import FsdpConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.trainer.fsdp.attention import (
    PACKED_SDPA,
    VARLEN,
    has_flash_attention_4,
    register_packed_attention,
    varlen_kernel,
)
from asyncrl.trainer.fsdp.supports import check_heads, unsupported
from asyncrl.types import HOW_TO_TIE, UNTIED, ModelFacts, auto_class, decoder_of, drop_towers, misfit, settle

logger = logging.getLogger(__name__)

_WHOLE = "name a whole model: save it again with all of its tensors"
FLASH_ATTENTION = "flash_attention_2"
_LARGEST_HEAD = 128
"""Size of an attention head that FlashAttention 4 has kernels for, forward and backward, on all of its GPUs."""
_AMPERE = (8, 0)


def load_model(
    model: ModelConfig,
    fsdp: FsdpConfig,
    mesh: DeviceMesh,
    *,
    key: str = "model.path",
    head: bool = True,
    dtype: torch.dtype = torch.float32,
    max_model_len: int | None = None,
    recompute: str = "none",
) -> tuple[PreTrainedModel, dict[str, nn.Module]]:
    """The model of `model.path` on the CPU, unsharded; without `head` only the layers up to the hidden states. And its
    encoders of images, which are not part of it any more (`types.drop_towers`).

    The first rank of the mesh reads the weights. On the other ranks parameters are uninitialised memory that is never
    touched until `shard` sends each rank its part, so the model occupies host memory once, not once per rank.

    Args:
        key: the key of the recipe that names the model, for errors.
        max_model_len: see `types.settle`.
        recompute: `trainer.recompute`.

    Raises:
        ConfigError: the model cannot be read, its files lack a tensor or contradict its config, its heads do not divide
            over the ranks that share a row, or packing would break its architecture.
    """
    check_path(model.path, key)
    register_packed_attention()
    hub = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    how = {"dtype": dtype, "attn_implementation": "eager"}  # until `proof` has found another one
    loaded: Any = None
    try:
        config = AutoConfig.from_pretrained(model.path, **hub)
        settle(config, max_model_len)
        kind: Any = auto_class(config) if head else AutoModel
        if _reads(mesh):
            found, loaded = kind.from_pretrained(model.path, config=config, output_loading_info=True, **hub, **how)
        else:
            # Structure only: `shard` fills in the weights.
            with no_init_weights():
                found = kind.from_config(config, trust_remote_code=model.trust_remote_code, **how)
            found.tie_weights()
            found.eval()
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        do = "name a directory or hub name of a causal LM"
        raise ConfigError(explain(f"train {key}={model.path}", str(error), do)) from error
    if loaded is not None:
        if why := misfit(found, loaded):
            raise ConfigError(explain(f"train {key}={model.path}", why, HOW_TO_TIE if why == UNTIED else _WHOLE))
        if unused := sorted(loaded["unexpected_keys"]):
            text = "%s: %d tensors of the files are not used, the first is %s"
            logger.warning(text, model.path, len(unused), unused[0])
    if towers := drop_towers(found):
        text = "%s: %s are left out of the training%s"
        frozen = "" if model.image_directory is None else ", and stay as they are"
        logger.info(text, model.path, " and ".join(towers), frozen)
    check_supported(found, head=head)
    check_heads(fsdp, ModelFacts.of_config(model.path, found.config.to_dict()), key)
    recompute_layers(found, recompute)
    return found, towers


def recompute_layers(model: PreTrainedModel, recompute: str) -> None:
    """Makes the layers recompute in the backward pass what `trainer.recompute` says."""
    if recompute not in ("selective", "full"):
        return
    how: dict[str, Any] = {"use_reentrant": False}
    if recompute == "selective":
        how["context_fn"] = partial(create_selective_checkpoint_contexts, _keeps_attention)
    model.gradient_checkpointing_enable(how)


def _keeps_attention(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Torch's attention kernels, varlen and flash attention have it in their names."""
    name = str(operator)
    keeps = "attention" in name or "attn" in name
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(frozen=True, slots=True)
class Kernels:
    """Attention kernels that a rank's device and packages allow.

    Attributes:
        capability: of its CUDA device; None: no CUDA device.
        flash_attn: the package is installed, with FlashAttention 2; flash-attn-4 has the same name.
        varlen: torch has a kernel for sequences of different lengths.
        fa4: that kernel, and SDPA's, can be FlashAttention 4's.
    """

    capability: tuple[int, int] | None
    flash_attn: bool = False
    varlen: bool = True
    fa4: bool = False

    @classmethod
    def of(cls, device: torch.device) -> Kernels:
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        fa4 = has_flash_attention_4(capability)
        return cls(capability, is_flash_attn_2_available(), varlen_kernel() is not None, fa4)

    def activate(self, config: Any) -> None:
        """Makes FlashAttention 4 torch's kernels for the rest of the process, if the heads of `config` are of its
        sizes."""
        named = (getattr(config, name, None) or 0 for name in ("head_dim", "qk_head_dim", "v_head_dim"))
        head = max(named) or config.hidden_size // config.num_attention_heads
        if self.fa4 and head <= _LARGEST_HEAD:
            torch.nn.attention.activate_flash_attention_impl("FA4")


def choose_attention(fsdp: FsdpConfig, kernels: Kernels, *, sinks: bool = False) -> str:
    """Resolves `trainer.fsdp.attention`. Raises ConfigError: the requested attention cannot run.

    Args:
        sinks: the model's attention has them.
    """
    needs = ["a CUDA device"] * (kernels.capability is None)
    needs += ["trainer.fsdp.param_dtype=bfloat16"] * (fsdp.param_dtype != "bfloat16")
    missing = {FLASH_ATTENTION: list(needs), VARLEN: list(needs)}
    missing[FLASH_ATTENTION] += ["the package flash-attn"] * (not kernels.flash_attn)
    missing[FLASH_ATTENTION] += ["trainer.fsdp.context_parallel=1"] * (fsdp.context_parallel > 1)
    for lacks in missing.values() if sinks else ():
        lacks.append("a model without attention sinks")
    if kernels.capability is not None and kernels.capability < _AMPERE:
        missing[VARLEN].append("a GPU of Ampere or later")
    missing[VARLEN] += ["torch 2.11 or later"] * (not kernels.varlen)
    if fsdp.attention == "auto" and kernels.fa4 and not missing[VARLEN]:
        return VARLEN
    if fsdp.attention == "auto":
        return next((name for name, lacks in missing.items() if not lacks), PACKED_SDPA)
    if lacks := missing.get(fsdp.attention):
        do = f"provide that, or set trainer.fsdp.attention={PACKED_SDPA}"
        raise ConfigError(explain(f"trainer.fsdp.attention={fsdp.attention}", f"it needs {' and '.join(lacks)}", do))
    return fsdp.attention


def check_supported(causal_lm: PreTrainedModel, *, head: bool = True) -> None:
    """Raises ConfigError for models that would silently train wrongly: by `unsupported` over the loaded model's config,
    and by features that only the model itself shows."""
    config = causal_lm.config
    problems = unsupported(ModelFacts.of_config(str(config.name_or_path), config.to_dict()))
    if not isinstance(getattr(decoder_of(causal_lm), "layers", None), nn.ModuleList):
        problems.append("no list of decoder layers")
    if head and causal_lm.get_output_embeddings() is None:
        problems.append("no output layer")
    if problems:
        found = f"the backend does not support {', '.join(problems)}"
        do = "use a decoder-only model such as Qwen2, Qwen3 (also MoE) or Llama"
        raise ConfigError(explain(f"train a {type(causal_lm).__name__} with trainer.backend=fsdp", found, do))


def compile_layers(model: PreTrainedModel, *, backend: str = "inductor") -> None:
    """Compiles each decoder layer in place, for rows of any length. FSDP's work around a layer stays outside, and
    weight names do not change."""
    for layer in decoder_layers(model):
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)


def decoder_layers(model: PreTrainedModel) -> Any:
    return decoder_of(model).layers


def shard(module: nn.Module, model: PreTrainedModel, mesh: DeviceMesh, fsdp: FsdpConfig) -> None:
    """Shards `module` in place over the last dimension of the mesh; the dimension before it, if any, holds copies.
    Groups: one per decoder layer of `model`, one for each layer on top of `model` (computing in float32), one for the
    rest. The values are the first rank's. Collective."""
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, fsdp.param_dtype), reduce_dtype=getattr(torch, fsdp.reduce_dtype)
    )
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if fsdp.offload_parameters else OffloadPolicy()
    kind: Any = {"mesh": mesh, "mp_policy": precision, "offload_policy": offload}
    spreads = mesh.size() > 1
    whole = {name: p.detach() for name, p in module.named_parameters()} if spreads and _reads(mesh) else {}
    for layer in decoder_layers(model):
        fully_shard(layer, reshard_after_forward=fsdp.reshard_after_forward, **kind)
    for top in module.children():
        if top is not model:
            fully_shard(top, mesh=mesh, offload_policy=offload)
    # The backward pass needs the rest (embedding, output layer) immediately: freeing it would gather it twice.
    fully_shard(module, reshard_after_forward=False, **kind)
    if spreads:
        _spread(module, whole, mesh)


def _reads(mesh: DeviceMesh) -> bool:
    return mesh.get_rank() == 0


@torch.no_grad()
def _spread(module: nn.Module, whole: dict[str, torch.Tensor], mesh: DeviceMesh) -> None:
    """Sends every rank its shard of each parameter in `whole`, which only the first rank holds and which is emptied;
    then the buffers. One tensor at a time; collective."""
    device = mesh.device_type
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        values = whole.pop(name, None)
        if values is None:
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        sharded = distribute_tensor(values.to(device), mesh, parameter.placements)
        parameter.to_local().copy_(sharded.to_local())
    for buffer in module.buffers():
        values = buffer.to(device)
        dist.broadcast(values, src=0)
        buffer.copy_(values)
