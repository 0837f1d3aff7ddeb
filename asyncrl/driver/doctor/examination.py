"""The examination: all checks, in the order in which a run would meet them. The preflight checks the recipe and
computes what the run needs; the doctor compares that with the machine and the cluster (a local one that it starts and
ends, or that of the run), and tries the reward.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.checkpoint.run_directory import package_versions
from asyncrl.config.hub import use_cache_if_unreachable
from asyncrl.config.load import Loaded, load, serving_api_key
from asyncrl.config.recipe import Recipe
from asyncrl.data.rows import PromptRow
from asyncrl.driver import preflight
from asyncrl.driver.cluster.placement import joined_address, place_run, words
from asyncrl.driver.cluster.ray_session import ray_cluster
from asyncrl.driver.doctor import machine
from asyncrl.driver.doctor.machine import Observation, bad, guarded, ok, warning
from asyncrl.driver.memory_plan import computes_here, ranks_memory, served_bytes
from asyncrl.errors import Process
from asyncrl.inference.engines import ENGINES
from asyncrl.remote.reply import reply_now
from asyncrl.rewards.reward_pool import RewardPool

TRIED_ROWS = 4
REMEDIES = {"note": "see whether it is meant", "advice": "set it, unless another reason counts more"}
"""Label of a plan line that is a warning -> remedy."""


def examine(path: Path, overrides: list[str], *, use_hub: bool = True, use_ray: bool = True) -> Iterator[Observation]:
    """Yields findings as they are made, without secrets from the environment. Starts and ends reward processes and Ray;
    trains and writes nothing.

    Args:
        use_hub: look up models and data on the hub, which downloads tokenizer and data.
        use_ray: start Ray, or join its cluster.
    """
    yield from guarded("versions", machine.check_versions)
    read: list[Loaded] = []
    yield from guarded("recipe", lambda: read.append(load(path, overrides)))
    for loaded in read:
        yield ok("recipe", f"{path} is valid")
        for found in _of_recipe(loaded, path, use_hub=use_hub, use_ray=use_ray):
            yield replace(found, text=loaded.hide(found.text), remedy=loaded.hide(found.remedy))


def _of_recipe(loaded: Loaded, path: Path, *, use_hub: bool, use_ray: bool) -> Iterator[Observation]:
    recipe = loaded.recipe
    yield from guarded("packages", lambda: preflight.check_packages(recipe))
    yield from guarded("packages", machine.check_compiled)
    yield from guarded("GPUs", lambda: machine.check_gpus(recipe))
    yield from guarded("shared memory", machine.check_shared_memory)
    yield from guarded("open files", lambda: machine.check_files(recipe))
    yield from guarded("network", machine.check_address)
    passed: list[preflight.Preflight] = []
    yield from guarded("plan", lambda: _plan(recipe, passed, use_hub=use_hub))
    for found in passed:
        fitted, _ = preflight.with_fitting_batch(recipe, found, loaded)
        yield from guarded("memory and disk", lambda fitted=fitted, found=found: _sizes(fitted, found, path))
        if found.train is not None:
            rows = list(itertools.islice(itertools.chain(found.train.rows, found.train.drawn), TRIED_ROWS))
            yield from guarded("reward", lambda rows=rows: [asyncio.run(_tried(recipe, rows))])
    yield from guarded("server", lambda: preflight.check_server(recipe.rollout.serve, serving_api_key()))
    if "wandb" in recipe.observability.sinks:
        yield from guarded("W&B", _wandb)
    if use_ray:
        yield from guarded("Ray", lambda: check_cluster(recipe, joined_address(recipe.ray.address)))


def _plan(recipe: Recipe, passed: list[preflight.Preflight], *, use_hub: bool) -> Iterator[Observation]:
    """The preflight, and the plan that a dry run prints."""
    if use_hub:
        use_cache_if_unreachable(preflight.hub_names(recipe))
    passed.append(preflight.check_recipe(recipe, use_hub=use_hub))
    area = ""
    for label, text in preflight.describe(recipe, passed[0]):
        area = label or area
        yield warning(area, text, REMEDIES[area]) if area in REMEDIES else ok(area, text)


def _sizes(recipe: Recipe, found: preflight.Preflight, path: Path) -> Iterator[Observation]:
    """Compares memory and checkpoint sizes with this machine: processes that compute on its CPUs, and its disk."""
    ranks, weights, trainer = ranks_memory(recipe, found.facts) or [], served_bytes(recipe, found.facts), recipe.trainer
    if ranks and weights and computes_here(recipe):
        largest = max(memory.peak or memory.total for memory in ranks)
        replicas = 0 if ENGINES[recipe.rollout.engine].elsewhere else recipe.rollout.num_replicas
        yield machine.check_memory(largest * trainer.num_ranks + weights * replicas)
    checkpoint = sum((memory.weights + memory.optimizer) * trainer.shard_ranks for memory in ranks[:1])
    directory = Path(recipe.run.dir or Path("runs") / (recipe.run.name or path.stem))
    yield machine.check_disk(directory, checkpoint * (recipe.checkpoint.keep + 1))


def _wandb() -> Iterator[Observation]:
    from asyncrl.observability.sinks.wandb import logged_in

    if logged_in():
        yield ok("W&B", "logged in")
    else:
        do = "`wandb login`; or later `asyncrl-dashboard sync RUN_DIR`"
        yield warning("W&B", "nobody is logged in: the run is recorded offline", do)


async def _tried(recipe: Recipe, rows: Sequence[PromptRow]) -> Observation:
    """Scores correct and empty answers to a few rows, in the processes that the run would use."""
    names, pool = ", ".join(recipe.reward.names), RewardPool(recipe.reward)
    try:
        await pool.start()
        began, calls, told_apart = time.perf_counter(), 0, 0
        for row in rows:
            answers = [form.format(row.ground_truth) for form in ("{}", "\\boxed{{{}}}", "#### {}")]
            empty, *paid = [(await pool.score(answer, row)).reward for answer in ("", *answers)]
            told_apart += max(paid) > empty
            calls += 1 + len(paid)
        took_ms = 1000 * (time.perf_counter() - began) / calls
    except Exception as error:  # noqa: BLE001 - whatever a user's reward raises is the finding
        do = "repair the reward, or the rows that it cannot read"
        return bad("reward", f"{names}: {type(error).__name__}: {error}", do)
    finally:
        await pool.close()
    text = f"{names}: {told_apart} of {len(rows)} rows pay their ground truth more than an empty answer; "
    text += f"{took_ms:.1f} ms a call"
    if told_apart:
        return ok("reward", text)
    return warning("reward", text, "see that a right answer of the model's form is paid: docs/rewards.md")


TIMEOUT_S = 60.0
"""For requests to another machine."""
PROBE_BYTES = 64 << 20
SLOW_BYTES_PER_S = 5e8


def check_cluster(recipe: Recipe, address: str | None) -> Iterator[Observation]:
    """Starts and ends a local cluster, or joins `address`, and reports its resources."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="asyncrl-doctor-") as scratch, ray_cluster(address, Path(scratch) / "log"):
        took_s, has, nodes = time.monotonic() - began, ray.cluster_resources(), [n for n in ray.nodes() if n["Alive"]]
        text = f"{'started' if address is None else 'joined ' + address} in {took_s:.1f} s: {len(nodes)} node(s), "
        yield ok("Ray", f"{text}{has.get('CPU', 0):g} CPUs, {has.get('GPU', 0):g} GPUs")
        yield from guarded("placement", lambda: _of_placement(recipe, nodes))
        here = ray.get_runtime_context().get_node_id()
        for node in nodes:
            if node["NodeID"] != here:
                yield from guarded("nodes", lambda node=node: _of_node(node))


