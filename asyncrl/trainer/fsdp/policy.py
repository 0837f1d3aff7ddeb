"""The policy in training: a Hugging Face causal language model that maps packed tokens to log-probabilities."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.config.model import ModelConfig
from asyncrl.config.trainer import FsdpConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.trainer.fsdp.attention import PACKED_SDPA, register_packed_attention
from asyncrl.trainer.fsdp.batch import PackedTokens
from asyncrl.trainer.fsdp.token_logprobs import token_logprobs

FLASH_ATTENTION = "flash_attention_2"
LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Config keys of models that change logits after the output layer (Gemma 2, Cohere, Granite, Falcon-H1)."""
KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}


class Policy(nn.Module):
    """`causal_lm` is the model as Hugging Face builds it; its names are the names of the weights."""

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        super().__init__()
        self.causal_lm = causal_lm

    def forward(self, tokens: PackedTokens, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of each predicted token, [n] float32 each; see `token_logprobs`."""
        layout = tokens.layout
        hidden = self.causal_lm.base_model(
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
        head: Any = self.causal_lm.get_output_embeddings()
        return token_logprobs(
            hidden.index_select(0, tokens.predictors),
            head.weight,
            getattr(head, "bias", None),
            tokens.targets,
            temperature=temperature,
        )


def load_policy(model: ModelConfig, fsdp: FsdpConfig, device: torch.device) -> Policy:
    """The policy on the CPU, unsharded, with float32 master weights.

    Every rank reads the whole model before it is sharded: host memory of a node peaks at 4 bytes per parameter and
    local rank (8 ranks of a 7B model: 224 GB); device memory only ever holds the rank's shard.

    Raises:
        ConfigError: the model cannot be read, or its architecture computes something that packing would get wrong.
    """
    register_packed_attention()
    try:
        causal_lm = AutoModelForCausalLM.from_pretrained(
            model.path,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            dtype=torch.float32,
            attn_implementation=choose_attention(fsdp, device),
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(
            explain(f"train model.path={model.path}", str(error), "name a directory or hub name of a causal LM")
        ) from error
    check_supported(causal_lm)
    if fsdp.activation_checkpointing:
        causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    return Policy(causal_lm)


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


def check_supported(causal_lm: PreTrainedModel) -> None:
    """Raises ConfigError where the result would be wrong without a sign: layers that mix the sequences of a packed row
    (recurrent, linear attention), logits that are transformed after the output layer, and weights whose names differ
    from those of the checkpoint (fused experts)."""
    config = causal_lm.config
    problems = [f"{key}={v}" for key in LOGIT_TRANSFORMS if (v := getattr(config, key, None)) not in (None, 1, 1.0)]
    problems += sorted(set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYER_TYPES)
    problems += (
        ["fused experts"] if any(n.endswith(".experts.gate_up_proj") for n, _ in causal_lm.named_parameters()) else []
    )
    if not isinstance(getattr(causal_lm.base_model, "layers", None), nn.ModuleList):
        problems.append("no list of decoder layers")
    if causal_lm.get_output_embeddings() is None:
        problems.append("no output layer")
    if problems:
        raise ConfigError(
            explain(
                f"train a {type(causal_lm).__name__} with trainer.backend=fsdp",
                f"the backend does not support {', '.join(problems)}",
                "use a dense decoder-only model such as Qwen2, Qwen3 or Llama",
            )
        )


def shard(policy: Policy, mesh: DeviceMesh, fsdp: FsdpConfig) -> None:
    """Shards the policy in place over the mesh, one group per decoder layer and one for the rest."""
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, fsdp.param_dtype), reduce_dtype=getattr(torch, fsdp.reduce_dtype)
    )
    for layer in policy.causal_lm.base_model.layers:  # pyright: ignore[reportGeneralTypeIssues]
        fully_shard(layer, mesh=mesh, reshard_after_forward=fsdp.reshard_after_forward, mp_policy=precision)
    # the rest (embedding, output layer) is read again at once by the backward pass: freeing it would gather it twice
    fully_shard(policy, mesh=mesh, reshard_after_forward=False, mp_policy=precision)
