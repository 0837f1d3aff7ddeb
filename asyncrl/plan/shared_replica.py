"""A replica on a virtual clock. Pure.

Requests that decode together get one token each per decode step, so one counter describes the progress of all: the
tokens of a request that has decoded since the beginning. A request of L tokens that begins at counter c ends at c + L.
An event costs O(log requests), however many tokens lie between two events.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable

ROUNDING = 1e-9


class SimulatedRequest:
    """One response. `tokens`: its final length."""

    __slots__ = ("begun", "cancelled", "ended", "group", "replica_id", "tokens")

    def __init__(self, group: SimulatedGroup, tokens: float) -> None:
        self.group, self.tokens = group, tokens
        self.replica_id = -1
        self.begun: float | None = None
        """The replica's counter when the request began to decode."""
        self.ended = self.cancelled = False


class SimulatedGroup:
    """A group in generation. `parts`: tokens of each version; `prefilled`: replicas that have its prompt."""

    __slots__ = ("attempt", "left", "ordinal", "parts", "prefilled", "requests", "tokens", "version")

    def __init__(self, ordinal: int, attempt: int, version: int) -> None:
        self.ordinal, self.attempt, self.version = ordinal, attempt, version
        self.requests: list[SimulatedRequest] = []
        self.left = 0
        """Requests whose answers the rollouter has not collected."""
        self.tokens = 0.0
        self.parts: dict[int, float] = {}
        self.prefilled: set[int] = set()


class SharedReplica:
    """Owns the requests of one replica. Times are seconds of the simulation."""

    def __init__(
        self,
        replica_id: int,
        step_s: Callable[[int], float],
        *,
        decodes_at_once: int,
        prefill_s: Callable[[SimulatedGroup, bool], float],
    ) -> None:
        """
        Args:
            step_s: seconds of a decode step with this many requests, at least one.
            prefill_s: (group, known) -> seconds for its prompt; `known`: this replica has computed it before.
        """
        self.replica_id = replica_id
        self._step_s, self._prefill_s = step_s, prefill_s
        self._decodes_at_once = decodes_at_once
        self._at = 0.0
        self._count = 0.0
        self._stall_s = 0.0
        """Prefill that must be done before the next decode step."""
        self._running: list[tuple[float, int, SimulatedRequest]] = []
        self._waiting: deque[SimulatedRequest] = deque()
        self._number = 0
        self._begun_sum = 0.0
        self._bounds, self._versions = [0.0], [0]
        """Counter from which on each version decodes."""
        self.running = 0
        self.paused = False
        self.closed = False
        """True if no request may begin (a publish waits for the running ones)."""
        self.stamp = 0
        """Changes when `next_end` does."""
        self.counted_busy = False

    @property
    def busy(self) -> bool:
        return self.running > 0 and not self.paused

    def send(self, request: SimulatedRequest, now: float) -> None:
        self._advance(now)
        request.replica_id = self.replica_id
        self._waiting.append(request)
        self._seat()

    def next_end(self) -> float | None:
        """Time when the next request ends if nothing changes; None: none will."""
        self.stamp += 1
        while self._running and self._running[0][2].cancelled:
            heapq.heappop(self._running)
        if not self._running or self.paused:
            return None
        left = max(0.0, self._running[0][0] - self._count)
        return self._at + self._stall_s + left * self._step_s(self.running)

    def ended(self, now: float) -> list[SimulatedRequest]:
        """Takes the requests that have their last token; adds the tokens of each version to their groups."""
        self._advance(now)
        found = []
        reached = self._count + ROUNDING * max(1.0, self._count)
        while self._running and self._running[0][0] <= reached:
            _, _, request = heapq.heappop(self._running)
            if not request.cancelled:
                self._leave(request)
                self._book(request)
                request.ended = True
                found.append(request)
        if found:
            self._seat()
        return found

    def cancel(self, request: SimulatedRequest, now: float) -> None:
        """Drops a request that has not ended."""
        self._advance(now)
        request.cancelled = True
        if request.begun is None:
            self._waiting.remove(request)
        else:
            self._leave(request)
            self._seat()

    def pause(self, now: float) -> None:
        self._advance(now)
        self.paused = True

    def commit(self, version: int, now: float, *, prefills_again: bool, prefill_tokens_per_s: float | None) -> None:
        """Continues with the weights of `version`.

        Args:
            prefills_again: the prompts and tokens of all running requests are computed again.
        """
        self._advance(now)
        self.paused = self.closed = False
        if self._bounds[-1] == self._count:
            self._versions[-1] = version
        else:
            self._bounds.append(self._count)
            self._versions.append(version)
        # `_begun_sum` gives the tokens of all running requests without a loop over them.
        if prefills_again and prefill_tokens_per_s and self.running:
            sampled = self.running * self._count - self._begun_sum
            prompts = sum(self._prefill_s(r.group, False) for _, _, r in self._running if not r.cancelled)
            self._stall_s += sampled / prefill_tokens_per_s + prompts
        self._seat()

    # -- inside --------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        passed, self._at = now - self._at, now
        # The counter stands still during prefill.
        if self.running and not self.paused and passed > 0:
            stalled = min(self._stall_s, passed)
            self._stall_s -= stalled
            self._count += (passed - stalled) / self._step_s(self.running)

    def _seat(self) -> None:
        while self._waiting and self.running < self._decodes_at_once and not (self.closed or self.paused):
            request = self._waiting.popleft()
            known = self.replica_id in request.group.prefilled
            request.group.prefilled.add(self.replica_id)
            self._stall_s += self._prefill_s(request.group, known)
            request.begun = self._count
            self._begun_sum += self._count
            self._number += 1
            self.running += 1
            heapq.heappush(self._running, (self._count + request.tokens, self._number, request))

    def _leave(self, request: SimulatedRequest) -> None:
        assert request.begun is not None, "it runs"
        self.running -= 1
        self._begun_sum -= request.begun

    def _book(self, request: SimulatedRequest) -> None:
        """Adds the request's tokens to its group, by version."""
        assert request.begun is not None, "it has ended"
        parts, left, begun = request.group.parts, request.tokens, request.begun
        at = bisect_right(self._bounds, begun) - 1
        while left > ROUNDING:
            until = self._bounds[at + 1] if at + 1 < len(self._bounds) else math.inf
            made = min(left, until - begun)
            if made > 0:
                version = self._versions[at]
                parts[version] = parts.get(version, 0.0) + made
            left, begun, at = left - made, until, at + 1
        request.group.tokens += request.tokens
