"""CPU threads of a trainer rank, also with a GPU: it reads models, copies weights and steps optimizers in host memory.
Pure, except `local_cores`.

The ranks of a node divide the cores that its replicas leave: shared cores slow both processes, idle cores are lost.
"""

from __future__ import annotations

import math
import os

from asyncrl.config.recipe import Mode, Recipe


def rank_threads(mode: Mode, *, cores: int, num_ranks: int, num_replicas: int, replica_threads: int) -> int:
    """Threads of each trainer rank of a node, at least 1.

    In mode sync, and with colocated replicas, replicas are idle while ranks work: the ranks divide all cores. Otherwise
    each replica keeps its threads and the ranks divide the rest. A remainder stays free.

    Args:
        cores: of the node.
        num_ranks: trainer ranks on the node, at least 1.
        num_replicas: on the node. replica_threads: busy threads of each.
    """
    busy = 0 if mode == "sync" else num_replicas * replica_threads
    return max(1, (cores - busy) // num_ranks)


def trainer_threads(recipe: Recipe, *, cores: int, num_nodes: int = 1, node_gpus: int = 0) -> int:
    """Threads of each trainer rank of a run: `trainer.num_threads`, or `rank_threads` for the ranks and replicas of one
    of `num_nodes` equal nodes. Ranks with GPUs fill a node, of `node_gpus`, before they use the next one.

    Depends only on the recipe and the cluster's size, not on placement, so that a resumed run has the same number and
    bitwise the same sums.
    """
    trainer, rollout = recipe.trainer, recipe.rollout
    if trainer.num_threads is not None:
        return trainer.num_threads
    num_ranks = math.ceil(trainer.num_ranks / num_nodes)
    num_replicas = math.ceil(rollout.num_replicas / num_nodes)
    # With GPUs, processes fill a node before they use the next one, so the fullest node decides.
    if node_gpus:
        num_ranks = min(trainer.num_ranks, node_gpus)
        wanted = trainer.num_ranks + rollout.num_replicas * rollout.settings.num_workers
        shared = recipe.is_colocated or rollout.settings.gpu_share < 1 or wanted > num_nodes * node_gpus
        if rollout.engine != "torch" or rollout.torch.device != "cpu":
            num_replicas = min(rollout.num_replicas, node_gpus if shared else node_gpus - num_ranks)
    mode, busy = "sync" if recipe.is_colocated else recipe.mode, replica_threads(recipe)
    return rank_threads(mode, cores=cores, num_ranks=num_ranks, num_replicas=num_replicas, replica_threads=busy)


def replica_threads(recipe: Recipe) -> int:
    """CPU threads of a replica."""
    return recipe.rollout.torch.num_threads if recipe.rollout.engine == "torch" else 1


def local_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS has no affinity
