"""`asyncrl-train RECIPE.yaml [key=value ...]`.

Exit codes, the same for a person and a scheduler (docs/operations.md):

    0    the run reached run.max_steps
    1    an error of the program itself
    2    bad input; nothing was trained, and nothing started unless only a part could find it
    3    the run cannot go on: a budget of failures is spent
    4    a wait reached its deadline
    5    a process was lost that is not replaced
    6    weights could not be published
    7    nothing made progress any more
    8    the run directory cannot be written or read
    130  SIGINT, 143 SIGTERM: ended early, with a checkpoint once training has begun
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from asyncrl.checkpoint.locate import date_of
from asyncrl.checkpoint.run_directory import RunDirectory
from asyncrl.checkpoint.store import check_resumable
from asyncrl.commands import EXIT_SIGNAL_BASE, log_failure, plain_console, refuse
from asyncrl.config.hidden import Hidden
from asyncrl.config.hub import use_cache_if_unreachable
from asyncrl.config.load import Loaded, environment_defaults, load, serving_api_key
from asyncrl.driver import hardware, preflight
from asyncrl.driver.cluster.fork_server import ForkServer
from asyncrl.driver.cluster.placement import place_run
from asyncrl.driver.hardware import parse_machines
from asyncrl.driver.preload import start_preloading
from asyncrl.errors import ConfigError, StorageError
from asyncrl.registry import make_importable
from asyncrl.remote.garbage import collect_seldom
from asyncrl.trainer.backends import require_written_by

logger = logging.getLogger("asyncrl.commands.train")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="asyncrl-train",
        description="Train a language model by asynchronous reinforcement learning.",
        epilog="exit codes: 0 done, 1 program error, 2 bad input (nothing trained), 3 failure budget spent, "
        "4 deadline, 5 process lost, 6 weights, 7 stalled, 8 storage, 130/143 ended by a signal, checkpointed",
    )
    parser.add_argument("recipe", type=Path, help="recipe in YAML, for example recipes/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key, for example run.max_steps=5")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, start nothing")
    parser.add_argument("--on", metavar="MACHINES", help="with --dry-run: for 8xH100 or 2x8xH200, with expected times")
    parser.add_argument("--mean-response", type=int, metavar="N", help="with --on: tokens; unset: half of the longest")
    arguments = parser.parse_intermixed_args(argv)
    if (arguments.on or arguments.mean_response) and not (arguments.dry_run and arguments.on):
        parser.error("--on is for --dry-run, and --mean-response for --on")
    collect_seldom()
    console = Console(stderr=False)
    for name, value in environment_defaults().items():
        os.environ.setdefault(name, value)
    make_importable()
    hide = Hidden()
    try:
        loaded = load(arguments.recipe, arguments.overrides)
        hide = loaded.hide
        with ForkServer() as forks:
            return _train(loaded, arguments, console, forks)
    except (ConfigError, StorageError) as e:
        return refuse(f"asyncrl-train: this recipe cannot run\n{hide(str(e))}", e)


def _train(loaded: Loaded, arguments: argparse.Namespace, console: Console, forks: ForkServer) -> int:
    recipe, hide, dry_run = loaded.recipe, loaded.hide, arguments.dry_run
    path, overrides = arguments.recipe, arguments.overrides
    name = recipe.run.name or path.stem
    directory = RunDirectory(Path(recipe.run.dir or Path("runs") / name))
    words = [w for w in overrides if not w.startswith("resume=")]
    command = shlex.join(["asyncrl-train", str(path), *words])
    if not dry_run:
        resumed = directory.resolve_resume(recipe.resume, recipe.checkpoint.keep, command)
        date = recipe.model.date or date_of(resumed)
        recipe = replace(recipe, model=replace(recipe.model, date=date))
        use_cache_if_unreachable(preflight.hub_names(recipe))
        start_preloading(forks, recipe)  # imports while this process reads the input and starts Ray
    machines = parse_machines(arguments.on) if arguments.on else None
    if machines is not None:
        recipe = replace(recipe, ray=replace(recipe.ray, gpu_memory_gib=machines[0].memory_gib))
        place_run(recipe, machines[1])
    # Phase 1: check everything and print the plan. A dry run ends here.
    if not dry_run:  # which may be for another machine
        preflight.check_packages(recipe)
    recipe, found = preflight.with_fitting_batch(recipe, preflight.check_recipe(recipe, use_hub=not dry_run), loaded)
    say = plain_console().print
    say(f"asyncrl-train {name}", style="bold")
    for label, text in preflight.describe(recipe, found):
        say(f"  {label:<9} {hide(text)}")
    if machines is not None:
        say(f"  expected  {hardware.describe(recipe, found.facts, machines[0], arguments.mean_response)}")
    if dry_run:
        say("  dry run: the recipe is valid; nothing was started")
        return 0
    assert found.train is not None, "the hub was used"
    # Phase 2: take the port and the directory.
    key = serving_api_key()
    preflight.check_server(recipe.rollout.serve, key)
    directory.lock(command)
    directory.serving.unlink(missing_ok=True)  # left by a killed run
    # Resolved again, now under the lock: the previous owner may have written a last checkpoint.
    start_from = directory.resolve_resume(recipe.resume, recipe.checkpoint.keep, command)
    if start_from is not None:
        check_resumable(recipe, found.train.digest, start_from)
        require_written_by(recipe.trainer.backend, start_from / "trainer")
    say(f"  run       {directory.path}" + (f", resumed from {start_from.name}" if start_from else ""))

    from asyncrl.driver.run import run
    from asyncrl.driver.run_spec import RunSpec
    from asyncrl.observability.logs import configure_driver

    # Phase 3: the run itself.
    configure_driver(directory.log, console, hide)
    directory.write_config(recipe, loaded.written, name)
    found.train.rows.keep(directory.prompts)
    resume = f"{command} resume=auto"
    try:
        held_out = {held: prompts for held, prompts in found.held_out.items() if prompts is not None}
        spec = RunSpec(recipe, name, directory, start_from, found.train, held_out, loaded.written, hide, key)
        result = run(spec, console, forks)
    except KeyboardInterrupt:
        say("interrupted before the first step")
        return EXIT_SIGNAL_BASE + 2
    except Exception as e:  # noqa: BLE001 - end of the program: it is logged
        exit_code = log_failure(logger, "the run failed", e)
        if isinstance(e, ConfigError):
            directory.disown()  # the same command may work after the correction
        say(f"evidence: {directory.faults}, {directory.log}, {directory.events}; go on with: {resume}")
        return exit_code
    if result.signal is not None:
        say(f"ended after step {result.step}; go on with: {resume}")
        return EXIT_SIGNAL_BASE + result.signal
    say(f"done: {result.step} steps in {directory.path}; as a page: asyncrl-report {directory.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
