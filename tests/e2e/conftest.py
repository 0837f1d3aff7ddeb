"""A cluster, and a way to run the real command on it."""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.audit import audit_run
from tests.forks import fork_server
from tests.processes import ROOT, assert_gone
from tests.unit.audit_model import edited, mutations, sealed

MODEL = "runs/tiny-qwen3"
COMMAND = [sys.executable, "-m", "asyncrl.commands.train"]
SMALL = (
    "batch.groups_per_step=4",
    "batch.group_size=4",
    "rollout.sampling.max_response_tokens=32",
    "eval.every_steps=0",
    "checkpoint.every_steps=2",
)
"""For runs that have to run, not to learn."""
ALERT = ("rollout.num_replicas=1", "ray.health_interval_s=0.5", "ray.health_timeout_s=5")
"""For runs that lose processes: a loss is found soon."""


@pytest.fixture(scope="session")
def cluster():
    """The address of a Ray cluster that runs join. Starting one for each would take as long as what is tested."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *known]))
        with fork_server() as forks:
            with forks():
                started = Cluster(initialize_head=True, head_node_args={"include_dashboard": False})
            patch.undo()
            yield started.address
            started.shutdown()


@contextlib.contextmanager
def two_nodes(**head):
    """A cluster with a head that is for the driver alone (it has no CPU to reserve), and two nodes for replicas and
    ranks."""
    from ray.cluster_utils import Cluster

    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **head})
    for _ in range(2):
        started.add_node(num_cpus=1)
    yield started
    started.shutdown()


def below(process: psutil.Process) -> list[psutil.Process]:
    """Its living descendants; `info` has "name" and "cmdline" of each, None where it has ended since."""
    tree = process.children(recursive=True)
    for descendant in tree:
        descendant.info = dict.fromkeys(("name", "cmdline", "status"))
        with contextlib.suppress(psutil.Error):
            descendant.info = descendant.as_dict(list(descendant.info))
    return [descendant for descendant in tree if descendant.info["status"] != psutil.STATUS_ZOMBIE]


@dataclass
class Run:
    """One call of `asyncrl-train`, the only one at its time."""

    directory: Path
    process: subprocess.Popen[str]

    def wait(self, timeout_s: float = 380) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)
            raise

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float = 300) -> Any:
        """Returns what the condition gives when that is true; fails when the run ends before."""
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, f"never: {what}: {self.log}"
            time.sleep(0.1)
        return found

    def wait_for_step(self, step: int, timeout_s: float = 300) -> None:
        """Returns when `step` is in metrics.jsonl."""
        self.wait_for(lambda: any(r["step"] >= step for r in self.metrics), f"step {step}", timeout_s)

    def wait_for_event(self, kind: str, count: int = 1, timeout_s: float = 300) -> None:
        self.wait_for(lambda: len(events(self, kind)) >= count, f"{count} events {kind}", timeout_s)

    def actor_pids(self, role: str) -> list[int]:
        """Processes of one role, below this run's driver or the cluster that it has joined."""
        return [p.pid for p in below(psutil.Process()) if f"ray::{role}" in " ".join(p.info["cmdline"] or ())]

    @property
    def has_a_cluster(self) -> bool:
        """Whether it runs on a Ray that it has started itself."""
        return any("raylet" in (p.info["name"] or "") for p in below(psutil.Process(self.process.pid)))

    @property
    def metrics(self) -> list[dict]:
        return self._lines("metrics.jsonl")

    @property
    def events(self) -> list[dict]:
        return self._lines("events.jsonl")

    @property
    def samples(self) -> list[dict]:
        return self._lines("samples.jsonl")

    @property
    def log(self) -> str:
        path = self.directory.with_suffix(".out")
        return path.read_text() if path.exists() else ""

    def transitions(self, kind: str) -> list[int]:
        """Ordinals in the order of their transitions of `kind`."""
        return [e["ordinal"] for e in self.events if e["event"] == "group" and e["transition"] == kind]

    def _lines(self, name: str) -> list[dict]:
        path = self.directory / name
        if not path.exists():
            return []
        whole, _, _ = path.read_text().rpartition("\n")  # the last line may be half written
        return [json.loads(line) for line in whole.splitlines()]


@pytest.fixture
def start(inputs, cluster, tmp_path):
    """start(*overrides, name="run", recipe="quickstart", joined=True) -> Run; every process of it is gone when the test
    ends. Not `joined`: with a cluster of its own, as on a laptop."""
    runs: list[Run] = []

    def call(*overrides: str, name: str = "run", recipe: str = "quickstart", joined: bool = True) -> Run:
        directory = tmp_path / name
        place = [f"ray.address={cluster}"] if joined else []
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path}
        with directory.with_suffix(".out").open("a") as output:
            process = subprocess.Popen(
                [*COMMAND, f"recipes/{recipe}.yaml", f"run.dir={directory}", *place, *overrides],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )
        runs.append(Run(directory, process))
        return runs[-1]

    yield call
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait(60)
    for directory in {run.directory for run in runs}:
        if (directory / "events.jsonl").exists() and (directory / "config.json").exists():
            assert not audit_run(directory).findings, "every run directory must be clean"


