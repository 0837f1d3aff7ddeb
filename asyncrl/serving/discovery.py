"""The discovery file: where the fleet is and how its replicas are, for whoever wants to find it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncrl.serving.fleet import ReplicaState


@dataclass(frozen=True, slots=True)
class FleetAddress:
    """`address`: the URL that requests go to, without /v1. `started_at`: seconds since the epoch."""

    address: str
    model: str
    engine: str
    pid: int
    started_at: float


class DiscoveryFile:
    """A JSON file that always holds one whole state; it is there while the fleet serves."""

    def __init__(self, path: Path, fleet: FleetAddress) -> None:
        self._path = path
        self._fleet = fleet

    def write(self, states: list[ReplicaState]) -> None:
        replicas: list[dict[str, Any]] = []
        for state in states:
            fields = asdict(state)
            replicas.append({"id": fields.pop("replica_id"), **fields})
        content = json.dumps({**asdict(self._fleet), "replicas": replicas}, indent=1)
        part = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")
        part.write_text(content + "\n", encoding="utf-8")
        part.replace(self._path)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
