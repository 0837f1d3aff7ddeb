"""Groups in files: token arrays in one .npz, everything else in JSON beside them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.types import Segment, Trajectory, TrajectoryGroup

ARRAYS = {"prompt_ids": np.int32, "response_ids": np.int32, "logprobs": np.float32, "loss_mask": np.bool_}


def save_groups(directory: Path, groups: list[TrajectoryGroup]) -> None:
    """Writes `groups.npz` (each array concatenated over all trajectories, in order) and `groups.json`."""
    trajectories = [t for group in groups for t in group.trajectories]
    arrays: dict[str, np.ndarray] = {}
    for name, dtype in ARRAYS.items():
        parts = [getattr(t, name) for t in trajectories]
        arrays[name] = np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)
    np.savez(directory / "groups.npz", **arrays)  # pyright: ignore[reportArgumentType]  # stub takes no dict of arrays
    described = [
        {"ordinal": g.ordinal, "attempt": g.attempt, "trajectories": [_describe(t) for t in g.trajectories]}
        for g in groups
    ]
    (directory / "groups.json").write_text(json.dumps(described))


def load_groups(directory: Path) -> list[TrajectoryGroup]:
    described = json.loads((directory / "groups.json").read_text())
    with np.load(directory / "groups.npz") as stored:
        arrays = {name: stored[name] for name in ARRAYS}
    at = dict.fromkeys(ARRAYS, 0)

    def take(name: str, count: int) -> np.ndarray:
        start = at[name]
        at[name] = start + count
        return arrays[name][start : start + count]

    def trajectory(entry: dict[str, Any]) -> Trajectory:
        num_prompt, num_response = entry.pop("num_prompt"), entry.pop("num_response")
        return Trajectory(
            **{name: take(name, num_prompt if name == "prompt_ids" else num_response) for name in ARRAYS},
            segments=tuple(Segment(**s) for s in entry.pop("segments")),
            reward_parts=tuple((name, value) for name, value in entry.pop("reward_parts")),
            **entry,
        ).validate()

    return [
        TrajectoryGroup(g["ordinal"], g["attempt"], tuple(trajectory(t) for t in g["trajectories"])) for g in described
    ]


def _describe(trajectory: Trajectory) -> dict[str, Any]:
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
