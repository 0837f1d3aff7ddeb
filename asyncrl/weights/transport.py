"""The protocols of a weight transport: one sender, any number of receivers (replica workers). If several trainer ranks
send a part each, there is a sender per part (`transports.PartsReceiver`).

A transport only moves buckets. `driver/publish/checkpoint_engine.py` decides when to pause, verify, retry and
commit. The manifest travels with the calls to the replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from asyncrl.types import Digest, Manifest, TensorSpec, TransferSource

if TYPE_CHECKING:
    import torch


class WeightSink(Protocol):
    """Writes received bytes to their destination. `write` is called in manifest order; a tensor may come in several
    slices."""

    def write(self, spec: TensorSpec, offset: int, data: torch.Tensor) -> None:
        """`data`: [n] uint8, bytes `[offset, offset + n)` of the tensor. Valid only during the call: copy it.

        Raises WeightTransferError: the sink has no such tensor, or its shape or dtype differs.
        """
        ...


@runtime_checkable
class DirectSink(WeightSink, Protocol):
    """A sink whose memory a transport can receive into, without a copy.

    A slice arrives by `write`, or by `destination` and then `wrote`. `write` and `wrote` keep manifest order;
    `destination` may run ahead by the few buckets in transfer.
    """

    def destination(self, spec: TensorSpec, offset: int, nbytes: int, device: torch.device) -> torch.Tensor | None:
        """[nbytes] uint8, contiguous, on `device`: the place of bytes `[offset, offset + nbytes)` of the tensor. None
        if they cannot be received in place; they then arrive by `write`.

        Raises WeightTransferError: as `write`, so that nothing lands in a tensor that does not fit.
        """
        ...

    def wrote(self, spec: TensorSpec, offset: int, nbytes: int) -> None:
        """The bytes are complete in the memory that `destination` returned. Raises as `write`."""
        ...


class WeightSender(Protocol):
    def open(self) -> TransferSource:
        """Creates the resources; returns the source for receivers, with receiver=0 (callers number the copies)."""
        ...

    def send(self, manifest: Manifest, weights: Iterable[tuple[str, torch.Tensor]], timeout_s: float) -> Digest | None:
        """Sends every bucket to all receivers; returns once all have the last one. `weights` come in the order of
        `manifest.tensors`. Returns this side's digest if `manifest.verify`.

        Raises WeightTransferError: a tensor is missing, extra or of another shape; a receiver reported an error.
        Raises DeadlineExceeded: a receiver did not answer in time; the message names it.
        """
        ...

    def interrupt(self) -> None:
        """Makes a send in progress, and every later one until `open`, raise WeightTransferError soon. From any
        thread."""
        ...

    def close(self) -> None:
        """Frees memory, sockets and files. Idempotent; safe after an error."""
        ...


class WeightReceiver(Protocol):
    def receive(self, manifest: Manifest, sink: WeightSink, timeout_s: float) -> Digest | None:
        """Writes one publish into `sink`; returns this side's digest if `manifest.verify`.

        Raises WeightTransferError, DeadlineExceeded. A sink's own error is reported to the sender too.
        """
        ...

    def close(self) -> None: ...


class HeldReceiver:
    """The receiver of the source that was joined last. Used in one thread, in which its sockets stay."""

    def __init__(self, build: Callable[[TransferSource], WeightReceiver]) -> None:
        self._build = build
        self._source: TransferSource | None = None
        self._receiver: WeightReceiver | None = None

    def of(self, source: TransferSource) -> WeightReceiver:
        """The receiver of `source`; closes that of another one."""
        if self._receiver is None or source != self._source:
            self.close()
            self._receiver, self._source = self._build(source), source
        return self._receiver

    def close(self) -> None:
        """Idempotent."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()
