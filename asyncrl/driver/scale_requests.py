"""Requests to a run for another number of replicas: a file in the run directory, which the driver answers by a file.

Whoever may write to the run directory may ask. `ID.request.json` holds the number (null: only report the fleet) and the
time when the caller stops waiting; `ID.answer.json` holds the fleet, or the reason for the refusal.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncrl.driver.fleet.fleet_size import FleetSize
from asyncrl.errors import AsyncRLError, ConfigError, DeadlineExceeded, explain
from asyncrl.json_records import from_plain
from asyncrl.types import FleetReport

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""Pause of the driver between two looks for requests."""
MAX_BYTES = 4096
"""Largest request; a larger file is not a request."""
REQUEST, ANSWER = ".request.json", ".answer.json"


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """`replicas` None: only report the fleet. `until_s`: seconds since the epoch when the caller stops waiting."""

    replicas: int | None
    until_s: float

    @classmethod
    def read(cls, path: Path) -> ScaleRequest:
        """Raises ConfigError if the file is not a request."""
        try:
            with path.open("rb") as file:
                return from_plain(cls, json.loads(file.read(MAX_BYTES)))
        except (OSError, ValueError, RecursionError) as error:
            found, do = f"{type(error).__name__}: {error}", "use asyncrl-scale"
            raise ConfigError(explain(f"the request {path.name}", found, do)) from error


class ScaleDesk:
    """The driver's side. Owns the directory of requests during the run."""

    def __init__(self, directory: Path, fleet: FleetSize) -> None:
        self._directory = directory
        self._fleet = fleet

    async def serve(self) -> None:
        """Answers requests.

        Consumes: request files. Expired ones are removed.
        Produces: files with the answers; new targets of the fleet.
        Waits for: nothing; it looks every half second.
        Unblocked by: a file.
        Stops when: cancelled. Files that cannot be read or written are logged; the run goes on without them.
        """
        failing = False
        try:
            while True:
                try:
                    await asyncio.to_thread(self._directory.mkdir, exist_ok=True)
                    for path in await asyncio.to_thread(self._requests):
                        if (answer := self._answer(path)) is not None:
                            await asyncio.to_thread(_replace, _of(path, ANSWER), answer)
                        await asyncio.to_thread(path.unlink, missing_ok=True)
                    failing = False
                except OSError as error:
                    if not failing:
                        logger.warning("requests of asyncrl-scale cannot be answered: %s", error)
                    failing = True
                await asyncio.sleep(LOOK_S)
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _requests(self) -> list[Path]:
        """Files only: to open a pipe would block."""
        return sorted(path for path in self._directory.glob(f"*{REQUEST}") if path.is_file())

    def _answer(self, path: Path) -> dict[str, Any] | None:
        """The answer; None if the request has expired."""
        try:
            request = ScaleRequest.read(path)
            if time.time() > request.until_s:
                return None
            if request.replicas is None:
                return {"fleet": asdict(self._fleet.report)}
            return {"fleet": asdict(self._fleet.resize(request.replicas))}
        except AsyncRLError as error:
            return {"error": str(error)}
        except Exception as error:
            logger.exception("the request %s failed", path.name)
            return {"error": explain(f"the request {path.name}", repr(error), "see the log of the run; it goes on")}


def ask(directory: Path, replicas: int | None, timeout_s: float) -> FleetReport:
    """The command's side: sends a request to the run and returns its fleet. A request that is not answered in time is
    withdrawn.

    Raises:
        ConfigError: the run cannot have this many replicas.
        DeadlineExceeded: no answer.
        OSError: the directory cannot be written.
    """
    request = directory / f"{uuid.uuid4().hex}{REQUEST}"
    answered = _of(request, ANSWER)
    deadline = time.monotonic() + timeout_s
    _replace(request, {"replicas": replicas, "until_s": time.time() + timeout_s})
    try:
        while not answered.exists():
            if time.monotonic() > deadline:
                found = f"the run has not answered within {timeout_s:g} s"
                do = "see its log.txt: it may be starting, or restarting its training side; then ask again"
                what = "a look at the fleet" if replicas is None else asked(replicas)
                raise DeadlineExceeded(explain(what, found, do))
            time.sleep(0.05)
        answer = json.loads(answered.read_text(encoding="utf-8"))
    finally:
        # Also after a timeout: the run must not act on a request that nobody waits for.
        for path in (request, answered):
            path.unlink(missing_ok=True)
    if "error" in answer:
        raise ConfigError(answer["error"])
    fleet = answer["fleet"]
    by_id = {name: {int(i): value for i, value in fleet[name].items()} for name in ("states", "waiting")}
    return FleetReport(**{**fleet, **by_id})


def asked(replicas: int) -> str:
    return f"{replicas} replica{'s' * (replicas != 1)}"


def _of(request: Path, suffix: str) -> Path:
    return request.with_name(request.name.removesuffix(REQUEST) + suffix)


def _replace(path: Path, value: dict[str, Any]) -> None:
    """Writes the file atomically."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(value) + "\n", encoding="utf-8")
    part.replace(path)
