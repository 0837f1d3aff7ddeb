"""Memory of trainer ranks, replicas and publishes, by arithmetic: whether the processes fit into their GPUs, which
layouts would fit otherwise, and the dry run's lines on it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from math import prod
from typing import Literal

import psutil

from asyncrl.config.recipe import Recipe
from asyncrl.config.rollout import DEFAULT_MEMORY_SHARE, longest_sequence
from asyncrl.config.trainer import FsdpConfig, MegatronConfig, TrainerConfig
from asyncrl.driver.cluster.placement import Demand, joined_address, visible_gpus
from asyncrl.errors import ConfigError, explain
from asyncrl.inference.engines import ENGINES
from asyncrl.trainer.backends import memory_of, require_fits, stages_of
from asyncrl.trainer.model_tensors import RankMemory, Shape, model_tensors
from asyncrl.types import ModelFacts, TensorSpec
from asyncrl.weights.plan import make_spec, plan_buckets

GIB = 1 << 30
_UNITS = ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
SMI_TIMEOUT_S = 20.0
RESERVED_BYTES = 3 * GIB
"""GPU memory of CUDA, NCCL and allocator fragmentation, in addition to a rank's tensors."""
ENGINE_BYTES = 2 * GIB
"""Memory of an engine's forward passes, in addition to weights and cache."""
MOST_PLACES = 1024
"""Requests that vLLM's own default decodes concurrently on the largest GPUs."""
SURE = 0.9
"""Share of a rank's memory that recomputation is chosen for: estimates are within a tenth of what torch counts."""
RECOMPUTE: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
"""Less memory, and more work, from left to right."""
_OTHER_GPU = "; or ray.gpu_memory_gib, if the GPUs have more"
FACTORS = (1, 2, 4, 8, 16, 32, 64)
"""Tried for the number of ranks, the tensor-parallel ranks and stages, and the split of a replica."""


def gpu_bytes(recipe: Recipe) -> int | None:
    """Memory of the smallest GPU that the run may get; None if unknown."""
    if recipe.ray.gpu_memory_gib is not None:
        return int(recipe.ray.gpu_memory_gib * GIB)
    return smallest_gpu_here(visible_gpus()) if joined_address(recipe.ray.address) is None else None


