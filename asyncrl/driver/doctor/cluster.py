"""Checks Ray: starts and ends a local cluster, or joins the cluster of the run."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.checkpoint.run_directory import package_versions
from asyncrl.config.recipe import Recipe
from asyncrl.driver.cluster.placement import place_run, words
from asyncrl.driver.cluster.ray_session import ray_cluster
from asyncrl.driver.doctor.machine import Observation, bad, guarded, ok, warning
from asyncrl.errors import Process
from asyncrl.remote.reply import reply_now

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
