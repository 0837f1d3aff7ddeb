"""Which replica served a turn: the table behind the header `x-request-id`. Pure: the caller has the clock."""

from __future__ import annotations

from collections import OrderedDict

MAX_TURNS = 100_000
EXPIRY_S = 3600.0
_BODY_PREFIXES = ("chatcmpl-", "cmpl-")
"""A body's id is one of these and the id of its request."""


def request_id_of(named: str) -> str:
    """The id of the request that a client names by its own id or by that of the answer's body. Some clients have the
    body only."""
    named = named.strip()
    prefix = next((prefix for prefix in _BODY_PREFIXES if named.startswith(prefix)), "")
    return named.removeprefix(prefix)


class TurnTable:
    """The replica of each recent turn by the id of its request. The oldest are dropped, and those that nobody has named
    for `expiry_s` seconds.

    A conversation stays on its replica when each turn names the one before, or when all its turns have one id.
    """

    def __init__(self, *, max_turns: int = MAX_TURNS, expiry_s: float = EXPIRY_S) -> None:
        self._replicas: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._max_turns = max_turns
        self._expiry_s = expiry_s

    def __len__(self) -> int:
        return len(self._replicas)

    def served(self, request_id: str, replica_id: int, now_s: float) -> None:
        """Records the replica that served the turn of this id."""
        self._replicas[request_id] = replica_id, now_s
        self._replicas.move_to_end(request_id)
        while len(self._replicas) > self._max_turns or self._is_old(next(iter(self._replicas)), now_s):
            self._replicas.popitem(last=False)

    def replica_of(self, request_id: str, now_s: float) -> int | None:
        """The replica that served the turn of this id; None when the id is unknown or has expired."""
        if request_id not in self._replicas or self._is_old(request_id, now_s):
            return None
        return self._replicas[request_id][0]

    def _is_old(self, request_id: str, now_s: float) -> bool:
        return now_s - self._replicas[request_id][1] > self._expiry_s
