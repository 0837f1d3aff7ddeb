"""The message queue as a checkpoint holds it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from asyncrl.queue.group_files import load_groups, load_partials, save_groups, save_partials
from asyncrl.queue.masking import StoredGroup
from asyncrl.queue.records import LedgerSnapshot
from asyncrl.types import PartialGroup


@dataclass(frozen=True, slots=True, eq=False)
class SavedState:
    """Everything of one moment.

    `snapshot` names it in the events. `groups`: ready and leased ones, in the order of their records. `partials`: of
    running groups, under the tickets that they had. The windows are `EndWindow.to_text`.
    """

    snapshot: str
    ledger: LedgerSnapshot
    groups: tuple[StoredGroup, ...]
    partials: tuple[PartialGroup, ...]
    failed_window: str
    filtered_window: str


def save_state(directory: Path, state: SavedState) -> None:
    """Writes `state` below `directory`, which is made."""
    directory.mkdir(parents=True, exist_ok=True)
    save_groups(directory, [stored.group for stored in state.groups])
    save_partials(directory, list(state.partials))
    data = {
        "snapshot": state.snapshot,
        "ledger": state.ledger.to_json(),
        "put_versions": [stored.put_version for stored in state.groups],
        "failed_window": state.failed_window,
        "filtered_window": state.filtered_window,
    }
    (directory / "ledger.json").write_text(json.dumps(data))


def load_state(directory: Path) -> SavedState:
    data = json.loads((directory / "ledger.json").read_text())
    groups = zip(load_groups(directory), data["put_versions"], strict=True)
    return SavedState(
        snapshot=data["snapshot"],
        ledger=LedgerSnapshot.from_json(data["ledger"]),
        groups=tuple(StoredGroup(group, version) for group, version in groups),
        partials=tuple(load_partials(directory)),
        failed_window=data["failed_window"],
        filtered_window=data["filtered_window"],
    )
