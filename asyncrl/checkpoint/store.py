"""Checkpoints of the whole run: `checkpoints/step_<n>/{state.json, files.json, trainer/, queue/}`.

A checkpoint is written into a temporary directory, flushed to disk and renamed into place, so a directory `step_<n>`
was complete when it got its name. `files.json` holds the digests of that moment: a run finds later damage before it
resumes. `CheckpointStore.finish` deletes the oldest checkpoints over `checkpoint.keep`.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from asyncrl.checkpoint.digests import FileDigest, seal, verify
from asyncrl.config.recipe import Recipe, trains_branches
from asyncrl.errors import ConfigError, StorageError, explain, writing
from asyncrl.json_records import from_plain, sync
from asyncrl.types.guard import GuardState

logger = logging.getLogger(__name__)

FORMAT = 1
"""Format version of all files of a checkpoint; other versions are rejected."""
_REPAIR = "make room there, or repair the directory; the checkpoints before it are as they were"
_NAME = re.compile(r"step_(\d+)(\.replaced)?")


@dataclass(frozen=True, slots=True)
class RunState:
    """The driver's state of the run; trainer and queue save their own.

    `elapsed_s`: seconds of the run so far, over all restarts. `guard`: state of the off-policy guard, None if it is
    off. `arrays`: see `Recipe.kept_arrays`; None in checkpoints older than this field; a resumed run may need fewer.
    `branches`: groups may have branches (rollout.agent.train=all_branches). The other fields must not change on resume:
    the ledger and the ready groups depend on them.
    """

    global_steps: int
    elapsed_s: float
    groups_per_step: int
    group_size: int
    max_lag: int
    seed: int
    shuffle: bool
    prompts_digest: str
    guard: GuardState | None = None
    arrays: tuple[str, ...] | None = None
    branches: bool = False

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        prompts_digest: str,
        *,
        global_steps: int,
        elapsed_s: float,
        guard: GuardState | None = None,
    ) -> RunState:
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
            guard,
            recipe.kept_arrays,
            trains_branches(recipe),
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
    """The newest `keep` checkpoints of one run directory. One process at a time may change it."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory = directory
        self._keep = keep

    def begin(self, step: int) -> Path:
        """An empty directory for checkpoint `step`; `finish` renames it into place, `discard` removes it.

        Raises StorageError: it cannot be created.
        """
        temporary = self._directory / f".step_{step}.tmp"
        with writing(f"the checkpoint {temporary}", _REPAIR):
            for unfinished in self._directory.glob(".step_*.tmp"):
                shutil.rmtree(unfinished)
            temporary.mkdir(parents=True)
        return temporary

    def finish(
        self,
        temporary: Path,
        state: RunState,
        given_up: threading.Event | None = None,
        *,
        written: Mapping[str, FileDigest] | None = None,
    ) -> Path:
        """Makes the checkpoint durable and visible, and removes the checkpoints over `keep`.

        Args:
            given_up: if set, the checkpoint is not renamed: the run continues from another checkpoint.
            written: digests that the writing processes have made; see `seal`.

        Raises StorageError: it cannot be written. The temporary directory is removed; the other checkpoints stay.
        """
        # Phase 1: complete the temporary directory and flush it, files before directories.
        final = self._directory / f"step_{state.global_steps}"
        replaced = final.with_name(f"{final.name}.replaced")
        with writing(f"the checkpoint {final}", _REPAIR):
            try:
                (temporary / "state.json").write_text(render_state(state))
                seal(temporary, written)
                for path in sorted(temporary.rglob("*"), reverse=True):
                    sync(path)
                sync(temporary)
                if given_up is not None and given_up.is_set():
                    raise OSError("the checkpoint was given up meanwhile")
                # Phase 2: rename into place. A crash between the renames leaves the old checkpoint under its
                # `.replaced` name.
                if final.exists():  # the old checkpoint of this step stays valid until the new one is there
                    self._drop(replaced)
                    final.rename(replaced)
                temporary.rename(final)
                sync(self._directory)
                sync(self._directory.parent)
            except OSError:
                self.discard(temporary)
                raise
        # Phase 3: the new checkpoint is durable, so older ones may go.
        self._drop(replaced)
        for old in self.all()[: -self._keep]:
            self._drop(old)
        return final

    def discard(self, temporary: Path) -> None:
        """Removes an unfinished checkpoint. Idempotent; if it fails, the next `begin` retries."""
        _remove(temporary)

    def all(self) -> list[Path]:
        """Checkpoints, oldest first, intact or not."""
        if not self._directory.exists():
            return []
        found = [(int(m[1]), not m[2], p) for p in self._directory.iterdir() if (m := _NAME.fullmatch(p.name))]
        return [path for _, _, path in sorted(found)]

    def latest(self, damage: Callable[[Path], str | None] = verify) -> Path | None:
        """The newest intact checkpoint; None if there is no checkpoint. Reads the whole checkpoint; writes nothing.

        Args:
            damage: returns the damage of a checkpoint in words; None if intact.

        Raises StorageError: there are checkpoints, and all are damaged.
        """
        damaged = []
        for path in reversed(self.all()):
            if (wrong := damage(path)) is None:
                return path
            logger.warning("checkpoint %s is damaged and not used: %s", path, wrong)
            damaged.append(f"{path.name}: {wrong}")
        if damaged:
            do = "restore one of them from a backup, or remove them all to let the run start again at step 0"
            raise StorageError(explain(f"the newest checkpoint in {self._directory}", "; ".join(damaged), do))
        return None

    def set_aside_corrupt(self, intact: Path) -> list[Path]:
        """Renames damaged checkpoints that are newer than the newest intact one to `corrupt_step_<n>`; returns the new
        names. Called before training starts: damaged checkpoints would displace intact ones among the newest `keep`.

        Args:
            intact: the checkpoint just found intact; it is not read again.
        """
        aside = []
        for path in reversed(self.all()):
            if path == intact or verify(path) is None:
                break
            aside.append(_set_aside(path, "corrupt"))
            logger.warning("the damaged checkpoint %s is now %s", path.name, aside[-1])
        return aside

    def set_aside_after(self, step: int) -> None:
        """Renames the checkpoints after `step`, from which the run continues: these steps will be trained again."""
        for path in self.all():
            if (match := _NAME.fullmatch(path.name)) and int(match[1]) > step:
                _set_aside(path, "abandoned")

    def _drop(self, old: Path) -> None:
        """Renames before removing, so that after an interruption every directory `step_<n>` is still complete."""
        try:
            _remove(old.rename(self._directory / f".{old.name}.tmp"))
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("the old checkpoint %s was not removed: %s", old, error)


