"""Guards any sender: one publish at a time, and a close that ends the publish in progress."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import torch

from asyncrl.errors import DeadlineExceeded, TransferEnded, WeightTransferError, explain
from asyncrl.types import Digest, Manifest, TransferSource
from asyncrl.weights.transport import WeightSender
from asyncrl.weights.transports.control_channel import Deadline

_CLOSE_MARGIN_S = 10.0
"""Longest time that a send takes to end after its deadline."""


class InterruptibleSender:
    """A thread-safe `WeightSender`.

    A second `send` is refused while one is in progress. `close` and `open` end a send in progress with
    TransferEnded (at its next tensor or message, or at its deadline) and wait for its end.
    """

    def __init__(self, sender: WeightSender) -> None:
        self._sender = sender
        self._turn = threading.Lock()
        self._closing = threading.Event()
        self._thread: int | None = None
        self._publish_id = 0
        self._deadline = Deadline(0.0)

    def open(self) -> TransferSource:
        """As `WeightSender.open`; replaces an open sender. Raises as `close`, and WeightTransferError: this thread is
        in the middle of a send."""
        if self._thread == threading.get_ident():
            raise self._busy("open the sender")
        self.close()
        self._closing.clear()
        return self._sender.open()

    def send(self, manifest: Manifest, weights: Iterable[tuple[str, torch.Tensor]], timeout_s: float) -> Digest | None:
        """As `WeightSender.send`. Raises WeightTransferError: another send is in progress and continues."""
        if not self._turn.acquire(blocking=False):
            raise self._busy(f"send publish {manifest.publish_id}")
        self._thread, self._publish_id = threading.get_ident(), manifest.publish_id
        self._deadline = Deadline(timeout_s)
        try:
            return self._sender.send(manifest, self._until_closed(weights), timeout_s)
        finally:
            self._thread = None
            if self._closing.is_set():
                self._sender.close()
            self._turn.release()

    def interrupt(self) -> None:
        self._closing.set()
        self._sender.interrupt()

    def close(self) -> None:
        """As `WeightSender.close`. Called during this thread's own send (by a signal handler, say), it returns
        immediately, and the send closes when it ends.

        Raises DeadlineExceeded: a send in progress did not end; its memory is freed when it does.
        """
        self.interrupt()
        if self._thread == threading.get_ident():
            return
        # The lock is free once the send has returned; only then may its buffers be freed.
        patience_s = self._deadline.remaining_s() + _CLOSE_MARGIN_S
        if not self._turn.acquire(timeout=patience_s):
            found = f"publish {self._publish_id} did not end within {patience_s:.1f} s"
            do = "look what its weights wait for; what it holds is freed when it ends"
            raise DeadlineExceeded(explain("close the weight sender", found, do))
        try:
            self._sender.close()
        finally:
            self._turn.release()

    def _until_closed(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for item in weights:
            if self._closing.is_set():
                do = "open() it again to send weights"
                raise TransferEnded(explain(f"send publish {self._publish_id}", "the sender was closed meanwhile", do))
            yield item

    def _busy(self, asked: str) -> WeightTransferError:
        found = f"publish {self._publish_id} is being sent"
        return WeightTransferError(explain(asked, found, "wait for its end, or close() the sender to end it"))
