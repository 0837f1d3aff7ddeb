"""Groups in files: token arrays in one .npz, everything else in JSON beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.types import PartialGroup, PartialTrajectory, RecordedCall, Segment, Ticket, Trajectory, TrajectoryGroup

ARRAYS = {"prompt_ids": np.int32, "response_ids": np.int32, "logprobs": np.float32, "loss_mask": np.bool_}
CALL_ARRAYS = {"prompt_ids": np.int32, "token_ids": np.int32, "logprobs": np.float32}


def save_groups(directory: Path, groups: list[TrajectoryGroup]) -> None:
    """Writes `groups.npz` (each array concatenated over all trajectories, in order) and `groups.json`."""
    arrays = _Writer(ARRAYS)
    described = [
        {"ordinal": g.ordinal, "attempt": g.attempt, "trajectories": [_describe(t, arrays) for t in g.trajectories]}
        for g in groups
    ]
    arrays.save(directory / "groups.npz")
    (directory / "groups.json").write_text(json.dumps(described))


def load_groups(directory: Path) -> list[TrajectoryGroup]:
    described = json.loads((directory / "groups.json").read_text())
    arrays = _Reader(directory / "groups.npz")
    return [
        TrajectoryGroup(g["ordinal"], g["attempt"], tuple(_trajectory(t, arrays) for t in g["trajectories"]))
        for g in described
    ]


def save_partials(directory: Path, partials: list[PartialGroup]) -> None:
    """Writes `partials.json`, the arrays of complete trajectories in `partials_done.npz` and those of recorded calls in
    `partials_calls.npz`."""
    done, calls = _Writer(ARRAYS), _Writer(CALL_ARRAYS)
    described = [
        {
            "ticket": asdict(p.ticket),
            "trajectories": [
                {
                    "done": _describe(t.done, done) if t.done else None,
                    "calls": [_describe_call(c, calls) for c in t.calls],
                }
                for t in p.trajectories
            ],
        }
        for p in partials
    ]
    done.save(directory / "partials_done.npz")
    calls.save(directory / "partials_calls.npz")
    (directory / "partials.json").write_text(json.dumps(described))


def load_partials(directory: Path) -> list[PartialGroup]:
    described = json.loads((directory / "partials.json").read_text())
    done, calls = _Reader(directory / "partials_done.npz"), _Reader(directory / "partials_calls.npz")
    return [
        PartialGroup(
            Ticket(**p["ticket"]),
            tuple(
                PartialTrajectory(
                    tuple(_call(c, calls) for c in t["calls"]), _trajectory(t["done"], done) if t["done"] else None
                )
                for t in p["trajectories"]
            ),
        )
        for p in described
    ]


class _Writer:
    """Concatenates arrays by name."""

    def __init__(self, dtypes: Mapping[str, type[np.generic]]) -> None:
        self._dtypes = dtypes
        self._parts: dict[str, list[np.ndarray]] = {name: [] for name in dtypes}

    def add(self, source: Trajectory | RecordedCall) -> None:
        for name, parts in self._parts.items():
            parts.append(getattr(source, name))

    def save(self, path: Path) -> None:
        arrays = {
            name: np.concatenate(parts).astype(self._dtypes[name], copy=False)
            if parts
            else np.zeros(0, self._dtypes[name])
            for name, parts in self._parts.items()
        }
        np.savez(path, **arrays)  # pyright: ignore[reportArgumentType]  # stub takes no dict of arrays


class _Reader:
    """Takes the arrays apart again, in the order in which they were added."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as stored:
            self._arrays = {name: stored[name] for name in stored.files}
        self._at = dict.fromkeys(self._arrays, 0)

    def take(self, name: str, count: int) -> np.ndarray:
        """Raises ValueError: the file holds fewer, so it does not belong to its description."""
        start = self._at[name]
        self._at[name] = start + count
        if start + count > len(self._arrays[name]):
            raise ValueError(f"{name} has {len(self._arrays[name])} entries, its description needs {start + count}")
        return self._arrays[name][start : start + count]


def _describe(trajectory: Trajectory, arrays: _Writer) -> dict[str, Any]:
    arrays.add(trajectory)
    return {
        "num_prompt": len(trajectory.prompt_ids),
        "num_response": len(trajectory.response_ids),
        "segments": [asdict(s) for s in trajectory.segments],
        "reward": trajectory.reward,
        "reward_parts": trajectory.reward_parts,
        "finish_reason": trajectory.finish_reason,
        "turns": trajectory.turns,
        "started_s": trajectory.started_s,
        "finished_s": trajectory.finished_s,
    }


def _trajectory(entry: dict[str, Any], arrays: _Reader) -> Trajectory:
    num_prompt, num_response = entry.pop("num_prompt"), entry.pop("num_response")
    return Trajectory(
        **{name: arrays.take(name, num_prompt if name == "prompt_ids" else num_response) for name in ARRAYS},
        segments=tuple(Segment(**s) for s in entry.pop("segments")),
        reward_parts=tuple((name, value) for name, value in entry.pop("reward_parts")),
        **entry,
    ).validate()


def _describe_call(call: RecordedCall, arrays: _Writer) -> dict[str, Any]:
    arrays.add(call)
    return {
        "num_prompt": len(call.prompt_ids),
        "num_tokens": len(call.token_ids),
        "segments": [asdict(s) for s in call.segments],
        "finish_reason": call.finish_reason,
    }


def _call(entry: dict[str, Any], arrays: _Reader) -> RecordedCall:
    counts = {"prompt_ids": entry["num_prompt"], "token_ids": entry["num_tokens"], "logprobs": entry["num_tokens"]}
    return RecordedCall(
        **{name: arrays.take(name, count) for name, count in counts.items()},
        segments=tuple(Segment(**s) for s in entry["segments"]),
        finish_reason=entry["finish_reason"],
    )
