"""Admission queue before an engine that has a queue itself, like vLLM. Pure, given the clock.

A request queued inside the engine would start after a publish with the cache salt of the old weights, and a pause could
not distinguish it from a running one. So the engine gets only as many requests as it can decode concurrently, and none
while it is paused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Stream = TypeVar("Stream")


def enqueue(waiting: deque[Stream], new: Stream, is_resumed: Callable[[Stream], bool]) -> int:
    """Puts `new` at the end or, if it is resumed, behind the resumed requests at the front; returns its place.

    A publish interrupts responses just before the groups of a further step begin. An interrupted response queued behind
    all of them would delay the rest of its nearly finished group, and with it a whole step.
    """
    place = len(waiting)
    if is_resumed(new):
        place = next((place for place, other in enumerate(waiting) if not is_resumed(other)), place)
    waiting.insert(place, new)
    return place


class EngineQueue(Generic[Stream]):
    """A queue before `limit` places, with a gate that is initially closed. Resumed streams go first; otherwise first
    come, first served.

    Args:
        start: called for each stream that gets a place, in queue order.
        clock: seconds, monotonic.
        is_resumed: whether a stream continues a response that had a place before.
    """

    def __init__(
        self,
        limit: int,
        start: Callable[[Stream], None],
        clock: Callable[[], float],
        is_resumed: Callable[[Stream], bool] = lambda stream: False,
    ) -> None:
        self._limit = limit
        self._start = start
        self._clock = clock
        self._is_resumed = is_resumed
        self._open = False
        self._busy_s = 0.0
        self._busy_since: float | None = None
        self.waiting: deque[Stream] = deque()
        self.running: list[Stream] = []

    @property
    def busy_s(self) -> float:
        """Time with at least one running stream, pauses included."""
        return self._busy_s + (0.0 if self._busy_since is None else self._clock() - self._busy_since)

    def enter(self, stream: Stream) -> None:
        if enqueue(self.waiting, stream, self._is_resumed) == 0:  # otherwise the head of the queue is unchanged
            self._admit()

    def leave(self, stream: Stream) -> None:
        """Removes an ended stream, running or queued; its place goes to the next one."""
        if stream in self.running:
            self.running.remove(stream)
        elif stream in self.waiting:
            self.waiting.remove(stream)
        self._admit()

    def requeue(self, stream: Stream) -> None:
        """Moves a running stream back to the head of the queue."""
        self.running.remove(stream)
        self.waiting.appendleft(stream)
        self._admit()

    def set_open(self, is_open: bool) -> None:
        self._open = is_open
        self._admit()

    def _admit(self) -> None:
        while self._open and self.waiting and len(self.running) < self._limit:
            stream = self.waiting.popleft()
            self.running.append(stream)
            self._start(stream)
        if self.running and self._busy_since is None:
            self._busy_since = self._clock()
        elif not self.running and self._busy_since is not None:
            self._busy_s += self._clock() - self._busy_since
            self._busy_since = None
