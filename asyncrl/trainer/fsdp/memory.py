"""Memory estimate of an FSDP2 rank, by arithmetic. Pure; imports no torch.

Trained tensors have weights, gradients and moments in float32; frozen tensors have the dtype of the passes. All are
split evenly over the ranks of a copy. A test compares the estimate with a rank's allocations, and benchmarks/memory.py
with torch's memory tracker.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from asyncrl.config.trainer import LoraConfig, TrainerConfig
from asyncrl.trainer.model_tensors import EMBEDDING, NORM, OUTPUT, RankMemory, Shape, layer_of, logits_per_chunk

_FLOAT32, _MOMENTS = 4, 8
_BYTES = {"float32": 4, "bfloat16": 2}
_HEAD = 128
"""Size of an attention head in most models, for models whose tensors do not show it (no norms of heads)."""


def rank_memory(
    trainer: TrainerConfig,
    tensors: Mapping[str, Shape],
    *,
    critic: bool = False,
    reference: bool = False,
    own_reference: bool = False,
    tokens: int | None = None,
    experts_per_token: int = 1,
) -> list[RankMemory]:
    """A single entry: all ranks hold the same.

    Args:
        tensors: of the policy; a critic and a reference have the same sizes.
        own_reference: the reference is not the base of the adapters, if there are any.
        tokens: of the largest micro-batch; None: leave out the memory of its passes.
    """
    policy = sum(map(prod, tensors.values()))
    adapters = sum(_adapter(name, shape, trainer.lora) for name, shape in tensors.items()) if trainer.lora.rank else 0
    value = policy - prod(tensors.get(OUTPUT, (0,))) + tensors[NORM][0] + 1 if critic else 0
    trained = (adapters or policy) + value
    frozen = policy if adapters else 0  # the base, which is the reference too
    frozen += policy if reference and (own_reference or not adapters) else 0
    ranks, fsdp = trainer.shard_ranks, trainer.fsdp
    # State of the whole step, split over the ranks.
    weights = (_FLOAT32 * trained + _BYTES[fsdp.param_dtype] * frozen) // ranks
    gradients = _FLOAT32 * trained // (ranks if fsdp.reduce_every_microbatch else 1)
    optimizer = _MOMENTS * trained // ranks
    # The peak depends on what is on the device during the passes and during the optimizer step.
    passes = peak = None
    if tokens is not None:
        passes = _peak_of_passes(trainer, tensors, tokens, experts_per_token)
        held = weights + gradients
        peak = held + passes + optimizer
        if fsdp.offload_parameters:
            peak = passes + (0 if fsdp.reduce_every_microbatch else gradients)  # unreduced ones are on the device
        elif fsdp.offload_optimizer:
            peak = held + max(passes, optimizer)
    where = " (in host memory)" * fsdp.offload_parameters
    return [
        RankMemory(
            ranks=f"each rank{where}",
            weights=weights,
            gradients=gradients,
            optimizer=optimizer,
            passes=passes,
            peak=peak,
            between_steps=0 if fsdp.offload_parameters else weights + (0 if fsdp.offload_optimizer else optimizer),
        )
    ]


def _peak_of_passes(trainer: TrainerConfig, tensors: Mapping[str, Shape], tokens: int, experts_per_token: int) -> int:
    """Bytes of the passes over a micro-batch of `tokens`, shared by `context_parallel` ranks. The maximum over four
    moments: logits are formed; logits are differentiated; the first layer of the backward pass runs; the gradients of
    embedding and output layer are reduced."""
    width, recomputes = _BYTES[trainer.fsdp.param_dtype], trainer.recompute in ("selective", "full")
    trains_all, ranks = not trainer.lora.rank, trainer.fsdp.context_parallel
    tokens = -(-tokens // ranks)
    layers: dict[int, dict[str, Shape]] = {}
    for name, shape in tensors.items():
        if (number := layer_of(name)) is not None:
            layers.setdefault(number, {})[name.split(".", 3)[3]] = shape
    vocabulary, hidden = tensors[EMBEDDING]
    inner = [_inner(own, experts_per_token) for own in layers.values()]
    saved = [_saved(own, width, experts_per_token, recomputes=recomputes, ranks=ranks) for own in layers.values()]
    # Kept from the forward pass until a layer's turn in the backward pass; cosines and sines of the positions too.
    kept = len(layers) * width * hidden if recomputes else sum(saved)
    if trainer.recompute == "selective":
        kept += sum(width * own["self_attn.q_proj.weight"][0] for own in layers.values())
    checkpoints = tokens * (kept + 2 * width * _HEAD)
    # Embedding and output layer, and the largest layer, in the dtype of the passes.
    root = width * sum(prod(shape) for name, shape in tensors.items() if layer_of(name) is None)
    layer = width * max(sum(map(prod, own.values())) for own in layers.values())
    output = prod(tensors.get(OUTPUT, tensors[EMBEDDING])) if trains_all else 0
    logits = min(tokens * vocabulary, logits_per_chunk(trainer.device))  # entries of one chunk
    # Logits, after the final norm and the hidden states whose logits are formed.
    before = checkpoints + tokens * _norm(hidden, width) + root
    forward = before + 2 * _FLOAT32 * logits
    of_output = (_FLOAT32 + width) * output  # the sum of its gradients and a chunk's
    of_logits = _FLOAT32 + width * (width < _FLOAT32)  # 16-bit logits exist in addition to float32 ones
    backward = before + of_logits * logits + of_output + width * hidden * tokens + layer
    # A layer is recomputed, then differentiated: gradients of activations, and of its weights until they are reduced.
    recomputed = tokens * max(saved) if recomputes else 0
    gradients = tokens * width * (max(2 * a + b for a, b in inner) + 2 * hidden)
    reduced = _FLOAT32 * layer // width if trains_all else 0
    first_layer = checkpoints + recomputed + gradients + root + 2 * layer + reduced + width * output
    last = root + _FLOAT32 * root // width if trains_all else 0
    return max(forward, backward, first_layer, last)


def _norm(size: int, width: int) -> int:
    """Bytes per token that a norm saves, including its output: it computes in float32."""
    return (_FLOAT32 + 2 * width if width < _FLOAT32 else 3 * width) * size


def _saved(layer: Mapping[str, Shape], width: int, experts_per_token: int, *, recomputes: bool, ranks: int) -> int:
    """Bytes per token that a layer saves for its backward pass. Where `ranks` share the row, each has at least one key
    head, and attention's output exists both by heads and by tokens."""
    query, hidden = layer["self_attn.q_proj.weight"]
    key = layer["self_attn.k_proj.weight"][0]
    norms = 2 * _norm(hidden, width)
    if "self_attn.q_norm.weight" in layer:
        norms += (_norm(query + key, width) - width * (query + key)) if width < _FLOAT32 else 2 * width * (query + key)
    if recomputes and width == _FLOAT32:
        norms -= width * hidden  # the input of the first one is the checkpoint itself
    inner, of_experts = _inner(layer, experts_per_token)
    attention = 2 * (query + key)
    if ranks > 1:
        attention += query + 2 * (max(key, ranks * layer.get("self_attn.q_norm.weight", (_HEAD,))[0]) - key)
    return norms + width * attention + width * (4 * inner + 3 * of_experts)


def _inner(layer: Mapping[str, Shape], experts_per_token: int) -> tuple[int, int]:
    """Elements per token inside the feed-forward block, over all its chosen experts; and of the hidden states that
    these experts receive."""
    taken = {"mlp.gate_proj.weight": 1, "mlp.shared_expert.gate_proj.weight": 1}
    inner = sum(times * layer[name][0] for name, times in taken.items() if name in layer)
    width, hidden = layer.get("mlp.experts.0.gate_proj.weight", (0, 0))
    return inner + experts_per_token * width, experts_per_token * hidden


def _adapter(name: str, shape: Shape, lora: LoraConfig) -> int:
    """Elements of the two adapter matrices of the linear layer with this tensor."""
    layer = name.removesuffix(".weight")
    if len(shape) != 2 or ".experts." in name or not layer.startswith("model.layers.") or layer.endswith("gate"):
        return 0
    wanted = lora.target_modules == ["all-linear"] or any(layer.endswith(end) for end in lora.target_modules)
    return lora.rank * sum(shape) if wanted else 0
