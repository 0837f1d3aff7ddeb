from __future__ import annotations

import importlib
from pathlib import Path

from asyncrl.config.recipe import Recipe
from asyncrl.errors import ConfigError, explain
from asyncrl.observability.metrics import Record


class TensorBoardSink:
    """Scalars for TensorBoard below `<run>/tensorboard`."""

    def __init__(self, recipe: Recipe, name: str, directory: Path) -> None:
        try:
            summary = importlib.import_module("tensorboard.summary")
        except ImportError as e:
            raise ConfigError(
                explain(
                    "observability.sinks=[tensorboard]",
                    f"tensorboard is not installed: {e}",
                    "pip install 'asyncrl[tensorboard]'",
                )
            ) from e
        self._writer = summary.Writer(str(directory / "tensorboard"))

    def write(self, step: int, record: Record) -> None:
        for name, value in record.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
