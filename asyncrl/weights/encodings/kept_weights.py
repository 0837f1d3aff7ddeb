"""The receiving side of `delta`: a replica's copy of the last published weights, which differences update."""

from __future__ import annotations

import torch

from asyncrl.errors import WeightTransferError, explain
from asyncrl.types import Digest, Manifest, TensorSpec
from asyncrl.weights.assembling_sink import AssemblingSink
from asyncrl.weights.digest import slice_digest
from asyncrl.weights.encodings.delta import weight_of
from asyncrl.weights.encodings.difference import apply, elements
from asyncrl.weights.plan import DTYPE_BYTES
from asyncrl.weights.transport import WeightReceiver, WeightSink


class KeptWeights:
    """A copy of the last published weights in host memory. An engine's own weights cannot be the base, because it
    fuses, shards and converts them."""

    def __init__(self) -> None:
        self._memory: dict[str, tuple[TensorSpec, torch.Tensor]] = {}
        """Name -> (spec, bytes)."""
        self._digest: Digest | None = None
        """Of whole tensors, in publish order; None: no complete copy."""

    def keep(self, receiver: WeightReceiver, manifest: Manifest, sink: WeightSink, timeout_s: float) -> Digest | None:
        """As `WeightReceiver.receive`, with encoding full; keeps a copy."""
        # No digest until all is received: a failed publish leaves no base.
        self._digest, held = None, self._memory
        self._memory = {}
        for spec in manifest.tensors:
            had, memory = held.pop(spec.name, (None, None))
            if memory is None or had != spec:
                memory = torch.empty(spec.nbytes, dtype=torch.uint8)
            self._memory[spec.name] = spec, memory
        digest = receiver.receive(manifest, _CopyingSink(self._memory, sink), timeout_s)
        self._digest = tuple(slice_digest(memory, 0, "xxh3") for _, memory in self._memory.values())
        return digest

    def patch(self, receiver: WeightReceiver, manifest: Manifest, sink: WeightSink, timeout_s: float) -> Digest | None:
        """As `WeightReceiver.receive`, with encoding delta: `sink` gets all weights, whole, and the digest is of these.

        Raises WeightTransferError too: the copy is not the base of the differences, or they are damaged. The next
        publish must then be full.
        """
        problem = self._problem(manifest)
        self._digest, digest = None, []

        def change(name: str, data: torch.Tensor) -> None:
            if problem is not None:
                raise problem
            spec, memory = self._memory[weight_of(name)]
            try:
                apply(elements(memory.numpy(), DTYPE_BYTES[spec.dtype]), data.cpu().numpy())
            except ValueError as error:
                do = "publish all weights; look at the memory and the network of this machine if it happens again"
                found = f"the difference is damaged: {error}"
                raise WeightTransferError(explain(f"apply {name}", found, do)) from error
            digest.append(slice_digest(memory, 0, "xxh3"))
            sink.write(spec, 0, memory)

        receiver.receive(manifest, AssemblingSink(change), timeout_s)
        if problem is not None:  # a publish without tensors
            raise problem
        self._digest = tuple(digest)
        return self._digest if manifest.verify else None

    def _problem(self, manifest: Manifest) -> WeightTransferError | None:
        """The error that the first change raises. Raised before joining, it would leave the sender waiting."""
        asked = f"apply the differences of publish {manifest.publish_id}"
        do = "publish all weights"
        if self._digest is None:
            return WeightTransferError(explain(asked, "this replica has no whole copy of weights to apply them to", do))
        names = [weight_of(spec.name) for spec in manifest.tensors]
        if names != list(self._memory):
            return WeightTransferError(explain(asked, "they are of other tensors than this replica has", do))
        if self._digest != manifest.base_digest:
            pairs = zip(names, self._digest, manifest.base_digest or (), strict=False)
            differing = [name for name, ours, theirs in pairs if ours != theirs]
            found = f"this replica has another base: other bytes in {', '.join(differing[:3]) or 'an unknown tensor'}"
            return WeightTransferError(explain(asked, found, do))
        return None


class _CopyingSink:
    """Copies slices and passes them on to `sink`."""

    def __init__(self, memory: dict[str, tuple[TensorSpec, torch.Tensor]], sink: WeightSink) -> None:
        self._memory, self._sink = memory, sink

    def write(self, spec: TensorSpec, offset: int, data: torch.Tensor) -> None:
        _, memory = self._memory[spec.name]
        self._sink.write(spec, offset, data)  # first: it checks name, shape and offset
        memory[offset : offset + data.numel()].copy_(data)
