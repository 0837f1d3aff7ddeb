"""How many threads a trainer rank computes with on the cores of its node, also beside a GPU: it reads models, copies
weights and steps optimizers that are kept in the host's memory. Pure, but for `local_cores`.

Threads of processes that share a core slow each other down, and a core that no process uses is lost. So the ranks of a
node divide the cores that the replicas beside them leave.
"""

from __future__ import annotations

import math
import os

from asyncrl.config.recipe import Mode, Recipe


def rank_threads(
    mode: Mode,
    *,
    cores: int,
    num_ranks: int,
    num_replicas: int,
    replica_threads: int = 1,
) -> int:
    """Threads of each trainer rank of a node, at least 1.

    In mode sync the replicas are idle while a rank works: the ranks divide all cores. In the other modes replicas
    generate at that time, and each keeps its threads; the ranks divide the rest. Cores that do not divide stay free.
    Colocated replicas sleep while a rank works, in any mode.

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

    It depends on the recipe and the size of the cluster alone, not on where processes happen to be placed: a resumed
    run has the same number, and with it the same sums.
    """
    trainer, rollout = recipe.trainer, recipe.rollout
    if trainer.num_threads is not None:
        return trainer.num_threads
    num_ranks = math.ceil(trainer.num_ranks / num_nodes)
    num_replicas = math.ceil(rollout.num_replicas / num_nodes)
    if node_gpus:
        num_ranks = min(trainer.num_ranks, node_gpus)
        wanted = trainer.num_ranks + rollout.num_replicas * rollout.settings.num_workers
        shared = recipe.is_colocated or rollout.settings.gpu_share < 1 or wanted > num_nodes * node_gpus
        if rollout.engine != "torch" or rollout.torch.device != "cpu":
            num_replicas = min(rollout.num_replicas, node_gpus if shared else node_gpus - num_ranks)
    return rank_threads(
        "sync" if recipe.is_colocated else recipe.mode,
        cores=cores,
        num_ranks=num_ranks,
        num_replicas=num_replicas,
        replica_threads=replica_threads(recipe),
    )


def replica_threads(recipe: Recipe) -> int:
    """Threads with which a replica computes on a CPU."""
    return recipe.rollout.torch.num_threads if recipe.rollout.engine == "torch" else 1


def local_cores() -> int:
    """Cores of this machine that the system lets this process run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS binds no process to cores
