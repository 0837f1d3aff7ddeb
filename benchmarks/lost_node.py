"""How long a run stands still when a node of its cluster is lost: seconds without a step.

    make quickstart                             # once: the model and the data
    python benchmarks/lost_node.py              # 3 runs, about 5 minutes on 2 cores
    python benchmarks/lost_node.py --rounds 1 --write

One machine stands for a cluster of four Ray nodes: one for the driver, three with one place for a process each. A run
of the quickstart's model has a replica on two of them and its trainer rank on one of these. First the node that has
a replica alone is lost, then, when two replicas serve again, the node of the trainer. A node's processes are all killed
at once. What a machine of its own would add (a dead node that is silent, not gone) is Ray's own limit for that, 30 s by
default.

`--write` keeps the table in benchmarks/results/lost_node.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from asyncrl.checkpoint.run_directory import git_commit, package_versions

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "lost_node.md"
DEADLINE_S = 300.0
SMALL = (
    "batch.groups_per_step=4", "batch.group_size=4", "run.max_steps=100000", "eval.every_steps=0",
    "checkpoint.every_steps=5", "recovery.max_replica_restarts=20", "weights.transport=collective",
    "rollout.num_replicas=2", "ray.start_timeout_s=120",
)  # fmt: skip


@dataclass(frozen=True)
class Loss:
    """Of one node. `step_s`: the longest time between two steps from then on; `whole_s`: until as many replicas serve
    as before."""

    step_s: float
    whole_s: float


class Run:
    """The command as a user would give it, on a cluster."""

    def __init__(self, directory: Path, address: str) -> None:
        self.directory = directory
        command = [sys.executable, "-m", "asyncrl.commands.train", "recipes/quickstart.yaml", f"run.dir={directory}"]
        self._output = directory.with_suffix(".out")
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [*command, f"ray.address={address}", *SMALL], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
            )

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.directory / name
        text = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    @property
    def steps(self) -> int:
        return max((line["step"] for line in self.lines("metrics.jsonl")), default=0)

    def trained(self) -> list[float]:
        """When each step was committed: those that were trained again, too."""
        return [event["time_s"] for event in self.lines("events.jsonl") if event["event"] == "step"]

    @property
    def served(self) -> int:
        """Replicas that have begun to serve, over the whole run."""
        return sum(event["event"] == "replica_serving" for event in self.lines("events.jsonl"))

    def wait(self, what: str, done: Any) -> float:
        """Seconds until `done()`. Raises SystemExit: the run has ended, or it takes too long."""
        began = time.monotonic()
        while not done():
            if self.process.poll() is not None or time.monotonic() > began + DEADLINE_S:
                raise SystemExit(f"no {what}: {self._output.read_text()[-2000:]}")
            time.sleep(0.05)
        return time.monotonic() - began


def nodes_with(role: str, cluster: Any) -> set[Any]:
    raylets = {node.all_processes["raylet"][0].process.pid: node for node in cluster.worker_nodes}
    found = [p for p in psutil.process_iter(["cmdline"]) if f"ray::{role}" in " ".join(p.info["cmdline"] or ())]
    return {raylets[parent.pid] for p in found for parent in p.parents() if parent.pid in raylets}


def lose(run: Run, cluster: Any, node: Any) -> Loss:
    served, began = run.served, time.monotonic()
    last_s = run.trained()[-1]
    cluster.remove_node(node, allow_graceful=False)
    run.wait("replica after the loss", lambda: run.served > served)
    whole_s = time.monotonic() - began
    reached = run.steps
    run.wait("steps after the loss", lambda: run.steps >= reached + 3)
    times = [last_s, *(at for at in run.trained() if at > last_s)]
    return Loss(max(later - earlier for earlier, later in pairwise(times)), whole_s)


def one_round(scratch: Path) -> tuple[Loss, Loss]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(3):
        cluster.add_node(num_cpus=1)
    run = Run(scratch / "run", cluster.address)
    try:
        run.wait("first checkpoint", lambda: run.steps >= 12)
        of_trainer = nodes_with("TrainerWorker", cluster)
        (alone, *_) = nodes_with("Replica", cluster) - of_trainer
        replica = lose(run, cluster, alone)
        cluster.add_node(num_cpus=1)
        reached = run.steps
        run.wait("calm", lambda: run.steps >= reached + 12)
        (node,) = nodes_with("TrainerWorker", cluster)
        trainer = lose(run, cluster, node)
        return replica, trainer
    finally:
        run.process.terminate()
        try:
            run.process.wait(60)
        except subprocess.TimeoutExpired:
            run.process.kill()
        cluster.shutdown()


def hardware() -> str:
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; {versions}; commit {git_commit()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"keep the table in {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    rounds = []
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as scratch:
            rounds.append(one_round(Path(scratch)))
        print(f"round {number + 1}: {rounds[-1]}", flush=True)
    lines = [
        "# From the loss of a node to the next step",
        "",
        "The longest time between two steps from the loss on, and the time until two replicas served again: seconds, "
        "median (lowest to highest).",
        "",
        "| the lost node had | without a step | two replicas again | rounds |",
        "|---|---|---|---|",
    ]
    for name, losses in zip(("a replica", "the trainer rank"), zip(*rounds, strict=True), strict=True):
        cells = [spread([getattr(loss, key) for loss in losses]) for key in ("step_s", "whole_s")]
        lines.append(f"| {name} | {' | '.join(cells)} | {len(losses)} |")
    text = "\n".join([*lines, "", hardware(), ""])
    print(text)
    if arguments.write:
        RESULTS.write_text(text)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    main()
