"""Receives a publish that several trainer ranks send, each a run of its tensors, over any transport.

The receiver takes the parts one after the other, so a sink sees the order of the manifest. Each sender has its own
connection, and its own buckets at the receiver.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.types import Digest, Manifest, PartsSource
from asyncrl.weights.plan import part_manifests
from asyncrl.weights.transport import WeightReceiver, WeightSink
from asyncrl.weights.transports.control_channel import Deadline


class PartsReceiver:
    """Implements `WeightReceiver`. Owns the receivers of all parts."""

    def __init__(self, source: PartsSource, receivers: Sequence[WeightReceiver]) -> None:
        """`receivers`: one for each of `source.parts`."""
        self._source, self._receivers = source, receivers

    def receive(self, manifest: Manifest, sink: WeightSink, timeout_s: float) -> Digest | None:
        deadline, digest = Deadline(timeout_s), ()
        parts = part_manifests(manifest, self._source.first_tensors, self._source.bucket_bytes)
        for receiver, part in zip(self._receivers, parts, strict=True):
            digest += receiver.receive(part, sink, deadline.remaining_s()) or ()
        return digest if manifest.verify else None

    def close(self) -> None:
        for receiver in self._receivers:
            receiver.close()
