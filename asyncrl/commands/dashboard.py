"""`asyncrl-dashboard`: W&B and TensorBoard views of a run.

    asyncrl-dashboard wandb ENTITY/PROJECT     creates or replaces the workspace of the project
    asyncrl-dashboard sync RUN_DIR             sends steps that W&B lacks, rewrites TensorBoard's files

Exit codes: 2 bad input, 8 the server or the disk refuses.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.checkpoint.run_directory import RunDirectory
from asyncrl.commands import plain_console, refuse
from asyncrl.config.run import SINKS
from asyncrl.errors import AsyncRLError, ConfigError, StorageError, explain


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="asyncrl-dashboard", description=str(__doc__).split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    wandb = commands.add_parser("wandb", help="create or replace the saved workspace of a W&B project")
    wandb.add_argument("project", metavar="ENTITY/PROJECT")
    wandb.add_argument("--print", action="store_true", help="print the workspace as JSON, send nothing")
    sync = commands.add_parser("sync", help="bring the sinks of a run up to its metrics.jsonl")
    sync.add_argument("run", metavar="RUN_DIR", type=Path)
    sync.add_argument("--sink", choices=SINKS, action="append", help="this one; those of its recipe when left out")
    sync.add_argument("--project", help="W&B project; the recipe's when left out")
    options = parser.parse_args(argv)
    try:
        return _workspace(options) if options.command == "wandb" else _sync(options)
    except AsyncRLError as error:
        return refuse(f"asyncrl-dashboard: {error}", error)


def _workspace(options: argparse.Namespace) -> int:
    entity, slash, project = options.project.partition("/")
    if not (entity and slash and project) or "/" in project:
        do = "asyncrl-dashboard wandb my-team/my-project"
        raise ConfigError(explain(f"a workspace in {options.project}", "that is not ENTITY/PROJECT", do))
    _require("wandb_workspaces", "asyncrl[dashboard]")
    from asyncrl.observability.workspace import save, workspace

    if options.print:
        spec = workspace(entity, project)._to_model().spec
        sys.stdout.write(spec.model_dump_json(by_alias=True, exclude_none=True, indent=2) + "\n")
        return 0
    address = _sent(f"save a workspace in {options.project}", lambda: save(entity, project))
    plain_console().print(f"saved {address}")
    return 0


def _sync(options: argparse.Namespace) -> int:
    directory = RunDirectory(options.run)
    asked = f"sync {options.run}"
    sinks = options.sink or directory.read_setting(asked, "recipe.observability.sinks", tuple[str, ...])
    if unknown := set(sinks) - set(SINKS):
        raise ConfigError(explain(asked, f"its recipe has the sinks {sorted(unknown)}", f"name one of {SINKS}: --sink"))
    name = directory.read_setting(asked, "name", str)
    recipe = directory.read_setting(asked, "recipe", Mapping[str, Any])
    if not sinks:
        do = "name one: --sink wandb or --sink tensorboard"
        raise ConfigError(explain(asked, "its recipe has no observability.sinks", do))
    directory.lock(f"asyncrl-dashboard sync {options.run}")
    from asyncrl.observability.sinks.sync import rewrite_tensorboard, sync_wandb

    for sink in sinks:
        _require(sink, f"asyncrl[{sink}]" if sink == "tensorboard" else sink)
        if sink == "tensorboard":
            told = f"tensorboard: {rewrite_tensorboard(directory.path)} steps in {directory.path / 'tensorboard'}"
        else:
            key = "recipe.observability.wandb_project"
            project = options.project or directory.read_setting(asked, key, str)
            send = partial(sync_wandb, directory.path, name, project, recipe)
            sent, all_of_them, address = _sent(f"send {options.run} to W&B", send)
            told = f"wandb: sent {sent} of {all_of_them} steps to {address}"
        plain_console().print(told)
    return 0


def _require(module: str, package: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ConfigError(explain(f"use {module}", "it is not installed", f"pip install '{package}'"))


def _sent(asked: str, call: Any) -> Any:
    """The result of `call`. Raises StorageError if W&B refuses or cannot be reached."""
    try:
        return call()
    except AsyncRLError:
        raise
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        do = "check the network, the login and the names, and call it again"
        raise StorageError(explain(asked, found, do)) from error


if __name__ == "__main__":
    sys.exit(main())
