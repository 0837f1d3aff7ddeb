"""Hugging Face models for training: loaded, checked, compiled and sharded; the policy, the critic and the reference."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from asyncrl.config.model import ModelConfig
from asyncrl.config.trainer import FsdpConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.trainer.fsdp.attention import PACKED_SDPA, register_packed_attention
from asyncrl.trainer.fsdp.batch import PackedTokens
from asyncrl.weights.experts import MODEL_TYPES, is_fused

FLASH_ATTENTION = "flash_attention_2"
LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Config keys of models that change logits after the output layer (Gemma 2, Cohere, Granite, Falcon-H1)."""
KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}


def load_model(
    model: ModelConfig, fsdp: FsdpConfig, device: torch.device, *, key: str = "model.path", head: bool = True
) -> PreTrainedModel:
    """The model of `model.path` on the CPU, unsharded, in float32; without `head` only what gives hidden states.

    Every rank reads the whole model before it is sharded: host memory of a node peaks at 4 bytes per parameter and
    local rank (8 ranks of a 7B model: 224 GB); device memory only ever holds the rank's shard.

    Args:
        key: the key of the recipe that names the model, for errors.

    Raises:
        ConfigError: the model cannot be read, or its architecture computes something that packing would get wrong.
    """
    register_packed_attention()
    kind = AutoModelForCausalLM if head else AutoModel
    try:
        found = kind.from_pretrained(
            model.path,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            dtype=torch.float32,
            attn_implementation=choose_attention(fsdp, device),
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(
            explain(f"train {key}={model.path}", str(error), "name a directory or hub name of a causal LM")
        ) from error
    check_supported(found, head=head)
    if fsdp.activation_checkpointing:
        found.gradient_checkpointing_enable({"use_reentrant": False})
    return found


def hidden_states(model: PreTrainedModel, tokens: PackedTokens) -> torch.Tensor:
    """[n, hidden size]: the last layer's output at the predictor of each predicted token."""
    layout = tokens.layout
    hidden = model.base_model(
        input_ids=tokens.input_ids,
        position_ids=tokens.position_ids,
        use_cache=False,
        packed_layout=layout,
        # what flash attention reads; packed_sdpa reads the layout
        cu_seq_lens_q=layout.boundaries,
        cu_seq_lens_k=layout.boundaries,
        max_length_q=layout.max_length,
        max_length_k=layout.max_length,
    ).last_hidden_state[0]
    return hidden.index_select(0, tokens.predictors)


def choose_attention(fsdp: FsdpConfig, device: torch.device) -> str:
    """What `trainer.fsdp.attention` resolves to. Raises ConfigError: flash attention was asked for and cannot run."""
    missing = []
    if device.type != "cuda":
        missing.append("a CUDA device")
    if importlib.util.find_spec("flash_attn") is None:
        missing.append("the package flash-attn")
    if fsdp.param_dtype != "bfloat16":
        missing.append("trainer.fsdp.param_dtype=bfloat16")
    if fsdp.attention == FLASH_ATTENTION and missing:
        raise ConfigError(
            explain(
                f"trainer.fsdp.attention={FLASH_ATTENTION}",
                f"it needs {' and '.join(missing)}",
                f"provide that, or set trainer.fsdp.attention={PACKED_SDPA}",
            )
        )
    return FLASH_ATTENTION if not missing and fsdp.attention != PACKED_SDPA else PACKED_SDPA


def check_supported(causal_lm: PreTrainedModel, *, head: bool = True) -> None:
    """Raises ConfigError where the result would be wrong without a sign: layers that mix the sequences of a packed row
    (recurrent, linear attention), logits that are transformed after the output layer, and experts of
    which it is not known how they lie in one tensor."""
    config = causal_lm.config
    problems = [f"{key}={v}" for key in LOGIT_TRANSFORMS if (v := getattr(config, key, None)) not in (None, 1, 1.0)]
    problems += sorted(set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYER_TYPES)
    fused = any(is_fused(name) for name, _ in causal_lm.named_parameters())
    problems += ["fused experts"] if fused and config.model_type not in MODEL_TYPES else []
    if not isinstance(getattr(causal_lm.base_model, "layers", None), nn.ModuleList):
        problems.append("no list of decoder layers")
    if head and causal_lm.get_output_embeddings() is None:
        problems.append("no output layer")
    if problems:
        raise ConfigError(
            explain(
                f"train a {type(causal_lm).__name__} with trainer.backend=fsdp",
                f"the backend does not support {', '.join(problems)}",
                "use a decoder-only model such as Qwen2, Qwen3 (also MoE) or Llama",
            )
        )


def compile_layers(model: PreTrainedModel, *, backend: str = "inductor") -> None:
    """Compiles each decoder layer in place, for rows of any length. What FSDP does around a layer stays outside, and so
    do the names of the weights."""
    for layer in decoder_layers(model):
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)


def decoder_layers(model: PreTrainedModel) -> Any:
    return model.base_model.layers


def offload_policy(mesh: DeviceMesh, fsdp: FsdpConfig) -> OffloadPolicy:
    return CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if fsdp.offload_parameters else OffloadPolicy()


def shard(module: nn.Module, model: PreTrainedModel, mesh: DeviceMesh, fsdp: FsdpConfig) -> None:
    """Shards `module` in place over the mesh, one group per decoder layer of `model` in it and one for the rest."""
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, fsdp.param_dtype), reduce_dtype=getattr(torch, fsdp.reduce_dtype)
    )
    kind: Any = {"mesh": mesh, "mp_policy": precision, "offload_policy": offload_policy(mesh, fsdp)}
    for layer in decoder_layers(model):
        fully_shard(layer, reshard_after_forward=fsdp.reshard_after_forward, **kind)
    # the rest (embedding, output layer) is read again at once by the backward pass: freeing it would gather it twice
    fully_shard(module, reshard_after_forward=False, **kind)
