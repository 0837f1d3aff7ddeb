"""Runs `asyncrl-train` under faults: waits, restarts, and what counts as a finding."""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from asyncrl.audit import AuditReport, audit_run
from asyncrl.observability import stacks
from asyncrl.types.events import (
    ReplicaFailed,
    ReplicaRejoined,
    ReplicaServing,
    ReplicaSuspended,
    RollouterFailed,
    RollouterRestarted,
    RunStarted,
    TrainingFailed,
    TrainingRestarted,
)
from asyncrl.types.metrics import Metric
from tools.chaos_driver import Driver, command_of
from tools.chaos_faults import ROLES, Fault, Saboteur

HEALED = {
    "replica": (ReplicaServing.kind, ReplicaRejoined.kind),
    "engine": (ReplicaServing.kind,),
    "rollouter": (RollouterRestarted.kind,),
    "trainer": (TrainingRestarted.kind,),
    "queue": (TrainingRestarted.kind,),
}
"""Role -> the events that say that its loss was repaired; a new driver repairs all."""
NOTICED = {
    "replica": (ReplicaFailed.kind, ReplicaSuspended.kind, RunStarted.kind),
    "rollouter": (RollouterFailed.kind, RunStarted.kind),
    "trainer": (TrainingFailed.kind, RunStarted.kind),
    "queue": (TrainingFailed.kind, RunStarted.kind),
}
"""Role -> the events that say that the run replaces what it has lost of it."""
EXPLAINED = {"driver": (-signal.SIGKILL,), "checkpoint": (-signal.SIGKILL,), "disk": (8,)}
"""Role -> exit codes of the driver that a fault of it explains."""
OVERRIDES = (
    "recovery.max_replica_restarts=10000",
    "recovery.max_restarts=10000",
    "recovery.rejoin_timeout_s=8",
    "checkpoint.every_steps=3",
    "checkpoint.keep=3",
    "ray.health_interval_s=0.5",
    "ray.health_timeout_s=6",
)
POLL_S = 0.1
START_S = 300.0
"""Longest that the first step may take."""
LOOK_S = 0.5
"""Seconds between two looks at what processes there are."""
ORPHAN_S = 20.0
"""What the processes of a driver that has ended get to end too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`steps`: at which the run ends (it is prolonged when it gets there before its last fault). `deadline_s`: longest
    that the run may take to train again after a fault. `pause_s`: mean time between a recovery and the next fault."""

    recipe: str
    kills: int
    seed: int = 0
    steps: int = 40
    roles: tuple[str, ...] = ROLES
    overrides: tuple[str, ...] = ()
    pause_s: float = 2.0
    deadline_s: float = 180.0
    disk_mb: int = 128
    compare: bool = False


@dataclass(frozen=True, slots=True)
class ChaosReport:
    plan: Plan
    faults: tuple[Fault, ...]
    findings: tuple[str, ...]
    skipped: tuple[str, ...]
    audit: AuditReport | None
    drivers: int
    seconds: float
    accuracy: float | None
    calm_accuracy: float | None

    @property
    def clean(self) -> bool:
        return not self.findings and self.audit is not None and self.audit.clean


class GaveUp(Exception):
    """The run does not train any more; the findings say why."""


