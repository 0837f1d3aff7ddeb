"""Orders from the replica to SGLang's schedulers, and their answers, as files in a private directory.

SGLang passes only named tensors to its schedulers, and returns only success or failure. So an order is a file whose
name is passed as the name of an empty tensor; each scheduler writes its digest or error to another file.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.model import ModelConfig
from asyncrl.types import Manifest, TransferSource

LOADER = "asyncrl.inference.sglang.weight_loader.load"
"""The function that SGLang calls in its schedulers."""


@dataclass(frozen=True, slots=True)
class PublishOrder:
    """One publish for all schedulers of a replica.

    Attributes:
        source: its `receiver` is the number of the scheduler with tensor-parallel rank 0.
        deadline_s: of the publish, on the machine's monotonic clock.
        model: whose files the schedulers serve.
        after_failure: the weights may differ from the last publish.
    """

    manifest: Manifest
    source: TransferSource
    deadline_s: float
    model: ModelConfig
    after_failure: bool


class WeightChannel:
    """The replica's side: writes orders and reads the answers of all schedulers."""

    def __init__(self, directory: Path, workers: int) -> None:
        self._directory = directory
        self._workers = workers

    def write(self, order: PublishOrder) -> str:
        """Writes an order; returns its name for the schedulers."""
        name = f"publish-{order.manifest.publish_id}"
        (self._directory / name).write_bytes(pickle.dumps(order))
        return name

    def outcomes(self, name: str) -> Sequence[Sequence[Any]]:
        """`WorkerUpdate.outcome` of each scheduler. Raises FileNotFoundError."""
        paths = [self._directory / f"{name}.{rank}" for rank in range(self._workers)]
        return [pickle.loads(path.read_bytes()) for path in paths]  # from processes below this one

    def remove(self, name: str) -> None:
        """Removes what `write` and the schedulers wrote."""
        for path in (self._directory / name, *self._directory.glob(f"{name}.*")):
            path.unlink(missing_ok=True)


def read_order(name: str) -> PublishOrder:
    """The scheduler's side."""
    return pickle.loads((_directory() / name).read_bytes())  # from the process above this one


def write_outcome(name: str, rank: int, outcome: Sequence[Any]) -> None:
    path = _directory() / f"{name}.{rank}"
    # The rename makes the outcome appear complete or not at all.
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(pickle.dumps(list(outcome)))
    unfinished.rename(path)


def _directory() -> Path:
    """TMPDIR, which the replica sets for all of SGLang's processes."""
    return Path(tempfile.gettempdir())
