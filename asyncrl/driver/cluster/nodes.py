"""Prepares every machine of a run before actors start there: the run directory, and files of models of the hub."""

from __future__ import annotations

import logging
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.driver.memory_plan import smallest_gpu_here
from asyncrl.errors import ConfigError, Process, explain
from asyncrl.remote.reply import reply_now

logger = logging.getLogger(__name__)

HubModel = tuple[str, str | None]
"""Name and revision."""
SEEN_S = 10.0
"""Longest time until a file written on one machine is visible on others: network file systems cache directories."""
_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.py", "*.jinja")
_PICKLED = "*.bin"
"""Weights of models without safetensors."""


def prepare_nodes(directory: Path, models: Sequence[HubModel], timeout_s: float) -> None:
    """Returns once every usable node has the files of `models` in its cache and shares `directory`. Otherwise ranks
    would download during their rendezvous and miss its deadline, and checkpoints written to a directory that is not
    shared would be lost.

    Args:
        directory: of the run; exists on this machine.
        timeout_s: for the whole preparation.

    Raises:
        ConfigError: a node has a different directory at that path, or cannot get a model; the message names the node.
        DeadlineExceeded, ProcessDied: naming the node.
    """
    nodes = usable_nodes(ray.nodes())
    shares = spans(nodes, ray.get_runtime_context().get_node_id())
    if not shares and not models:
        return
    deadline = time.monotonic() + timeout_s
    token, place = secrets.token_hex(8), directory / ".nodes"
    try:
        if shares:
            place.mkdir(exist_ok=True)
            (place / token).write_text(token)
        seen = place if shares else None
        asked = [(n, _on(n, prepare_node).remote(seen, token, n["NodeID"], models)) for n in nodes]
        # The nodes work concurrently; `deadline` covers all of them.
        for node, ref in asked:
            address = node["NodeManagerAddress"]
            found = reply_now(
                ref,
                timeout_s=max(0.0, deadline - time.monotonic()),
                call="check of the run directory, download of models",
                process=Process(f"node {address}"),
            )
            if found is None and shares and not _seen(place / f"{token}-{node['NodeID']}"):
                found = "run.dir", "what is written there is not seen here"
            if found is not None:
                raise _refused(directory, address, *found)
    finally:
        if shares:
            shutil.rmtree(place, ignore_errors=True)
    logger.info("%d node(s) have the run directory and the files of %d model(s) of the hub", len(nodes), len(models))


def smallest_gpu(timeout_s: float) -> int | None:
    """Memory of the smallest GPU on the nodes that a run may get, in bytes; None: there is none, or a node cannot tell.
    Raises DeadlineExceeded, ProcessDied: naming the node."""
    nodes = [node for node in usable_nodes(ray.nodes()) if node["Resources"].get("GPU")]
    asked = [(node, _on(node, smallest_gpu_here).remote()) for node in nodes]
    found = [
        reply_now(ref, timeout_s=timeout_s, call="size of its GPUs", process=Process(f"node {n['NodeManagerAddress']}"))
        for n, ref in asked
    ]
    return None if None in found else min(found, default=None)


def usable_nodes(nodes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The nodes of `ray.nodes()` on which parts of a run may be placed: nodes with GPUs if there are any, else all."""
    alive = [node for node in nodes if node["Alive"]]
    return [node for node in alive if node["Resources"].get("GPU")] or alive


def spans(nodes: Sequence[dict[str, Any]], here: str) -> bool:
    """True when parts of a run may be placed on other nodes than the driver's (`here`), which has the directory."""
    return any(node["NodeID"] != here for node in nodes)


def _on(node: dict[str, Any], function: Callable[..., Any]) -> Any:
    """`function` as a task of this node."""
    strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return ray.remote(num_cpus=0, max_retries=0)(function).options(scheduling_strategy=strategy)


def prepare_node(place: Path | None, token: str, node_id: str, models: Sequence[HubModel]) -> tuple[str, str] | None:
    """Runs on one node. Returns the failed setting and the finding; None if all is well."""
    if place is not None:
        if not _seen(place / token):
            return "run.dir", "no such directory, or not the one that the other machines have"
        try:
            (place / f"{token}-{node_id}").write_text(token)
        except OSError as error:
            return "run.dir", f"it cannot be written: {error}"
    for name, revision in models:
        try:
            fetch_model(name, revision)
        except (OSError, ValueError) as error:  # base classes of the hub library's errors
            return f"model {name}", str(error).split("\n")[0]
    return None


def fetch_model(name: str, revision: str | None) -> Path:
    """The directory of the model in this machine's cache, with its files; downloads missing files. Raises OSError,
    ValueError."""
    from huggingface_hub import snapshot_download

    directory = Path(snapshot_download(name, revision=revision, allow_patterns=list(_FILES)))
    if not any(directory.glob("*.safetensors")):
        snapshot_download(name, revision=revision, allow_patterns=[_PICKLED])
    return directory


def _seen(file: Path) -> bool:
    """True once the file exists; False after SEEN_S."""
    end = time.monotonic() + SEEN_S
    while not file.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _refused(directory: Path, address: str, key: str, found: str) -> ConfigError:
    if key == "run.dir":
        do = "set run.dir to a directory on a file system that all nodes share, at the same path"
        return ConfigError(explain(f"run.dir={directory} on node {address}", found, do))
    do = "give that node a way to the hub, or a cache (HF_HOME) that has the model"
    return ConfigError(explain(f"{key} on node {address}", found, do))
