"""Which replica serves the next request. Pure: no clock, no I/O."""

from __future__ import annotations

import heapq
from collections import OrderedDict

from asyncrl.errors import GenerationError


class Router:
    """Least loaded replica first; requests of one session go to the same replica while it serves (prefix cache).

    A pick costs O(log replicas): loads live in a heap whose outdated entries are skipped.

    Args:
        max_sessions: sessions that are remembered, the least recently used forgotten first.
        max_imbalance: a session leaves its replica when that one has this many more requests than the least loaded.
    """

    def __init__(self, *, max_sessions: int = 100_000, max_imbalance: int = 32) -> None:
        self._loads: dict[int, int] = {}
        self._heap: list[tuple[int, int, int]] = []
        self._picks = 0
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._max_sessions = max_sessions
        self._max_imbalance = max_imbalance

    def add(self, replica_id: int) -> None:
        self._loads[replica_id] = 0
        self._push(replica_id)

    def remove(self, replica_id: int) -> None:
        self._loads.pop(replica_id, None)

    @property
    def loads(self) -> dict[int, int]:
        """Requests in flight per replica."""
        return dict(self._loads)

    def pick(self, session_id: str = "") -> int:
        """Takes a replica for one request; `done` gives it back. Raises GenerationError when none is left."""
        least = self._least_loaded()
        chosen = self._sessions.get(session_id, least) if session_id else least
        if chosen not in self._loads or self._loads[chosen] - self._loads[least] > self._max_imbalance:
            chosen = least
        if session_id:
            self._sessions[session_id] = chosen
            self._sessions.move_to_end(session_id)
            if len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)
        self._loads[chosen] += 1
        self._push(chosen)
        return chosen

    def done(self, replica_id: int) -> None:
        """One request of `replica_id` has ended; a replica that was removed meanwhile is ignored."""
        if replica_id in self._loads:
            self._loads[replica_id] -= 1
            self._push(replica_id)

    def _push(self, replica_id: int) -> None:
        # The pick counter breaks ties, so that equal loads are served in turn.
        self._picks += 1
        heapq.heappush(self._heap, (self._loads[replica_id], self._picks, replica_id))
        if len(self._heap) > 4 * len(self._loads) + 64:
            self._heap = [(load, i, r) for i, (r, load) in enumerate(self._loads.items())]
            heapq.heapify(self._heap)
            self._picks = len(self._heap)

    def _least_loaded(self) -> int:
        while self._heap:
            load, _, replica_id = self._heap[0]
            if self._loads.get(replica_id) == load:
                return replica_id
            heapq.heappop(self._heap)
        raise GenerationError("no replica is serving: all of them have stopped")
