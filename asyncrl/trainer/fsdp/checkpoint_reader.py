"""The CheckpointReader of FSDP2: reads weights and adapters that `sharded_state.save` wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from asyncrl.trainer.backend import StoredAdapter
from asyncrl.trainer.fsdp import lora
from asyncrl.trainer.fsdp.stored_state import StoredState
from asyncrl.weights.encodings.base import BaseWeights
from asyncrl.weights.encodings.lora import LORA_B
from asyncrl.weights.experts import unfused


class FsdpCheckpoint:
    def __init__(self, directory: Path) -> None:
        """Raises ConfigError: there is no checkpoint below `directory`, or it cannot be read."""
        self._written = StoredState(directory, f"read the weights of {directory}")
        self._names = [name.removeprefix("model.") for name in self._written.entries if name.startswith("model.")]

    def weights(self, base: str | None = None, revision: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """See `CheckpointReader`."""
        adapter = self.adapter()
        if adapter is None:
            for name in self._names:
                yield from unfused(name, self._written.read(f"model.{name}"))
            return
        scaled = {name: t * adapter.scale if name.endswith(LORA_B) else t for name, t in adapter.tensors.items()}
        for name, tensor in BaseWeights(base or adapter.base, revision).merged(scaled):
            yield name, tensor.float()

    def adapter(self) -> StoredAdapter | None:
        """See `CheckpointReader`."""
        written = self._written
        if lora.SCALE not in written:
            return None
        try:
            scale, base = float(written.read(lora.SCALE)), bytes(written.read(lora.BASE).tolist()).decode()
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise written.unfit(f"{lora.SCALE} and {lora.BASE} are none of a run with adapters: {error}") from error
        tensors = {name: written.read(f"model.{name}") for name in self._names}
        if not any(".lora_A." in name for name in tensors):
            raise written.unfit("it has no adapter")
        return StoredAdapter(scale, base, tensors)
