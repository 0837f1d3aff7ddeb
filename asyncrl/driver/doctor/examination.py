"""The examination: all checks, in the order in which a run would meet them. The preflight checks the recipe and
computes what the run needs; the doctor compares that with the machine and the cluster (a local one that it starts and
ends, or that of the run), and tries the reward. The machine: packages, GPUs, memory, shared memory, files, disk, the
address of its name.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil
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
from asyncrl.driver.memory_plan import computes_here, ranks_memory, served_bytes
from asyncrl.driver.preflight import sees_gpus
from asyncrl.errors import AsyncRLError, Process
from asyncrl.inference.engines import ENGINES
from asyncrl.remote.reply import reply_now
from asyncrl.rewards.reward_pool import RewardPool

Status = Literal["ok", "warning", "bad"]


@dataclass(frozen=True, slots=True)
class Observation:
    """The finding of one check.

    Attributes:
        area: subject of the check, in one or two words.
        status: bad: the run will not start, or fails; warning: it may fail, or be slower than necessary.
        remedy: what to do; empty if nothing is wrong.
    """

    area: str
    status: Status
    text: str
    remedy: str = ""


def ok(area: str, text: str) -> Observation:
    return Observation(area, "ok", text)


def warning(area: str, text: str, remedy: str) -> Observation:
    return Observation(area, "warning", text, remedy)


def bad(area: str, text: str, remedy: str) -> Observation:
    return Observation(area, "bad", text, remedy)


def guarded(area: str, check: Callable[[], Iterable[Observation] | None]) -> Iterator[Observation]:
    """The findings of a check; a failure of the check becomes a finding."""
    try:
        yield from check() or ()
    except AsyncRLError as error:  # in the words of `explain`
        text, _, remedy = str(error).partition("\ndo:")
        yield bad(area, text.removeprefix("asked: ").replace("\nfound:", ":"), remedy.strip())
    except Exception as error:  # noqa: BLE001 - a doctor reports, whatever a machine is like
        yield warning(area, f"could not be checked: {type(error).__name__}: {error}", "see whether it matters")


GIB = 1 << 30
FILES_PER_PROCESS = 512
"""Open files and sockets of one process, a generous estimate."""


def check_versions() -> Iterator[Observation]:
    """Compares the installed packages with asyncrl's requirements."""
    from packaging.requirements import Requirement

    for wanted in map(Requirement, metadata.requires("asyncrl") or ()):
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            have = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            have = None
        if have is None or not wanted.specifier.contains(have, prereleases=True):
            text = f"{wanted.name} {have or 'is not installed'}; asyncrl needs {wanted.specifier}"
            yield bad("versions", text, f"pip install '{wanted.name}{wanted.specifier}'")
    named = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    yield ok("versions", f"Python {sys.version.split()[0]}, {named}")


