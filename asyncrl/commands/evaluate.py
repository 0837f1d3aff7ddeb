"""`asyncrl-eval CHECKPOINT DATASET`: evaluates a checkpoint, or any model, on a dataset, the way a run does.

    weights of CHECKPOINT -> model directory -> Replica[0..R) <-- GenerationClient <-- Rollouter (environment, reward)

Exit codes are those of `asyncrl-train` (docs/operations.md).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from asyncrl.checkpoint.locate import FoundCheckpoint, find_checkpoint
from asyncrl.checkpoint.trust import HELP_CODE, HELP_RUN, TRUST_CODE, TRUST_RUN, reaches_out, require_trusted
from asyncrl.commands import EXIT_SIGNAL_BASE, at_signals, log_failure, new_log, plain_console, refuse
from asyncrl.config.algorithm_parts import ADVANTAGES
from asyncrl.config.checks import require
from asyncrl.config.environments import JUDGES
from asyncrl.config.hidden import Hidden
from asyncrl.config.hub import use_cache_if_unreachable
from asyncrl.config.load import hidden_by, load, load_recipe
from asyncrl.config.paths import is_hub_model, is_place
from asyncrl.config.recipe import Recipe
from asyncrl.data.model_files import check_model
from asyncrl.data.row_table import RenderedPrompts
from asyncrl.data.rows import to_record
from asyncrl.driver.cluster.fork_server import ForkServer
from asyncrl.driver.preflight import check_packages, check_recipe
from asyncrl.driver.preload import start_preloading
from asyncrl.errors import ConfigError, DeadlineExceeded, explain, writing
from asyncrl.inference.engines import STANDALONE
from asyncrl.json_records import write_json
from asyncrl.registry import make_importable
from asyncrl.remote.tasks import cancel
from asyncrl.types import EvalResult, ReplicaTable

logger = logging.getLogger("asyncrl.commands.evaluate")

ALL_ROWS = 1 << 52
_OVERRIDE = re.compile(r"[+~]{0,2}\w+(\.\w+)*=")
DEFAULT_LENGTH = 4096
"""Longest prompt and response together, in tokens, for a model whose config states no length."""


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    console = Console(stderr=arguments.json)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    make_importable()
    try:
        with tempfile.TemporaryDirectory(prefix="asyncrl-eval-") as scratch:
            return _evaluate(arguments, Path(scratch), console)
    except ConfigError as e:
        return refuse(f"asyncrl-eval: {e}", e)
    except _Stopped as e:
        return EXIT_SIGNAL_BASE + e.number
    except KeyboardInterrupt:
        return EXIT_SIGNAL_BASE + signal.SIGINT
    except Exception as e:  # noqa: BLE001 - end of the program: it is logged
        return log_failure(logger, "the evaluation failed", e)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; datasets and overrides may come in any order."""
    arguments = _parser().parse_intermixed_args(argv)
    arguments.overrides = [word for word in arguments.datasets if _OVERRIDE.match(word) and not Path(word).exists()]
    arguments.datasets = [word for word in arguments.datasets if word not in arguments.overrides]
    return arguments


def _evaluate(arguments: argparse.Namespace, scratch: Path, console: Console) -> int:
    rows = arguments.rows
    if not arguments.datasets or (rows is not None and len(arguments.datasets) > 1):
        found = f"{len(arguments.datasets)} datasets"
        raise ConfigError(explain("an evaluation", found, "name one dataset; or several, without --rows"))
    if rows is not None and rows.exists():
        raise ConfigError(explain(f"--rows {rows}", "it exists", "name a file that does not exist yet"))
    if rows is not None and not os.access(rows.absolute().parent, os.W_OK):
        found = f"{rows.absolute().parent} is no directory that can be written"
        raise ConfigError(explain(f"--rows {rows}", found, "make the directory, or name another file"))
    found = find_checkpoint(arguments.checkpoint)
    named = None if arguments.recipe is None else load(arguments.recipe, []).written
    hide = hidden_by([named, found and found.recipe, arguments.overrides])
    try:
        return _evaluate_found(arguments, found, scratch, console, hide)
    except ConfigError as e:
        raise type(e)(hide(str(e))) from e


