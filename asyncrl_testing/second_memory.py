"""Shared memory in the role of a GPU's, to test the negotiation of `ipc` without a GPU."""

from __future__ import annotations

import json
from functools import partial

import torch

from asyncrl.errors import WeightTransferError, explain
from asyncrl.types import IpcSource
from asyncrl.weights.transports.ipc import IpcReceiver
from asyncrl.weights.transports.media import HostMapping, Mapping, Medium
from asyncrl.weights.transports.shared_segment import SharedSegment, attach


class SecondMemory(Medium):
    """`unreachable`: receivers that cannot map it; `mistaken`: receivers that map other memory."""

    def __init__(self, nbytes: int, *, unreachable: tuple[int, ...] = (), mistaken: tuple[int, ...] = ()) -> None:
        self._segment = SharedSegment()
        self._segment.reserve(nbytes)
        super().__init__(self._segment.data)
        self._unreachable = unreachable
        self._mistaken = mistaken

    def describe(self) -> str:
        places = {"path": str(self._segment.path), "unreachable": self._unreachable, "mistaken": self._mistaken}
        return json.dumps(places)

    def close(self) -> None:
        self._segment.close()


def build_second_memory_receiver(source: IpcSource, device: str = "cpu") -> IpcReceiver:
    """A receiver that maps a `SecondMemory`, unless that says otherwise."""
    return IpcReceiver(source, device=device, open_medium=partial(_open, source.receiver))


def _open(receiver: int, description: str, device: torch.device) -> Mapping:
    places = json.loads(description)
    if receiver in places["unreachable"]:
        raise WeightTransferError(explain("map device memory", "it is out of reach", "nothing"))
    memory = attach(places["path"])
    return HostMapping(torch.zeros_like(memory) if receiver in places["mistaken"] else memory)
