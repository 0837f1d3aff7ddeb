from __future__ import annotations

import importlib
from pathlib import Path

from asyncrl.config.recipe import Recipe
from asyncrl.observability.metrics import Record


class TensorBoardSink:
    """Scalars for TensorBoard below `<run>/tensorboard`."""

    def __init__(self, recipe: Recipe, name: str, directory: Path) -> None:
        summary = importlib.import_module("tensorboard.summary")
        self._writer = summary.Writer(str(directory / "tensorboard"))

    def write(self, step: int, record: Record) -> None:
        for name, value in record.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
