"""Tells paths on this machine from names on the hub, and names the command that makes a missing path."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from asyncrl.errors import ConfigError, explain

_TOOL_TASKS = "interleaved", "code", "harness"
_COMMANDS = (
    # command, the model that it makes, the name of the datasets that it makes
    ("python tools/make_tiny_model.py --out runs/tiny-qwen3", "tiny-qwen3", ""),
    ("python tools/make_arithmetic_dataset.py --out data", "", "arithmetic"),
    ("python tools/make_arithmetic_dataset.py --schema gsm8k --out data", "", "gsm8k"),
    ("python tools/make_tool_task.py", "tiny-tool-qwen3", "tool"),
    *((f"python tools/make_tool_task.py --task {task}", f"tiny-{task}-qwen3", task) for task in _TOOL_TASKS),
    ("python tools/make_swe_task.py", "tiny-swe-qwen3", "swe"),
    ("python tools/make_tiny_vision.py", "tiny-vision", "drawn_numbers"),
    ("make real-model", "smollm2-135m-instruct", "chain_sum"),
)
MADE_BY = {f"runs/{model}": command for command, model, _ in _COMMANDS if model}
MADE_BY |= {
    f"data/{data}_{part}": made
    for made, _, data in _COMMANDS
    if data
    for part in ("train.jsonl", "test.jsonl", "train.parquet", "test.parquet")
}
"""Path below the root of the checkout -> the command that makes it."""
FOLDERS = ("runs", "data", "models", "datasets", "checkpoints", "outputs", "exports")
"""A name that begins with one of these folders is a path on this machine, even if the hub has such an organisation.
This project's commands write to the first two; the others are users' folders, which a stranger's upload must not
replace."""
SUFFIXES = (".jsonl", ".parquet", ".json")


def is_place(name: str) -> bool:
    """True if `name` exists here, or its start, suffix, first folder or parent folder marks it as local. Other names
    may be looked up on the hub."""
    path = _path(name)
    if path.exists() or name.startswith((".", "/", "~")) or path.suffix in SUFFIXES:
        return True
    return "/" in name and ":" not in name and (path.parts[0] in FOLDERS or path.parent.is_dir())


def is_generator(name: str) -> bool:
    """True if `name` is `package.module:Name`, and no path. A name without a dot is one only if that module exists:
    other such names are a hub's `dataset:split`."""
    module, colon, attribute = name.partition(":")
    parts = module.split(".")
    if not colon or is_place(name) or not attribute.isidentifier() or not all(map(str.isidentifier, parts)):
        return False
    if len(parts) > 1:
        return True
    try:
        found = find_spec(module)
    except ValueError:
        return False
    return found is not None and found.origin is not None  # a folder is none


def _path(name: str) -> Path:
    """Raises ConfigError: an invalid file name."""
    try:
        path = Path(name).expanduser()
        path.exists()  # a name may be too long, which only the system knows
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(explain(f"the path {name[:100]!r}", str(error)[:200], "name another one")) from error
    return path


def is_hub_model(path: str) -> bool:
    """True if `path` may be looked up on the hub, where model names have at most two parts."""
    return not is_place(path) and path.count("/") <= 1


def check_path(path: str, key: str = "model.path") -> None:
    """Raises ConfigError: `path` is a local path without a directory; it is never looked up on the hub."""
    if is_hub_model(path) or _path(path).exists():
        return
    do, command = "name an existing directory, or a hub name", how_to_make(path)
    raise ConfigError(explain(f"{key}={path}", "no such directory", f"make it with `{command}`" if command else do))


def require_mounted(paths: Mapping[str, str | None]) -> None:
    """Raises ConfigError: the value is a URL, which would become a local directory."""
    for key, path in paths.items():
        if path is not None and "://" in path:
            raise ConfigError(explain(f"{key}={path}", "a URL", "name a mounted directory that all machines reach"))


def how_to_make(name: str) -> str | None:
    """The project's command that makes the path `name`, or None."""
    return MADE_BY.get(os.path.relpath(Path(name).expanduser()))
