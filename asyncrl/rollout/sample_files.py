"""The rollouter's files for people: samples of trajectories, and the prompts whose groups ended `failed`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from asyncrl.config.hidden import Hidden
from asyncrl.data.rows import PromptRow
from asyncrl.errors import StorageError, explain
from asyncrl.types import Ticket, TrajectoryGroup


class SampleFile:
    """Writes the first trajectories of each admission version, decoded, one JSON object a line."""

    def __init__(self, path: Path, per_version: int, hide: Hidden) -> None:
        self._path, self._hide = path, hide
        self._per_version = per_version
        self._version, self._written = -1, 0

    def offer(
        self, group: TrajectoryGroup, ticket: Ticket, row: PromptRow, decode: Callable[[np.ndarray], str]
    ) -> None:
        """Raises StorageError."""
        if ticket.version > self._version:
            self._version, self._written = ticket.version, 0
        if ticket.version < self._version:
            return
        trajectories = group.trajectories[: max(0, self._per_version - self._written)]
        self._written += len(trajectories)
        for trajectory in trajectories:
            record = {
                "time_s": time.time(),
                "ordinal": group.ordinal,
                "attempt": group.attempt,
                "prompt": row.messages[-1].content,
                "response": decode(trajectory.response_ids),
                "ground_truth": row.ground_truth,
                "reward": trajectory.reward,
                "finish_reason": trajectory.finish_reason,
                "segments": [[s.start, s.stop, s.version, s.replica_id] for s in trajectory.segments],
            }
            _append(self._path, self._hide(json.dumps(record)))


class QuarantineFile:
    """Records every prompt that spent its attempts, with the error of its last one, one JSON object per line."""

    def __init__(self, path: Path, hide: Hidden) -> None:
        self._path, self._hide = path, hide

    def add(self, ticket: Ticket, row: PromptRow, error: str) -> None:
        """`error`: a traceback. Raises StorageError."""
        record = {
            "time_s": time.time(),
            "ordinal": ticket.ordinal,
            "attempt": ticket.attempt,
            "origin": row.origin,
            "prompt": row.messages[-1].content,
            "ground_truth": row.ground_truth,
            "error": error,
        }
        _append(self._path, self._hide(json.dumps(record)))


def _append(path: Path, line: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        do = "make room there; then go on with resume=auto"
        raise StorageError(explain(f"write {path}", str(error), do)) from error
