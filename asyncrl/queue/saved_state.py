"""Saves and loads the state of the message queue in a checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from asyncrl.errors import ConfigError, explain
from asyncrl.json_records import from_plain
from asyncrl.queue.group_files import load_groups, load_partials, save_groups, save_partials
from asyncrl.queue.ledger import LedgerSnapshot
from asyncrl.queue.masking import StoredGroup
from asyncrl.types import PartialGroup


@dataclass(frozen=True, slots=True)
class _Saved:
    """Contents of ledger.json."""

    snapshot: str
    chain: str
    ledger: LedgerSnapshot
    put_versions: tuple[int, ...]
    failed_window: str
    filtered_window: str


@dataclass(frozen=True, slots=True, eq=False)
class SavedState:
    """The state of a message queue at one moment.

    `snapshot`: its name in the events; `chain`: the running hash of that event. `groups`: the ready and leased groups,
    in the order of their records. `partials`: the running groups, with their tickets. The windows are
    `EndWindow.to_text`.
    """

    snapshot: str
    chain: str
    ledger: LedgerSnapshot
    groups: tuple[StoredGroup, ...]
    partials: tuple[PartialGroup, ...]
    failed_window: str
    filtered_window: str


def save_state(directory: Path, state: SavedState) -> None:
    """Creates `directory` and writes `state` there."""
    directory.mkdir(parents=True, exist_ok=True)
    save_groups(directory, [stored.group for stored in state.groups])
    save_partials(directory, list(state.partials))
    versions = tuple(stored.put_version for stored in state.groups)
    windows = state.failed_window, state.filtered_window
    saved = _Saved(state.snapshot, state.chain, state.ledger, versions, *windows)
    (directory / "ledger.json").write_text(json.dumps(asdict(saved)))


def load_state(directory: Path) -> SavedState:
    """Raises ConfigError: `save_state` did not write the files, or they do not belong together."""
    try:
        return _load(directory)
    except Exception as error:  # json, zipfile, zlib and numpy raise almost any error for files that they did not write
        found = f"{type(error).__name__}: {error}"
        do = "name another checkpoint, or its run directory for the newest intact one"
        raise ConfigError(explain(f"the message queue of {directory.parent}", found, do)) from error


def _load(directory: Path) -> SavedState:
    saved = from_plain(_Saved, json.loads((directory / "ledger.json").read_text()), "ledger.json")
    groups, partials = load_groups(directory), load_partials(directory)
    stored = tuple(StoredGroup(group, version) for group, version in zip(groups, saved.put_versions, strict=True))
    held = [r.ordinal for r in saved.ledger.records if r.state != "running"]
    if [g.ordinal for g in groups] != held:
        raise ValueError(f"groups.json has {[g.ordinal for g in groups]}, ledger.json has {held}")
    if len({r.ordinal for r in saved.ledger.records}) != len(saved.ledger.records):
        raise ValueError("ledger.json has a group twice")
    windows = saved.failed_window, saved.filtered_window
    return SavedState(saved.snapshot, saved.chain, saved.ledger, stored, tuple(partials), *windows)
