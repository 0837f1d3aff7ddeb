"""Hands tensors from the receiving thread to the loading thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Condition

import torch

from asyncrl.errors import DeadlineExceeded, explain
from asyncrl.types import TensorSpec

_CPU = torch.device("cpu")
AHEAD_BYTES = 16 << 20
"""Bytes received ahead of the loader. Reception and loading overlap, small tensors cross threads in batches, and memory
stays bounded."""


class Feed:
    """A bounded buffer for `num_tensors` tensors; an error on one side ends both. Created by the loader: its CUDA
    stream on `device` then waits for the receiver's.

    The receiver's last `offer` returns only after the loader has loaded all tensors, so that the sender sees every
    loader error.
    """

    def __init__(self, num_tensors: int, timeout_s: float, device: torch.device = _CPU) -> None:
        self._left = num_tensors
        self._deadline = time.monotonic() + timeout_s
        self._changed = Condition()
        self._items: deque[tuple[str, torch.Tensor]] = deque()
        self._nbytes = 0
        self._error: BaseException | None = None
        self._loaded = False
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def offer(self, name: str, tensor: torch.Tensor) -> None:
        """Called by the receiver; the loader's work on the tensor is ordered after the work on the current stream.
        Raises the loader's error, DeadlineExceeded."""
        if self._stream is not None and tensor.device.type == "cuda":
            self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
            tensor.record_stream(self._stream)  # else its memory could be reused while the loader still reads
        with self._changed:
            self._wait(lambda: self._nbytes < AHEAD_BYTES, f"the engine to load the tensors before {name}")
            self._items.append((name, tensor))
            self._nbytes += tensor.nbytes
            self._left -= 1
            self._changed.notify_all()
            if self._left == 0:
                self._wait(lambda: self._loaded, "the engine to load the last tensors")

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Called by the loader. Raises the receiver's error, DeadlineExceeded."""
        while True:
            with self._changed:
                self._wait(lambda: bool(self._items) or self._left == 0, "the next tensor of a publish")
                if not self._items:
                    return
                items, self._items, self._nbytes = self._items, deque(), 0
                self._changed.notify_all()
            # Popping each tensor lets its memory be freed as soon as the loader drops it.
            while items:
                yield items.popleft()

    def finish(self) -> None:
        """The loader has loaded everything."""
        with self._changed:
            self._loaded = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Ends the other side with this error; the first error counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        if not self._changed.wait_for(lambda: self._error is not None or ready(), self._deadline - time.monotonic()):
            raise DeadlineExceeded(
                explain(f"wait for {what}", "the deadline of the transfer", "raise weights.transfer_timeout_s")
            )
        if self._error is not None:
            raise self._error


def completed(
    tensors: Iterable[tuple[str, torch.Tensor]], specs: Sequence[TensorSpec], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields `tensors`. On an error, yields zeros for the missing tensors and then raises it. For loaders with
    collective calls, in which the other workers would wait for this one."""
    came: set[str] = set()
    try:
        for name, tensor in tensors:
            came.add(name)
            yield name, tensor
    except Exception:
        for spec in specs:
            if spec.name not in came:
                yield spec.name, torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        raise
