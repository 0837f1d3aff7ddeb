"""Writes received bytes into the parameters of the served model."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from asyncrl.errors import WeightTransferError, explain
from asyncrl.types import TensorSpec

_EACH_ONCE = "send every slice of the manifest once"


class ParameterSink:
    """A `DirectSink` that writes one publish directly into the storage of `targets`; make a new one per publish.

    A tensor of the target's dtype is copied bytewise; one of another dtype, or for a target that is not contiguous, is
    gathered first and then converted.
    Names that share storage (tied embeddings) count as one: either may arrive, or both.

    Args:
        targets: checkpoint name -> tensor of the model, a view of its storage.
    """

    def __init__(self, targets: Mapping[str, torch.Tensor]) -> None:
        self._targets = targets
        self._bytes_left: dict[str, int] = {}
        self._staging: dict[str, torch.Tensor] = {}

    def check(self, spec: TensorSpec) -> None:
        """Raises WeightTransferError: no such tensor in the model, or a different shape."""
        self._target(spec, 0, spec.nbytes)

    def write(self, spec: TensorSpec, offset: int, data: torch.Tensor) -> None:
        """As `WeightSink.write`; the copy is complete on return."""
        length = data.numel()
        target = self._target(spec, offset, length)
        left = self._left_after(spec, offset, length)
        destination = target if _fits(spec, target) else self._staged(spec, data.device)
        _as_bytes(destination)[offset : offset + length].copy_(data)
        # The last slice: convert the gathered tensor into the parameter.
        if left == 0 and destination is not target:
            target.copy_(self._staging.pop(spec.name))
        if data.is_cuda:  # the sender reuses its buffer as soon as this returns
            torch.cuda.current_stream(data.device).synchronize()
        self._bytes_left[spec.name] = left

    def destination(self, spec: TensorSpec, offset: int, nbytes: int, device: torch.device) -> torch.Tensor | None:
        """As `DirectSink.destination`: the parameter itself, if dtype and device match."""
        target = self._target(spec, offset, nbytes)
        if not _fits(spec, target) or target.device != device:
            return None
        return _as_bytes(target)[offset : offset + nbytes]

    def wrote(self, spec: TensorSpec, offset: int, nbytes: int) -> None:
        """As `DirectSink.wrote`; the bytes are complete on return."""
        target = self._target(spec, offset, nbytes)
        left = self._left_after(spec, offset, nbytes)
        if target.is_cuda:  # the copy is ordered before this stream only, not before readers on other streams
            torch.cuda.current_stream(target.device).synchronize()
        self._bytes_left[spec.name] = left

    def exchanged(self, name: str) -> None:
        """Marks a target as complete: it was replaced by the buffer that received its bytes."""
        self._bytes_left[name] = 0

    def finish(self, names: Collection[str] | None = None) -> None:
        """Raises WeightTransferError naming a missing or incomplete tensor. `names`: the required tensors; None:
        all."""
        whole = {self._targets[name].data_ptr() for name, left in self._bytes_left.items() if left == 0}
        wanted = self._targets if names is None else {name: self._targets[name] for name in names}
        missing = [name for name, t in wanted.items() if t.numel() > 0 and t.data_ptr() not in whole]
        missing += [name for name, left in self._bytes_left.items() if left > 0 and name not in missing]
        if missing:
            found = f"{len(missing)} did not come in full, the first is {missing[0]!r}"
            do = "publish all of named_weights()"
            raise WeightTransferError(explain(f"the {len(self._targets)} tensors of the model", found, do))

    def _target(self, spec: TensorSpec, offset: int, nbytes: int) -> torch.Tensor:
        target = self._targets.get(spec.name)
        if target is None:
            raise _refused(spec, "the model has no tensor of that name", "train and serve the same model.path")
        if tuple(target.shape) != tuple(spec.shape):
            raise _refused(spec, f"the model's has shape {tuple(target.shape)}", "train and serve the same model.path")
        if offset < 0 or offset + nbytes > spec.nbytes:
            raise _refused(spec, f"bytes [{offset}, {offset + nbytes}) of {spec.nbytes}", _EACH_ONCE)
        return target

    def _left_after(self, spec: TensorSpec, offset: int, nbytes: int) -> int:
        """Bytes still missing after this slice."""
        left = self._bytes_left.get(spec.name, spec.nbytes) - nbytes
        if left < 0:
            found = f"bytes [{offset}, {offset + nbytes}) of {spec.nbytes}, {left + nbytes} of which had not come yet"
            raise _refused(spec, found, _EACH_ONCE)
        return left

    def _staged(self, spec: TensorSpec, device: torch.device) -> torch.Tensor:
        if spec.name not in self._staging:
            dtype = getattr(torch, spec.dtype, None)
            if not isinstance(dtype, torch.dtype):
                raise _refused(spec, f"{spec.dtype!r} is no dtype of torch", "send float32, bfloat16 or float16")
            self._staging[spec.name] = torch.empty(spec.shape, dtype=dtype, device=device)
        return self._staging[spec.name]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _fits(spec: TensorSpec, target: torch.Tensor) -> bool:
    """Whether the bytes of `spec` are those of `target`."""
    return spec.dtype == str(target.dtype).removeprefix("torch.") and target.is_contiguous()


def _refused(spec: TensorSpec, found: str, do: str) -> WeightTransferError:
    return WeightTransferError(explain(f"tensor {spec.name!r} {spec.shape} {spec.dtype}", found, do))
