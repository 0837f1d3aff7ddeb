"""What the plan of a run advises: where processes would wait for cores, or responses for places. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from asyncrl.config.recipe import Recipe
from asyncrl.config.threads import replica_threads

PLACES = {"torch": "num_slots", "vllm": "max_num_seqs", "sglang": "max_running_requests"}
"""Engine -> the setting that says how many requests a replica decodes at once."""


def advice(recipe: Recipe, *, cores: int | None) -> Iterator[str]:
    """Each with its reason. `cores`: of the machine whose CPUs compute; None: ranks and replicas have GPUs, or are on
    other machines."""
    if recipe.rollout.engine not in PLACES:
        return  # servers that run already
    if cores is not None:
        yield from _replicas(recipe, cores)
    yield from _places(recipe)


def _replicas(recipe: Recipe, cores: int) -> Iterator[str]:
    replicas, threads, ranks = recipe.rollout.num_replicas, replica_threads(recipe), recipe.trainer.num_ranks
    alternate = recipe.mode == "sync" or recipe.is_colocated
    busy = ranks * (recipe.trainer.num_threads or 1)
    free = cores if alternate else cores - busy
    fitting = max(1, free // threads)
    if replicas > fitting:
        beside = "" if alternate else f" and {ranks} trainer rank(s)"
        yield (
            f"rollout.num_replicas={fitting}: {replicas} replicas{beside} share {cores} cores, and each waits for the "
            "others"
        )


def _places(recipe: Recipe) -> Iterator[str]:
    rollout, key = recipe.rollout, PLACES[recipe.rollout.engine]
    trajectories = recipe.batch.groups_per_step * recipe.batch.group_size
    places, due = rollout.settings.decodes_at_once, math.ceil(trajectories / rollout.num_replicas)
    if due > places:
        yield (
            f"rollout.{rollout.engine}.{key}={due} where the KV cache has room, or more replicas: a step takes "
            f"{trajectories} responses, and {rollout.num_replicas} replica(s) decode {rollout.num_replicas * places} "
            "at once"
        )
