"""Checkpoints of the whole run: `checkpoints/step_<n>/{state.json, trainer/, queue/}`.

A checkpoint is written into a temporary directory, flushed to disk and renamed into place, so a directory
`step_<n>` is always complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from asyncrl.config.recipe import Recipe
from asyncrl.errors import ConfigError, explain

_NAME = re.compile(r"step_(\d+)")


@dataclass(frozen=True, slots=True)
class RunState:
    """What the run is, apart from the trainer's and the queue's own state.

    `elapsed_s`: seconds of all processes of the run so far. The rest must not change on resume: the ledger and
    the ready groups were built with it.
    """

    global_steps: int
    elapsed_s: float
    groups_per_step: int
    group_size: int
    max_lag: int
    seed: int
    shuffle: bool
    prompts_digest: str

    @classmethod
    def of(cls, recipe: Recipe, prompts_digest: str, *, global_steps: int, elapsed_s: float) -> RunState:
        batch = recipe.batch
        return cls(
            global_steps,
            elapsed_s,
            batch.groups_per_step,
            batch.group_size,
            recipe.max_lag,
            recipe.run.seed,
            recipe.data.shuffle,
            prompts_digest,
        )


_FIXED = {
    "groups_per_step": "batch.groups_per_step",
    "group_size": "batch.group_size",
    "max_lag": "staleness.max_lag (through mode)",
    "seed": "run.seed",
    "shuffle": "data.shuffle",
    "prompts_digest": "the rendered prompts (digest)",
}


class CheckpointStore:
    """The newest `keep` checkpoints of one run directory."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory = directory
        self._keep = keep

    def begin(self, step: int) -> Path:
        """An empty directory to write checkpoint `step` into; `finish` gives it its name."""
        temporary = self._directory / f".step_{step}.tmp"
        for unfinished in self._directory.glob(".step_*.tmp"):
            shutil.rmtree(unfinished)
        temporary.mkdir(parents=True)
        return temporary

    def finish(self, temporary: Path, state: RunState) -> Path:
        """Makes the checkpoint durable and visible, and removes those over `keep`."""
        (temporary / "state.json").write_text(json.dumps(asdict(state), indent=2) + "\n")
        for path in sorted(temporary.rglob("*"), reverse=True):
            _fsync(path)
        _fsync(temporary)
        final = self._directory / f"step_{state.global_steps}"
        if final.exists():  # the same step was saved before: the new one replaces it
            shutil.rmtree(final)
        temporary.rename(final)
        _fsync(self._directory)
        for old in self.all()[: -self._keep]:
            # Renamed first: whatever interrupts the removal, a directory step_<n> is complete.
            shutil.rmtree(old.rename(self._directory / f".{old.name}.tmp"))
        return final

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        if not self._directory.exists():
            return []
        found = [(int(m[1]), p) for p in self._directory.iterdir() if (m := _NAME.fullmatch(p.name))]
        return [path for _, path in sorted(found)]

    def set_aside_after(self, step: int) -> None:
        """Renames checkpoints of later steps: the run goes on from `step`, so they are of a branch that it leaves."""
        for path in self.all():
            if int(path.name.removeprefix("step_")) > step:
                aside = path.with_name(f"abandoned_{path.name}")
                if aside.exists():
                    shutil.rmtree(aside)
                path.rename(aside)

    def latest(self) -> Path | None:
        checkpoints = self.all()
        return checkpoints[-1] if checkpoints else None


def read_state(checkpoint: Path) -> RunState:
    """Raises ConfigError when `checkpoint` is not a checkpoint of a run."""
    try:
        return RunState(**json.loads((checkpoint / "state.json").read_text()))
    except (OSError, TypeError, ValueError) as e:
        raise ConfigError(
            explain(
                f"resume from {checkpoint}",
                f"it is not a complete checkpoint: {e}",
                "name a directory runs/<name>/checkpoints/step_<n>, or resume=auto for the newest one of the run",
            )
        ) from e


def check_resumable(recipe: Recipe, prompts_digest: str, checkpoint: Path) -> None:
    """Raises ConfigError naming the key of the recipe that differs from the checkpointed run."""
    saved = read_state(checkpoint)
    asked = RunState.of(recipe, prompts_digest, global_steps=saved.global_steps, elapsed_s=saved.elapsed_s)
    for field, key in _FIXED.items():
        if getattr(saved, field) != getattr(asked, field):
            raise ConfigError(
                explain(
                    f"resume {checkpoint} with {key}={getattr(asked, field)}",
                    f"the run was started with {getattr(saved, field)}; its ledger and ready groups depend on it",
                    "keep it, or start a new run with another run.dir",
                )
            )


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
