"""Converts a checkpoint for another training backend: the run continues in a new run directory."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.checkpoint.locate import FoundCheckpoint
from asyncrl.checkpoint.run_directory import RunDirectory
from asyncrl.checkpoint.store import CheckpointStore, read_state
from asyncrl.checkpoint.trust import TRUST_RUN
from asyncrl.config.model import ModelConfig
from asyncrl.config.paths import is_hub_model
from asyncrl.errors import ConfigError, StorageError, explain
from asyncrl.trainer.backends import open_training_state, require_trains, write_training_state, written_by
from asyncrl.trainer.training_state import MODELS
from asyncrl.types import ModelFacts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from asyncrl.trainer.training_state import TrainingState


RECORD = "converted.json"
"""File in a converted checkpoint: its origin, and what was converted."""


def convert(found: FoundCheckpoint, model: ModelConfig, out: Path, to: str, *, trust_run: bool = False) -> str:
    """Writes a run directory for `trainer.backend=to` with `found` as its only checkpoint; describes the result.

    Weights, optimizer moments and steps, the queue and the run's progress are preserved bit by bit. Random states of
    the ranks are not. The run's logs and config are copied, so that its history stays whole.

    Args:
        model: of the run; its config decides how backend `to` lays out the weights.
        trust_run: the run may name a critic on the hub.

    Raises:
        ConfigError: `out` exists, the checkpoint is of `to` or has only adapters, or `to` cannot train the model.
        StorageError: `out` cannot be written.
    """
    require_new(out)
    source = found.directory / "trainer"
    written, asked = written_by(source), f"convert {found.directory} to trainer.backend={to}"
    if written == to:
        raise ConfigError(explain(asked, "it is of that backend", f"resume it with trainer.backend={to} as it is"))
    config_of = lru_cache(partial(_config, found, model, to, trust_run))
    state = open_training_state(source, config_of)
    configs = _configs(found, model, state, config_of)
    said = f"{written} to {to}: {' and '.join(configs)} with both moments; random states start as in a new run"
    record = {"checkpoint": str(found.directory.resolve()), "from": written, "to": to, "what": said}
    progress = read_state(found.directory)
    # The new run has one checkpoint at the same step, and the old run's history.
    with new_directory(out) as directory:
        store = CheckpointStore(directory / "checkpoints", keep=1)
        temporary = store.begin(progress.global_steps)
        write_training_state(to, temporary / "trainer", state, configs)
        shutil.copytree(found.directory / "queue", temporary / "queue")
        (temporary / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        store.finish(temporary, progress)
        if found.recipe is not None:
            _copy_run(RunDirectory(found.directory.resolve().parent.parent), RunDirectory(directory), to)
    return f"{said}; go on with: asyncrl-train RECIPE trainer.backend={to} run.dir={out} resume=auto"


def _copy_run(run: RunDirectory, new: RunDirectory, to: str) -> None:
    """Copies the logs of a run, and its config with the new backend."""
    for old, copy in ((run.events, new.events), (run.metrics, new.metrics)):
        if old.exists():
            shutil.copy(old, copy)
    config = json.loads(run.config.read_text(encoding="utf-8"))
    trainer = config["recipe"].get("trainer")
    config["recipe"]["trainer"] = (trainer if isinstance(trainer, dict) else {}) | {"backend": to}
    new.config.write_text(json.dumps(config, indent=2) + "\n")


def _config(found: FoundCheckpoint, model: ModelConfig, to: str, trust_run: bool, name: str) -> Mapping[str, Any]:
    """The Hugging Face config of a model in the checkpoint. Raises ConfigError if `to` cannot train it."""
    path = model.path if name == "model" else _critic_path(found) or model.path
    asked = f"convert the {name} of {found.directory}"
    if name == "critic" and path != model.path and is_hub_model(path) and not trust_run:
        said = f"its config.json says algorithm.critic.path={path}: a model of the hub"
        raise ConfigError(explain(asked, said, f"pass {TRUST_RUN} if the run is yours or of somebody you trust"))
    config = read_config(path, model, asked).to_dict()
    require_trains(to, ModelFacts.of_config(path, config))
    return config


def _configs(
    found: FoundCheckpoint, model: ModelConfig, state: TrainingState, config_of: Callable[[str], Mapping[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    """The config of each model in the checkpoint. Raises ConfigError if it does not match the weights."""
    configs = {}
    for name in MODELS:
        if not (shapes := state.shapes(name)):
            continue
        config = configs[name] = config_of(name)
        rows = shapes.get("model.embed_tokens.weight", ())
        here = (config.get("vocab_size"), config.get("hidden_size"))
        if rows != here:
            path = model.path if name == "model" else _critic_path(found) or model.path
            said = f"the embedding in the checkpoint is {list(rows)}, that of {path} {list(here)}"
            do, asked = "pass --model DIRECTORY, the model that was trained", f"convert the {name} of {found.directory}"
            raise ConfigError(explain(asked, said, do))
    if "model" not in configs:
        raise ConfigError(explain(f"convert {found.directory}", "it has no weights", "name another checkpoint"))
    return configs


def _critic_path(found: FoundCheckpoint) -> str | None:
    section: Any = found.recipe or {}
    for key in ("algorithm", "critic", "path"):
        section = section.get(key) if isinstance(section, dict) else None
    return section if isinstance(section, str) else None


def read_config(path: str, model: ModelConfig, asked: str) -> PretrainedConfig:
    """The config of `model`, or of another one at `path`. Raises ConfigError: it cannot be read."""
    from transformers import AutoConfig

    revision = model.revision if path == model.path else None
    try:
        return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        do = "name a directory in Hugging Face format, or a hub name that this machine can reach, with --model"
        raise ConfigError(explain(asked, str(error), do)) from error


# A directory that exists only when it is complete.


def require_new(out: Path) -> None:
    """Raises ConfigError if `out` exists."""
    if out.exists() or out.is_symlink():
        raise ConfigError(explain(f"export to {out}", "it exists", "name a directory that does not exist yet"))


@contextlib.contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A directory that becomes `out` if the block does not raise. Raises StorageError."""
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        temporary.rename(out)
    except OSError as error:
        raise StorageError(explain(f"write {out}", str(error), "make room there, or name another directory")) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
