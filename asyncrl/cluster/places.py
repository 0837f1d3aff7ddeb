"""The placement group of a run: where its replicas and trainer ranks start, also after a restart or a lost node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl.cluster.placement import Placement, place_run, words
from asyncrl.config.recipe import Recipe
from asyncrl.errors import DeadlineExceeded, NoPlace, Process, RunFailed, explain
from asyncrl.inference.replica_actor import ReplicaPlace
from asyncrl.remote.reply import reply_now
from asyncrl.remote.waits import WAITS, Wait, replica

logger = logging.getLogger(__name__)

TRAINER_RANKS = Process("trainer ranks")
ON_CPU = {"CPU": 0.001}
"""What a bundle without GPUs reserves: enough to choose a node by, too little to keep anything from starting."""
POLL_S = 0.5
"""Pause between two looks at where the bundles are."""
ANYWHERE = "DEFAULT"
"""Ray's name of its own scheduling strategy."""


class Places:
    """The bundles of a run, by process. Owns nothing where there is no group: one node without GPUs has one place."""

    def __init__(self, placement: Placement, group: PlacementGroup | None) -> None:
        self.placement = placement
        self._group = group
        self._of_replica = placement.bundle_of_replica

    def of_replica(self, replica_id: int) -> ReplicaPlace | None:
        """For each process of this replica, the first and its replacements; None: anywhere."""
        if self._group is None:
            return None

        async def ready(timeout_s: float) -> None:
            await self._nodes_of([self._of_replica[replica_id]], replica(replica_id), timeout_s)

        return ReplicaPlace(self._strategy(self._of_replica[replica_id]), ready)

    async def of_ranks(self, timeout_s: float) -> list[Any]:
        """Ray's scheduling strategy of each trainer rank, by the nodes that the bundles have now.

        Raises RunFailed: bundles whose node was lost have no other within `timeout_s`.
        """
        if self._group is None:
            return [ANYWHERE] * sum(bundle.num_ranks for bundle in self.placement.bundles)
        own = [i for i, bundle in enumerate(self.placement.bundles) if bundle.num_ranks]
        try:
            nodes = await self._nodes_of(own, TRAINER_RANKS, timeout_s)
        except NoPlace as error:
            raise RunFailed(str(error)) from error
        return [self._strategy(i) for i in self.placement.bundle_of_rank([node or "" for node in nodes])]

    def nodes(self) -> list[str | None]:
        """The living node of each bundle; None: Ray has found none yet, or it was lost. Without a group: no bundles."""
        if self._group is None:
            return []
        found = placement_group_table(self._group).get("bundles_to_node_id", {})
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return [node if (node := found.get(i)) in alive else None for i in range(len(self.placement.bundles))]

    def _strategy(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        assert self._group is not None
        return PlacementGroupSchedulingStrategy(self._group, bundle)

    async def _nodes_of(self, own: Sequence[int], process: Process, timeout_s: float) -> list[str | None]:
        """The nodes of all bundles, as soon as those of `own` have one. Raises NoPlace."""
        wait = Wait("a place", process, timeout_s)
        with WAITS.of(wait):
            while True:
                nodes = await asyncio.to_thread(self.nodes)
                missing = [self.placement.bundles[i] for i in own if nodes[i] is None]
                if not missing:
                    return nodes
                if time.monotonic() - wait.since_s > timeout_s:
                    found = f"no node had room for it within {timeout_s:g} s; {await asyncio.to_thread(_free)}"
                    do = "bring the lost node back, or add one; then go on from the last checkpoint with resume=auto"
                    raise NoPlace(explain(f"a place for {process}: {words(missing)}", found, do)).of(process)
                await asyncio.sleep(min(POLL_S, timeout_s))


@contextlib.contextmanager
def reserved(recipe: Recipe) -> Iterator[Places]:
    """The places of a run in the cluster that Ray has joined; given back at the end. Returns within
    `ray.start_timeout_s`.

    Raises:
        ConfigError: the nodes are too small for the run, whoever else uses them.
        DeadlineExceeded: others keep what it needs.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    placement = place_run(recipe, [int(node["Resources"].get("GPU", 0)) for node in nodes])
    if len(nodes) == 1 and not any(bundle.gpus for bundle in placement.bundles):
        yield Places(placement, None)
        return
    resources = [{"GPU": float(b.gpus)} if b.gpus else ON_CPU for b in placement.bundles]
    group = placement_group(resources, strategy=placement.strategy)
    try:
        places = Places(placement, group)
        _await(places, group, recipe.ray.start_timeout_s)
        yield places
    finally:
        try:
            remove_placement_group(group)
        except Exception as error:  # noqa: BLE001 - task boundary: Ray removes it with the driver at the latest
            logger.warning("the placement group was not removed: %r", error)


def _await(places: Places, group: PlacementGroup, timeout_s: float) -> None:
    """Returns when every bundle has a node. Raises DeadlineExceeded."""
    bundles = places.placement.bundles
    try:
        reply_now(group.ready(), timeout_s=timeout_s, call="placement", process=Process("placement group"))
    except DeadlineExceeded as error:
        do = "end what uses them, or raise ray.start_timeout_s"
        raise DeadlineExceeded(explain(words(bundles), f"not free within {timeout_s:g} s; {_free()}", do)) from error
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    for node in dict.fromkeys(places.nodes()):
        own = [bundle for bundle, place in zip(bundles, places.nodes(), strict=True) if place == node]
        logger.info("node %s has %s", addresses.get(node or "", "?"), words(own))


def _free() -> str:
    """What the living nodes have free, in words."""
    free = available_resources_per_node()
    alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    gpus = sorted((free.get(node, {}).get("GPU", 0) for node in alive), reverse=True)
    return f"{len(alive)} node(s) with {', '.join(f'{number:g}' for number in gpus)} GPUs free"