def _evaluate_found(
    arguments: argparse.Namespace, found: FoundCheckpoint | None, scratch: Path, console: Console, hide: Hidden
) -> int:
    recipe, rows = load_evaluation(arguments, found, scratch), arguments.rows
    check_packages(recipe, trains=False)
    prompts = check_recipe(recipe, use_hub=True, trains=False).held_out
    held_out = {name: found for name, found in prompts.items() if found is not None}
    assert len(held_out) == len(prompts), "the hub was used"

    from asyncrl.observability.logs import configure_driver

    log = (arguments.log_file or new_log("asyncrl-eval")).absolute()
    configure_driver(log, console, hide)
    rollout = recipe.rollout
    say = plain_console(stderr=arguments.json).print
    say(
        f"asyncrl-eval {arguments.checkpoint}: {sum(len(each.rows) for each in held_out.values())} prompts x "
        f"{recipe.eval.samples} on {rollout.num_replicas} {rollout.engine} replica(s); log {log}"
    )
    with ForkServer() as forks:
        start_preloading(forks, recipe, trains=False)  # imports while Ray starts
        results = run(recipe, held_out, forks, log=log, hidden=hide.names, show=arguments.show)
    version = None if found is None else found.global_steps
    for (name, result), dataset in zip(results.items(), arguments.datasets, strict=False):
        rates = _by_source(held_out[name], result)
        dropped = held_out[name].num_dropped
        if len(held_out) > 1:
            say(f"\n{dataset}", style="bold")
        for prompt, response, reward in result.shown:
            say(f"\n{prompt}\n-> {response!r}\n   reward {reward:g}", markup=False)
        console.print(_table(result, rates, dropped, version))
        if arguments.json:
            about = {"checkpoint": arguments.checkpoint, "dataset": dataset, "version": version}
            plain_console().print(_as_json(about | {"temperature": recipe.eval.temperature}, result, rates, dropped))
        if rows is not None and not result.num_asked:
            write_rows(rows, held_out[name], result)
    if len(results) == len(held_out) and not any(result.num_asked for result in results.values()):
        return 0
    do = "raise --timeout, or lower --max-prompts or --samples"
    say(explain(f"the evaluation within {arguments.timeout:g} s", "it is partial: not every prompt was answered", do))
    return DeadlineExceeded.exit_code


def _by_source(prompts: RenderedPrompts, result: EvalResult) -> dict[str, float]:
    """data_source -> accuracy, where the whole set was answered and has several sources."""
    rates: dict[str, list[float]] = {}
    for row, rate in zip(prompts.rows, result.pass_rates, strict=False):
        rates.setdefault(row.data_source, []).append(rate)
    return {} if result.num_asked or len(rates) < 2 else {name: fmean(found) for name, found in sorted(rates.items())}


def load_evaluation(arguments: argparse.Namespace, found: FoundCheckpoint | None, scratch: Path) -> Recipe:
    """The recipe of the run, of `--recipe`, or a plain one, with the command line applied.

    Writes the weights of a checkpoint, as replicas get them, to a model directory below `scratch`.

    Raises ConfigError, StorageError.
    """
    # Phase 1: the base recipe.
    if arguments.recipe is not None:
        sections = asdict(load_recipe(arguments.recipe, []))
    elif found is not None:
        sections = _of_run(arguments, found, scratch)
    else:
        sections = _plain(arguments.checkpoint, arguments.engine or "torch")
    if arguments.trust_remote_code:
        sections["model"]["trust_remote_code"] = True
    # Phase 2: the model, with the checkpoint's weights exported for the replicas.
    models = filter(is_hub_model, [arguments.checkpoint if found is None else sections["model"]["path"]])
    use_cache_if_unreachable([*models, *(each for each in arguments.datasets if not is_place(each))])
    if found is not None:
        from asyncrl.commands.export import export
        from asyncrl.config.model import ModelConfig

        model = ModelConfig(**sections["model"])
        export(found, model, scratch / "model", dtype=model.inference_dtype)
        sections["model"] |= {"path": str(scratch / "model"), "revision": None}
    else:
        sections["model"]["path"] = arguments.checkpoint
    # Phase 3: the dataset and the sampling.
    stems = [Path(each).stem if Path(each).suffix else each for each in arguments.datasets]
    names = stems if len({*stems}) == len(stems) else [f"{n}_{stem}" for n, stem in enumerate(stems)]
    held_out = dict(zip(names, arguments.datasets, strict=True))
    data = {"train": arguments.datasets[0], "mixture": {}, "curriculum": {}, "eval": held_out}
    sections.setdefault("data", {}).update(data)
    sections["model"].pop("image_directory", None)
    sections.setdefault("eval", {}).update(_asked(arguments, sections))
    # Phase 4: drop settings that only training needs: they must not prevent an evaluation.
    unused = "weights", "observability", "teacher", "judge", "trainer.lora", "reward.judge", "reward.group"
    for key in (*unused, "algorithm.kl", "algorithm.critic", "algorithm.distillation"):  # models may no longer exist
        sections = _without(sections, key)
    rollout = sections.get("rollout", {})
    require(
        sections.get("reward", {}).get("function") != "zero"
        or arguments.reward is not None
        or (environment := str(rollout.get("environment"))) in JUDGES
        or ":" in environment
        or bool(rollout.get("agent", {}).get("sandbox", {}).get("check")),
        asked="an evaluation with reward.function=zero",
        found="it judges nothing, and an evaluation asks neither a judge nor rewards of groups",
        do="pass --reward NAME",
    )
    algorithm = sections.get("algorithm", {})
    if "advantage" in algorithm and ADVANTAGES[algorithm["advantage"]].needs_teacher:
        algorithm.pop("advantage")
        sections.pop("batch", None)  # it may have groups of one, which no other advantage accepts
    # Phase 5: engine and replicas.
    rollout = sections.setdefault("rollout", {})
    _require_standalone(arguments.engine or rollout.get("engine", "torch"))
    rollout["num_replicas"] = arguments.replicas
    rollout["max_replicas"] = rollout["min_replicas"] = None  # limits of the run's fleet
    if arguments.engine is not None and arguments.engine != rollout.get("engine", "torch"):
        length = rollout.get(rollout.get("engine", "torch"), {}).get("max_model_len")
        rollout["engine"] = arguments.engine
        rollout.setdefault(arguments.engine, {})
        if length is not None:
            rollout[arguments.engine]["max_model_len"] = length
    if arguments.reward is not None:
        sections.setdefault("reward", {}).update({"function": arguments.reward, "parts": {}})
    file = scratch / "recipe.yaml"
    file.write_text(json.dumps(sections))
    recipe = load_recipe(file, arguments.overrides)
    _require_standalone(recipe.rollout.engine)
    return recipe


