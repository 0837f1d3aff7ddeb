"""`events.jsonl`: what happened, one object a line, with wall and monotonic time."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


class EventLog:
    """Appends events from any number of processes of one machine: each line is a single O_APPEND write, so lines
    never mix and survive the death of the writer."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, event: str, **fields: Any) -> None:
        """One event of kind `event`; fields must be JSON values."""
        record = {"event": event, "time_s": time.time(), "monotonic_s": time.monotonic(), **fields}
        os.write(self._file, (json.dumps(record) + "\n").encode())

    def close(self) -> None:
        os.close(self._file)
