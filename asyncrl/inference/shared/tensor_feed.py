"""Hands tensors from the thread that receives them to the thread that loads them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from threading import Condition

import torch

from asyncrl.errors import DeadlineExceeded, explain
from asyncrl.types import TensorSpec
from asyncrl.weights.assembling_sink import AssemblingSink

_AHEAD = 2
"""Tensors that may wait: reception overlaps with loading, and the memory stays small."""


class Feed:
    """A bounded hand-over of `num_tensors` tensors; an error on one side ends both.

    The receiver's last `offer` returns only when the loader has loaded all tensors, so that the sender gets every error
    of the loader.
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
            self._wait(lambda: len(self._items) < _AHEAD, f"the engine to load the tensor before {name}")
            self._items.append((name, tensor))
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


class StreamFeed(Feed):
    """A `Feed` between CUDA streams, too: the loader's thread works on one, the receiver's on another."""

    def __init__(self, num_tensors: int, timeout_s: float, device: torch.device) -> None:
        """Called by the loader."""
        super().__init__(num_tensors, timeout_s)
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def offer(self, name: str, tensor: torch.Tensor) -> None:
        """As `Feed.offer`, after the bytes have arrived on this stream."""
        if self._stream is not None and tensor.device.type == "cuda":
            torch.cuda.current_stream(tensor.device).synchronize()
            tensor.record_stream(self._stream)  # else its memory could be used again while the loader still reads
        super().offer(name, tensor)


class CheckedSink:
    """A `DirectSink` that refuses an unfit tensor before any of its bytes arrive, and passes on whole tensors.

    `check` raises WeightTransferError for a tensor that does not belong to the model.
    """

    def __init__(self, check: Callable[[TensorSpec], None], on_tensor: Callable[[str, torch.Tensor], None]) -> None:
        self._check = check
        self._inner = AssemblingSink(on_tensor)

    def write(self, spec: TensorSpec, offset: int, data: torch.Tensor) -> None:
        self._check(spec)
        self._inner.write(spec, offset, data)

    def destination(self, spec: TensorSpec, offset: int, nbytes: int, device: torch.device) -> torch.Tensor | None:
        self._check(spec)
        return self._inner.destination(spec, offset, nbytes, device)

    def wrote(self, spec: TensorSpec, offset: int, nbytes: int) -> None:
        self._inner.wrote(spec, offset, nbytes)