def _require_standalone(engine: str) -> None:
    """Raises ConfigError if the engine cannot load the evaluated weights."""
    if engine not in STANDALONE:
        found = "its servers have whatever was published to them last, and only a run publishes to them"
        do = f"pass --engine {' or --engine '.join(STANDALONE)}"
        raise ConfigError(explain(f"an evaluation with rollout.engine={engine}", found, do))


def _of_run(arguments: argparse.Namespace, found: FoundCheckpoint, scratch: Path) -> dict[str, Any]:
    """The checked recipe of the run's config.json; its data section is replaced.

    Raises ConfigError if there is no recipe, or it needs trust that the command line does not give
    (`checkpoint.trust`).
    """
    asked, instead = f"evaluate {found.directory}", "pass --recipe RECIPE.yaml"
    if not isinstance(recipe := found.recipe, dict):
        raise ConfigError(explain(asked, "its run directory, with the recipe, is not there", instead))
    if isinstance(recipe.get("model"), dict):  # data.image_directory, perhaps of the command line, sets it
        recipe = _without(recipe, "model.image_directory")
    sources = {"train": arguments.datasets[0], "mixture": {}, "curriculum": {}, "eval": {}}
    for section, ours in (("data", sources), ("eval", {"every_steps": 0})):
        theirs = recipe.get(section)
        recipe = recipe | {section: (theirs if isinstance(theirs, dict) else {}) | ours}
    if not arguments.trust_run:
        named = [o.partition("=")[0] for o in arguments.overrides if not o.startswith("model.")]
        named += ["model.trust_remote_code"] * arguments.trust_remote_code
        if arguments.reward is not None:
            named += ["reward.function", "reward.parts"]
        for key in reaches_out(recipe).keys() & set(named):
            recipe = _without(recipe, key)  # a mapping would be merged with that of the command line
        do = f"else {instead}, or name what is yours on the command line: --reward NAME, {TRUST_CODE}, key=value"
        require_trusted(asked, recipe, do)
    file = scratch / "run.json"
    file.write_text(json.dumps(recipe))
    return asdict(load_recipe(file, []))


def _without(sections: Mapping[str, Any], key: str) -> dict[str, Any]:
    name, _, inner = key.partition(".")
    return {n: _without(s, inner) if n == name else s for n, s in sections.items() if n != name or inner}


