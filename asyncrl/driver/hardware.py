"""Expected times of a recipe on named GPUs, by arithmetic: for a dry run that asks which machine a job needs.

A replica's decoding step reads its weights and the KV cache of its running requests; a training step multiplies. Shares
of the peaks that are reached in practice, and times that arithmetic does not see, are constants fitted to published
steps: tests/unit/test_hardware.py names them with their sources.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from asyncrl.config.recipe import Recipe
from asyncrl.errors import ConfigError, explain
from asyncrl.trainer.model_tensors import MODEL_TYPES, layer_of, model_tensors
from asyncrl.types import ModelFacts

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: memory, dense bfloat16 FLOP/s and bytes/s of memory. Source: NVIDIA's data sheets, of SXM where sold."""

    memory_gib: float
    flops: float
    bandwidth: float


GPUS = {
    "A100-40GB": Gpu(39.5, 312e12, 1.55e12),
    "A100": Gpu(79.1, 312e12, 2.04e12),
    "H20": Gpu(95.1, 148e12, 4.0e12),
    "H100": Gpu(79.6, 989e12, 3.35e12),
    "H200": Gpu(139.8, 989e12, 4.8e12),
    "B200": Gpu(178.4, 2250e12, 7.7e12),
    "L40S": Gpu(44.4, 362e12, 0.86e12),
    "RTX4090": Gpu(23.5, 165e12, 1.01e12),
}


DENSE, MIXTURE = 0.28, 0.05
"""Shares of the peak in training: of dense models, attention counted, and of mixtures, whose matrices are small."""
DECODING = 0.5
"""Share of the memory's bandwidth, and of the FLOP/s, while decoding."""
LAUNCH_S = 0.006
"""Scheduling and launches of a decoding step."""
PUBLISHED = {"collective": 20e9, "ipc": 20e9, "disk": 2e9}
"""Transport -> bytes/s of a publish."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a step asks of a model: parameters in all and per token, bytes of KV cache per token, multiplications of
    attention per token and token before it."""

    parameters: float
    active: float
    cache: float
    attention: float
    is_mixture: bool

    @classmethod
    def of(cls, facts: ModelFacts) -> Work | None:
        """None if the model's config does not say enough."""
        if (tensors := model_tensors(facts)) is None:
            return None
        share = (facts.sizes.experts_per_token or 1) / max(facts.num_experts, 1)
        active = sum(prod(shape) * (share if ".experts." in name else 1) for name, shape in tensors.items())
        keys = sum(s[0] for name, s in tensors.items() if name.endswith(("k_proj.weight", "v_proj.weight")))
        queries = sum(s[0] for name, s in tensors.items() if layer_of(name) is not None and "q_proj.w" in name)
        whole = sum(map(prod, tensors.values()))
        return cls(whole, active, 2 * keys, 2 * queries, is_mixture=facts.num_experts > 0)


@dataclass(frozen=True, slots=True)
class Expected:
    """Seconds of one step and of its parts. They follow each other in mode sync; else generation and training run
    concurrently."""

    generate_s: float
    train_s: float
    publish_s: float
    step_s: float


def describe(recipe: Recipe, facts: ModelFacts, gpu: Gpu, mean_response: int | None) -> str:
    """The plan's line. `mean_response`: tokens; None: half of the longest."""
    prompt = recipe.data.max_prompt_tokens / 2
    response = mean_response or (recipe.rollout.max_model_len - prompt) / 2
    if (found := expected(recipe, facts, gpu, prompt=prompt, response=response)) is None:
        return f"not known: no sizes of {facts.name} ({', '.join(MODEL_TYPES)} are known from their config)"
    how = "one after the other" if recipe.mode == "sync" or recipe.is_colocated else "concurrently"
    text = f"a step of {found.step_s:.0f} s: generation {found.generate_s:.0f}, training {found.train_s:.0f}, {how}, "
    text += f"publish {found.publish_s:.0f}; for prompts of {prompt:.0f} and responses (--mean-response) of "
    return f"{text}{response:.0f} tokens in the mean, give or take 30 %"


