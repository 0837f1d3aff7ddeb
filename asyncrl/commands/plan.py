"""`asyncrl-plan RECIPE.yaml [key=value ...]`: predicts step time, idle shares, lag and publishes before a run.

Exit codes: 0 done, 2 bad input, 8 the cost model cannot be written; with --probe also the exit codes of the run.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from asyncrl.checkpoint.run_directory import RunDirectory
from asyncrl.commands import plain_console, refuse
from asyncrl.config.checks import DEVICES
from asyncrl.config.load import load_recipe
from asyncrl.config.recipe import Recipe
from asyncrl.config.threads import local_cores
from asyncrl.errors import AsyncRLError, ConfigError, RunFailed, explain, writing
from asyncrl.json_records import write_json
from asyncrl.plan import CostModel, Forecast, Row, predict, read_costs, write_costs
from asyncrl.plan.fit import Traced, costs_of_run, measured
from asyncrl.report.run_files import RunFiles, read_run, read_spans

T = TypeVar("T")
MAX_ROWS = 400
TABLE_WIDTH = 200
COLUMNS: tuple[tuple[str, Callable[[Forecast], str]], ...] = (
    ("step s", lambda f: f"{f.step_s:.4g}"),
    ("samples/s", lambda f: f"{f.samples_per_s:.4g}"),
    ("trainer idle", lambda f: f"{f.trainer_idle:.1%}"),
    ("replicas idle", lambda f: f"{f.replica_idle:.1%}"),
    ("lag", lambda f: f"{f.lag_mean:.2f}"),
    ("max lag", lambda f: f"{f.lag_max}"),
    ("publish s", lambda f: f"{f.publish_s:.3g}"),
    ("paused s", lambda f: f"{f.paused_s:.3g}"),
    ("masked", lambda f: f"{f.masked:.1%}"),
)
"""(heading, text) of each figure of a row."""


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_intermixed_args(argv)
    console = Console()
    try:
        variants = combinations(options.vary)
        load_recipe(options.recipe, options.overrides)
        costs, run = _costs(options, console)
        if options.write is not None:
            with writing(options.write, "make room there, or name another file"):
                options.write.write_text(write_costs(costs), encoding="utf-8")
        rows = [Row({"measured": run.name}, _fitting(lambda: measured(run), run))] if run is not None else []
        for settings in variants:
            predict_row = functools.partial(_row, options, settings, costs)
            rows.append(predict_row() if run is None else _fitting(predict_row, run))
    except AsyncRLError as error:
        return refuse(f"asyncrl-plan: {error}", error)
    if options.json:
        sys.stdout.write(write_json({"costs": asdict(costs), "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    else:
        plain_console().print(f"costs: {costs.source}")
        # Wider than a narrow terminal, which then wraps whole lines instead of every heading.
        Console(width=max(console.width, TABLE_WIDTH)).print(_table(rows))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="asyncrl-plan", description=str(__doc__).split("\n")[0])
    add = parser.add_argument
    add("recipe", type=Path, help="recipe in YAML, for example recipes/quickstart.yaml")
    add("overrides", nargs="*", metavar="key=value", help="override a key, for example run.max_steps=5")
    costs = parser.add_mutually_exclusive_group(required=True)
    costs.add_argument("--costs", metavar="FILE", type=Path, help="a cost model in YAML, see docs/plan.md")
    costs.add_argument("--from-run", metavar="RUN_DIR", type=Path, help="measure the costs in the files of a run")
    costs.add_argument(
        "--probe", action="store_true", help="run the recipe in mode sync for up to two minutes, and measure them there"
    )
    rows = "one row for each value of a key of the recipe; several times: one for each combination"
    add("--vary", metavar="key=a,b,c", action="append", default=[], help=rows)
    add(
        "--cores",
        type=float,
        metavar="N",
        help="cores that trainer ranks and replicas share; left out: those of this machine if it has no GPU. 0: each "
        "has its own. Read with --from-run and --probe",
    )
    add("--steps", type=int, metavar="N", help="optimizer steps to simulate, at least 4")
    add("--write", metavar="FILE", type=Path, help="write the cost model, to edit it and give it to --costs")
    add("--json", action="store_true", help="print costs and rows as JSON, and nothing else")
    return parser


def combinations(words: Sequence[str]) -> list[dict[str, str]]:
    """One mapping of key to value for each combination of `key=a,b,c`; without axes one empty mapping. Raises
    ConfigError."""
    axes: dict[str, list[str]] = {}
    for word in words:
        key, _, listed = word.partition("=")
        values = [value for value in listed.split(",") if value]
        if not key or not values or key in axes:
            found = "the key was given before" if key in axes else "it is not of the form key=a,b,c"
            raise ConfigError(explain(f"--vary {word}", found, "write for example --vary rollout.num_replicas=1,2,4"))
        axes[key] = values
    found = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    if len(found) > MAX_ROWS:
        most = f"at most {MAX_ROWS} make a table"
        raise ConfigError(explain(f"{len(found)} configurations", most, "vary fewer keys or values"))
    return found


def _costs(options: argparse.Namespace, console: Console) -> tuple[CostModel, RunFiles | None]:
    """The cost model, and the run from which it was measured, if any."""
    if options.steps is not None and options.steps < 4:
        raise ConfigError(explain(f"--steps {options.steps}", "too few to measure anything", "simulate 4 or more"))
    if options.costs is not None:
        try:
            text = options.costs.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            do = "name a YAML file; --from-run RUN_DIR --write FILE writes one"
            raise ConfigError(explain(f"the cost model {options.costs}", str(error), do)) from error
        return read_costs(text, str(options.costs)), None
    if options.from_run is not None:
        return _measure(options, read_run(options.from_run))
    # --probe: measure a short run of the recipe.
    with TemporaryDirectory(prefix="asyncrl-plan-", ignore_cleanup_errors=True) as scratch:
        directory = Path(scratch) / "probe"
        quiet = Console(stderr=True) if options.json else console
        probe(options.recipe, options.overrides, directory, quiet)
        return _measure(options, read_run(directory))


def _measure(options: argparse.Namespace, run: RunFiles) -> tuple[CostModel, RunFiles]:
    """Raises ConfigError if the run's recipe cannot be read, or its files lack the costs."""
    cores = options.cores or None
    if options.cores is None and not any(DEVICES.glob("nvidia[0-9]*")):
        cores = float(local_cores())
    traced, recipe = Traced.of(read_spans(run)), _recipe_of(run)
    return _fitting(lambda: costs_of_run(run, traced, recipe, cores), run), run


