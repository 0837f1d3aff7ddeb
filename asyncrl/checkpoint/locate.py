"""Finds the checkpoint that a command line names; the path may also be a model in Hugging Face format."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from asyncrl.checkpoint.digests import verify
from asyncrl.checkpoint.store import CheckpointStore, read_state
from asyncrl.errors import ConfigError, explain
from asyncrl.json_records import read_json


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """`recipe`: the resolved recipe of its run, by sections, from `config.json`; a model on the training machine has
    its full directory. None: the run has no recipe."""

    directory: Path
    global_steps: int
    recipe: dict[str, Any] | None


def find_checkpoint(path: str) -> FoundCheckpoint | None:
    """The checkpoint at `path`: a directory `step_<n>`, or the newest intact one of a run directory. None when `path`
    is neither, for example a model directory or a hub name. Reads the whole checkpoint.

    Raises:
        ConfigError: the checkpoint is damaged, or the run has none.
        StorageError: all checkpoints of the run are damaged.
    """
    directory = Path(path).expanduser()
    if (directory / "state.json").is_file() or (directory / "files.json").is_file():
        if (wrong := verify(directory)) is not None:
            do = "name another checkpoint, or its run directory for the newest intact one"
            raise ConfigError(explain(f"the checkpoint {directory}", f"it is not intact: {wrong}", do))
        run = directory.resolve().parent.parent
        return FoundCheckpoint(directory, read_state(directory).global_steps, _recipe_of(run))
    if (recipe := _recipe_of(directory)) is not None:
        latest = CheckpointStore(directory / "checkpoints", keep=1).latest()
        if latest is None:
            do = "wait for its first one (checkpoint.every_steps), or name a checkpoint of another run"
            raise ConfigError(explain(f"the newest checkpoint of the run {directory}", "it has none", do))
        return FoundCheckpoint(latest, read_state(latest).global_steps, recipe)
    return None


def _recipe_of(run: Path) -> dict[str, Any] | None:
    """None for a model directory: its config.json holds no recipe."""
    try:
        written = read_json((run / "config.json").read_bytes())
        recipe, resolved = written.get("recipe"), written.get("resolved")
    except (OSError, ValueError, AttributeError):
        return None
    if not isinstance(recipe, dict):
        return None
    model, known = recipe.get("model"), resolved if isinstance(resolved, dict) else {}
    if not isinstance(model, dict):
        return recipe
    directory, date = known.get("model_directory"), model.get("date") or known.get("date")
    if isinstance(directory, str) and not Path(str(model.get("path"))).is_dir():
        # A path on the training machine is never a hub name, even when this command runs on another machine.
        model = model | {"path": directory}
    return recipe | {"model": model | ({} if date is None else {"date": date})}


def date_of(checkpoint: Path | None) -> str:
    """`model.date` of the run of this checkpoint, if its config.json is there and has one; else today's."""
    recipe = _recipe_of(checkpoint.parent.parent) if checkpoint is not None else None
    model = (recipe or {}).get("model")
    saved = model.get("date") if isinstance(model, dict) else None
    return str(saved or datetime.now().date().isoformat())
