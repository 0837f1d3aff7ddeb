"""What asyncrl-report would find of the learning of a run, while it runs: each finding once."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.report.findings import of_learning
from asyncrl.report.run_files import RunFiles
from asyncrl.types.metrics import Record

logger = logging.getLogger(__name__)

WINDOW = 20
LEAST = 5
"""Steps after which a run is judged: the first ones fill the queue."""


class LiveFindings:
    """Logs a warning with cause and key the first time that the last steps show a finding."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings`: key of the recipe -> value."""
        self._settings = settings
        self._last: deque[Record] = deque(maxlen=WINDOW)
        self._said: set[str] = set()

    def stepped(self, record: Record) -> None:
        self._last.append(record)
        if len(self._last) < LEAST:
            return
        run = RunFiles("", Path(), self._settings, tuple(dict(line) for line in self._last), (), (), (), {})
        for found in of_learning(run):
            if found.title not in self._said:
                self._said.add(found.title)
                logger.warning("%s. %s %s", found.title, found.evidence, found.remedy)