def _fitting(fit: Callable[[], T], run: RunFiles) -> T:
    """Raises ConfigError if the run's figures cannot be those of one run."""
    try:
        return fit()
    except AsyncRLError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        found = f"its figures do not fit together: {type(error).__name__}: {error}"
        do = "name another run, or give the costs with --costs FILE"
        raise ConfigError(explain(f"the costs of the run {run.directory}", found, do)) from error


def _recipe_of(run: RunFiles) -> Recipe:
    """The recipe in the run's config.json. Raises ConfigError if this version rejects it."""
    written = RunDirectory(run.directory).read_config(f"the recipe of {run.directory}")
    with TemporaryDirectory(prefix="asyncrl-plan-") as scratch:
        file = Path(scratch) / "recipe.yaml"
        file.write_text(json.dumps(written.get("recipe", {})), encoding="utf-8")
        return load_recipe(file, [])


def _row(options: argparse.Namespace, settings: dict[str, str], costs: CostModel) -> Row:
    words = [*options.overrides, *(f"{key}={value}" for key, value in settings.items())]
    return Row(settings, predict(load_recipe(options.recipe, words), costs, options.steps))


def _table(rows: Sequence[Row]) -> Table:
    keys = list(dict.fromkeys(key for row in rows for key in row.settings))
    shown = [column for column in COLUMNS if column[0] != "masked" or any(row.forecast.masked for row in rows)]
    table = Table(box=None, pad_edge=False)
    for key in keys:
        table.add_column(key)
    for heading, _ in shown:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(row.settings.get(key, "") for key in keys), *(text(row.forecast) for _, text in shown))
    return table


# A short run of a recipe to measure its costs: `asyncrl-train` in mode sync, interrupted after some steps.


PROBE_S = 105.0
"""Time until the run is asked to end."""
END_S = 15.0
"""Longest time from there until it is killed. The files written by then are used."""
PROBE_STEPS = 16
LOOK_S = 0.2
EXIT_BAD_INPUT = 2
OVERRIDES = (
    "mode=sync",  # generation and training take turns: each is measured without the other
    "staleness.publish_every_steps=1",
    "eval.every_steps=0",
    "checkpoint.every_steps=0",
    "observability.trace_every_groups=1",
    "observability.progress=false",
    "observability.sinks=[]",
    "resume=never",
)


def probe(
    recipe: Path,
    overrides: Sequence[str],
    directory: Path,
    console: Console,
    program: Sequence[str] = (sys.executable, "-m", "asyncrl.commands.train"),
) -> None:
    """Trains some steps in `directory`, which must not exist. `run.max_steps` and settings derived from it keep the
    recipe's values.

    Args:
        program: command that takes a recipe and overrides.

    Raises:
        ConfigError: the recipe cannot run.
        RunFailed: the run failed, or trained nothing in time.
    """
    words = [*overrides, *OVERRIDES, f"run.dir={directory}"]
    command = [*program, str(recipe), *words]
    console.print(f"probe: {PROBE_STEPS} steps, at most {PROBE_S + END_S:.0f} s", highlight=False)
    directory.parent.mkdir(parents=True, exist_ok=True)
    said, metrics = directory.parent / f"{directory.name}.out", RunDirectory(directory).metrics
    with said.open("w", encoding="utf-8") as output:
        run = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            until = time.monotonic() + PROBE_S
            while run.poll() is None and time.monotonic() < until and _lines(metrics) < PROBE_STEPS:
                time.sleep(LOOK_S)
        finally:
            ended = _end(run)
    steps = _lines(metrics)
    if run.returncode in (0, 128 + signal.SIGINT) or (steps and not ended):
        return
    asked = f"the costs of {recipe} by a short run"
    found = said.read_text(encoding="utf-8", errors="replace").strip()[-2000:]
    do = "correct what it says, or give the costs with --costs FILE or --from-run RUN_DIR"
    if run.returncode == EXIT_BAD_INPUT:
        raise ConfigError(explain(asked, found, do))
    raise RunFailed(explain(asked, f"asyncrl-train ended with {run.returncode} after {steps} steps:\n{found}", do))


def _end(run: subprocess.Popen[bytes]) -> bool:
    """Ends the run after the step in progress; False if it had to be killed."""
    if run.poll() is None:
        run.send_signal(signal.SIGINT)
        try:
            run.wait(END_S)
        except subprocess.TimeoutExpired:
            run.kill()
            run.wait()
            return False
    return True


def _lines(metrics: Path) -> int:
    return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0


if __name__ == "__main__":
    sys.exit(main())
