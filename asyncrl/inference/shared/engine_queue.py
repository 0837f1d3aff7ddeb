"""Decides which requests enter an engine that would queue requests itself, as vLLM does. Pure, given the clock.

A request that waits inside the engine would start after a publish with the cache salt of the old weights, and a pause
could not tell it from a running one. So the engine gets at most as many requests as it decodes at once and has KV cache
for, and none while it is paused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Stream = TypeVar("Stream")


def enqueue(waiting: deque[Stream], new: Stream, is_resumed: Callable[[Stream], bool]) -> int:
    """Puts `new` at the end, or, if it is resumed, behind the resumed ones at the front; returns its place.

    A publish interrupts responses just before the groups of a further step begin. Behind all of these, the one that
    had nearly ended would be the last of its group by far, and its whole step would wait, or be older.
    """
    place = len(waiting)
    if is_resumed(new):
        place = next((place for place, other in enumerate(waiting) if not is_resumed(other)), place)
    waiting.insert(place, new)
    return place


class EngineQueue(Generic[Stream]):
    """A queue before `limit` places, and a gate that begins closed. Resumed streams are before the others; otherwise
    none overtakes another.

    Args:
        start: called for each stream that gets a place, in the order of the queue.
        clock: seconds, monotonic.
        fits: whether there is room for a stream beside the running ones; True where none run. Asked for the first in
            the queue, at each change and by `ask_again`.
        is_resumed: whether a stream goes on with a response that had a place before.
    """

    def __init__(
        self,
        limit: int,
        start: Callable[[Stream], None],
        clock: Callable[[], float],
        fits: Callable[[Stream, Sequence[Stream]], bool] = lambda stream, running: True,
        is_resumed: Callable[[Stream], bool] = lambda stream: False,
    ) -> None:
        self._limit = limit
        self._start = start
        self._clock = clock
        self._fits = fits
        self._is_resumed = is_resumed
        self._open = False
        self._busy_s = 0.0
        self._busy_since: float | None = None
        self.waiting: deque[Stream] = deque()
        self.running: list[Stream] = []

    @property
    def busy_s(self) -> float:
        """Time with at least one stream running, pauses included."""
        return self._busy_s + (0.0 if self._busy_since is None else self._clock() - self._busy_since)

    def enter(self, stream: Stream) -> None:
        if enqueue(self.waiting, stream, self._is_resumed) == 0:  # otherwise the first one waits as before
            self._admit()

    def leave(self, stream: Stream) -> None:
        """Removes a stream that has ended, running or queued; its place goes to the next one."""
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

    def ask_again(self) -> None:
        """The running streams have come nearer to their ends."""
        self._admit()

    def _admit(self) -> None:
        while self._open and self.waiting and len(self.running) < self._limit:
            if not self._fits(self.waiting[0], self.running):
                break
            stream = self.waiting.popleft()
            self.running.append(stream)
            self._start(stream)
        if self.running and self._busy_since is None:
            self._busy_since = self._clock()
        elif not self.running and self._busy_since is not None:
            self._busy_s += self._clock() - self._busy_since
            self._busy_since = None
