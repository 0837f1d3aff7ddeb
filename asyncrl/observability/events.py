"""`events.jsonl`: what happened, one object a line, with wall and monotonic time."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from asyncrl.errors import unwritable


class EventLog:
    """Appends events from any number of processes of one machine: each line is a single O_APPEND write, so lines
    never mix and survive the death of the writer."""

    def __init__(self, path: Path) -> None:
        """Raises StorageError."""
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                os.write(self._file, b"\n")  # a crash tore the last line: the next one stands by itself
        except OSError as error:
            raise unwritable(path, error) from error

    def write(self, event: str, **fields: Any) -> None:
        """One event of kind `event`; fields must be JSON values. Raises StorageError: it could not be written."""
        record = {"event": event, "time_s": time.time(), "monotonic_s": time.monotonic(), **fields}
        line = (json.dumps(record) + "\n").encode()
        try:
            written = os.write(self._file, line)
        except OSError as error:
            raise unwritable(self._path, error) from error
        if written < len(line):
            raise unwritable(self._path, f"only {written} of {len(line)} bytes were written")

    def close(self) -> None:
        os.close(self._file)
