"""Which processes of a run share a bundle of GPUs, and on which node each bundle fits. Pure.

A bundle is a reservation on one node. A replica is one bundle with all of its GPUs, so tensor parallelism never leaves
a machine. Trainer ranks form as few bundles as the nodes allow, of equal size, so that neighbours share a machine.
Where processes share GPUs, each GPU is its own bundle with at most one rank: NCCL refuses two ranks on one GPU, and Ray
puts two halves onto one GPU of a larger bundle.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from asyncrl.config.checks import require
from asyncrl.config.recipe import Recipe
from asyncrl.config.trainer import TrainerConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.inference.engines import ENGINES

Strategy = Literal["PACK", "STRICT_PACK", "SPREAD"]

SHARE_IN_TURNS = 0.5
"""Share of its GPU that a replica reserves when it takes turns with a trainer rank, which reserves the rest."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """`gpus`: whole GPUs of one node; 0: its processes compute on a CPU. `replicas`: their ids. `num_ranks`: number of
    trainer ranks; their rank numbers depend on where Ray puts the bundles (`Placement.bundle_of_rank`)."""

    gpus: int
    replicas: tuple[int, ...] = ()
    num_ranks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The processes and GPUs that a recipe asks for.

    Attributes:
        replica_gpus: of one replica, on one node; 0: computes on a CPU.
        rank_gpus: of one trainer rank, 0 or 1.
        gpu_share: below 1, each replica takes this share of a GPU that it shares with a trainer rank. With
            turns (`Recipe.is_colocated`) it only matters to Ray's accounting: each has the whole GPU in its turn.
        may_share: processes share GPUs evenly if there are more processes than GPUs.
        one_node: weights reach replicas on the trainer's node only.
        ranks_together: number of consecutive ranks that communicate most and should share a node; divides `num_ranks`.
        least_ranks: every number of ranks is a multiple of it.
    """

    num_replicas: int
    num_ranks: int
    replica_gpus: int = 0
    rank_gpus: int = 0
    gpu_share: float = 1.0
    may_share: bool = False
    one_node: bool = False
    ranks_together: int = 1
    least_ranks: int = 1

    @classmethod
    def of(cls, recipe: Recipe) -> Demand:
        rollout, trainer, weights = recipe.rollout, recipe.trainer, recipe.weights
        takes_whole = ENGINES[rollout.engine].takes_whole_gpus
        on_cpu = not takes_whole and rollout.torch.device == "cpu"
        turns = recipe.is_colocated and not on_cpu and trainer.device != "cpu"
        return cls(
            num_replicas=rollout.num_replicas,
            num_ranks=trainer.num_ranks,
            replica_gpus=0 if on_cpu or ENGINES[rollout.engine].elsewhere else rollout.settings.num_workers,
            rank_gpus=0 if trainer.device == "cpu" else 1,
            gpu_share=SHARE_IN_TURNS if turns else rollout.settings.gpu_share,
            may_share=not takes_whole,
            one_node=weights.transport == "ipc" or (weights.transport == "disk" and not weights.disk_directory),
            ranks_together=trainer.layout.tensor * trainer.layout.context
            if trainer.backend == "megatron"
            else math.lcm(trainer.fsdp.shard_ranks or 1, trainer.fsdp.context_parallel),
            least_ranks=_least_ranks(trainer),
        )

    @property
    def num_gpus(self) -> int:
        """GPUs that the run needs when no process shares a GPU that it could have alone."""
        if self.gpu_share < 1:
            return max(self.num_replicas, self.num_ranks)
        return self.num_replicas * self.replica_gpus + self.num_ranks * self.rank_gpus


def _least_ranks(trainer: TrainerConfig) -> int:
    megatron, fsdp = trainer.megatron, trainer.fsdp
    if trainer.backend != "megatron":
        return math.lcm(fsdp.shard_ranks or 1, fsdp.context_parallel)
    of_model = megatron.tensor_parallel * megatron.pipeline_parallel * megatron.context_parallel
    return math.lcm(of_model, megatron.expert_parallel * megatron.pipeline_parallel)


@dataclass(frozen=True, slots=True)
class Machines:
    """The node of each rank, and of each replica by its id."""

    ranks: tuple[str, ...]
    replicas: Mapping[int, str]

    def sender_of(self, replica_id: int) -> int:
        """The first rank on the replica's node; of one whose node is lost, rank 0."""
        node = self.replicas.get(replica_id)
        return self.ranks.index(node) if node in self.ranks else 0