def render_state(state: RunState) -> str:
    """The content of `state.json`."""
    return json.dumps({"format": FORMAT, **asdict(state)}, indent=2) + "\n"


def read_state(checkpoint: Path) -> RunState:
    """Raises ConfigError: `checkpoint` is not a run's checkpoint, or has another format."""
    asked = f"read the checkpoint {checkpoint}"
    try:
        values = json.loads((checkpoint / "state.json").read_text())
        if isinstance(values, dict) and (written := values.pop("format", None)) != FORMAT:
            found = f"its format is {written or 'unknown: state.json names none'}; this asyncrl reads {FORMAT}"
            do = "go on with the asyncrl that wrote it (its run's config.json says which), or name another checkpoint"
            raise ConfigError(explain(asked, found, do))
        return from_plain(RunState, values, "state.json")
    except ConfigError:
        raise
    except (OSError, ValueError, RecursionError) as e:
        do = "name a directory runs/<name>/checkpoints/step_<n>, or resume=auto for the newest one of the run"
        raise ConfigError(explain(asked, f"it is not a complete checkpoint: {e}", do)) from e


def check_resumable(recipe: Recipe, prompts_digest: str, checkpoint: Path) -> None:
    """Raises ConfigError, naming the recipe key that differs from the checkpointed run."""
    saved = read_state(checkpoint)
    asked = RunState.of(recipe, prompts_digest, global_steps=saved.global_steps, elapsed_s=saved.elapsed_s)
    # Fields on which ledger and ready groups depend.
    for field, key in _FIXED.items():
        if getattr(saved, field) != getattr(asked, field):
            wanted = f"resume {checkpoint} with {key}={getattr(asked, field)}"
            found = f"the run was started with {getattr(saved, field)}; its ledger and ready groups depend on it"
            raise ConfigError(explain(wanted, found, "keep it, or start a new run with another run.dir"))
    # Ready groups must carry every array that this recipe trains with.
    held = ("teacher_logprobs",) if saved.arrays is None else saved.arrays  # the only one before there was the field
    if lacking := [name for name in asked.arrays or () if name not in held]:
        found = f"its ready groups were generated without {', '.join(lacking)}, which this recipe trains with"
        do = "leave algorithm.distillation, trainer.router_replay and rollout.sampling as they were, or start a new run"
        raise ConfigError(explain(f"resume {checkpoint}", found, do))
    if saved.branches and not asked.branches:
        asked_for, found = f"resume {checkpoint} with rollout.agent.train=last_branch", "its groups may have branches"
        raise ConfigError(explain(asked_for, found, "keep rollout.agent.train=all_branches, or start a new run"))


def _set_aside(path: Path, why: str) -> Path:
    aside = path.with_name(f"{why}_{path.name}")
    _remove(aside)
    return path.rename(aside)


def _remove(directory: Path) -> None:
    """Removes a directory that is no longer needed; a partial removal is harmless."""
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("%s was not removed: %s", directory, error)
