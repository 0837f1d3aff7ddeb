"""Copies of a rank's state in host memory: checkpoints and weights are written from them while the rank trains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from asyncrl.weights.pinned_memory import pinned_empty

SAVING_TIMEOUT = timedelta(days=7)
"""Timeout of the process group in which ranks write a checkpoint. The checkpoint writer bounds the wait instead: it
waits for a late rank as long as all ranks answer."""


class HostCopies:
    """Makes copies, and reuses the memory of a returned copy: writing to fresh pages costs as much as the copy itself.

    A copy belongs to its caller until it is given back, so the memory of a checkpoint in writing is never touched: the
    next copy takes new memory. At most one unused copy is kept. Methods may be called from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def copy(self, live: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Name -> copy in host memory, taken one at a time. A shard stays a DTensor, which knows its place in the
        whole; nothing is gathered. Tensors whose shape, dtype or placement changed get new memory, pinned if there is a
        GPU: all copies then run at bus speed with a single wait at the end."""
        # Only one copy may take the kept memory, so it is removed under the lock.
        with self._lock:
            kept, self._kept = self._kept, {}
        copies: dict[str, torch.Tensor] = {}
        devices: set[torch.device] = set()
        for name, tensor in live:
            copies[name] = _copied(tensor, kept.pop(name, None))
            devices.add(tensor.device)
        # Copies into pinned memory were only enqueued: wait for each device once.
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        return copies

    def give_back(self, copies: dict[str, torch.Tensor]) -> None:
        """Returns a copy. The next `copy` overwrites its tensors and empties the dict."""
        with self._lock:
            self._kept = copies


def _copied(tensor: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """A copy, in the memory of `kept` if it fits."""
    if kept is None or not _agree(tensor, kept):
        kept = torch.empty_like(tensor, device="cpu")
        kept = _pinned(kept, tensor.device) if tensor.is_cuda else kept
    local_part(kept).copy_(local_part(tensor), non_blocking=True)
    return kept


def _pinned(copy: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`copy`, whose values nobody has written yet, in pinned memory."""
    local = local_part(copy)
    pinned = pinned_empty(local.shape, local.dtype, device)
    if isinstance(copy, DTensor):
        copy._local_tensor = pinned
        return copy
    return pinned


def _agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    if isinstance(one, DTensor) != isinstance(other, DTensor) or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if isinstance(one, DTensor) and isinstance(other, DTensor) and one.placements != other.placements:
        return False
    return local_part(one).shape == local_part(other).shape


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of a DTensor, which may lie on another device than its mesh; another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Captures:
    """The last captured state of a rank, until it is written. Owns its memory, and the process group in which the ranks
    write: they write in a thread of their own while they train, and collectives of the two must not be matched with
    each other."""

    def __init__(self) -> None:
        """Collective. Needs torch.distributed's default group."""
        self._copies = HostCopies()
        self._captured: tuple[str, dict[str, torch.Tensor]] | None = None
        group = dist.new_group(backend="gloo", timeout=SAVING_TIMEOUT)
        assert isinstance(group, dist.ProcessGroup), "every rank is a member"
        self._group = group

    def take(self, live: dict[str, torch.Tensor], header: str = "") -> None:
        """Copies `live`, and drops an earlier copy. `header`: describes it."""
        unwritten, self._captured = self._captured, None
        if unwritten is not None:
            self._copies.give_back(unwritten[1])
        self._captured = header, self._copies.copy(live.items())

    def write(self, write: Callable[[str, dict[str, torch.Tensor], dist.ProcessGroup], None]) -> None:
        """Calls `write` with the header, the copy and the group, and releases the copy. Raises RuntimeError: nothing
        was captured since the last call."""
        captured, self._captured = self._captured, None
        if captured is None:
            raise RuntimeError("save was called before capture")
        try:
            write(*captured, self._group)
        finally:
            self._copies.give_back(captured[1])


# Optimizer state that is in host memory between steps.


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """Location in which the optimizer looks for one tensor of its state."""

    read: Callable[[], torch.Tensor]
    write: Callable[[torch.Tensor], None]


class HostState:
    """Moves the tensors of some slots between host memory and their device. Owns the host buffers, allocated once and
    pinned if there is a GPU. On a CPU the two places are different memory as well, so tests see the moves."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        """Moves them to the host."""
        held = [(slot, slot.read()) for slot in slots]
        self._slots = [(slot, t.device, pinned_empty(t.shape, t.dtype, t.device)) for slot, t in held]
        self._on_device = True
        self.to_host()

    def to_device(self) -> None:
        """Idempotent."""
        if self._on_device:
            return
        for slot, device, buffer in self._slots:
            slot.write(buffer.to(device, non_blocking=True, copy=True))
        self._on_device = True

    def to_host(self) -> None:
        """Returns once the device's memory is free. Idempotent."""
        if not self._on_device:
            return
        for slot, _, buffer in self._slots:
            buffer.copy_(slot.read(), non_blocking=True)
        for device in {device for _, device, _ in self._slots if device.type == "cuda"}:
            torch.cuda.synchronize(device)  # the copies are done before anything reads a buffer
        for slot, _, buffer in self._slots:
            slot.write(buffer)
        self._on_device = False