@dataclass(frozen=True, slots=True)
class Placement:
    """The bundles of a run.

    Attributes:
        replica_gpus, rank_gpus: share of its bundle that one process takes, possibly a fraction of a GPU.
        strategy: Ray's placement strategy.
    """

    bundles: tuple[Bundle, ...]
    replica_gpus: float
    rank_gpus: float
    strategy: Strategy

    @property
    def bundle_of_replica(self) -> dict[int, int]:
        """Index of the bundle of each replica."""
        return {replica_id: i for i, bundle in enumerate(self.bundles) for replica_id in bundle.replicas}

    @property
    def shares_gpus(self) -> bool:
        """True when several processes compute on one GPU."""
        return any(b.gpus and len(b.replicas) + b.num_ranks > b.gpus for b in self.bundles)

    def bundle_of_rank(self, nodes: Sequence[str]) -> list[int]:
        """Index of the bundle of each trainer rank: the ranks of a node are consecutive.

        Args:
            nodes: of each bundle.
        """
        own = [i for i, bundle in enumerate(self.bundles) if bundle.num_ranks]
        in_order = [i for node in dict.fromkeys(nodes[i] for i in own) for i in own if nodes[i] == node]
        return [i for i in in_order for _ in range(self.bundles[i].num_ranks)]


def place_run(recipe: Recipe, node_gpus: Sequence[int]) -> Placement:
    """The bundles of a run on nodes with these numbers of GPUs.

    Raises ConfigError if they do not fit even on idle nodes, if processes that share a GPU would exchange weights over
    NCCL, or if the transport does not reach every replica.
    """
    demand, transport = Demand.of(recipe), recipe.weights.transport
    found = plan_placement(demand, node_gpus)
    nodes = fit(found.bundles, node_gpus) if demand.one_node and found.strategy == "PACK" else None
    reached = [node for node, b in zip(nodes or (), found.bundles, strict=False) if b.num_ranks]
    reached = reached if sends_copies(recipe) else reached[:1]
    others = "disk" if found.shares_gpus else "collective, or disk"  # no NCCL between processes on one GPU
    require(
        nodes is None or all(node in reached for node, b in zip(nodes, found.bundles, strict=True) if b.replicas),
        asked=f"weights.transport={transport}; {words(found.bundles)}",
        found=f"they do not fit on one node ({', '.join(str(gpus) for gpus in node_gpus)} GPUs), and this transport "
        "reaches replicas on the node of a sending rank only",
        do=f"set weights.transport={others} with weights.disk_directory on shared storage",
    )
    if found.shares_gpus and transport == "collective":
        why = f"processes share the {sum(node_gpus)} GPUs, and NCCL refuses two processes on one GPU"
        do = "set weights.transport=ipc (disk with Megatron-core on several nodes), or use fewer processes or more GPUs"
        raise ConfigError(explain(f"weights.transport={transport}; {words(found.bundles)}", why, do))
    return found


def sends_copies(recipe: Recipe) -> bool:
    """Whether a rank on each node may send all tensors of a publish: those of FSDP gather them together. Snapshots and
    differences are of one rank."""
    weights, is_fsdp = recipe.weights, recipe.trainer.backend == "fsdp"
    return weights.transport == "ipc" and is_fsdp and weights.encoding == "full" and not recipe.sends_snapshots


def plan_placement(demand: Demand, node_gpus: Sequence[int]) -> Placement:
    """The bundles of `demand` on nodes with these numbers of GPUs; without GPUs everything computes on CPUs.

    Raises ConfigError if they do not fit; the message says what is missing.
    """
    if not any(node_gpus):
        demand = replace(demand, replica_gpus=0, rank_gpus=0, gpu_share=1.0)
    singly = [*_ranks([1] * demand.num_ranks, demand.rank_gpus), *_replicas(demand)]
    if not demand.num_gpus:
        return Placement(tuple(singly), 0, 0, "STRICT_PACK" if demand.one_node else "SPREAD")
    if demand.gpu_share < 1:
        pairs = _pairs(demand)
        if fit(pairs, node_gpus) is None:
            raise _too_few(demand, pairs, node_gpus)
        shares = demand.gpu_share, round(1 - demand.gpu_share, 4)
        return Placement(tuple(pairs), *shares, _strategy(demand, pairs, node_gpus))
    if demand.may_share and demand.num_gpus > sum(node_gpus):
        return _evenly(demand, node_gpus)
    if (bundles := _fitting(demand, node_gpus)) is None:
        raise _too_few(demand, singly, node_gpus)
    strategy = _strategy(demand, bundles, node_gpus)
    return Placement(tuple(bundles), demand.replica_gpus, demand.rank_gpus, strategy)


