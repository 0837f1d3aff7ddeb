"""What an FSDP2 rank holds, by arithmetic. Pure; imports no torch.

What is trained has weights, gradients and moments in float32, what is frozen is in the dtype of the passes; all of it
is split evenly over the ranks of a copy. Gathered layers, which the step frees again, come on top. A test compares it
with what a rank allocates.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from asyncrl.config.trainer import LoraConfig, TrainerConfig
from asyncrl.trainer.model_tensors import NORM, OUTPUT, RankMemory, Shape

_FLOAT32, _MOMENTS = 4, 8
_BYTES = {"float32": 4, "bfloat16": 2}


def rank_memory(
    trainer: TrainerConfig, tensors: Mapping[str, Shape], *, critic: bool = False, reference: bool = False
) -> list[RankMemory]:
    """One entry: all ranks hold the same. `tensors`: of the policy; a critic and a reference have the same sizes."""
    policy = sum(map(prod, tensors.values()))
    adapters = sum(_adapter(name, shape, trainer.lora) for name, shape in tensors.items()) if trainer.lora.rank else 0
    value = policy - prod(tensors.get(OUTPUT, (0,))) + tensors[NORM][0] + 1 if critic else 0
    trained = (adapters or policy) + value
    frozen = policy if adapters or reference else 0  # the base of adapters is the reference, too
    ranks = trainer.shard_ranks
    return [
        RankMemory(
            ranks="each rank" + " (in host memory)" * trainer.fsdp.offload_parameters,
            weights=(_FLOAT32 * trained + _BYTES[trainer.fsdp.param_dtype] * frozen) // ranks,
            gradients=_FLOAT32 * trained // (ranks if trainer.fsdp.reduce_every_microbatch else 1),
            optimizer=_MOMENTS * trained // ranks,
        )
    ]


def _adapter(name: str, shape: Shape, lora: LoraConfig) -> int:
    """Elements of the two matrices beside the linear layer of this tensor."""
    layer = name.removesuffix(".weight")
    if len(shape) != 2 or ".experts." in name or not layer.startswith("model.layers.") or layer.endswith("gate"):
        return 0
    wanted = lora.target_modules == ["all-linear"] or any(layer.endswith(end) for end in lora.target_modules)
    return lora.rank * sum(shape) if wanted else 0