def check_compiled(package: str = "torch") -> Iterator[Observation]:
    """Whether Python can keep compiled files; otherwise every process compiles its imports again."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None or Path(importlib.util.cache_from_source(found.origin)).exists():
        return
    place = Path(found.origin).parent
    if sys.dont_write_bytecode:
        reason, do = "PYTHONDONTWRITEBYTECODE is set", "unset PYTHONDONTWRITEBYTECODE"
    elif not os.access(place, os.W_OK):
        reason, do = f"{place} cannot be written", "set PYTHONPYCACHEPREFIX to a directory that can"
    else:
        return
    text = f"no compiled files of {package}, and {reason}: every process takes about three times as long to start"
    yield warning("packages", text, f"{do}, or once: python -m compileall -q {place.parent}")


def check_gpus(recipe: Recipe) -> Iterator[Observation]:
    import torch

    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    if sizes:
        yield ok("GPUs", f"{len(sizes)} x {torch.cuda.get_device_name(0)}, {min(sizes) / GIB:.0f} GiB each")
    elif sees_gpus(recipe):
        text = f"this machine has NVIDIA devices, and torch {torch.__version__} finds none"
        yield bad("GPUs", text, "install torch with CUDA, or see CUDA_VISIBLE_DEVICES and the driver")
    else:
        yield ok("GPUs", "none on this machine")


def check_shared_memory(place: Path = Path("/dev/shm")) -> Iterator[Observation]:
    """Transport ipc, Ray's objects, vLLM and SGLang use shared memory."""
    if not place.is_dir():
        return
    free = shutil.disk_usage(place).free
    text = f"{free / GIB:.1f} GiB free in {place}"
    if free < GIB:
        do = "give the container more: docker run --shm-size=8g, or an emptyDir of medium Memory"
        yield Observation("shared memory", "bad" if free < GIB // 8 else "warning", text, do)
    else:
        yield ok("shared memory", text)


def check_files(recipe: Recipe) -> Iterator[Observation]:
    soft, hard = (
        sys.maxsize if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    needed = max(4096, FILES_PER_PROCESS * (recipe.rollout.most_replicas // 8 + 2))
    if soft < needed:
        do = f"ulimit -n {needed}" + ("" if hard >= needed else f" (the hard limit is {hard}: ask the administrator)")
        yield warning("open files", f"{soft} open files a process", do)
    else:
        yield ok("open files", f"at least {needed} open files a process")


def check_address() -> Iterator[Observation]:
    """gloo and NCCL connect by the address of the host name, unless an interface is set."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        with socket.socket() as listener:
            listener.bind((address, 0))
    except OSError as error:
        do = f"put '127.0.0.1 {name}' (or the machine's address) into /etc/hosts, or set GLOO_SOCKET_IFNAME"
        yield warning("network", f"the host's name {name} has no address of this machine: {error}", do)
        return
    yield ok("network", f"{name} is {address}; ports can be taken there")


def check_memory(needed: int) -> Observation:
    """`needed`: bytes of the processes of a run that compute on CPUs."""
    room = psutil.virtual_memory().available
    text = f"ranks and replicas together take {needed / GIB:.1f} GiB of {room / GIB:.0f} GiB free"
    if needed > 0.9 * room:
        return bad("memory", text, "lower rollout.num_replicas, or use a smaller model or LoRA")
    return ok("memory", text)


def check_disk(directory: Path, needed: int) -> Observation:
    """`needed`: bytes of the kept checkpoints and one being written; 0 if unknown."""
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        return bad("disk", f"{place} cannot be written", "set run.dir to a directory that can")
    free = shutil.disk_usage(place).free
    text = f"{free / GIB:.1f} GiB free for {directory}; checkpoints take {needed / GIB:.2f} GiB"
    if needed > free:
        return bad("disk", text, "make room, lower checkpoint.keep, or set run.dir to another disk")
    return ok("disk", text)


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
    yield from guarded("versions", check_versions)
    read: list[Loaded] = []
    yield from guarded("recipe", lambda: read.append(load(path, overrides)))
    for loaded in read:
        yield ok("recipe", f"{path} is valid")
        for found in _of_recipe(loaded, path, use_hub=use_hub, use_ray=use_ray):
            yield replace(found, text=loaded.hide(found.text), remedy=loaded.hide(found.remedy))


def _of_recipe(loaded: Loaded, path: Path, *, use_hub: bool, use_ray: bool) -> Iterator[Observation]:
    recipe = loaded.recipe
    yield from guarded("packages", lambda: preflight.check_packages(recipe))
    yield from guarded("packages", check_compiled)
    yield from guarded("GPUs", lambda: check_gpus(recipe))
    yield from guarded("shared memory", check_shared_memory)
    yield from guarded("open files", lambda: check_files(recipe))
    yield from guarded("network", check_address)
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
        yield check_memory(largest * trainer.num_ranks + weights * replicas)
    checkpoint = sum((memory.weights + memory.optimizer) * trainer.shard_ranks for memory in ranks[:1])
    directory = Path(recipe.run.dir or Path("runs") / (recipe.run.name or path.stem))
    yield check_disk(directory, checkpoint * (recipe.checkpoint.keep + 1))


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