def parse_machines(text: str) -> tuple[Gpu, list[int]]:
    """`8xH100` or, for several nodes, `2x8xH100`: the GPU, and how many each node has. Raises ConfigError."""
    found = re.fullmatch(r"(?:(\d+)x)?(\d+)x([\w-]+)", text)
    names = {name.lower(): name for name in GPUS}
    if found is None or found[3].lower() not in names or "0" in (found[1], found[2]):
        do = "write 8xH100 for one machine, 2x8xH100 for two"
        raise ConfigError(explain(f"--on {text}", f"known are {', '.join(GPUS)}", do))
    return GPUS[names[found[3].lower()]], [int(found[2])] * int(found[1] or 1)


def expected(recipe: Recipe, facts: ModelFacts, gpu: Gpu, *, prompt: float, response: float) -> Expected | None:
    """Of a step whose prompts and responses have `prompt` and `response` tokens in the mean. None: the model's config
    does not say enough."""
    if (work := Work.of(facts)) is None:
        return None
    rollout, ranks = recipe.rollout, recipe.trainer.num_ranks
    trajectories = recipe.batch.groups_per_step * recipe.batch.group_size
    longest = max(rollout.max_model_len - prompt, response + 1)
    workers, replicas = rollout.settings.num_workers, rollout.num_replicas
    share = getattr(rollout.settings, "memory_share", None) or 0.85
    cache = workers * gpu.memory_gib * GIB * share - 2 * work.parameters
    places = max(1.0, min(rollout.settings.decodes_at_once, cache / (work.cache * (prompt + response))))

    def decode_s(running: float, tokens: float) -> float:
        """Of one token for each of `running` requests, whose contexts have `tokens`."""
        read = 2 * work.parameters if not work.is_mixture else 2 * _touched(work, running)
        moved = (read + running * tokens * work.cache) / (workers * gpu.bandwidth * DECODING)
        return LAUNCH_S + max(moved, 2 * work.active * running / (workers * gpu.flops * DECODING))

    due = trajectories / replicas
    if recipe.mode == "fully_async":
        running = min(places, due * (recipe.max_lag + 1))
        generate = due * response * decode_s(running, prompt + response / 2) / running
    else:
        running = min(places, due)
        whole = decode_s(running, prompt + response / 2)
        generate = (due - running) * response * whole / running + _wave(running, prompt, response, longest, decode_s)
    # Passes over a token: forward and twice as much backward, another forward of what is recomputed and compared.
    algorithm, again = recipe.algorithm, {"full": 1.0, "selective": 0.8}.get(recipe.trainer.recompute, 0.0)
    passes = (3 + again) * recipe.batch.num_epochs + algorithm.needs_reference
    passes += algorithm.ratio == "proximal" and algorithm.proximal == "recompute" and recipe.batch.num_minibatches > 1
    passes *= 2 if algorithm.needs_critic else 1
    tokens = prompt + response
    of_token = 2 * work.active + 2 * work.attention * tokens / 2
    speed = ranks * gpu.flops * (MIXTURE if work.is_mixture else DENSE)
    train = trajectories * tokens * of_token * passes / speed
    publish = 1 + 2 * work.parameters / PUBLISHED[recipe.weights.transport]
    alternate = recipe.mode == "sync" or recipe.is_colocated
    return Expected(generate, train, publish, publish + (generate + train if alternate else max(generate, train)))


def _touched(work: Work, running: float) -> float:
    """Parameters of a mixture that one decoding step reads: a few requests do not ask all experts."""
    return min(work.parameters, work.active + (work.parameters - work.active) * running * 0.05)


def _wave(
    running: float, prompt: float, response: float, longest: float, decode_s: Callable[[float, float], float]
) -> float:
    """Seconds until the last of `running` requests has ended. The share of responses that are longer than x of
    `longest` is taken as 1 - x^k, with the k that has the mean `response`."""
    steps, k = 64, response / (longest - response)
    middles = [(i + 0.5) / steps for i in range(steps)]
    of_each = (decode_s(max(1.0, running * (1 - x**k)), prompt + x * longest) for x in middles)
    return longest / steps * sum(of_each)
