"""The CheckpointReader of Megatron-core: reads the master weights that `stored_state.write` wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from asyncrl.trainer.backend import StoredAdapter
from asyncrl.trainer.megatron.stored_state import RankFiles

MASTER = "master"


class MegatronCheckpoint:
    def __init__(self, directory: Path) -> None:
        """Raises ConfigError: there is no checkpoint below `directory`, or it cannot be read."""
        self._written = RankFiles(directory, f"read the weights of {directory}")

    def weights(self, base: str | None = None, revision: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """See `CheckpointReader`."""
        for name in self._written.names("model"):
            yield name, self._written.whole("model", MASTER, name)

    def adapter(self) -> StoredAdapter | None:
        """None: this backend trains all weights."""
        return None