class Server:
    """One call of `asyncrl-serve`."""

    def __init__(self, directory, *options):
        self.output, self.file = directory / "serve.out", directory / "fleet.json"
        files = "--discovery-file", str(self.file), "--log-file", str(directory / "log.txt")
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "asyncrl.commands.serve", MODEL, "--port", "0", *files, *options],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, condition, what, timeout_s=180):
        """What `condition` gives for the discovery file, once that is true."""
        deadline = time.monotonic() + timeout_s
        while True:
            if self.file.exists() and condition(found := json.loads(self.file.read_text())):
                return found
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, f"{what}: {self.output.read_text()}"
            time.sleep(0.1)

    def descendants(self):
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, number):
        """Its exit code after the signal `number`, and the processes that are left of it."""
        left = self.descendants()
        self.process.send_signal(number)
        code = self.process.wait(150)
        _, alive = psutil.wait_procs(left, timeout=60)
        return code, alive


@pytest.fixture
def serve(inputs, tmp_path):
    servers = []

    def start(*options):
        servers.append(Server(tmp_path, *options))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            children = server.descendants()
            server.process.kill()
            server.process.wait(60)
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


def assert_audited(run: Run, *, max_lag: int, steps: int | None = None, code: int = 0, timeout_s: float = 380) -> None:
    """How a run that was mended must end: with this exit code, a clean audit, the bound, a line for every step."""
    assert run.wait(timeout_s) == code, run.log
    assert not audit_run(run.directory).findings
    metrics = run.metrics
    assert [r["step"] for r in metrics] == list(range(1, (steps or len(metrics)) + 1))
    assert all(r["staleness/lag_max"] <= max_lag for r in metrics)
    if steps is not None:
        last = metrics[-1]
        assert (last["queue/running"], last["queue/ready"], last["queue/leased"]) == (0, 0, 0)


def finish(run, *, more_steps=3, timeout_s=300):
    """Lets the run train a few more steps, ends it by SIGINT, and checks it."""
    run.wait_for_step(max((r["step"] for r in run.metrics), default=0) + more_steps, timeout_s)
    run.process.send_signal(signal.SIGINT)
    assert_audited(run, max_lag=2, code=130, timeout_s=150)


def events(run, kind):
    return [e for e in run.events if e["event"] == kind]


def kill_a_rank(run):
    """Kills one of two trainer ranks; its name. The order of process ids is not that of ranks: Ray may hand either
    actor the process that it started first."""
    victim = psutil.Process(run.actor_pids("TrainerWorker")[1])
    log = (run.directory / "log.txt").read_text()
    (rank,) = re.findall(rf"trainer rank (\d) of 2 ready on \S+, pid {victim.pid}\b", log)
    victim.kill()
    return f"trainer rank {rank}"