def _fitting(demand: Demand, node_gpus: Sequence[int]) -> list[Bundle] | None:
    """Fewest and largest bundles of ranks first: neighbours then share a machine. None: no division fits."""
    for ranks in _divisions(demand, max(node_gpus)):
        bundles = [*ranks, *_replicas(demand)]
        if fit(bundles, node_gpus) is not None:
            return bundles
    return None


def describe_demand(demand: Demand) -> str:
    """Describes the bundles of a run before its nodes are known."""
    if not demand.num_gpus:
        return "none: everything computes on CPUs"
    whole = plan_placement(demand, [max(demand.num_gpus, demand.replica_gpus)])
    text = "where there are any: " + words([bundle for bundle in whole.bundles if bundle.gpus])
    if demand.may_share and demand.gpu_share == 1:
        text += "; processes share GPUs where there are fewer, at most one rank on each"
    elif max(bundle.num_ranks for bundle in whole.bundles) > 1:
        text += "; ranks are divided evenly where no node holds all of them"
    return text


def fit(bundles: Sequence[Bundle], node_gpus: Sequence[int]) -> list[int] | None:
    """Index of a node for each bundle, as Ray's strategy PACK chooses; None if they do not fit.

    Ray fills the node with the most free GPUs with every bundle that fits, largest first, then the next node.
    """
    chosen: dict[int, int] = {}
    left = sorted(range(len(bundles)), key=lambda i: -bundles[i].gpus)
    free = dict(enumerate(node_gpus))
    while left:
        if not free:
            return None
        node = max(free, key=lambda n: free[n])
        room = free.pop(node)
        for i in left:
            if bundles[i].gpus <= room:
                room -= bundles[i].gpus
                chosen[i] = node
        left = [i for i in left if i not in chosen]
    return [chosen[i] for i in range(len(bundles))]


def words(bundles: Sequence[Bundle]) -> str:
    """The bundles in words, equal bundles counted: "2 bundles of 4 GPUs (a replica), 1 of 8 GPUs (8 trainer ranks)"."""
    found = Counter((b.gpus, b.num_ranks, len(b.replicas)) for b in bundles)
    parts = []
    for (gpus, ranks, replicas), count in sorted(found.items(), key=lambda item: (-item[0][2], item[0])):
        held = [_counted(replicas, "replica")] * (replicas > 0) + [_counted(ranks, "trainer rank")] * (ranks > 0)
        size = f"of {gpus} GPU{'s' * (gpus > 1)}" if gpus else "without GPUs"
        noun = "" if parts else " bundles" if count > 1 else " bundle"
        parts.append(f"{count}{noun} {size} ({' and '.join(held)})")
    return ", ".join(parts)


def _counted(count: int, noun: str) -> str:
    return f"a {noun}" if count == 1 else f"{count} {noun}s"


def _ranks(sizes: Sequence[int], gpus: int) -> list[Bundle]:
    return [Bundle(size * gpus, num_ranks=size) for size in sizes]


def _replicas(demand: Demand) -> list[Bundle]:
    return [Bundle(demand.replica_gpus, (i,)) for i in range(demand.num_replicas)]


def _pairs(demand: Demand) -> list[Bundle]:
    """Bundles of one GPU each, for a replica and a rank while both remain."""
    return [
        Bundle(1, (i,) if i < demand.num_replicas else (), num_ranks=int(i < demand.num_ranks))
        for i in range(demand.num_gpus)
    ]


