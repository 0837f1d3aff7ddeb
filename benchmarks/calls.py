"""What a call of an actor costs through Ray and over a line.

    python benchmarks/calls.py [--rounds 5] [--calls 1000] [--bytes 4000] [--write]

One client calls a method that returns what it was sent, call after call, in rounds that alternate between the two ways.
The figures are of a call: the time until its answer, and the CPU time of the client's and of the actor's process in all
their threads. Medians over the rounds.

Writes benchmarks/results/calls.md with --write.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

import ray

from asyncrl.checkpoint.run_directory import git_commit, package_versions
from asyncrl.driver.cluster.ray_session import ray_cluster
from asyncrl.errors import Process
from asyncrl.remote.actor_client import ActorClient
from asyncrl.remote.connection import HasConnections

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "calls.md"
TIMEOUT_S = 30.0


class Echo(HasConnections):
    async def echo(self, sent: bytes) -> bytes:
        return sent

    async def cpu_s(self) -> float:
        return own_cpu_s()


def own_cpu_s() -> float:
    times = os.times()
    return times.user + times.system


async def measure(rounds: int, calls: int, sent: bytes) -> dict[str, list[tuple[float, float, float]]]:
    """Way -> microseconds of a call in each round: until its answer, of the client's CPU, of the actor's."""
    handle = ray.remote(Echo).options(num_cpus=0, max_concurrency=1000).remote()
    ways = {way: ActorClient(handle, Process("echo"), is_direct=way == "line") for way in ("Ray", "line")}
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}
    for client in ways.values():
        await client.call(TIMEOUT_S, Echo.echo, sent)  # opens the line
    for _ in range(rounds):
        for way, client in ways.items():
            actor_s, client_s, began = await client.call(TIMEOUT_S, Echo.cpu_s), own_cpu_s(), time.perf_counter()
            for _ in range(calls):
                await client.call(TIMEOUT_S, Echo.echo, sent)
            wall_s, client_s = time.perf_counter() - began, own_cpu_s() - client_s
            actor_s = await client.call(TIMEOUT_S, Echo.cpu_s) - actor_s
            us = tuple(1e6 * seconds / calls for seconds in (wall_s, client_s, actor_s))
            print(way, *(f"{value:.0f}" for value in us), flush=True)
            found[way].append((us[0], us[1], us[2]))
    return found


def report(found: dict[str, list[tuple[float, float, float]]], options: argparse.Namespace) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in package_versions().items())
    lines = [
        "# Calls of an actor",
        "",
        f"`python benchmarks/calls.py --rounds {options.rounds} --calls {options.calls} --bytes {options.bytes}`: one "
        f"client, one actor, {os.cpu_count()} cores.",
        "",
        f"Commit {git_commit()}; {versions}.",
        "",
        "| way | us until the answer | us CPU of the client | us CPU of the actor |",
        "|---|---|---|---|",
    ]
    for way, rounds in found.items():
        medians = (f"{statistics.median(values):.0f}" for values in zip(*rounds, strict=True))
        lines.append(f"| {way} | {' | '.join(medians)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=1000, help="in a round, each way")
    parser.add_argument("--bytes", type=int, default=4000, help="that a call sends and gets")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, ray_cluster(None, Path(scratch) / "log"):
        found = asyncio.run(measure(options.rounds, options.calls, bytes(options.bytes)))
    text = report(found, options)
    print(text)
    if options.write:
        RESULT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
