"""The placement groups of a run: where its replicas and trainer ranks start, also after a restart or a lost node. One
group lasts for the whole run; each replica that joins later has its own small group."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
from ray._private import state as ray_state
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from asyncrl.config.recipe import Recipe
from asyncrl.driver.cluster.placement import Demand, Machines, Placement, place_run, words
from asyncrl.errors import DeadlineExceeded, NoPlace, Process, RunFailed, explain
from asyncrl.inference.replica_actor import ReplicaPlacement
from asyncrl.remote.reply import reply_now
from asyncrl.remote.waits import WAITS, Wait, replica

logger = logging.getLogger(__name__)

TRAINER_RANKS = Process("trainer ranks")
ON_CPU = {"CPU": 0.001}
"""Reservation of a bundle without GPUs: enough for Ray to choose a node, too little to block another process."""
POLL_S = 0.5
"""Pause between two looks at the nodes of the bundles."""
ANYWHERE = "DEFAULT"
"""Name of Ray's default scheduling strategy."""
NODE_ID = "ray.io/node-id"
"""Node label that ties a bundle to a node."""


class PlacementGroups:
    """The bundles of a run, by process, and the places of replicas that join it. Without a group (one node without
    GPUs) it owns nothing."""

    def __init__(self, placement: Placement, group: PlacementGroup | None, *, only_node: str | None = None) -> None:
        """`only_node`: the only node that weights reach; with a group, the trainer's node counts instead. None: any."""
        self.placement = placement
        self._group = group
        self._only_node = only_node
        self._of_replica = placement.bundle_of_replica
        self._own: dict[int, PlacementGroup] = {}
        """Groups of replicas that joined later."""
        self._lock = threading.Lock()

    def of_replica(self, replica_id: int) -> ReplicaPlacement | None:
        """The place of every process of this replica, including replacements; None: anywhere. A replica that joined
        later needs `ready` first."""
        ready = functools.partial(self.ready, replica_id)
        if self._group is None:
            if self._only_node is None or replica_id in self._of_replica:
                return None
            return ReplicaPlacement(NodeAffinitySchedulingStrategy(self._only_node, soft=False), ready)
        if (bundle := self._of_replica.get(replica_id)) is not None:
            return ReplicaPlacement(self._strategy(bundle), ready)
        return ReplicaPlacement(PlacementGroupSchedulingStrategy(self._own[replica_id], 0), ready)

    async def ready(self, replica_id: int, timeout_s: float) -> None:
        """Returns once a node has room for this replica. For a replica that joins, requests its own group first; Ray's
        autoscaler sees the pending group. Raises NoPlace."""
        if self._group is None:
            return
        process = replica(replica_id)
        if (bundle := self._of_replica.get(replica_id)) is not None:
            await self._bundles_placed([bundle], process, timeout_s)
            return
        do, limits = "add a node, or ask for fewer replicas", ""
        if self._only_node is not None:
            limits = "; weights.transport reaches the node of the trainer ranks only"
            do = "ask for fewer replicas, or set weights.transport=collective"
        gpus = f"{self.placement.replica_gpus:g} GPUs of one node"
        await _until_placed(lambda: "" if self._own_node(replica_id) else gpus, process, timeout_s, do, limits)

    async def give_back(self, replica_id: int) -> None:
        """Gives back the place of a replica that joined later. The other places are reserved for the whole run."""
        await asyncio.to_thread(self._give_back, replica_id)

    async def ending(self) -> set[int]:
        """Replicas whose node is draining, as Ray reports it: by SIGTERM, `ray drain-node` or the cloud provider."""
        return set() if self._group is None else await asyncio.to_thread(self._ending)

    def give_back_all(self) -> None:
        for group in list(self._own.values()):
            _remove(group)

    async def of_ranks(self, timeout_s: float) -> list[Any]:
        """Ray's scheduling strategy for each trainer rank, given the current nodes of the bundles.

        Raises RunFailed if bundles of a lost node get no other node within `timeout_s`.
        """
        if self._group is None:
            return [ANYWHERE] * sum(bundle.num_ranks for bundle in self.placement.bundles)
        own = [i for i, bundle in enumerate(self.placement.bundles) if bundle.num_ranks]
        try:
            await self._bundles_placed(own, TRAINER_RANKS, timeout_s)
        except NoPlace as error:
            raise RunFailed(str(error)) from error
        nodes = await asyncio.to_thread(self.nodes)
        return [self._strategy(i) for i in self.placement.bundle_of_rank([node or "" for node in nodes])]

    def machines(self) -> Machines:
        """Where ranks and replicas are now."""
        nodes, placement = [node or "" for node in self.nodes()], self.placement
        if not nodes:
            return Machines(("",), dict.fromkeys(self._of_replica, ""))
        ranks = tuple(nodes[i] for i in placement.bundle_of_rank(nodes))
        return Machines(ranks, {replica: nodes[i] for replica, i in self._of_replica.items()})

    def nodes(self) -> list[str | None]:
        """The living node of each bundle; None: not placed yet, lost, or draining. Empty without a group."""
        if self._group is None:
            return []
        found, usable = _bundles(self._group), _usable_nodes()
        return [node if (node := found.get(i)) in usable else None for i in range(len(self.placement.bundles))]

    def _own_node(self, replica_id: int) -> str | None:
        """The node of a replica that joins; None while it has none. Requests its group on the first call."""
        with self._lock:
            if replica_id not in self._own:
                near: list[dict[str, str]] | None = None
                # The transport reaches the sender's node only, so the group is tied to that node.
                if self._only_node is not None:
                    sender = next((i for i, bundle in enumerate(self.placement.bundles) if bundle.num_ranks), 0)
                    if (node := self.nodes()[sender]) is None:
                        return None
                    near = [{NODE_ID: node}]
                gpus = self.placement.replica_gpus
                self._own[replica_id] = placement_group(
                    [{"GPU": gpus} if gpus else ON_CPU],
                    strategy="SPREAD",
                    bundle_label_selector=near,  # pyright: ignore[reportArgumentType] None is its default
                )
            group = self._own[replica_id]
        node = _bundles(group).get(0)
        return node if node in _usable_nodes() else None

    def _give_back(self, replica_id: int) -> None:
        with self._lock:
            group = self._own.pop(replica_id, None)
            if group is not None:
                _remove(group)

    def _ending(self) -> set[int]:
        nodes = ray_state.state.get_draining_nodes()
        if not nodes or self._group is None:
            return set()
        bundles = _bundles(self._group)
        found = {i for i, bundle in self._of_replica.items() if bundles.get(bundle) in nodes}
        return found | {i for i, group in list(self._own.items()) if _bundles(group).get(0) in nodes}

    def _strategy(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        assert self._group is not None
        return PlacementGroupSchedulingStrategy(self._group, bundle)

    async def _bundles_placed(self, own: Sequence[int], process: Process, timeout_s: float) -> None:
        """Returns once every bundle of `own` has a node. Raises NoPlace."""

        def missing() -> str:
            nodes = self.nodes()
            return words([self.placement.bundles[i] for i in own if nodes[i] is None])

        do = "bring the lost node back, or add one; then go on from the last checkpoint with resume=auto"
        await _until_placed(missing, process, timeout_s, do)


async def _until_placed(
    missing: Callable[[], str], process: Process, timeout_s: float, do: str, limits: str = ""
) -> None:
    """Returns once `missing`, which says in words what has no place, returns nothing. Raises NoPlace."""
    wait = Wait("a place", process, timeout_s)
    with WAITS.of(wait):
        while lacking := await asyncio.to_thread(missing):
            if time.monotonic() - wait.since_s > timeout_s:
                found = f"no node had room for it within {timeout_s:g} s; {await asyncio.to_thread(_free)}{limits}"
                raise NoPlace(explain(f"a place for {process}: {lacking}", found, do)).of(process)
            await asyncio.sleep(min(POLL_S, timeout_s))


@contextlib.contextmanager
def reserved(recipe: Recipe) -> Iterator[PlacementGroups]:
    """The places of a run in the cluster that Ray has joined, given back at the end. Waits at most
    `ray.start_timeout_s`.

    Raises:
        ConfigError: the nodes are too small for the run, even idle.
        DeadlineExceeded: other users hold the resources.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    placement = place_run(recipe, [int(node["Resources"].get("GPU", 0)) for node in nodes])
    only_node = nodes[0]["NodeID"] if Demand.of(recipe).one_node else None
    if len(nodes) == 1 and not any(bundle.gpus for bundle in placement.bundles):
        yield PlacementGroups(placement, None, only_node=only_node)
        return
    resources = [{"GPU": float(b.gpus)} if b.gpus else ON_CPU for b in placement.bundles]
    group = placement_group(resources, strategy=placement.strategy)
    placements = PlacementGroups(placement, group, only_node=only_node)
    try:
        _await(placements, group, recipe.ray.start_timeout_s)
        yield placements
    finally:
        placements.give_back_all()
        _remove(group)


def _remove(group: PlacementGroup) -> None:
    try:
        remove_placement_group(group)
    except Exception as error:  # noqa: BLE001 - task boundary: Ray removes it with the driver at the latest
        logger.warning("the placement group was not removed: %r", error)


def _bundles(group: PlacementGroup) -> dict[int, str]:
    """Node id of each bundle that Ray has placed, by bundle index."""
    return placement_group_table(group).get("bundles_to_node_id", {})


def _usable_nodes() -> set[str]:
    """Ids of the living nodes that are not draining."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]} - ray_state.state.get_draining_nodes().keys()


def _await(placements: PlacementGroups, group: PlacementGroup, timeout_s: float) -> None:
    """Returns once every bundle has a node. Raises DeadlineExceeded."""
    bundles = placements.placement.bundles
    try:
        reply_now(group.ready(), timeout_s=timeout_s, call="placement", process=Process("placement group"))
    except DeadlineExceeded as error:
        do = "end what uses them, or raise ray.start_timeout_s"
        raise DeadlineExceeded(explain(words(bundles), f"not free within {timeout_s:g} s; {_free()}", do)) from error
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    for node in dict.fromkeys(placements.nodes()):
        own = [bundle for bundle, held in zip(bundles, placements.nodes(), strict=True) if held == node]
        logger.info("node %s has %s", addresses.get(node or "", "?"), words(own))


def _free() -> str:
    """The free GPUs of the living nodes, in words."""
    free = ray_state.available_resources_per_node()
    alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    gpus = sorted((free.get(node, {}).get("GPU", 0) for node in alive), reverse=True)
    return f"{len(alive)} node(s) with {', '.join(f'{number:g}' for number in gpus)} GPUs free"
