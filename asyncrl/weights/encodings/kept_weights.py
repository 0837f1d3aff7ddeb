"""The receiving side of `delta`: a replica's copy of the weights that it got last, and what differences make of it."""

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
    """One copy of the model's weights in the host's memory, as the last publish brought them. An engine's own weights
    cannot be the base: it fuses, shards and converts them."""

    def __init__(self) -> None:
        self._memory: dict[str, tuple[TensorSpec, torch.Tensor]] = {}
        """By name; bytes."""
        self._digest: Digest | None = None
        """Of whole tensors, in the order of the publish; None: the copy is incomplete, or there is none."""

    def keep(self, receiver: WeightReceiver, manifest: Manifest, sink: WeightSink, timeout_s: float) -> Digest | None:
        """As `WeightReceiver.receive`, of a publish with encoding full; keeps what arrives."""
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
        """As `WeightReceiver.receive`, of a publish with encoding delta: `sink` gets all weights, whole. The digest is
        of the weights, each tensor whole.

        Raises WeightTransferError too: the copy is not the base of these differences, or they are damaged. The next
        publish must be full then.
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
                raise WeightTransferError(
                    explain(f"apply {name}", f"the difference is damaged: {error}", do)
                ) from error
            digest.append(slice_digest(memory, 0, "xxh3"))
            sink.write(spec, 0, memory)

        receiver.receive(manifest, AssemblingSink(change), timeout_s)
        if problem is not None:  # a publish without tensors
            raise problem
        self._digest = tuple(digest)
        return self._digest if manifest.verify else None

    def _problem(self, manifest: Manifest) -> WeightTransferError | None:
        """What the receiver reports in place of a change: raised before it joins, the sender would wait for it."""
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
    """Passes slices on to `sink`, and copies them."""

    def __init__(self, memory: dict[str, tuple[TensorSpec, torch.Tensor]], sink: WeightSink) -> None:
        self._memory, self._sink = memory, sink

    def write(self, spec: TensorSpec, offset: int, data: torch.Tensor) -> None:
        _, memory = self._memory[spec.name]
        self._sink.write(spec, offset, data)  # which checks where the bytes belong
        memory[offset : offset + data.numel()].copy_(data)
