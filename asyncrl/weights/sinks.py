"""Sinks that engines build on."""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncrl.errors import WeightTransferError, explain
from asyncrl.types import TensorSpec


class AssemblingSink:
    """Collects slices into whole tensors and passes each on when it is complete.

    Every tensor lives in fresh memory that the callback may keep: an engine that reloads layer by layer holds
    references until a layer is complete.
    """

    def __init__(self, on_tensor: Callable[[str, torch.Tensor], None]) -> None:
        self._on_tensor = on_tensor
        self._spec: TensorSpec | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._filled = 0

    def write(self, spec: TensorSpec, offset: int, data: torch.Tensor) -> None:
        """As `WeightSink.write`. Raises WeightTransferError: the slices of a tensor do not follow one another."""
        if self._spec is None:
            self._spec, self._filled = spec, 0
            self._bytes = torch.empty(spec.nbytes, dtype=torch.uint8, device=data.device)
        end = offset + data.numel()
        if spec != self._spec or offset != self._filled or end > spec.nbytes:
            found = f"bytes [{offset}, {end}) of {spec.name}"
            self._spec, expected = None, f"bytes from {self._filled} of {self._spec.name}"
            raise WeightTransferError(explain(expected, found, "write slices in manifest order, each once"))
        self._bytes[offset:end].copy_(data)
        self._filled = end
        if end == spec.nbytes:
            self._spec, whole = None, self._bytes
            self._bytes = self._bytes[:0]
            self._on_tensor(spec.name, whole.view(getattr(torch, spec.dtype)).view(spec.shape))
