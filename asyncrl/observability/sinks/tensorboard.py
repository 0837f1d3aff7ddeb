from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from asyncrl.types.metrics import Record


class TensorBoardSink:
    """Scalars for TensorBoard in `directory`; begins a new file after a failure."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None

    def write(self, step: int, record: Record) -> None:
        try:
            if self._writer is None:
                self._writer = importlib.import_module("tensorboard.summary").Writer(str(self._directory))
            for name, value in record.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()
        except BaseException:
            self._writer = None
            raise

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def abandon(self) -> None:
        pass  # its threads end with the process
