"""The examination: all checks in the order in which a run would meet their subjects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from asyncrl.config.hidden import Hidden
from asyncrl.config.hub import use_cache_if_unreachable
from asyncrl.config.load import Loaded, load
from asyncrl.config.recipe import Recipe
from asyncrl.driver.cluster.address import joined_address
from asyncrl.driver.doctor.cluster import check_cluster
from asyncrl.driver.doctor.machine import (
    check_address,
    check_compiled,
    check_disk,
    check_files,
    check_gpus,
    check_processors,
    check_shared_memory,
    check_versions,
)
from asyncrl.driver.doctor.observation import Observation, guarded, ok, warning
from asyncrl.driver.doctor.plan import (
    check_data,
    check_memory,
    check_publish,
    check_reward,
    check_staleness,
    trained_bytes,
)
from asyncrl.driver.preflight import Preflight, check_packages, check_recipe, hub_names


def examine(path: Path, overrides: list[str], *, use_hub: bool = True, use_ray: bool = True) -> Iterator[Observation]:
    """As `_examine`, without what the recipe takes from the environment."""
    loaded: list[Loaded] = []
    for found in _examine(path, overrides, loaded, use_hub=use_hub, use_ray=use_ray):
        hide = loaded[0].hide if loaded else Hidden()
        yield replace(found, text=hide(found.text), remedy=hide(found.remedy))


def _examine(
    path: Path, overrides: list[str], loaded: list[Loaded], *, use_hub: bool, use_ray: bool
) -> Iterator[Observation]:
    """Findings, one by one as they are made. Starts reward processes and Ray, and ends them; trains nothing and writes
    nothing.

    Args:
        loaded: gets the recipe.
        use_hub: look up models and data of the hub, which downloads tokenizer and data.
        use_ray: start Ray, or join its cluster.
    """
    yield from guarded("versions", check_versions)

    def read() -> Iterator[Observation]:
        loaded.append(load(path, overrides))
        recipe = loaded[0].recipe
        batch = f"{recipe.batch.groups_per_step} groups x {recipe.batch.group_size}"
        yield ok("recipe", f"{path}: {batch}, {recipe.mode}, max_lag {recipe.max_lag}")

    yield from guarded("recipe", read)
    if not loaded:
        return
    recipe = loaded[0].recipe
    address = joined_address(recipe.ray.address)
    found: list[Preflight] = []
    yield from guarded("packages", lambda: _packages(recipe))
    yield from guarded("packages", check_compiled)
    for area, check in (
        ("GPUs", lambda: check_gpus(recipe, joins=address is not None)),
        ("processors", lambda: check_processors(recipe)),
        ("shared memory", check_shared_memory),
        ("open files", lambda: check_files(recipe)),
        ("network", check_address),
        ("model and data", lambda: _preflight(recipe, found, use_hub=use_hub)),
    ):
        yield from guarded(area, check)
    if found:
        yield from _of_plan(recipe, found[0], path)
    yield from guarded("staleness", lambda: check_staleness(recipe))
    if "wandb" in recipe.observability.sinks:
        yield from guarded("W&B", _wandb)
    if use_ray:
        yield from guarded("Ray", lambda: check_cluster(recipe, address))


def _of_plan(recipe: Recipe, found: Preflight, path: Path) -> Iterator[Observation]:
    directory = Path(recipe.run.dir or Path("runs") / (recipe.run.name or path.stem))
    size = trained_bytes(recipe, found.facts)
    for area, check in (
        ("data", lambda: check_data(found)),
        ("reward", lambda: check_reward(recipe, found)),
        ("memory", lambda: check_memory(recipe, found.facts)),
        ("disk", lambda: check_disk(directory, size, recipe.checkpoint.keep)),
        ("publish", lambda: check_publish(recipe, found.facts)),
    ):
        yield from guarded(area, check)


def _packages(recipe: Recipe) -> Iterator[Observation]:
    check_packages(recipe)
    text = f"engine {recipe.rollout.engine} and backend {recipe.trainer.backend} are installed"
    yield ok("packages", text)


def _preflight(recipe: Recipe, found: list[Preflight], *, use_hub: bool) -> Iterator[Observation]:
    """Keeps what it finds, and yields what is to be said of it."""
    if use_hub:
        use_cache_if_unreachable(hub_names(recipe))
    found.append(check_recipe(recipe, use_hub=use_hub))
    facts = found[0].facts
    yield ok("model and data", f"engine and backend can run {facts.name}; every row was read")
    for note in found[0].notes:
        yield warning("model and data", note, "see whether it is meant")


def _wandb() -> Iterator[Observation]:
    from asyncrl.observability.sinks.wandb import logged_in

    if logged_in():
        yield ok("W&B", "logged in")
    else:
        do = "`wandb login`; or later `asyncrl-dashboard sync RUN_DIR`"
        yield warning("W&B", "nobody is logged in: the run is recorded offline", do)
