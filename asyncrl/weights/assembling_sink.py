"""A sink that passes whole tensors to an engine."""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncrl.errors import WeightTransferError, explain
from asyncrl.types import TensorSpec


class AssemblingSink:
    """Collects slices and passes each tensor on when complete. A `DirectSink` that refuses an unfit tensor before its
    bytes arrive.

    The callback may keep a tensor, which has its own memory: an engine that reloads layer by layer holds references
    until a layer is complete.
    """

    def __init__(
        self,
        on_tensor: Callable[[str, torch.Tensor], None],
        *,
        check: Callable[[TensorSpec], None] = lambda spec: None,
        take: Callable[[TensorSpec], torch.Tensor] | None = None,
    ) -> None:
        """
        Args:
            check: raises WeightTransferError for a tensor that does not belong to the model.
            take: memory for a tensor, [nbytes] uint8, in host memory, wherever its bytes come from; None: on their
                device.
        """
        self._on_tensor = on_tensor
        self._check = check
        self._take = take
        self._memory: dict[str, torch.Tensor] = {}
        self._spec: TensorSpec | None = None
        self._filled = 0

    def write(self, spec: TensorSpec, offset: int, data: torch.Tensor) -> None:
        """As `WeightSink.write`. Raises WeightTransferError: the slices of a tensor do not follow one another."""
        self._check(spec)
        self._check_next(spec, offset, data.numel())
        self._place(spec, offset, data.numel(), data.device).copy_(data)
        self._advance(spec, data.numel())

    def destination(self, spec: TensorSpec, offset: int, nbytes: int, device: torch.device) -> torch.Tensor | None:
        """As `DirectSink.destination`."""
        self._check(spec)
        if offset < 0 or offset + nbytes > spec.nbytes:
            raise self._out_of_order(spec, offset, nbytes)
        if self._take is not None and device.type != "cpu":
            return None
        return self._place(spec, offset, nbytes, device)

    def wrote(self, spec: TensorSpec, offset: int, nbytes: int) -> None:
        """As `DirectSink.wrote`. Raises as `write`."""
        self._check_next(spec, offset, nbytes)
        self._advance(spec, nbytes)

    def _place(self, spec: TensorSpec, offset: int, nbytes: int, device: torch.device) -> torch.Tensor:
        """The view for these bytes; allocates the tensor's memory at its first slice."""
        if spec.name not in self._memory:
            if self._take is not None:
                self._memory[spec.name] = self._take(spec)
            else:
                self._memory[spec.name] = torch.empty(spec.nbytes, dtype=torch.uint8, device=device)
        return self._memory[spec.name][offset : offset + nbytes]

    def _check_next(self, spec: TensorSpec, offset: int, nbytes: int) -> None:
        if self._spec is None:
            self._spec, self._filled = spec, 0
        if spec != self._spec or offset != self._filled or offset + nbytes > spec.nbytes:
            raise self._out_of_order(spec, offset, nbytes)

    def _out_of_order(self, spec: TensorSpec, offset: int, nbytes: int) -> WeightTransferError:
        expected = f"bytes from {self._filled} of {spec.name if self._spec is None else self._spec.name}"
        self._spec = None
        self._memory.clear()
        found = f"bytes [{offset}, {offset + nbytes}) of {spec.name}"
        return WeightTransferError(explain(expected, found, "write slices in manifest order, each once"))

    def _advance(self, spec: TensorSpec, nbytes: int) -> None:
        self._filled += nbytes
        if self._filled == spec.nbytes:
            whole, self._spec = self._memory.pop(spec.name), None
            self._on_tensor(spec.name, whole.view(getattr(torch, spec.dtype)).view(spec.shape))
