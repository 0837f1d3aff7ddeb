"""A fake driver that pins host memory, on a machine without a GPU."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch


class FakeDriver:
    """Replaces `torch.cuda.cudart()`. `error`: result of pinning."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error = 0
        self.pinned: dict[int, int] = {}
        """Address -> bytes."""
        self.devices: list[object] = []
        """Devices that were current, in order."""
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "device", self._enter)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert not flags
        if not self.error:
            self.pinned[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0

    def _enter(self, device: object) -> nullcontext[None]:
        self.devices.append(device)
        return nullcontext()
