"""Saves and loads the state of the message queue in a checkpoint: token arrays of groups in .npz files, everything else
in JSON files next to them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.errors import ConfigError, explain
from asyncrl.json_records import from_plain
from asyncrl.queue.ledger import LedgerSnapshot
from asyncrl.queue.masking import StoredGroup
from asyncrl.types import (
    FinishReason,
    Generation,
    PartialGroup,
    PartialTrajectory,
    Segment,
    Ticket,
    Trajectory,
    TrajectoryGroup,
)
from asyncrl.types.trajectories import TOKEN_ARRAYS, check_extra


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


ARRAYS = {"prompt_ids": np.int32, "response_ids": np.int32, "logprobs": np.float32, "loss_mask": np.bool_}
_EXTRA = {name: array.dtype for name, array in TOKEN_ARRAYS.items()}
STORED = ARRAYS | _EXTRA
CALL_ARRAYS = {"prompt_ids": np.int32, "token_ids": np.int32, "logprobs": np.float32}


@dataclass(frozen=True, slots=True)
class _DescribedSequence:
    """A trajectory without its branches, or one branch, in JSON: the lengths of its arrays, and everything that is not
    an array."""

    num_prompt: int
    num_response: int
    segments: tuple[Segment, ...]
    reward: float
    reward_parts: tuple[tuple[str, float], ...]
    finish_reason: FinishReason
    turns: int
    started_s: float
    finished_s: float
    extra: tuple[str, ...] = ()
    """Names of the arrays of `Trajectory.extra`."""
    rows: tuple[tuple[int, ...], ...] = ()
    """The shape of one row of each array in `extra`; empty: all rows are scalars."""


_SAME = [
    f.name for f in fields(_DescribedSequence) if not f.name.startswith("num_") and f.name not in ("extra", "rows")
]


@dataclass(frozen=True, slots=True)
class _Described(_DescribedSequence):
    branches: tuple[_DescribedSequence, ...] = ()


@dataclass(frozen=True, slots=True)
class _DescribedCall:
    num_prompt: int
    num_tokens: int
    segments: tuple[Segment, ...]
    finish_reason: FinishReason | None
    """None in older files means abort."""
    extra: tuple[str, ...] = ()
    rows: tuple[tuple[int, ...], ...] = ()
    """As in `_DescribedSequence`."""


@dataclass(frozen=True, slots=True)
class _DescribedGroup:
    ordinal: int
    attempt: int
    trajectories: tuple[_Described, ...]


@dataclass(frozen=True, slots=True)
class _DescribedPartial:
    calls: tuple[_DescribedCall, ...]
    done: _Described | None


@dataclass(frozen=True, slots=True)
class _DescribedPartialGroup:
    ticket: Ticket
    trajectories: tuple[_DescribedPartial, ...]


def save_groups(directory: Path, groups: list[TrajectoryGroup]) -> None:
    """Writes `groups.npz` (each array flat and concatenated over all trajectories, in order) and `groups.json`."""
    arrays = _Writer(STORED)
    described = [
        _DescribedGroup(g.ordinal, g.attempt, tuple(_describe(t, arrays) for t in g.trajectories)) for g in groups
    ]
    arrays.save(directory / "groups.npz")
    _write(directory / "groups.json", described)


def load_groups(directory: Path) -> list[TrajectoryGroup]:
    """Raises ValueError or numpy's errors: the files are not a checkpoint's."""
    described = _read(directory / "groups.json", _DescribedGroup)
    arrays = _Reader(directory / "groups.npz", STORED)
    return [
        TrajectoryGroup(g.ordinal, g.attempt, tuple(_trajectory(t, arrays) for t in g.trajectories)) for g in described
    ]


def save_partials(directory: Path, partials: list[PartialGroup]) -> None:
    """Writes `partials.json`, the arrays of complete trajectories (`partials_done.npz`) and of recorded calls
    (`partials_calls.npz`)."""
    done, calls = _Writer(STORED), _Writer(CALL_ARRAYS | _EXTRA)

    def describe(t: PartialTrajectory) -> _DescribedPartial:
        described = tuple(_describe_call(c, calls) for c in t.calls)
        return _DescribedPartial(described, _describe(t.done, done) if t.done else None)

    described = [_DescribedPartialGroup(p.ticket, tuple(map(describe, p.trajectories))) for p in partials]
    done.save(directory / "partials_done.npz")
    calls.save(directory / "partials_calls.npz")
    _write(directory / "partials.json", described)


def load_partials(directory: Path) -> list[PartialGroup]:
    """Raises as `load_groups`."""
    described = _read(directory / "partials.json", _DescribedPartialGroup)
    done = _Reader(directory / "partials_done.npz", STORED)
    calls = _Reader(directory / "partials_calls.npz", CALL_ARRAYS | _EXTRA)

    def trajectory(t: _DescribedPartial) -> PartialTrajectory:
        return PartialTrajectory(tuple(_call(c, calls) for c in t.calls), _trajectory(t.done, done) if t.done else None)

    return [PartialGroup(p.ticket, tuple(map(trajectory, p.trajectories))) for p in described]


def _write(path: Path, described: list[Any]) -> None:
    path.write_text(json.dumps([asdict(each) for each in described]))


def _read(path: Path, kind: Any) -> tuple[Any, ...]:
    return from_plain(tuple[kind, ...], json.loads(path.read_text()), path.name)


class _Writer:
    """Concatenates arrays with the same name."""

    def __init__(self, dtypes: Mapping[str, type[np.generic]]) -> None:
        self._dtypes = dtypes
        self._parts: dict[str, list[np.ndarray]] = {name: [] for name in dtypes}

    def add(self, source: Trajectory | Generation) -> None:
        for name, parts in self._parts.items():
            if name not in TOKEN_ARRAYS:
                parts.append(getattr(source, name))
            elif name in source.extra:
                parts.append(source.extra[name].ravel())

    def save(self, path: Path) -> None:
        arrays = {
            name: np.concatenate(parts).astype(self._dtypes[name], copy=False)
            if parts
            else np.zeros(0, self._dtypes[name])
            for name, parts in self._parts.items()
        }
        np.savez(path, **arrays)  # pyright: ignore[reportArgumentType]  # stub takes no dict of arrays


class _Reader:
    """Splits the arrays again, in the order in which they were added."""

    def __init__(self, path: Path, dtypes: Mapping[str, type[np.generic]]) -> None:
        """Raises ValueError: an array has another shape or dtype."""
        with np.load(path, allow_pickle=False) as stored:
            known = [name for name in dtypes if name in stored or name not in TOKEN_ARRAYS]
            self._arrays = {name: stored[name] for name in known}
        for name, array in self._arrays.items():
            if array.ndim != 1 or array.dtype != dtypes[name]:
                raise ValueError(f"{path.name}: {name} is {array.dtype} {list(array.shape)}")
        self._at = dict.fromkeys(self._arrays, 0)

    def take(self, name: str, count: int) -> np.ndarray:
        """Raises ValueError: fewer values are left, so the file does not match its description."""
        if name not in self._arrays:
            raise ValueError(f"{name} is not in the file, its description needs {count} entries")
        start = self._at[name]
        self._at[name] = start + count
        if count < 0 or start + count > len(self._arrays[name]):
            raise ValueError(f"{name} has {len(self._arrays[name])} entries, its description needs {start + count}")
        return self._arrays[name][start : start + count]


def _describe(trajectory: Trajectory, arrays: _Writer) -> _Described:
    own, *branches = (_describe_sequence(s, arrays) for s in trajectory.sequences)
    return _Described(*(getattr(own, f.name) for f in fields(own)), branches=tuple(branches))


def _describe_sequence(sequence: Trajectory, arrays: _Writer) -> _DescribedSequence:
    arrays.add(sequence)
    lengths = len(sequence.prompt_ids), len(sequence.response_ids)
    return _DescribedSequence(
        *lengths, **{name: getattr(sequence, name) for name in _SAME}, **_described_extra(sequence.extra)
    )


def _described_extra(extra: Mapping[str, np.ndarray]) -> dict[str, Any]:
    names = tuple(sorted(extra))
    return {"extra": names, "rows": tuple(extra[name].shape[1:] for name in names)}


def _extra(entry: _DescribedSequence | _DescribedCall, count: int, arrays: _Reader) -> dict[str, np.ndarray]:
    rows = entry.rows or ((),) * len(entry.extra)
    return {
        name: arrays.take(name, count * math.prod(row)).reshape(count, *row)
        for name, row in zip(entry.extra, rows, strict=True)
    }


def _trajectory(entry: _Described, arrays: _Reader) -> Trajectory:
    own = _sequence(entry, arrays)
    return replace(own, branches=tuple(_sequence(each, arrays) for each in entry.branches)).validate()


def _sequence(entry: _DescribedSequence, arrays: _Reader) -> Trajectory:
    return Trajectory(
        **{
            name: arrays.take(name, entry.num_prompt if name == "prompt_ids" else entry.num_response) for name in ARRAYS
        },
        **{name: getattr(entry, name) for name in _SAME},
        extra=_extra(entry, entry.num_response, arrays),
    )


def _describe_call(call: Generation, arrays: _Writer) -> _DescribedCall:
    arrays.add(call)
    lengths = len(call.prompt_ids), len(call.token_ids)
    return _DescribedCall(*lengths, call.segments, call.finish_reason, **_described_extra(call.extra))


def _call(entry: _DescribedCall, arrays: _Reader) -> Generation:
    counts = {"prompt_ids": entry.num_prompt, "token_ids": entry.num_tokens, "logprobs": entry.num_tokens}
    prompt_ids, token_ids, logprobs = (arrays.take(name, count) for name, count in counts.items())
    extra = _extra(entry, entry.num_tokens, arrays)
    check_extra(extra, entry.num_tokens)
    return Generation(prompt_ids, token_ids, logprobs, entry.segments, entry.finish_reason or "abort", extra=extra)
