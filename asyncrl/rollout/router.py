"""Which replica serves the next request. Pure: no clock, no I/O."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from asyncrl.errors import GenerationError

BLOCK_TOKENS = 16
"""Tokens of one block of a prefix; engines cache prefixes in blocks of this size or a multiple of it."""

_FINE_BLOCKS = 32

_NEWEST, _OLDER, _HELD = range(3)
"""Tiers of replicas: replicas with the newest version, replicas with older ones, and held replicas."""


class Affinity(NamedTuple):
    """The preferred replica of a request, after that of its session.

    `prefix`: `prefix_blocks` of the prompt; empty to ignore it. `near`: the replica that served the previous turn.
    `only`: no other replica may serve the request.
    """

    prefix: Sequence[int] = ()
    near: int | None = None
    only: int | None = None


ANYWHERE = Affinity()


def prefix_blocks(prompt_ids: np.ndarray) -> list[int]:
    """Hashes of prefixes of `prompt_ids` ([P] int32), shortest first; each prefix is a multiple of BLOCK_TOKENS long.
    Two prompts share a hash when they share that prefix, hash collisions aside.

    Each of the first 32 blocks ends a prefix; after them the distance doubles with the length. A prompt of 100,000
    tokens has about 150 prefixes, and the length of a common prefix is known to within 6%. Hashes are comparable only
    within one process.
    """
    data = prompt_ids.astype(np.int32, copy=False).tobytes()
    block_bytes = 4 * BLOCK_TOKENS
    blocks: list[int] = []
    start = before = 0
    step, fine_until = block_bytes, _FINE_BLOCKS * block_bytes
    while (stop := start + step) <= len(data):
        before = hash((before, data[start:stop]))
        blocks.append(before)
        start = stop
        if start == fine_until:
            step, fine_until = 2 * step, 2 * fine_until
    return blocks


class Router:
    """Picks the replica whose prefix cache helps a request, else the least loaded replica. Owns the load of every
    replica and the memory of sessions and prefixes.

    Order of preference: the replica of the session; of the previous turn; of the longest prefix of the prompt, most
    recently served; with the fewest requests. The first three are skipped if they have too many more requests than the
    last.

    The choice is among replicas of one version. During a rolling publish two versions serve. Held replicas then get no
    requests (unless all are held). Among the others the newest version is preferred while one of its replicas would
    have at most twice the requests of the least loaded older replica, plus one.

    A pick costs O(log replicas + blocks): loads are in heaps whose outdated entries are skipped.

    Args:
        max_sessions: number of sessions to remember; the least recently used one is dropped first.
        max_blocks: number of prefix hashes to remember, likewise.
        max_imbalance: a session leaves its replica when that replica has this many more requests than the least loaded.
        max_prefix_imbalance: the same for a prefix. Smaller, because all requests may share a prefix such as a system
            prompt.
    """

    def __init__(
        self,
        *,
        max_sessions: int = 100_000,
        max_blocks: int = 200_000,
        max_imbalance: int = 32,
        max_prefix_imbalance: int = 8,
    ) -> None:
        self._loads: dict[int, int] = {}
        self._versions: dict[int, int] = {}
        self._newest = -1
        self._held: set[int] = set()
        self._tiers: dict[int, int] = {}
        self._mixed = False
        self._heaps: tuple[list[tuple[int, int, int]], ...] = ([], [], [])
        self._latest: dict[int, int] = {}
        self._changes = 0
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._blocks: OrderedDict[int, int] = OrderedDict()
        self._max_sessions = max_sessions
        self._max_blocks = max_blocks
        self._max_imbalance = max_imbalance
        self._max_prefix_imbalance = max_prefix_imbalance

    def put(self, replica_id: int, version: int | None = None, *, held: bool = False) -> None:
        """Adds this replica, or updates it.

        Args:
            version: the served version; None: unchanged, or the newest for a new replica.
            held: True: no new requests, unless every replica is held.
        """
        self._loads.setdefault(replica_id, 0)
        if version is None:
            version = self._versions.get(replica_id, max(self._versions.values(), default=-1))
        self._versions[replica_id] = version
        (self._held.add if held else self._held.discard)(replica_id)
        self._sort(replica_id)

    def remove(self, replica_id: int) -> None:
        """Removes this replica and the memory of its cache. Costs O(sessions + blocks)."""
        if self._loads.pop(replica_id, None) is None:
            return
        del self._latest[replica_id], self._versions[replica_id], self._tiers[replica_id]
        self._held.discard(replica_id)
        self._sort()
        self._sessions = OrderedDict((s, r) for s, r in self._sessions.items() if r != replica_id)
        self._blocks = OrderedDict((b, r) for b, r in self._blocks.items() if r != replica_id)

    @property
    def loads(self) -> dict[int, int]:
        """Requests in flight per replica."""
        return dict(self._loads)

    def pick(
        self, session_id: str = "", prefix: Sequence[int] = (), near: int | None = None, only: int | None = None
    ) -> int:
        """Picks the replica for one request and counts the request; `done` uncounts it.

        Args:
            session_id: requests of one session share a replica; empty for none.
            prefix, near, only: as in `Affinity`. An unknown replica as `near` is ignored.

            Raises GenerationError: no replica is left, or `only` is not there.
        """
        chosen, limit = self._mixed_least() if self._mixed else (self._least(_NEWEST), None)
        if chosen is None:
            raise GenerationError("no replica is serving: all of them have stopped")
        if only is not None:
            if only not in self._loads:
                raise GenerationError(f"replica {only} is not serving")
            chosen = only
        elif (home := self._home(session_id, near, prefix)) is not None and self._fits(*home, chosen, limit):
            chosen = home[0]
        if session_id:
            self._sessions[session_id] = chosen
            self._sessions.move_to_end(session_id)
            if len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)
        if prefix:
            self._remember(prefix, chosen)
        self._loads[chosen] += 1
        self._push(chosen)
        return chosen

    def done(self, replica_id: int) -> None:
        """Records the end of one request of `replica_id`; a removed replica is ignored."""
        if replica_id in self._loads:
            self._loads[replica_id] -= 1
            self._push(replica_id)

    def _home(self, session_id: str, near: int | None, prefix: Sequence[int]) -> tuple[int, int] | None:
        """The replica that has likely cached the request's tokens, and its allowed excess of requests over the least
        loaded replica."""
        if session_id and (home := self._sessions.get(session_id)) is not None:
            return home, self._max_imbalance
        if near is not None and near in self._loads:
            return near, self._max_imbalance
        blocks = self._blocks
        for block in reversed(prefix):
            if (home := blocks.get(block)) is not None:
                return home, self._max_prefix_imbalance
        return None

    def _fits(self, home: int, imbalance: int, least: int, limit: int | None) -> bool:
        """False when `home` is overloaded (has more requests than `limit`, or too many more than `least`) or in another
        tier than `least`."""
        load = self._loads[home]
        if load - self._loads[least] > imbalance:
            return False
        return not self._mixed or (self._tiers[home] == self._tiers[least] and (limit is None or load <= limit))

    def _remember(self, prefix: Sequence[int], replica_id: int) -> None:
        """Remembers the replica for these prefixes. Longer prefixes are dropped before their own prefixes."""
        blocks = self._blocks
        for block in reversed(prefix[: self._max_blocks]):
            blocks[block] = replica_id
            blocks.move_to_end(block)
        while len(blocks) > self._max_blocks:
            blocks.popitem(last=False)

    def _sort(self, replica_id: int | None = None) -> None:
        """Puts this replica into its tier, or all replicas when the newest version has changed. O(replicas)."""
        newest = max((v for i, v in self._versions.items() if i not in self._held), default=-1)
        moved = () if replica_id is None else (replica_id,)
        if newest != self._newest:
            self._newest, moved = newest, tuple(self._loads)
        for i in moved:
            self._tiers[i] = _HELD if i in self._held else _NEWEST if self._versions[i] == newest else _OLDER
            self._push(i)
        self._mixed = any(self._tiers.values())

    def _push(self, replica_id: int) -> None:
        # Only the latest entry of a replica counts. Its number breaks ties, so that equal loads are served in turn.
        self._changes += 1
        self._latest[replica_id] = self._changes
        heap = self._heaps[self._tiers[replica_id]]
        heapq.heappush(heap, (self._loads[replica_id], self._changes, replica_id))
        if len(heap) > 4 * len(self._loads) + 64:
            heap[:] = [entry for entry in heap if self._latest.get(entry[2]) == entry[1]]
            heapq.heapify(heap)

    def _least(self, tier: int) -> int | None:
        """The least loaded replica of a tier; None when the tier is empty."""
        heap = self._heaps[tier]
        while heap:
            _, change, replica_id = heap[0]
            if self._latest.get(replica_id) == change:
                return replica_id
            heapq.heappop(heap)
        return None

    def _mixed_least(self) -> tuple[int | None, int | None]:
        """The least loaded replica of the tier for the next request, and the largest number of requests with which a
        replica of that tier may be picked."""
        newest, older = self._least(_NEWEST), self._least(_OLDER)
        if newest is None:
            return self._least(_HELD), None  # the newest tier is empty only when all are held
        if older is None:
            return newest, None
        limit = 2 * self._loads[older] + 1
        return (newest, limit) if self._loads[newest] <= limit else (older, None)
