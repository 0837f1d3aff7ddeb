"""Received bytes into the parameters of a model that is being served."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from asyncrl.errors import WeightTransferError, explain
from asyncrl.types import TensorSpec


class ParameterSink:
    """Writes one publish straight into the storage of `targets`; make a new one per publish.

    A tensor of the target's dtype is copied byte by byte; one of another dtype is gathered first and then converted.
    Names that share storage (tied embeddings) count as one: either may come, or both.

    Args:
        targets: the model's `state_dict()`.
    """

    def __init__(self, targets: Mapping[str, torch.Tensor]) -> None:
        self._targets = targets
        self._bytes_left: dict[str, int] = {}
        self._staging: dict[str, torch.Tensor] = {}

    def write(self, spec: TensorSpec, offset: int, data: torch.Tensor) -> None:
        """As `WeightSink.write`; the copy is complete on return."""
        target = self._target(spec)
        length = data.numel()
        left = self._bytes_left.get(spec.name, spec.nbytes) - length
        if offset < 0 or offset + length > spec.nbytes or left < 0:
            found = f"bytes [{offset}, {offset + length}) of {spec.nbytes}, {left + length} of which had not come yet"
            raise _refused(spec, found, "send every slice of the manifest once")
        destination = target if spec.dtype == _dtype_name(target) else self._staged(spec, data.device)
        _as_bytes(destination)[offset : offset + length].copy_(data)
        if left == 0 and destination is not target:
            target.copy_(self._staging.pop(spec.name))
        if data.is_cuda:  # the sender reuses its buffer as soon as this returns
            torch.cuda.current_stream(data.device).synchronize()
        self._bytes_left[spec.name] = left

    def finish(self) -> None:
        """Raises WeightTransferError naming a tensor that did not come, or came in part."""
        whole = {self._targets[name].data_ptr() for name, left in self._bytes_left.items() if left == 0}
        missing = [name for name, t in self._targets.items() if t.numel() > 0 and t.data_ptr() not in whole]
        missing += [name for name, left in self._bytes_left.items() if left > 0 and name not in missing]
        if missing:
            raise WeightTransferError(
                explain(
                    f"the {len(self._targets)} tensors of the model",
                    f"{len(missing)} did not come in full, the first is {missing[0]!r}",
                    "publish all of named_weights()",
                )
            )

    def _target(self, spec: TensorSpec) -> torch.Tensor:
        target = self._targets.get(spec.name)
        if target is None:
            raise _refused(spec, "the model has no tensor of that name", "train and serve the same model.path")
        if tuple(target.shape) != tuple(spec.shape):
            raise _refused(spec, f"the model's has shape {tuple(target.shape)}", "train and serve the same model.path")
        return target

    def _staged(self, spec: TensorSpec, device: torch.device) -> torch.Tensor:
        if spec.name not in self._staging:
            dtype = getattr(torch, spec.dtype, None)
            if not isinstance(dtype, torch.dtype):
                raise _refused(spec, f"{spec.dtype!r} is no dtype of torch", "send float32, bfloat16 or float16")
            self._staging[spec.name] = torch.empty(spec.shape, dtype=dtype, device=device)
        return self._staging[spec.name]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _refused(spec: TensorSpec, found: str, do: str) -> WeightTransferError:
    return WeightTransferError(explain(f"tensor {spec.name!r} {spec.shape} {spec.dtype}", found, do))