def smallest_gpu_here(chosen: frozenset[str] | None = None) -> int | None:
    """Memory of the smallest GPU of this machine among the `chosen`, by number or id; None: of all. None if there is
    none, or no program that tells."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    words = [program, "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:  # not torch: importing it would delay the start by seconds
        told = subprocess.run(words, capture_output=True, text=True, check=True, timeout=SMI_TIMEOUT_S).stdout
        gpus = [[word.strip() for word in line.split(",")] for line in told.splitlines()]
        return min((int(size) << 20 for *names, size in gpus if chosen is None or {*names} & chosen), default=None)
    except (OSError, ValueError, subprocess.SubprocessError):  # the plan then omits the check
        return None


def ranks_memory(recipe: Recipe, facts: ModelFacts, trainer: TrainerConfig | None = None) -> list[RankMemory] | None:
    """Memory per rank of the recipe's trainer, or of `trainer`; None if the model's config or the backend does not say
    enough."""
    tensors, algorithm = model_tensors(facts), recipe.algorithm
    if tensors is None:
        return None
    return memory_of(
        trainer or recipe.trainer,
        tensors,
        critic=algorithm.needs_critic,
        reference=algorithm.needs_reference,
        own_reference=algorithm.kl.path not in (None, recipe.model.path),
        tokens=recipe.max_tokens_per_microbatch,
        experts_per_token=facts.sizes.experts_per_token or 1,
    )


def served_bytes(recipe: Recipe, facts: ModelFacts) -> int | None:
    """Bytes of a replica's weights, and of a whole publish; None if the model's config does not say enough."""
    tensors = model_tensors(facts)
    return None if tensors is None else _itemsize(recipe) * sum(map(prod, tensors.values()))


def _itemsize(recipe: Recipe) -> int:
    return 4 if recipe.model.inference_dtype == "float32" else 2


def check_memory_fits(recipe: Recipe, facts: ModelFacts, gpu: int | None) -> None:
    """Raises ConfigError if a trainer rank or a replica does not fit into a GPU of `gpu` bytes. The error names the
    nearest layouts that fit."""
    tensors = model_tensors(facts)
    if gpu is None or tensors is None:
        return
    demand = Demand.of(recipe)
    if demand.rank_gpus:
        _check_ranks(recipe, facts, gpu, demand)
    _check_share(recipe, facts, gpu)
    settings, shrinking = recipe.rollout.settings, {"kv_cache_dtype", "quantization_config", "cpu_offload_gb"}
    smaller = shrinking & dict(getattr(settings, "engine_args", {})).keys() or getattr(settings, "quantization", None)
    if demand.replica_gpus and recipe.rollout.engine != "torch" and not smaller:
        _check_replica(recipe, facts, tensors, gpu)


def _check_ranks(recipe: Recipe, facts: ModelFacts, gpu: int, demand: Demand) -> None:
    recipe = with_fitting_recompute(recipe, facts, is_set=True)[0]
    room = _room_on_gpu(recipe, gpu, demand)

    def needed(trainer: TrainerConfig) -> int | None:
        """Peak bytes of a rank; without an estimate of the peak, the bytes held before any pass."""
        found = ranks_memory(recipe, facts, trainer) or ()
        return max((memory.total if memory.peak is None else memory.peak for memory in found), default=None)

    present = needed(recipe.trainer)
    if present is None or present <= room:
        return
    at = "at its peak" if recipe.trainer.backend == "fsdp" else "before activations"
    # Too large: collect, for each number of ranks, the nearest layout that fits.
    fitting: dict[int, str] = {}
    trajectories = recipe.batch.groups_per_step * recipe.batch.group_size
    for words, trainer in _layouts(recipe.trainer, facts):
        is_new = trainer.num_ranks not in fitting and trajectories % trainer.layout.num_plans == 0
        if is_new and (peak := needed(trainer) or 0) <= room:
            fitting[trainer.num_ranks] = f"{words} ({peak / GIB:.0f} GiB)"
    nearest = list(fitting.values())[:2]
    do = f"set {', or '.join(nearest)}" if nearest else "train a smaller model, or adapters (trainer.lora.rank)"
    do += _OTHER_GPU
    batches = f"micro-batches of {recipe.max_tokens_per_microbatch} tokens"
    asked = f"trainer.num_ranks={recipe.trainer.num_ranks} for {facts.name} with {batches}"
    has = f"{room / GIB:.0f} of the {gpu / GIB:.0f} GiB of its GPU"
    raise ConfigError(explain(asked, f"a rank needs about {present / GIB:.0f} GiB {at}, and has {has}", do))


def _room_on_gpu(recipe: Recipe, gpu: int, demand: Demand) -> int:
    share = 1.0 if demand.gpu_share == 1 or recipe.is_colocated else 1 - demand.gpu_share
    asleep = ENGINE_BYTES if recipe.is_colocated and recipe.rollout.engine in SHARE_KEYS else 0
    return int(gpu * share) - RESERVED_BYTES - 2 * recipe.weights.bucket_bytes - asleep


def _layouts(trainer: TrainerConfig, facts: ModelFacts) -> Iterator[tuple[str, TrainerConfig]]:
    """Other layouts that the model allows and the settings that select them, nearest first: less memory, shared rows or
    matrices, more ranks."""
    backend = trainer.backend
    present = asdict(getattr(trainer, backend))
    more = product((trainer.num_ranks * times for times in FACTORS), sorted({trainer.recompute, "full"}, reverse=True))
    for ranks, recompute in more:
        for other in _fsdp(trainer, ranks) if backend == "fsdp" else _megatron(trainer, ranks):
            words = [f"trainer.num_ranks={ranks}"] if ranks > trainer.num_ranks else []
            words += [f"trainer.recompute={recompute}"] if recompute != trainer.recompute else []
            for key, value in asdict(other).items():
                if value != present[key]:
                    words.append(f"trainer.{backend}.{key}={'null' if value is None else str(value).lower()}")
            try:
                found = replace(trainer, num_ranks=ranks, recompute=recompute, **{backend: other})
                require_fits(found, facts)
            except ConfigError:  # the ranks do not divide, e.g. by the expert-parallel size or the model's heads
                continue
            if words:
                yield " ".join(words), found


def _fsdp(trainer: TrainerConfig, ranks: int) -> Iterator[FsdpConfig]:
    fsdp = trainer.fsdp
    for shared, offloads in product(_shared(fsdp, ranks), sorted({fsdp.offload_optimizer, True})):
        yield replace(
            fsdp,
            context_parallel=shared,
            offload_optimizer=offloads,
            reduce_every_microbatch=True,
            # With more ranks, more copies of the model would not save memory per rank.
            shard_ranks=fsdp.shard_ranks if ranks == trainer.num_ranks else None,
        )


def _megatron(trainer: TrainerConfig, ranks: int) -> Iterator[MegatronConfig]:
    """Layouts with more tensor-parallel ranks, then more stages, whose sizes divide `ranks`."""
    megatron = trainer.megatron
    for stages, split in product(FACTORS, FACTORS):
        tensor, pipeline = megatron.tensor_parallel * split, megatron.pipeline_parallel * stages
        if ranks % (tensor * pipeline * megatron.context_parallel) == 0:
            yield replace(megatron, tensor_parallel=tensor, pipeline_parallel=pipeline)


def _shared(fsdp: FsdpConfig, ranks: int) -> Iterator[int]:
    """Possible numbers of ranks that share a row: the present one, doubled while its attention allows."""
    shared = fsdp.context_parallel
    while ranks % shared == 0 and (shared == 1 or fsdp.attention != "flash_attention_2"):
        yield shared
        shared *= 2


def _sequence_bytes(recipe: Recipe, tensors: dict[str, Shape]) -> int:
    """KV cache of one sequence of the longest length, over all workers of a replica; 0 if unknown."""
    key_width = sum(shape[0] for name, shape in tensors.items() if name.endswith(("k_proj.weight", "v_proj.weight")))
    return _itemsize(recipe) * key_width * recipe.rollout.max_model_len


def _room_of_worker(recipe: Recipe, facts: ModelFacts, gpu: int) -> tuple[float, int | None]:
    """Bytes that an engine's worker may take, and what a colocated rank leaves of its GPU."""
    share, beside = getattr(recipe.rollout.settings, "memory_share", None), _room_of_engine(recipe, facts, gpu)
    room = gpu * (DEFAULT_MEMORY_SHARE if share is None else share)
    return (room if beside is None else min(room, beside)), beside


