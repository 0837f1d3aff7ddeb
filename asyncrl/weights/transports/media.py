"""The memory of an `ipc` ring: shared memory, or GPU memory.

A medium is memory of the sender that receivers map. Whether a receiver can map GPU memory shows only when it tries: its
own GPU may not reach the sender's. The ring (`ipc.py`) uses shared memory unless all receivers succeed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch

from asyncrl.errors import WeightTransferError, explain
from asyncrl.weights.pinned_memory import pin, unpin

_CPU = torch.device("cpu")

EXPORTED = ("handle", "size", "offset", "counter", "counter_offset", "event", "event_sync")
"""The fields, after the device, that torch exports for a storage, in the order of `_new_shared_cuda`."""


class Mapping:
    """A view of a medium."""

    def __init__(self, data: torch.Tensor, *ends: torch.device) -> None:
        """`data`: [nbytes] uint8. `ends`: the devices on whose streams copies to or from it run."""
        self.data = data
        self._gpus = [device for device in ends if device.type == "cuda"]

    def synchronize(self) -> None:
        """Waits for all copies to or from `data` that this thread has begun."""
        for gpu in self._gpus:
            torch.cuda.current_stream(gpu).synchronize()

    def close(self) -> None:
        """Idempotent."""
        self.data = torch.empty(0, dtype=torch.uint8)


class Medium(Mapping):
    """The owner's view."""

    def describe(self) -> str:
        """Plain text from which receivers map it."""
        raise NotImplementedError


OpenMedium = Callable[[str, torch.device], Mapping]
"""Maps the memory of a `Medium.describe`, for a receiver whose tensors live on the device. Raises WeightTransferError:
this process cannot; the message says why."""


class HostMapping(Mapping):
    """Shared memory, for tensors on one device. For a GPU it is pinned if the driver can: copies are then several times
    faster and asynchronous."""

    def __init__(self, data: torch.Tensor, device: torch.device = _CPU) -> None:
        """`data`: [nbytes] uint8. `device`: the other end of the copies."""
        super().__init__(data, device)
        self._device = device
        self._is_pinned = device.type == "cuda" and data.numel() > 0 and pin(data, device)

    def close(self) -> None:
        if self._is_pinned:
            unpin(self.data, self._device)
            self._is_pinned = False
        super().close()


class Stage:
    """Copies buckets from a GPU to host memory on its own stream, while the next bucket is gathered and packed into
    another buffer. On a CPU every step is synchronous."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        """`buffers`: [bucket bytes] uint8 each, at least two, on one device."""
        self._buffers = buffers
        self._turn = 0
        self._stream = torch.cuda.Stream(buffers[0].device) if buffers[0].device.type == "cuda" else None

    @property
    def place(self) -> torch.Tensor:
        """The buffer for the next bucket; free once the copy before the last one is complete."""
        return self._buffers[self._turn]

    def begin(self, slot: torch.Tensor) -> None:
        """Begins to copy the packed bucket to `slot`, [bucket bytes] uint8, after the pending work of the current
        stream. The previous copy must be complete."""
        packed = self.place[: len(slot)]
        if self._stream is None:
            slot.copy_(packed)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(packed.device))
            with torch.cuda.stream(self._stream):
                slot.copy_(packed, non_blocking=True)
        self._turn = (self._turn + 1) % len(self._buffers)

    def wait(self) -> None:
        """Waits for all copies."""
        if self._stream is not None:
            self._stream.synchronize()


class CudaMedium(Medium):
    """Memory of one GPU, exported by CUDA IPC. After `close` it is kept for the next medium of its size: torch frees
    exported memory when its count of receivers is exactly zero, and the count goes negative if a receiver closes
    first."""

    _kept: ClassVar[dict[tuple[type, int, torch.device], CudaMedium]] = {}

    @classmethod
    def take(cls, nbytes: int, device: torch.device) -> Self:
        """Reuses a closed medium of this size, or makes one. Raises as `CudaMedium`."""
        kept: Any = cls._kept.pop((cls, nbytes, device), None)
        return cls(nbytes, device) if kept is None else kept

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Raises WeightTransferError: this process cannot export memory of the GPU."""
        self._asked = nbytes, device
        try:
            data = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            super().__init__(data, data.device)
            self.synchronize()
            uuid = str(torch.cuda.get_device_properties(self.data.device).uuid)
        except (RuntimeError, AssertionError, AttributeError, ValueError) as error:
            raise _cannot(f"export {nbytes} bytes of {device}", error) from error
        self._description = encode_export(uuid, exported(self.data.untyped_storage()))

    def describe(self) -> str:
        return self._description

    def close(self) -> None:
        self._kept[type(self), *self._asked] = self


class CudaMapping(Mapping):
    """A receiver's view of a `CudaMedium`. A copy between GPUs runs on a stream of its source, so both are waited
    for."""

    def __init__(self, description: str, device: torch.device) -> None:
        """Raises WeightTransferError: the GPU of the sender cannot be reached from here."""
        uuid, fields = decode_export(description)
        asked = f"map memory of GPU {uuid} for a receiver on {device}"
        if device.type != "cuda" or not torch.cuda.is_available():
            raise WeightTransferError(explain(asked, "this receiver has no GPU", "nothing: shared memory serves it"))
        own = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        source = visible_gpu(uuid)
        if source is None:
            do = "start replicas with the trainer's GPU among CUDA_VISIBLE_DEVICES, if copies between GPUs matter"
            raise WeightTransferError(explain(asked, "that GPU is not visible to this process", do))
        if source != own.index and not torch.cuda.can_device_access_peer(own.index, source):
            do = "nothing: shared memory serves GPUs that cannot reach each other"
            raise WeightTransferError(explain(asked, "the two GPUs have no peer access", do))
        there = torch.device("cuda", source)
        try:
            storage = torch.UntypedStorage._new_shared_cuda(source, *fields.values())
            super().__init__(torch.empty(0, dtype=torch.uint8, device=there).set_(storage), there, own)
        except (RuntimeError, AssertionError, AttributeError, TypeError, ValueError) as error:
            raise _cannot(asked, error) from error


def exported(storage: Any) -> dict[str, Any]:
    """The fields `EXPORTED` of a storage on a GPU. Raises WeightTransferError: torch cannot, or exports others."""
    try:
        _, *fields = storage._share_cuda_()
        return dict(zip(EXPORTED, fields, strict=True))
    except (RuntimeError, AttributeError, TypeError, ValueError) as error:
        raise _cannot("export memory of a GPU", error) from error


def encode_export(uuid: str, fields: dict[str, Any]) -> str:
    """JSON; bytes as hexadecimal digits."""
    plain = {name: value.hex() if isinstance(value, bytes) else value for name, value in fields.items()}
    return json.dumps({"gpu": uuid, **plain})


def decode_export(description: str) -> tuple[str, dict[str, Any]]:
    """The inverse of `encode_export`: (uuid, fields in the order of torch's arguments)."""
    plain = json.loads(description)
    fields = {name: plain[name] for name in EXPORTED}
    for name in ("handle", "counter", "event"):
        fields[name] = bytes.fromhex(fields[name])
    return plain["gpu"], fields


def visible_gpu(uuid: str) -> int | None:
    """The index of a GPU in this process; None if it is not visible."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    return None


def _cannot(asked: str, error: BaseException) -> WeightTransferError:
    found = str(error).partition("\n")[0]
    return WeightTransferError(explain(asked, found, "nothing: shared memory serves instead"))