def _asked(arguments: argparse.Namespace, sections: Mapping[str, Any]) -> dict[str, Any]:
    """The section eval. Of the run's section only the sampling is used."""
    held = sections.get("eval", {})
    asked: dict[str, Any] = {"every_steps": 0, "leased_replicas": 0, "timeout_s": arguments.timeout}
    asked["max_prompts"] = ALL_ROWS if arguments.max_prompts is None else arguments.max_prompts
    samples = held.get("samples", 1) if arguments.samples is None else arguments.samples
    temperature = arguments.temperature
    if temperature is None:
        temperature = held.get("temperature", 0.0)
        if samples > 1 and temperature == 0:
            temperature = 1.0
    pass_at = [k for k in held.get("pass_at", []) if k <= samples] if arguments.pass_at is None else arguments.pass_at
    return asked | {"samples": samples, "temperature": temperature, "pass_at": pass_at}


def _plain(model: str, engine: str) -> dict[str, Any]:
    """A recipe for a model without a run: half of its context for the prompt, half for the response."""
    limit = check_model(model).max_position_embeddings or DEFAULT_LENGTH
    length = min(limit, DEFAULT_LENGTH)
    data = {"max_prompt_tokens": length // 2, "on_long_prompt": "drop"}
    rollout = {"engine": engine, "sampling": {"max_response_tokens": length - length // 2}}
    return {"model": {"path": model}, "data": data, "rollout": rollout}


def run(
    recipe: Recipe,
    held_out: Mapping[str, RenderedPrompts],
    forks: ForkServer,
    *,
    log: Path,
    hidden: Collection[str] = (),
    show: int = 0,
) -> dict[str, EvalResult]:
    """Evaluates held-out sets on replicas of `model.path`, one after another, until `eval.timeout_s` is over. Shuts
    everything down before it raises."""
    from asyncrl.driver.cluster.ray_session import ray_cluster
    from asyncrl.rollout.user_code import run_to_its_end

    with ray_cluster(recipe.ray.address, log, hidden, recipe.ray.env, forks) as cluster:
        return run_to_its_end(_run(recipe, held_out, cluster.engine_environment(recipe.rollout.engine), show))


class _Stopped(BaseException):
    """A signal ended the program."""

    def __init__(self, number: int) -> None:
        self.number = number


async def _run(
    recipe: Recipe, held_out: Mapping[str, RenderedPrompts], environment: Mapping[str, str], show: int
) -> dict[str, EvalResult]:
    work = asyncio.create_task(_answer(recipe, held_out, environment, show))
    signals = at_signals(work.cancel)
    try:
        return await work
    except asyncio.CancelledError:
        if signals:
            raise _Stopped(signals[0]) from None
        raise


async def _answer(
    recipe: Recipe, held_out: Mapping[str, RenderedPrompts], environment: Mapping[str, str], show: int
) -> dict[str, EvalResult]:
    from asyncrl.driver.fleet.actor_channels import channels
    from asyncrl.driver.fleet.standalone import standalone_pool
    from asyncrl.inference.engines import ENGINES
    from asyncrl.rollout.rollouter import Rollouter, RolloutSpec

    client_id = f"eval-{os.getpid()}"
    rollouter = Rollouter(RolloutSpec(recipe, None, dict(held_out)), None, client_id)
    start_s = recipe.ray.start_timeout_s
    replicas = standalone_pool(
        recipe.model, recipe.rollout, recipe.recovery, environment=environment, start_timeout_s=start_s
    )

    async def route(table: ReplicaTable) -> None:
        await rollouter.set_replicas(channels(table, client_id))

    async def answer() -> dict[str, EvalResult]:
        await replicas.set_listener(route)
        results: dict[str, EvalResult] = {}
        ends = time.monotonic() + recipe.eval.timeout_s
        for name in held_out:
            left_s = max(0.0, ends - time.monotonic())
            try:
                results[name] = await rollouter.evaluate(name, recipe.run.seed, left_s, show=show, takes_part=True)
            except DeadlineExceeded:
                if not results:
                    raise
                break  # the sets before it have their results
        return results

    tasks: list[asyncio.Task[Any]] = []
    try:
        # Phase 1: load the model and start the workers concurrently.
        tasks = [asyncio.create_task(replicas.start()), asyncio.create_task(rollouter.start())]
        await asyncio.gather(*tasks)
        # Phase 2: evaluate until done, or until `watch` raises because a replica is lost for good.
        tasks = [asyncio.create_task(answer()), asyncio.create_task(replicas.watch())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return await next(task for task in tasks if task.done())
    finally:
        await cancel(*tasks)
        stop_timeout_s = ENGINES[recipe.rollout.engine].stop_timeout_s
        await asyncio.gather(rollouter.stop(), replicas.stop(stop_timeout_s), return_exceptions=True)


def write_rows(path: Path, prompts: RenderedPrompts, result: EvalResult) -> None:
    """JSONL in verl's schema: every row with `extra_info.pass_rate`. Raises StorageError."""
    with writing(path, "name another file with --rows"), path.open("w", encoding="utf-8") as file:
        for row, rate in zip(prompts.rows, result.pass_rates, strict=True):
            record: dict[str, Any] = to_record(row)
            record["extra_info"] = {**record["extra_info"], "pass_rate": rate}
            file.write(write_json(record, ensure_ascii=False) + "\n")


def _as_json(about: dict[str, Any], result: EvalResult, by_source: dict[str, float], dropped_rows: int) -> str:
    values = asdict(result)
    del values["pass_rates"], values["versions"], values["shown"]
    values["by_source"] = by_source
    values["pass_at"] = {str(k): value for k, value in result.pass_at}
    return write_json(about | values | {"dropped_rows": dropped_rows})


def _table(result: EvalResult, by_source: dict[str, float], dropped_rows: int, version: int | None) -> Table:
    """`version`: `global_steps` of the checkpoint; None for a model."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    low, high = result.interval
    sampled = f"mean@{result.samples}" if result.samples > 1 else "accuracy"
    table.add_row(sampled, f"{result.accuracy:.4f}   95% [{low:.4f}, {high:.4f}]")
    for k, value in result.pass_at:
        table.add_row(f"pass@{k}", f"{value:.4f}")
    for source, rate in by_source.items():
        table.add_row(f"  {source}", f"{rate:.4f}")
    table.add_row("reward", f"{result.reward_mean:.4f}")
    table.add_row("response tokens", f"{result.response_tokens_mean:.1f}")
    asked = f"{result.num_prompts}" + (f" ({dropped_rows} too long, left out)" if dropped_rows else "")
    if result.num_asked:
        asked += f", PARTIAL: of {result.num_asked}"
    if result.num_questions < result.num_prompts:
        asked += f" of {result.num_questions} different questions"
    table.add_row("prompts", asked)
    table.add_row("failed responses", f"{result.num_failed}")
    table.add_row("version", "-" if version is None else f"{version}")
    return table


def _whole_numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",") if word]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 1,4") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl-eval",
        description="Evaluate a checkpoint of a run, or a model, on a dataset.",
        epilog="key=value overrides a key of the recipe, for example rollout.torch.max_model_len=1024. "
        "exit codes: 0 done, 1 program error, 2 bad input, 4 deadline, 5 process lost, 8 storage, 130/143 signal",
    )
    add = parser.add_argument
    add("checkpoint", help="run directory, runs/NAME/checkpoints/step_N, model directory or hub name")
    kinds = "JSONL or parquet file, directory or hub name; then key=value ..."
    add("datasets", nargs="+", metavar="dataset", help=kinds)
    add("--samples", type=int, metavar="N", help="responses to every prompt (default: as the run evaluates, else 1)")
    add("--temperature", type=float, metavar="T", help="0 is greedy (default: as the run evaluates; 1 for samples > 1)")
    add("--pass-at", type=_whole_numbers, metavar="K,K", help="report pass@k for these k, for example 1,4")
    add("--max-prompts", type=int, metavar="N", help="the first N rows (default all)")
    late = "end after this many seconds, with what was answered"
    add("--timeout", type=float, default=86400.0, metavar="S", help=late)
    add("--engine", choices=sorted(STANDALONE), help="default: that of the run, else torch")
    add("--replicas", type=int, default=1, metavar="N", help="copies of the model (default 1)")
    add("--reward", metavar="NAME", help="a name from asyncrl.rewards or package.module:function (default: the run's)")
    add(TRUST_RUN, action="store_true", help=HELP_RUN)
    add(TRUST_CODE, action="store_true", help=HELP_CODE)
    add("--recipe", type=Path, metavar="YAML", help="where model, environment, sampling and reward come from instead")
    add("--rows", type=Path, metavar="OUT.jsonl", help="write every row with extra_info.pass_rate, for data.curriculum")
    add("--show", type=int, default=0, metavar="N", help="print the first N prompts with a response and its reward")
    add("--json", action="store_true", help="print one JSON object on stdout, the rest on stderr")
    add("--log-file", type=Path, metavar="PATH", help="logs of all processes (default in the temporary directory)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