def assert_damage_is_found(directory: Path, place: Path) -> int:
    """Changes copies of what the audit of this run reads, one thing at a time; returns how many changes there were.

    Where the hashes are made to fit, whatever was changed before the newest checkpoint still disagrees with it.
    """
    for path in (directory / "checkpoints").glob("step_*"):
        (place / "checkpoints" / path.name / "queue").mkdir(parents=True)
        for name in ("state.json", "files.json", "queue/ledger.json"):
            shutil.copy(path / name, place / "checkpoints" / path.name / name)
    files = {name: (directory / name).read_bytes() for name in ("config.json", "metrics.jsonl", "events.jsonl")}
    lines = [line for line in files["events.jsonl"].splitlines(keepends=True) if line.endswith(b"}\n")]
    events = [json.loads(line) for line in lines]
    kept = {id(event): line for event, line in zip(events, lines, strict=True)}
    newest = max(i for i, e in enumerate(events) if e["event"] == "snapshot")
    tried = 0

    def is_found(name: str, content: bytes) -> bool:
        nonlocal tried
        tried += 1
        for path, data in (files | {name: content}).items():
            (place / path).write_bytes(data)
        return bool(audit_run(place).findings)

    assert not is_found("events.jsonl", files["events.jsonl"])
    for at in {(e["event"], e.get("transition")): i for i, e in enumerate(events)}.values():
        for how, mutated in mutations(events, at):
            as_it_was = b"".join(kept.get(id(event)) or edited(event, lines[at]) for event in mutated)
            at_its_end = how == "deleted" and at + 1 == len(events)
            assert at_its_end or is_found("events.jsonl", as_it_was), (how, events[at])
            unsealed = [{k: v for k, v in e.items() if k not in ("at", "chain")} for e in mutated]
            if at < newest and mutated != events:
                assert is_found("events.jsonl", sealed(unsealed)), (how, events[at])
    for cut in range(0, newest, max(1, newest // 10)):
        assert is_found("events.jsonl", b"".join(lines[:cut])), cut
    config = json.loads(files["config.json"])
    config["resolved"]["max_lag"] += 1
    assert is_found("config.json", json.dumps(config).encode())
    metrics = [json.loads(line) for line in files["metrics.jsonl"].splitlines()]
    for lag in (math.nan, -1, metrics[-1]["staleness/lag_max"] - 1, metrics[-1]["staleness/lag_max"] + 1):
        changed = [*metrics[:-1], metrics[-1] | {"staleness/lag_max": lag}]
        assert is_found("metrics.jsonl", b"".join(json.dumps(line).encode() + b"\n" for line in changed)), lag
    return tried


def assert_a_dead_engine_is_replaced(start, recipe: str) -> None:
    """A run serves what is published, and a killed engine process is replaced. One replica, so that the run depends on
    each engine that it gets."""
    torch = start("run.max_steps=1", "eval.every_steps=1", name="torch", joined=False)
    assert torch.wait() == 0, torch.log
    alone = "rollout.num_replicas=1", "weights.verify=always"
    run = start("run.max_steps=6", *alone, recipe=recipe, joined=False)
    run.wait_for_step(2, timeout_s=400)
    (replica,) = run.actor_pids("Replica")
    tree = psutil.Process(run.process.pid).children(recursive=True)
    engine = max(psutil.Process(replica).children(recursive=True), key=lambda p: p.memory_info().rss)
    engine.send_signal(signal.SIGKILL)
    run.wait_for_event("replica_serving", count=2, timeout_s=400)
    assert_sound(run, max_lag=2, steps=6, timeout_s=600)
    assert [e["replica"] for e in events(run, "replica_failed")] == [0]
    assert all(e["verified"] for e in events(run, "publish"))
    assert_gone(tree)
    # Greedy decoding of the same weights: what differs is rounding.
    initial = [r.metrics[0]["eval/initial_accuracy"] for r in (torch, run)]
    assert initial[0] == pytest.approx(initial[1], abs=0.02)
    assert run.samples


def assert_it_outlives_its_server(run: Run, server) -> None:
    """A run of six steps whose server is killed publishes to the next one."""
    run.wait_for_step(2, timeout_s=400)
    server.kill()
    run.wait_for_event("replica_failed", timeout_s=400)
    (failed,) = events(run, "replica_failed")
    assert "is lost" in failed["error"]
    steps = len(run.metrics)
    server.start()
    run.wait_for_event("replica_serving", count=2, timeout_s=400)
    assert_sound(run, max_lag=2, steps=6, timeout_s=600)
    assert len(run.metrics) > steps
    assert [e["replica"] for e in events(run, "replica_failed")] == [0], "one replacement waited for it"


def assert_sound(run: Run, *, max_lag: int, steps: int, timeout_s: float = 380) -> None:
    """How a run must finish: all lines there, the bound, the balance, each ordinal trained once."""
    assert run.wait(timeout_s) == 0, run.log
    metrics = run.metrics
    assert [r["step"] for r in metrics] == list(range(1, steps + 1))
    for record in metrics:
        assert record["staleness/lag_max"] <= max_lag
        states = ("running", "ready", "leased", "trained", "filtered", "expired", "failed")
        assert record["queue/admitted"] == sum(record[f"queue/{s}"] for s in states)
    trained = run.transitions("trained")
    assert len(trained) == len(set(trained)) == metrics[-1]["queue/trained"]
    last = metrics[-1]
    assert (last["queue/running"], last["queue/ready"], last["queue/leased"]) == (0, 0, 0)
    groups = [e for e in events(run, "group") if e["transition"] == "trained"]
    assert max(e["trainer_version"] - e["oldest_version"] for e in groups) <= max_lag


def made_tool_task(task, place):
    """Overrides of a recipe: a model and rows of this task, below `place`. A part of the warm-up is enough here."""
    tool = [sys.executable, "tools/make_tool_task.py", "--task", task, "--share", "0.3"]
    subprocess.run([*tool, "--out", f"{place}/model", "--data", str(place)], cwd=ROOT, check=True, timeout=600)
    files = f"data.train={place}/{task}_train.jsonl", f"data.eval={{held_out: {place}/{task}_test.jsonl}}"
    return (f"model.path={place}/model", *files)


@pytest.fixture(scope="session")
def tool_task(tmp_path_factory):
    return made_tool_task("tool", tmp_path_factory.mktemp("tool-task"))
