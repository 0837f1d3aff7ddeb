"""The discovery file tells other programs the address of the fleet and the state of its replicas."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncrl.serving.fleet import ReplicaReport

logger = logging.getLogger(__name__)


def replica_path(replica_id: int | str) -> str:
    """The path of one replica below the fleet's address; /v1 follows."""
    return f"/replicas/{replica_id}"


@dataclass(frozen=True, slots=True)
class FleetAddress:
    """`address`: base URL without /v1. `started_at`: seconds since the epoch."""

    address: str
    model: str
    engine: str
    pid: int
    started_at: float


class DiscoveryFile:
    """A JSON file that exists while the fleet serves. Writes are atomic."""

    def __init__(self, path: Path, fleet: FleetAddress) -> None:
        self._path = path
        self._part = path.with_name(f".{path.name}.{os.getpid()}.part")
        self._fleet = fleet
        self._written = self._failing = False

    def write(self, states: list[ReplicaReport]) -> None:
        """Raises OSError only the first time; later the fleet continues without updates of the file."""
        try:
            self._write(states)
        except OSError as e:
            if not self._written:
                raise
            if not self._failing:
                logger.warning("the discovery file %s cannot be written and grows old: %s", self._path, e)
            self._failing = True
        else:
            self._written, self._failing = True, False

    def remove(self) -> None:
        for path in (self._path, self._part):
            try:
                path.unlink(missing_ok=True)
            except OSError as e:
                logger.warning("%s cannot be removed: %s", path, e)

    def _write(self, states: list[ReplicaReport]) -> None:
        replicas: list[dict[str, Any]] = []
        for state in states:
            fields = asdict(state)
            replica_id = fields.pop("replica_id")
            address = f"{self._fleet.address}{replica_path(replica_id)}"
            replicas.append({"id": replica_id, "address": address, "alive": state.alive, **fields})
        content = json.dumps({**asdict(self._fleet), "replicas": replicas}, indent=1)
        # Readers see the old file or the new one, never a part.
        self._part.write_text(content + "\n", encoding="utf-8")
        self._part.replace(self._path)
