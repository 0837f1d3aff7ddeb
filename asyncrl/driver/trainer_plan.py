"""The dry run's lines on the trainer's memory and on a publish, computed from the model's config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asyncrl.config.recipe import Recipe
from asyncrl.driver.memory_plan import ranks_memory
from asyncrl.trainer.backends import stages_of
from asyncrl.trainer.model_tensors import RankMemory, model_tensors
from asyncrl.types import ModelFacts, TensorSpec
from asyncrl.weights.plan import make_spec, plan_buckets

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def trainer_plan(recipe: Recipe, facts: ModelFacts) -> Iterator[tuple[str, str]]:
    """(label, text) of each line; none if the backend or the model's config does not say enough."""
    tensors, trainer = model_tensors(facts), recipe.trainer
    if tensors is None:
        return
    found = ranks_memory(recipe, facts)
    for memory in found or ():
        yield "memory", _memory(memory)
        if memory.passes is not None and memory.peak is not None:
            text = f"passes over {recipe.max_tokens_per_microbatch} tokens take up to {_bytes(memory.passes)}: "
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