def _evenly(demand: Demand, node_gpus: Sequence[int]) -> Placement:
    """Placement with more processes than GPUs: at most one rank per GPU, then each replica on the least used GPU."""
    total = sum(node_gpus)
    num_ranks = demand.num_ranks * demand.rank_gpus
    if num_ranks > total:
        found = "NCCL refuses two ranks on one GPU"
        do = f"set trainer.num_ranks to {total} or less, or trainer.device=cpu"
        raise ConfigError(explain(f"trainer.num_ranks={num_ranks} on {total} GPU{'s' * (total > 1)}", found, do))
    ranks = [1] * num_ranks + [0] * (total - num_ranks)
    replicas: list[list[int]] = [[] for _ in range(total)]
    for replica_id in range(demand.num_replicas * demand.replica_gpus):
        least = min(range(total), key=lambda gpu: ranks[gpu] + len(replicas[gpu]))
        replicas[least].append(replica_id)
    bundles = [Bundle(1, tuple(ids), rank) for ids, rank in zip(replicas, ranks, strict=True)]
    if not demand.rank_gpus:
        bundles += _ranks([1] * demand.num_ranks, 0)
    if not demand.replica_gpus:
        bundles += _replicas(demand)
    share = math.floor(100 / max(len(b.replicas) + b.num_ranks for b in bundles[:total])) / 100
    shares = share * demand.replica_gpus, share * demand.rank_gpus
    return Placement(tuple(bundles), *shares, _strategy(demand, bundles, node_gpus))


def _divisions(demand: Demand, largest: int) -> Iterator[list[Bundle]]:
    """Bundles of the ranks, fewest bundles first; their sizes differ by at most one unit."""
    if not demand.rank_gpus:
        yield _ranks([1] * demand.num_ranks, 0)
        return
    for unit in dict.fromkeys((demand.ranks_together, 1)):
        units = demand.num_ranks // unit
        for parts in range(math.ceil(demand.num_ranks / largest), units + 1):
            small, more = divmod(units, parts)
            yield _ranks([unit * (small + (i < more)) for i in range(parts)], 1)


def _strategy(demand: Demand, bundles: Sequence[Bundle], node_gpus: Sequence[int]) -> Strategy:
    fits_one = sum(bundle.gpus for bundle in bundles) <= max(node_gpus)
    return "STRICT_PACK" if demand.one_node and fits_one else "PACK"


def _too_few(demand: Demand, bundles: Sequence[Bundle], node_gpus: Sequence[int]) -> ConfigError:
    largest, total, size = max(node_gpus), sum(node_gpus), max(bundle.gpus for bundle in bundles)
    found = f"nodes with {', '.join(str(gpus) for gpus in sorted(node_gpus, reverse=True))} GPUs"
    smaller = _smaller(demand, node_gpus)
    do = f"add nodes, or set {smaller}" if smaller else "add nodes, or lower rollout.num_replicas or trainer.num_ranks"
    if size > largest:
        found += ": a replica lives on one node"
        do = f"set tensor_parallel_size of its engine to {largest} or less, or add larger nodes"
    elif demand.num_gpus > total:
        found += f": {total} of {demand.num_gpus}"
    else:
        room = sum(gpus // size for gpus in node_gpus)
        found += f", which hold {room} of the {demand.num_replicas} replicas of {size} GPUs whole"
    return ConfigError(explain(words(bundles), found, do))


def _smaller(demand: Demand, node_gpus: Sequence[int]) -> str:
    """Settings of a smaller run of the same proportions that fits the nodes, whatever memory a rank needs; empty: none
    does."""
    ranks = [n for n in range(demand.num_ranks, 0, -1) if demand.num_ranks % n == 0 and n % demand.least_ranks == 0]
    tried = (replace(demand, num_replicas=r, num_ranks=n) for r in range(demand.num_replicas, 0, -1) for n in ranks)
    found = [d for d in tried if d.rank_gpus and d.gpu_share == 1 and _fitting(d, node_gpus) is not None]
    if not found:
        return ""
    wanted = demand.num_replicas / demand.num_ranks
    best = max(found, key=lambda d: (d.num_gpus, -abs(math.log(d.num_replicas / d.num_ranks / wanted))))
    return f"rollout.num_replicas={best.num_replicas} trainer.num_ranks={best.num_ranks}, if a rank's memory allows it"


def joined_address(address: str | None) -> str | None:
    """Address of the cluster that a run joins, given `ray.address`; None: it starts a cluster."""
    return address or os.environ.get("RAY_ADDRESS")


def visible_gpus() -> frozenset[str] | None:
    """Numbers or ids of the GPUs that processes of this machine may use; None: all."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if named is None else frozenset(word.strip() for word in named.split(",") if word.strip())
