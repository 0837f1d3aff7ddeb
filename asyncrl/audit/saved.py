"""The checkpoints next to a log: a log that was cut or rewritten no longer agrees with them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from asyncrl.audit.audit_report import COUNTS
from asyncrl.json_records import from_plain
from asyncrl.ranges import Whole
from asyncrl.types import LedgerCounts

_NAME = re.compile(r"(abandoned_)?step_\d+(\.replaced)?")
_STATE, _LEDGER = "state.json", "queue/ledger.json"


@dataclass(frozen=True, slots=True)
class Saved:
    """The state of the queue in a checkpoint. `chain`: hash in the line of its snapshot."""

    name: str
    snapshot: str
    chain: str
    step: int
    version: int
    next_ordinal: int
    counts: LedgerCounts
    groups: Mapping[int, GroupNow]
    groups_per_step: int
    max_lag: int


def read_saved(directory: Path) -> list[Saved]:
    """One record for each checkpoint in `directory` whose two files are intact. A damaged checkpoint proves nothing:
    the run does not resume from it either."""
    paths = sorted(directory.iterdir()) if directory.is_dir() else []
    found = (_read(path) for path in paths if _NAME.fullmatch(path.name))
    return [saved for saved in found if saved is not None]


def _read(path: Path) -> Saved | None:
    try:
        listed = json.loads((path / "files.json").read_bytes())
        state, ledger = (_intact(path, name, listed) for name in (_STATE, _LEDGER))
        now = ledger["ledger"]
        groups = {r["ordinal"]: GroupNow(_state(r), r["attempt"], r["version"]) for r in now["records"]}
        from_plain(tuple[Whole, ...], list(groups))
        return Saved(
            path.name,
            from_plain(str, ledger["snapshot"]),
            ledger["chain"],
            now["step"],
            now["version"],
            now["next_ordinal"],
            from_plain(LedgerCounts, now["counts"]),
            groups,
            state["groups_per_step"],
            state["max_lag"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _state(record: Mapping[str, Any]) -> str:
    return "waiting" if record["state"] == "running" and not record["issued"] else record["state"]


def _intact(path: Path, name: str, listed: Mapping[str, Any]) -> Any:
    """The content of one file. Raises ValueError if it is damaged."""
    data = (path / name).read_bytes()
    if xxhash.xxh3_64_hexdigest(data) != listed[name]["xxh3_64"]:
        raise ValueError(f"{name} has other content than was written")
    return json.loads(data)


# The replay's records of groups, snapshots and steps.


class GroupNow(NamedTuple):
    """The latest state of an ordinal. `version`: of its oldest token, or of its admission. A tuple because one is
    created per event, and a frozen dataclass takes three times as long."""

    state: str
    attempt: int
    version: int


@dataclass(frozen=True, slots=True)
class Mark:
    """The state of the replay at a snapshot."""

    line: int
    journal: int
    step: int
    version: int
    next_ordinal: int
    counts: Mapping[str, int]


NOTHING = Mark(0, 0, 0, 0, 0, dict.fromkeys(COUNTS, 0))
"""State before the run."""


@dataclass(frozen=True, slots=True)
class Announced:
    """A `step` event that the queue has not committed yet."""

    line: int
    ordinals: tuple[int, ...]
    lag_max: int