class Chaos:
    """Args:
    work: directory for the run, its output and the evidence of hangs.
    """

    def __init__(self, plan: Plan, work: Path) -> None:
        self._plan, self._work = plan, work
        work.mkdir(parents=True, exist_ok=True)
        self._saboteur = Saboteur(plan.roles, work, seed=plan.seed, disk_mb=plan.disk_mb)
        self._rng = random.Random(plan.seed + 1)
        self._output = work / "output.txt"
        self._steps = plan.steps
        self._drivers: list[Driver] = []
        self._ended: list[tuple[Driver, float]] = []
        self._faults: list[Fault] = []
        self._findings: list[str] = []
        self._step = 0
        self._steps_trained = 0
        self._read = 0
        self._events: list[dict[str, Any]] = []
        self._looked_at = 0.0
        self._finished = False

    def run(self) -> ChaosReport:
        began = time.monotonic()
        audit = calm = None
        try:
            self._start()
            self._until_trained(None)
            for fault in self._saboteur.faults(lambda: self._drivers[-1], lambda: self._step):
                self._faults.append(fault)
                print(f"{fault.number}/{self._plan.kills} step {fault.step}: {fault.name} ({fault.detail})", flush=True)
                self._until_trained(fault)
                self._rest()
                if len(self._faults) >= self._plan.kills:
                    break
            if len(self._faults) < self._plan.kills:
                self._findings.append(f"only {len(self._faults)} of {self._plan.kills} faults could be injected")
            self._until_finished()
            self._until_gone()
        except GaveUp as why:
            self._findings.append(str(why))
        finally:
            self._clean_up()
        seconds = time.monotonic() - began
        if (self._run_dir / "config.json").exists():
            audit = audit_run(self._run_dir)
            self._findings += [f"audit: {finding}" for finding in audit.findings]
            if self._finished and (audit.outcome, audit.step) != ("finished", self._steps):
                self._findings.append(f"it ended with 0, but by its events it {audit.outcome} at step {audit.step}")
        if self._plan.compare:
            calm = self._calm()
        return ChaosReport(
            plan=self._plan,
            faults=tuple(self._faults),
            findings=tuple(self._findings),
            skipped=tuple(dict.fromkeys(self._saboteur.skipped)),
            audit=audit,
            drivers=len(self._drivers),
            seconds=seconds,
            accuracy=accuracy_of(self._run_dir),
            calm_accuracy=calm,
        )

    # -- waits -------------------------------------------------------------------------------------------------------

    def _until_trained(self, fault: Fault | None) -> None:
        """Returns when the run has trained a step since the fault, with its damage repaired; or has finished."""
        deadline = time.monotonic() + (self._plan.deadline_s if fault else START_S)
        drivers = len(self._drivers)
        while not self._finished:
            self._poll(fault)
            if len(self._drivers) > drivers:
                drivers, deadline = len(self._drivers), time.monotonic() + START_S
            if fault is None:
                if self._steps_trained:
                    return
            elif self._recovered(fault):
                fault.recovery_s = time.time() - fault.at_s
                return
            if time.monotonic() > deadline:
                self._hangs(fault)
        if fault is not None and fault.recovery_s is None:
            fault.recovery_s = time.time() - fault.at_s

    def _recovered(self, fault: Fault) -> bool:
        if self._saboteur.holds:
            return False
        since = [e for e in self._events if e["time_s"] > fault.at_s + fault.lasts_s]
        if fault.role not in ("disk", "reward") and fault.how != "stop":
            repaired = (*HEALED.get(fault.role, ()), "start")
            at = next((i for i, e in enumerate(since) if e["event"] in repaired), None)
            if at is None:
                return False
            since = since[at:]
        return any(e["event"] in ("trained", "end") for e in since)

    def _rest(self) -> None:
        until = time.monotonic() + self._rng.uniform(0, 2 * self._plan.pause_s)
        while time.monotonic() < until and not self._finished:
            self._poll(None)
        if self._finished and len(self._faults) < self._plan.kills:
            self._prolong()

    def _prolong(self) -> None:
        self._steps += self._plan.steps
        self._finished = False
        self._start()
        before = self._steps_trained
        deadline = time.monotonic() + START_S
        while self._steps_trained == before:
            self._poll(None)
            if time.monotonic() > deadline:
                self._hangs(None)

    def _until_finished(self) -> None:
        trained, deadline = self._steps_trained, time.monotonic() + self._plan.deadline_s
        while not self._finished:
            self._poll(None)
            if self._steps_trained != trained:
                trained, deadline = self._steps_trained, time.monotonic() + self._plan.deadline_s
            if time.monotonic() > deadline:
                self._hangs(None)

    def _until_gone(self) -> None:
        while self._ended:
            self._check_ended()
            time.sleep(POLL_S)

    def _poll(self, fault: Fault | None) -> None:
        """A moment of the run: what was due happens, what it wrote is read, a driver that ended is started again."""
        time.sleep(POLL_S)
        now = time.monotonic()
        self._saboteur.take_back()
        self._read_run()
        self._check_ended()
        driver = self._drivers[-1]
        code = driver.process.poll()
        if code is None:
            if now > self._looked_at + LOOK_S:
                self._looked_at = now
                driver.look()
            return
        if self._saboteur.disk_is_full:
            return  # a user would make room first
        self._ended.append((driver, time.monotonic() + ORPHAN_S))
        self._read_run()
        if code == 0:
            self._finished = True
            return
        last = fault or (self._faults[-1] if self._faults else None)
        if last is not None:
            last.ends.append(code)
        if last is None or code not in EXPLAINED.get(last.role, ()) or last.ends.count(code) > 1:
            cause = last.name if last else "no fault"
            self._findings.append(f"driver {len(self._drivers)} ended with {code} after {cause}: {self._last_words()}")
            if last is None or len(last.ends) > 3:
                raise GaveUp("the driver ends again and again")
        if self._rng.random() < 0.5:  # a user may be quick, or not
            self._until_gone()
        self._start()

    def _start(self) -> None:
        self._drivers.append(Driver(len(self._drivers) + 1, self._command(self._run_dir), self._output))

    def _check_ended(self) -> None:
        """What drivers that have ended left behind."""
        for driver, deadline in list(self._ended):
            left = driver.look()
            files = driver.leftovers()
            if (left or files) and time.monotonic() < deadline:
                continue
            number = self._drivers.index(driver) + 1
            for process in left:
                self._findings.append(f"driver {number} left process {process.pid} behind: {command_of(process)[:100]}")
            self._findings += [f"driver {number} left {file} behind" for file in files]
            driver.close()
            self._ended.remove((driver, deadline))

    def _hangs(self, fault: Fault | None) -> None:
        """Writes down what every process is doing, and gives up."""
        what = fault.name if fault else "no fault"
        lines = [f"no step for {self._plan.deadline_s:g} s after {what}", self._last_words()]
        for process in self._drivers[-1].look():
            try:
                lines.append(f"--- {process.pid} {process.status()} {command_of(process)[:120]}")
                if "python" in command_of(process) or "ray::" in command_of(process):
                    lines.append(stacks.read(process.pid))
            except psutil.Error:
                continue
        evidence = self._work / f"hang-{len(self._faults)}.txt"
        evidence.write_text("\n".join(lines) + "\n")
        raise GaveUp(f"no step for {self._plan.deadline_s:g} s after {what}: see {evidence}")

    # -- what the run writes -----------------------------------------------------------------------------------------

    def _read_run(self) -> None:
        """New events, without those of groups; steps that were trained are added as events `trained`."""
        path = self._run_dir / "events.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read)
                for raw in file:
                    if not raw.endswith(b"\n"):
                        break
                    self._read += len(raw)
                    if raw.startswith(b'{"event": "group"'):
                        continue
                    try:
                        event = json.loads(raw)
                    except ValueError:
                        continue  # torn; the audit judges it
                    self._events.append(event)
                    self._check_resume(event)
                    self._saboteur.noticed(*(role for role, kinds in NOTICED.items() if event["event"] in kinds))
        step = _last_step(self._run_dir / "metrics.jsonl")
        if step > self._step:
            self._steps_trained += step - self._step
            self._events.append({"event": "trained", "time_s": time.time(), "step": step})
        self._step = step

    def _check_resume(self, event: dict[str, Any]) -> None:
        spoiled = self._saboteur.corrupted
        if event["event"] != "resume" or not spoiled:
            return
        if event["checkpoint"] == spoiled:
            self._findings.append(f"resumed from {spoiled}, which was corrupted")
        if event["checkpoint"] is None:
            self._findings.append(f"started over after {spoiled} was corrupted; the one before was intact")
        self._saboteur.corrupted = ""

    def _last_words(self) -> str:
        words = self._output.read_text(errors="replace").splitlines() if self._output.exists() else []
        return " | ".join(line for line in words[-12:] if line.strip())[-900:]

    # -- around it ---------------------------------------------------------------------------------------------------

    @property
    def _run_dir(self) -> Path:
        return self._saboteur.run_dir

    def _command(self, run_dir: Path) -> list[str]:
        settings = [f"run.dir={run_dir}", f"run.max_steps={self._steps}", "resume=auto"]
        return [
            sys.executable,
            "-m",
            "asyncrl.commands.train",
            self._plan.recipe,
            *settings,
            *OVERRIDES,
            *self._plan.overrides,
        ]

    def _clean_up(self) -> None:
        self._saboteur.take_back(all_of_it=True)
        for driver in self._drivers:
            driver.close()
        self._saboteur.close()

    def _calm(self) -> float | None:
        """Accuracy of the same run without a fault."""
        run_dir = self._work / "calm"
        driver = Driver(0, self._command(run_dir), self._output)
        try:
            driver.process.wait(self._plan.deadline_s * max(1, self._steps))
            return accuracy_of(run_dir)
        finally:
            driver.close()


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # torn; the audit judges it
    return found


def _last_step(path: Path) -> int:
    lines = _lines(path)
    return int(lines[-1][Metric.STEP]) if lines else 0


def accuracy_of(run_dir: Path) -> float | None:
    values = [line[Metric.EVAL_ACCURACY] for line in _lines(run_dir / "metrics.jsonl") if Metric.EVAL_ACCURACY in line]
    return values[-1] if values else None
