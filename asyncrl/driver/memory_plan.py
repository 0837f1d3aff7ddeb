"""Whether trainer ranks and replicas fit into their GPUs, by arithmetic, and which layout does where they do not."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from math import prod

from asyncrl.cluster.address import joined_address
from asyncrl.cluster.placement import Demand
from asyncrl.config.recipe import Recipe
from asyncrl.config.trainer import TrainerConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.trainer.backends import memory_of
from asyncrl.trainer.model_tensors import RankMemory, Shape, model_tensors
from asyncrl.types import ModelFacts

GIB = 1 << 30
SMI_TIMEOUT_S = 20.0
RESERVED_BYTES = 3 * GIB
"""What CUDA, NCCL and an allocator's gaps take of a GPU beside a rank's tensors."""
ENGINE_BYTES = 2 * GIB
"""What an engine's passes take beside weights and cache."""
MOST_RANKS, MOST_SPLIT = 64, 64
"""Times as many ranks, and ranks of a replica, that are tried."""


def gpu_bytes(recipe: Recipe) -> int | None:
    """Memory of the smallest GPU that processes of the run may get; None where it is not known."""
    if recipe.ray.gpu_memory_gib is not None:
        return int(recipe.ray.gpu_memory_gib * GIB)
    program = shutil.which("nvidia-smi")
    if program is None or joined_address(recipe.ray.address) is not None:
        return None
    words = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:  # not torch: importing it would delay the start by seconds
        told = subprocess.run(words, capture_output=True, text=True, check=True, timeout=SMI_TIMEOUT_S).stdout
        return min((int(line) << 20 for line in told.splitlines()), default=None)
    except (OSError, ValueError, subprocess.SubprocessError):  # a plan goes on without it
        return None


def ranks_memory(recipe: Recipe, facts: ModelFacts, trainer: TrainerConfig | None = None) -> list[RankMemory] | None:
    """Of the recipe's trainer, or of another one; None where the model's config or the backend does not say enough."""
    tensors, algorithm = model_tensors(facts), recipe.algorithm
    if tensors is None:
        return None
    return memory_of(
        trainer or recipe.trainer,
        tensors,
        critic=algorithm.needs_critic,
        reference=algorithm.needs_reference,
        tokens=recipe.max_tokens_per_microbatch,
        experts_per_token=facts.sizes.experts_per_token or 1,
    )


def check_memory_fits(recipe: Recipe, facts: ModelFacts, gpu: int | None) -> None:
    """Raises ConfigError: a trainer rank or a replica does not fit into a GPU of `gpu` bytes. The error names the
    nearest layouts that do."""
    tensors = model_tensors(facts)
    if gpu is None or tensors is None:
        return
    demand = Demand.of(recipe)
    if demand.rank_gpus:
        _check_ranks(recipe, facts, gpu, demand)
    if demand.replica_gpus and recipe.rollout.engine != "torch":
        _check_replica(recipe, facts, tensors, gpu)


def _check_ranks(recipe: Recipe, facts: ModelFacts, gpu: int, demand: Demand) -> None:
    share = 1.0 if demand.gpu_share == 1 or recipe.is_colocated else 1 - demand.gpu_share
    room = int(gpu * share) - RESERVED_BYTES - 2 * recipe.weights.bucket_bytes

    def needed(trainer: TrainerConfig) -> int | None:
        found = ranks_memory(recipe, facts, trainer)
        peaks = [memory.peak for memory in found or () if memory.peak is not None]
        return max(peaks, default=None)

    present = needed(recipe.trainer)
    if present is None or present <= room:
        return
    fitting: dict[int, str] = {}
    for words, trainer in _layouts(recipe.trainer):
        if trainer.num_ranks not in fitting and (peak := needed(trainer) or 0) <= room:
            fitting[trainer.num_ranks] = f"{words} ({peak / GIB:.0f} GiB)"
    nearest = list(fitting.values())[:2]
    do = f"set {', or '.join(nearest)}" if nearest else "train a smaller model, or adapters (trainer.lora.rank)"
    raise ConfigError(
        explain(
            f"trainer.num_ranks={recipe.trainer.num_ranks} for {facts.name} with micro-batches of "
            f"{recipe.max_tokens_per_microbatch} tokens",
            f"a rank needs about {present / GIB:.0f} GiB at its peak, and has {room / GIB:.0f} of the {gpu / GIB:.0f} "
            "GiB of its GPU",
            do,
        )
    )


def _layouts(trainer: TrainerConfig) -> Iterator[tuple[str, TrainerConfig]]:
    """Other layouts, nearest first, with the words that set them: less memory, then more ranks."""
    fsdp, times = trainer.fsdp, 1
    while times <= MOST_RANKS:
        for recomputes in sorted({fsdp.activation_checkpointing, True}):
            for offloads in sorted({fsdp.offload_optimizer, True}):
                words = {
                    "trainer.num_ranks": (trainer.num_ranks * times, times > 1),
                    "trainer.fsdp.activation_checkpointing": ("true", recomputes != fsdp.activation_checkpointing),
                    "trainer.fsdp.offload_optimizer": ("true", offloads != fsdp.offload_optimizer),
                }
                set_here = " ".join(f"{key}={value}" for key, (value, changed) in words.items() if changed)
                other = replace(fsdp, activation_checkpointing=recomputes, offload_optimizer=offloads)
                if set_here:
                    yield set_here, replace(trainer, num_ranks=trainer.num_ranks * times, fsdp=other)
        times *= 2


def _check_replica(recipe: Recipe, facts: ModelFacts, tensors: dict[str, Shape], gpu: int) -> None:
    rollout, sizes = recipe.rollout, facts.sizes
    settings = rollout.settings
    width = 4 if recipe.model.inference_dtype == "float32" else 2
    weights = width * sum(map(prod, tensors.values()))
    key_width = sum(shape[0] for name, shape in tensors.items() if name.endswith(("k_proj.weight", "v_proj.weight")))
    cache = width * key_width * rollout.max_model_len
    room = gpu * getattr(settings, "memory_share", 0.85)
    workers = settings.num_workers

    def needed(split: int) -> float:
        return (weights + cache) / split + ENGINE_BYTES

    if needed(workers) <= room:
        return
    heads = sizes.kv_heads or 1
    tried = (workers * 2**times for times in range(1, MOST_SPLIT.bit_length()))
    fitting = next((split for split in tried if needed(split) <= room and (split <= heads or split % heads == 0)), None)
    key = f"rollout.{rollout.engine}.tensor_parallel_size"
    do = f"set {key}={fitting}" if fitting else "shorten rollout.sampling.max_response_tokens, or use a smaller model"
    raise ConfigError(
        explain(
            f"a replica of {facts.name} with {key}={workers}",
            f"a worker needs {weights / workers / GIB:.0f} GiB for weights, {cache / workers / GIB:.0f} for one "
            f"sequence of {rollout.max_model_len} tokens and {ENGINE_BYTES / GIB:.0f} besides, and has "
            f"{room / GIB:.0f} of the {gpu / GIB:.0f} GiB of its GPU",
            do,
        )
    )
