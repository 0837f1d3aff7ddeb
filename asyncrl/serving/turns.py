"""Which replica served a turn: the table behind the header `x-request-id`. Pure: the caller has the clock."""

from __future__ import annotations

from collections import OrderedDict

MAX_TURNS = 100_000
EXPIRY_S = 3600.0
_BODY_PREFIXES = ("chatcmpl-", "cmpl-")
"""A body's id is one of these and the id of its request. Clients that have only the body send it as it stands."""


class Turns:
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
        key = _key(request_id)
        self._replicas[key] = replica_id, now_s
        self._replicas.move_to_end(key)
        while len(self._replicas) > self._max_turns or self._is_old(next(iter(self._replicas)), now_s):
            self._replicas.popitem(last=False)

    def replica_of(self, request_id: str, now_s: float) -> int | None:
        """The replica that served the turn of this id; None when the id is unknown or has expired."""
        key = _key(request_id)
        if key not in self._replicas or self._is_old(key, now_s):
            return None
        return self._replicas[key][0]

    def _is_old(self, key: str, now_s: float) -> bool:
        return now_s - self._replicas[key][1] > self._expiry_s


def _key(request_id: str) -> str:
    for prefix in _BODY_PREFIXES:
        if request_id.startswith(prefix):
            return request_id.removeprefix(prefix)
    return request_id