def with_fitting_places(recipe: Recipe, facts: ModelFacts, *, is_set: bool) -> tuple[Recipe, str | None]:
    """The recipe whose replicas of vLLM decode as many requests as their KV cache holds, and a note where that is not
    the default number. `is_set`: the user's own is kept."""
    rollout, gpu, tensors = recipe.rollout, gpu_bytes(recipe), model_tensors(facts)
    sequence = 0 if tensors is None else _sequence_bytes(recipe, tensors)
    if is_set or rollout.engine != "vllm" or gpu is None or not sequence or not Demand.of(recipe).replica_gpus:
        return recipe, None
    workers, default = rollout.vllm.num_workers, rollout.vllm.max_num_seqs
    room = workers * (_room_of_worker(recipe, facts, gpu)[0] - ENGINE_BYTES) - (served_bytes(recipe, facts) or 0)
    most = min(MOST_PLACES, rollout.vllm.max_num_batched_tokens or MOST_PLACES)
    places = min(most, int(2 * room / sequence) // 64 * 64)
    if places <= default:
        return recipe, None
    vllm = replace(rollout.vllm, max_num_seqs=places)
    note = f"rollout.vllm.max_num_seqs={places}: the KV cache holds {room / sequence:.0f} sequences of "
    return replace(recipe, rollout=replace(rollout, vllm=vllm)), f"{note}{rollout.max_model_len} tokens"


def _check_replica(recipe: Recipe, facts: ModelFacts, tensors: dict[str, Shape], gpu: int) -> None:
    rollout, sizes = recipe.rollout, facts.sizes
    weights, cache = served_bytes(recipe, facts) or 0, _sequence_bytes(recipe, tensors)
    room, beside = _room_of_worker(recipe, facts, gpu)
    workers = rollout.settings.num_workers

    # Bytes per worker: (weights + cache of one full sequence) / split + ENGINE_BYTES.
    def needed(split: int) -> float:
        return (weights + cache) / split + ENGINE_BYTES

    if needed(workers) <= room:
        return
    heads = sizes.kv_heads or 1
    allowed = (n for n in (workers * times for times in FACTORS) if n <= heads or n % heads == 0)
    fitting = next((split for split in allowed if needed(split) <= room), None)
    key = f"rollout.{rollout.engine}.tensor_parallel_size"
    do = f"set {key}={fitting}" if fitting else "shorten rollout.sampling.max_response_tokens, or use a smaller model"
    do = do if beside is None else MORE_ROOM
    do += _OTHER_GPU
    needs = f"{weights / workers / GIB:.0f} GiB for weights, {cache / workers / GIB:.0f} for one sequence of "
    needs += f"{rollout.max_model_len} tokens and {ENGINE_BYTES / GIB:.0f} besides"
    found = f"a worker needs {needs}, and has {room / GIB:.0f} of the {gpu / GIB:.0f} GiB of its GPU"
    raise ConfigError(explain(f"a replica of {facts.name} with {key}={workers}", found, do))


# The share of an engine that takes turns with a trainer rank on one GPU.


SHARE_KEYS = {"vllm": "gpu_memory_utilization", "sglang": "mem_fraction_static"}


MORE_ROOM = (
    "set trainer.fsdp.offload_optimizer=true (trainer.megatron.offload_optimizer), or take more ranks, or LoRA "
    "(trainer.lora.rank)"
)


def with_fitting_share(recipe: Recipe, facts: ModelFacts) -> tuple[Recipe, str | None]:
    """The recipe whose colocated engine takes what a rank leaves, and a note with both numbers, or that they are not
    known."""
    rollout = recipe.rollout
    if not recipe.is_colocated or rollout.engine not in SHARE_KEYS or _own_share(recipe) is not None:
        return recipe, None
    gpu = gpu_bytes(recipe)
    beside = None if gpu is None else _room_of_engine(recipe, facts, gpu)
    if gpu is None or beside is None:
        key = f"rollout.{rollout.engine}.{SHARE_KEYS[rollout.engine]}"
        unknown = "the GPU's memory (ray.gpu_memory_gib)" if gpu is None else "the model's sizes"
        return recipe, f"{key} is {DEFAULT_MEMORY_SHARE:g}: {unknown} is not known; set what a trainer rank leaves"
    key, share = SHARE_KEYS[rollout.engine], min(DEFAULT_MEMORY_SHARE, _floored(beside / gpu))
    settings = replace(rollout.settings, **{key: share})
    kept = f"a rank keeps {(gpu - beside) / GIB:.0f} of {gpu / GIB:.0f} GiB between steps, with reserves"
    note = f"rollout.{rollout.engine}.{key}={share:g}: {kept}, and the engine takes {share * gpu / GIB:.0f}"
    return replace(recipe, rollout=replace(rollout, **{rollout.engine: settings})), note


def _check_share(recipe: Recipe, facts: ModelFacts, gpu: int) -> None:
    """Raises ConfigError: a colocated engine is to take more than a rank leaves, or nothing is left."""
    beside, share = _room_of_engine(recipe, facts, gpu), None
    if beside is None or (beside > 0 and ((share := _own_share(recipe)) is None or share * gpu <= beside)):
        return
    engine = recipe.rollout.engine
    asked = f"rollout.{engine}.{SHARE_KEYS[engine]}={share:g} with " if share is not None else ""
    taken = f"{share * gpu / GIB:.0f} GiB" if share is not None else "nothing is left for the engine"
    found = f"{taken} of a GPU of {gpu / GIB:.0f}, of which a trainer rank leaves {max(0, beside) / GIB:.0f}"
    do = f"leave it out, which takes {_floored(beside / gpu):g}; or {MORE_ROOM}" if beside > 0 else MORE_ROOM
    raise ConfigError(explain(f"{asked}placement=colocated", found, do))


def _own_share(recipe: Recipe) -> float | None:
    return getattr(recipe.rollout.settings, SHARE_KEYS[recipe.rollout.engine])


def _floored(share: float) -> float:
    return int(100 * share) / 100


def _room_of_engine(recipe: Recipe, facts: ModelFacts, gpu: int) -> int | None:
    """Bytes that a colocated engine may take, awake: all but what a rank keeps between steps, reserves and the buckets
    of a publish. None: it takes no turns, or the rank's memory is unknown."""
    found = ranks_memory(recipe, facts) if recipe.is_colocated and recipe.rollout.engine in SHARE_KEYS else None
    if not found:
        return None
    kept = max(memory.between_steps for memory in found)
    return gpu - kept - RESERVED_BYTES - ENGINE_BYTES - 2 * recipe.weights.bucket_bytes


# Recomputation and the micro-batch, which decide on the memory of activations.


def with_fitting_recompute(recipe: Recipe, facts: ModelFacts, *, is_set: bool) -> tuple[Recipe, str | None]:
    """The recipe with `trainer.recompute` resolved, and a note where that recomputes something. `is_set`: the user has
    set the micro-batch; on this machine's CPUs another one becomes smaller first."""
    if recipe.trainer.recompute != "auto":
        return recipe, None
    room, tokens = _room_of_rank(recipe, facts), recipe.max_tokens_per_microbatch
    if (here := computes_here(recipe)) and not is_set:
        tokens = longest_sequence(recipe.rollout, recipe.data.max_prompt_tokens)
    ways = {way: replace(recipe, trainer=replace(recipe.trainer, recompute=way)) for way in RECOMPUTE}
    peaks = {way: _peak(found, facts, tokens) for way, found in ways.items()}
    fits = (way for way, peak in peaks.items() if (room is not None and 0 < peak <= SURE * room) or (here and not peak))
    least = min(peaks, key=lambda way: peaks[way]) if peaks["full"] else "full"  # tiny models: none
    if (way := next(fits, least)) == "none":
        return ways[way], None
    why = "the memory of a rank or of its passes is not known"
    if room is not None and peaks[way]:
        with_it = f"{_bytes(peaks['none'])} without, {_bytes(peaks[way])} with it"
        why = f"a rank takes up to {with_it}, and has {_bytes(room)}"
    return ways[way], f"trainer.recompute={way}: {why}"


def with_fitting_microbatch(recipe: Recipe, facts: ModelFacts, *, is_set: bool) -> tuple[Recipe, str | None]:
    """The recipe with the largest micro-batch that fits, of at most its present one, and a note where that is less than
    the present one. `is_set`: the user's own is kept, and the note says what would fit."""
    room, asked = _room_of_rank(recipe, facts), recipe.max_tokens_per_microbatch
    if room is None or (peak := _peak(recipe, facts, asked)) <= room:
        return recipe, None
    least = longest_sequence(recipe.rollout, recipe.data.max_prompt_tokens)
    tokens = asked
    while tokens > least and _peak(recipe, facts, tokens) > room:
        tokens = max(least, tokens // 2)
    found = f"a rank takes up to {_bytes(peak)} with trainer.max_tokens_per_microbatch={asked}, and has {_bytes(room)}"
    if (then := _peak(recipe, facts, tokens)) > room:
        return recipe, f"{found}; {_bytes(then)} with {tokens}, the longest sequence: take a smaller model, or LoRA"
    if is_set:
        return recipe, f"{found}; {_bytes(then)} with {tokens}: set that, or leave the key out"
    return _with_microbatch(recipe, tokens), f"{found}: it is {tokens}, which takes {_bytes(then)}"


def computes_here(recipe: Recipe) -> bool:
    """True if the CPUs of this machine compute."""
    on_gpus = recipe.trainer.device.startswith("cuda") or gpu_bytes(recipe) is not None
    return not on_gpus and joined_address(recipe.ray.address) is None


def _room_of_rank(recipe: Recipe, facts: ModelFacts) -> int | None:
    """Bytes that a trainer rank may take, beside the replicas; None if unknown."""
    if not computes_here(recipe):
        demand, gpu = Demand.of(recipe), gpu_bytes(recipe)
        return _room_on_gpu(recipe, gpu, demand) if gpu is not None and demand.rank_gpus else None
    replicas = 0 if ENGINES[recipe.rollout.engine].elsewhere else recipe.rollout.num_replicas
    free = int(0.9 * psutil.virtual_memory().available) - replicas * (served_bytes(recipe, facts) or 0)
    return free // recipe.trainer.num_ranks


def _peak(recipe: Recipe, facts: ModelFacts, tokens: int) -> int:
    """Bytes of the rank that takes most; 0 if unknown."""
    found = ranks_memory(_with_microbatch(recipe, tokens), facts) or ()
    return max((memory.peak or 0 for memory in found), default=0)


def _with_microbatch(recipe: Recipe, tokens: int) -> Recipe:
    return replace(recipe, trainer=replace(recipe.trainer, max_tokens_per_microbatch=tokens))


# The lines of a dry run.


def trainer_plan(recipe: Recipe, facts: ModelFacts) -> Iterator[tuple[str, str]]:
    """(label, text) of each line; none if the backend or the model's config does not say enough."""
    tensors, trainer = model_tensors(facts), recipe.trainer
    if tensors is None:
        return
    found = ranks_memory(recipe, facts)
    for memory in found or ():
        yield "memory", _memory(memory)
        if memory.passes is not None and memory.peak is not None:
            text = f"passes over {recipe.max_tokens_per_microbatch} tokens with trainer.recompute={trainer.recompute} "
            text += f"take up to {_bytes(memory.passes)}: "
            yield "", f"{text}{_bytes(memory.peak)} at the peak; two buckets of a publish come on top"
    if any(memory.passes is None for memory in found or ()):
        yield "", "activations, two buckets of a publish and what an allocator keeps come on top: not estimated"
    if trainer.lora.rank:
        return
    dtype, limit = recipe.model.inference_dtype, recipe.weights.bucket_bytes
    specs = [make_spec(name, shape, dtype) for name, shape in tensors.items()]
    stages = stages_of(trainer, tensors)
    of_stages = [[spec for spec in specs if stages[spec.name] == stage] for stage in sorted(set(stages.values()))]
    buckets = [bucket for own in of_stages for bucket in plan_buckets(own, limit)]  # each stage sends its own buckets
    largest = max(specs, key=lambda spec: spec.nbytes)
    sizes = [bucket.nbytes for bucket in buckets]
    text = (
        f"{len(specs)} tensors, {_bytes(sum(spec.nbytes for spec in specs))} in {dtype}; {len(buckets)} bucket(s) of "
    )
    text += f"{_bytes(min(sizes))} to {_bytes(max(sizes))}; largest tensor {_bytes(largest.nbytes)} ({largest.name})"
    yield "publish", text
    yield from (("", text) for text in _copies(recipe, of_stages))
    if len(of_stages) > 1:
        parts = enumerate((len(own), sum(spec.nbytes for spec in own)) for own in of_stages)
        yield "", "from " + ", ".join(f"stage {s}: {count} tensors, {_bytes(size)}" for s, (count, size) in parts)


def _copies(recipe: Recipe, of_stages: Sequence[Sequence[TensorSpec]]) -> Iterator[str]:
    """Host memory of a publish: the copies for sending, receiving and computing differences."""
    own = [sum(spec.nbytes for spec in specs) for specs in of_stages]
    sender = f"{_bytes(max(own))} in the trainer rank that sends" + ("" if len(own) == 1 else " the most")
    worker = f"{_bytes(sum(own))} in each worker of a replica"
    if recipe.sends_snapshots:
        yield f"sent from a copy in host memory: {sender}"
    if recipe.weights.stage:
        yield f"staged in host memory: {worker}"
    if recipe.weights.encoding == "delta":
        yield f"encoding delta keeps a copy in host memory: {sender}, {worker}"


def _memory(memory: RankMemory) -> str:
    text = f"{memory.ranks}: {_bytes(memory.total)} = weights {_bytes(memory.weights)} + gradients "
    return f"{text}{_bytes(memory.gradients)} + optimizer {_bytes(memory.optimizer)}"


def _bytes(number: int) -> str:
    unit, name = next(((unit, name) for unit, name in _UNITS if number >= unit), (1, "bytes"))
    return f"{number / unit:.1f} {name}" if unit > 1 else f"{number} {name}"
