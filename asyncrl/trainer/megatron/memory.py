"""Memory estimate of each rank of a layout, by arithmetic. Pure; imports no torch.

Source: Megatron-core's buffers and distributed optimizer, as `optimizer.py` uses them. A test compares the estimate
with the allocations of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod

from asyncrl.config.trainer import TrainerConfig
from asyncrl.trainer.megatron.sizes import VOCABULARY_ROWS
from asyncrl.trainer.model_tensors import EMBEDDING, NORM, OUTPUT, RankMemory, Shape, layer_of

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_GRADIENT_BYTES, _MOMENT_BYTES, _MASTER_BYTES = 4, 8, 4


def stage_of(name: str, trainer: TrainerConfig, num_layers: int) -> int:
    """The pipeline stage that holds the tensor `name`; for a tied embedding, the first of two."""
    megatron = trainer.megatron
    layer = layer_of(name)
    if layer is None:
        return 0 if name == EMBEDDING else megatron.pipeline_parallel - 1
    chunk = layer * megatron.pipeline_parallel * megatron.chunks_per_stage // num_layers
    return chunk % megatron.pipeline_parallel


def rank_memory(
    trainer: TrainerConfig,
    tensors: Mapping[str, Shape],
    *,
    critic: bool = False,
    reference: bool = False,
    **others: int | None,
) -> list[RankMemory]:
    """One entry per pipeline stage. `tensors`: of the policy; critic and reference have the same sizes. `others`:
    ignored, since passes are not estimated."""
    megatron = trainer.megatron
    stages, width = megatron.pipeline_parallel, _DTYPE_BYTES[megatron.param_dtype]
    state = _MOMENT_BYTES + (_MASTER_BYTES if width < _MASTER_BYTES else 0)  # float32 weights serve as masters
    expert_copies = trainer.num_ranks // (megatron.expert_parallel * megatron.experts_split_by * stages)
    found = []
    for stage in range(stages):
        policy = _share(trainer, tensors, stage)
        trained = policy + (_share(trainer, tensors, stage, critic=True) if critic else Counter())
        held = trained.total() + (policy.total() if reference else 0)
        masters = -(-trained["dense"] // trainer.layout.num_plans) - (-trained["experts"] // expert_copies)
        weights, gradients = width * held, _GRADIENT_BYTES * trained.total()
        offloads = trainer.megatron.offload_optimizer
        found.append(
            RankMemory(
                ranks=f"stage {stage} of {stages}" if stages > 1 else "each rank",
                weights=weights,
                gradients=gradients,
                optimizer=state * masters,
                between_steps=weights + gradients + (0 if offloads else state * masters),
            )
        )
    return found


def _share(trainer: TrainerConfig, tensors: Mapping[str, Shape], stage: int, *, critic: bool = False) -> Counter[str]:
    """Elements of one model on a rank: "dense", outside the experts, and in the "experts"."""
    megatron = trainer.megatron
    num_layers = 1 + max(layer_of(name) or 0 for name in tensors)
    here = {n: shape for n, shape in tensors.items() if stage_of(n, trainer, num_layers) == stage}
    last = megatron.pipeline_parallel - 1
    if critic:
        here.pop(OUTPUT, None)
        if stage == last:
            here["head.weight"] = (tensors[NORM][0] + 1,)
    elif OUTPUT not in tensors and stage == last > 0:
        here[OUTPUT] = tensors[EMBEDDING]  # the last stage has a copy of a tied embedding
    found = Counter[str]()
    for name, shape in here.items():
        if ".experts." in name:
            found["experts"] += prod(shape)
        elif name in (EMBEDDING, OUTPUT):
            unit = VOCABULARY_ROWS * megatron.tensor_parallel
            found["dense"] += -(-shape[0] // unit) * VOCABULARY_ROWS * shape[1]
        else:
            found["dense"] += prod(shape) // (1 if _is_whole(name) else megatron.tensor_parallel)
    found["experts"] //= megatron.expert_parallel * megatron.experts_split_by
    return found


def _is_whole(name: str) -> bool:
    """True for tensors that every tensor-parallel rank holds whole."""
    return name.endswith(("norm.weight", "mlp.gate.weight", "shared_expert_gate.weight", "head.weight"))
