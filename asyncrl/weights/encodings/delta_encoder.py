"""The sending side of `delta`: a trainer rank's copy of the weights it last encoded, and the differences to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from asyncrl.types import Digest, EncodedWeights, TensorSpec
from asyncrl.weights.digest import slice_digest
from asyncrl.weights.encodings.delta import DELTA
from asyncrl.weights.encodings.difference import elements, encode
from asyncrl.weights.packing import byte_view, spec_of
from asyncrl.weights.plan import DTYPE_BYTES


class DeltaEncoder:
    """Encodes the weights that one rank sends. Owns, in host memory, a copy of them (the base of the next `encode`) and
    the differences."""

    def __init__(self) -> None:
        self._base: dict[str, tuple[TensorSpec, torch.Tensor]] = {}
        """Name -> (spec, bytes)."""
        self._differences: list[tuple[str, torch.Tensor]] = []
        self.digest: Digest = ()
        """Of the weights last encoded."""

    def encode(self, weights: Iterable[tuple[str, torch.Tensor]]) -> EncodedWeights:
        """Encodes `weights`, on any device, and keeps a copy. There is no base at the first call, if the tensors' specs
        changed, or after an error of `weights`, which propagates unchanged."""
        # Clear first: an error halfway must not leave a base that mixes two publishes.
        base, before = self._base, self.digest
        self._base, self._differences, self.digest = {}, [], ()
        copies: dict[str, tuple[TensorSpec, torch.Tensor]] = {}
        differences: list[tuple[str, torch.Tensor]] = []
        digest: list[int] = []
        for name, tensor in weights:
            spec, new = spec_of(name, tensor), byte_view(tensor).cpu()
            held_spec, held = base.pop(name, (None, None))
            if held is None or held_spec != spec:
                held = new.clone()  # its memory may be the trainer's own
            else:
                width = DTYPE_BYTES[spec.dtype]
                difference = encode(elements(held.numpy(), width), elements(new.numpy(), width))
                differences.append((name + DELTA, torch.from_numpy(difference.copy())))
                held.copy_(new)
            digest.append(slice_digest(held, 0, "xxh3"))
            copies[name] = (spec, held)
        has_base = len(differences) == len(copies) == len(before) and not base
        self._base, self._differences, self.digest = copies, differences if has_base else [], tuple(digest)
        specs = tuple(spec_of(*item) for item in self._differences)
        return EncodedWeights(self.digest, before if has_base else None, specs)

    def differences(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The result of the last `encode`; may be called repeatedly."""
        return iter(self._differences)
