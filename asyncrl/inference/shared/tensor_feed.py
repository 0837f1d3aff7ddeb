"""Tensors from the thread that receives them to the one that loads them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from threading import Condition

import torch

from asyncrl.errors import DeadlineExceeded, explain

_AHEAD = 2
"""Tensors that may wait: reception overlaps with loading, and the memory stays small."""


class Feed:
    """A bounded hand-over of `num_tensors` tensors; an error on one side ends both.

    The receiver's last `offer` returns only when the loader has taken all of them and is content: the sender is told of
    whatever was wrong with any of them.
    """

    def __init__(self, num_tensors: int, timeout_s: float) -> None:
        self._left = num_tensors
        self._deadline = time.monotonic() + timeout_s
        self._changed = Condition()
        self._items: deque[tuple[str, torch.Tensor]] = deque()
        self._error: BaseException | None = None
        self._loaded = False

    def offer(self, name: str, tensor: torch.Tensor) -> None:
        """Called by the receiver. Raises the loader's error, DeadlineExceeded."""
        with self._changed:
            self._wait(lambda: len(self._items) < _AHEAD, f"vLLM to load the tensor before {name}")
            self._items.append((name, tensor))
            self._left -= 1
            self._changed.notify_all()
            if self._left == 0:
                self._wait(lambda: self._loaded, "vLLM to load the last tensors")

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Called by the loader. Raises the receiver's error, DeadlineExceeded."""
        while True:
            with self._changed:
                self._wait(lambda: bool(self._items) or self._left == 0, "the next tensor of a publish")
                if not self._items:
                    return
                item = self._items.popleft()
                self._changed.notify_all()
            yield item

    def finish(self) -> None:
        """The loader has loaded everything."""
        with self._changed:
            self._loaded = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Ends the other side with this error; the first one counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        if not self._changed.wait_for(lambda: self._error is not None or ready(), self._deadline - time.monotonic()):
            raise DeadlineExceeded(
                explain(f"wait for {what}", "the deadline of the publish", "raise weights.timeout_s")
            )
        if self._error is not None:
            raise self._error