def _of_placement(recipe: Recipe, nodes: list[dict[str, Any]]) -> Iterator[Observation]:
    """Whether the nodes have room for the run. Raises ConfigError if not."""
    placement = place_run(recipe, [int(node["Resources"].get("GPU", 0)) for node in nodes])
    how = {"PACK": "on as few nodes as hold them", "STRICT_PACK": "on one node", "SPREAD": "spread over the nodes"}
    yield ok("placement", f"{words(placement.bundles)}; {how[placement.strategy]}")


def _of_node(node: dict[str, Any]) -> Iterator[Observation]:
    """Whether the node has the same package versions and a fast connection to this machine."""
    name, here = node["NodeManagerAddress"], package_versions()
    place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    with socket.create_server(("", 0)) as server:
        server.settimeout(TIMEOUT_S)
        probe = ray.remote(num_cpus=0, max_retries=0)(_probe).options(scheduling_strategy=place)
        asked = probe.remote(ray.util.get_node_ip_address(), server.getsockname()[1])
        # The node sends PROBE_BYTES here, then returns its versions.
        try:
            speed = _received(server)
            there = reply_now(
                asked, timeout_s=TIMEOUT_S, call="a probe of the network", process=Process(f"node {name}")
            )
        except Exception as error:  # noqa: BLE001 - whatever keeps that machine from answering is the finding
            do = "open the network between the nodes, and install the same packages there"
            yield bad("nodes", f"{name}: {type(error).__name__}: {str(error)[:300]}", do)
            return
    text = f"{name}: {speed / 1e9:.2f} GB/s to this machine"
    if different := [f"{n} {version} ({here.get(n)} here)" for n, version in there.items() if here.get(n) != version]:
        yield bad("nodes", f"{text}; {', '.join(different)}", "install the same versions on every node")
    elif speed < SLOW_BYTES_PER_S:
        yield warning("nodes", text, "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the fast network")
    else:
        yield ok("nodes", text)


def _received(server: socket.socket) -> float:
    """Received bytes per second."""
    connection, _ = server.accept()
    with connection:
        connection.settimeout(TIMEOUT_S)
        began, left = time.perf_counter(), PROBE_BYTES
        while left > 0 and (part := connection.recv(1 << 20)):
            left -= len(part)
        return (PROBE_BYTES - left) / (time.perf_counter() - began)


def _probe(address: str, port: int) -> dict[str, Any]:
    """Runs on another node: sends bytes to this one and returns the versions of its packages."""
    with socket.create_connection((address, port), timeout=TIMEOUT_S) as out:
        out.settimeout(TIMEOUT_S)
        out.sendall(bytes(PROBE_BYTES))
    return package_versions()
