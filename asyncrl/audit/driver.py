"""Checks the driver's events: lives, replicas, publishes, checkpoints and evaluations. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from asyncrl.audit.audit_report import Limits
from asyncrl.types import events

_REPLICA: dict[type[events.ReplicaEvent], tuple[tuple[str, ...], str]] = {
    events.ReplicaFailed: (("new", "serving", "leased", "suspended", "down"), "down"),
    events.ReplicaStarted: (("down",), "new"),
    events.ReplicaServing: (("new",), "serving"),
    events.ReplicaSuspended: (("new", "serving", "leased"), "suspended"),
    events.ReplicaRejoined: (("suspended",), "new"),
    events.ReplicaLeased: (("serving",), "leased"),
    events.ReplicaReturned: (("leased",), "new"),
    events.ReplicaJoined: (("away",), "down"),
    events.ReplicaLeft: (("new", "serving", "leased", "suspended", "down"), "away"),
}
"""Event -> (states of the replica in which it may occur, next state). `away`: not part of the fleet."""
_Life = events.RunFaulted | events.TrainingResumed | events.TrainingFailed | events.TrainingRestarted
_AT_ANY_TIME = events.ReplicaEvent | events.FleetResized | events.ModelReplicaChanged | _Life
"""Also while the run ends or its training side restarts, since background tasks tell them; except for the next ones."""
_IN_TRAINING = events.ReplicaServing | events.ReplicaLeased | events.ReplicaReturned


@dataclass(slots=True)
class _Beside:
    """An evaluation on leased replicas."""

    step: int
    version: int
    runs: bool = True


class Driver:
    """Follows the driver's events. `step` is always the step of the replay.

    A life is one process of the driver; within a life every `resume` begins a new training.
    """

    def __init__(self, limits: Limits, find: Callable[[str], None]) -> None:
        self._find = find
        self.life: Literal["none", "started", "training", "lost", "restarted", "ended"] = "none"
        """`lost`: the training side has failed and not restarted yet."""
        self.version = 0
        """The published version, as recorded by the queue."""
        self.evaluated: dict[int, dict[int, dict[str, events.SetEvaluated]]] = {}
        """Step that reported the result -> step of the evaluation -> set -> event."""
        self.failed: dict[int, set[int]] = {}
        """Step that reported the failure -> steps of failed evaluations."""
        self._limits = limits
        self._resumed = False
        self._published: int | None = None
        self._versions: set[int] = set()
        self._is_due = False
        """The queue has recorded a version without its `publish` event so far."""
        self._replicas: dict[int, str] = {}
        self._wanted = limits.replicas
        """Number of replicas that the run wants."""
        self._joined = self._left = 0
        """Replicas that began to serve, and that failed or were suspended, since the last publish."""
        self._restarts: Counter[str] = Counter()
        self._rollouter_is_gone = False
        self._restarted_from: str | None = None
        self._captured: int | None = None
        """Step of the snapshot whose checkpoint is being written."""
        self._checkpoint = -1
        """Step of the newest checkpoint."""
        self._told: set[tuple[int, str]] = set()
        self._beside: _Beside | None = None
        self._takes_turns = False
        """True once engines have slept since `start`: then they sleep before every step."""
        self._turn: int | None = None
        """Step for which the trainer has the devices; None after a publish."""

    @property
    def trains(self) -> bool:
        """True once this training has published. Before that no group is admitted, and a stop leaves no checkpoint."""
        return self.life == "training" and self._published is not None

    def on(self, event: events.Event, step: int) -> None:
        """Handles every event except those of the message queue, `start` and `end`."""
        if isinstance(event, _IN_TRAINING) or not isinstance(event, _AT_ANY_TIME):
            self._expect(event.kind, "training")
        match event:
            case events.RunFaulted() | events.TrainingResumed() | events.TrainingFailed() | events.TrainingRestarted():
                self._on_life(event)
            case events.StepTrained():
                self.settled(event.kind)
                if self._takes_turns and self._turn != event.step:
                    self._find(f"step {event.step} is trained, but nothing tells that the engines slept for it")
            case events.EnginesSlept():
                self._on_turn(event, step)
            case events.WeightsPublished():
                self._on_publish(event, step)
            case events.CheckpointSaved() | events.CheckpointFailed() | events.CheckpointLate():
                self._on_checkpoint(event)
            case events.RollouterFailed() | events.RollouterRestarted():
                self._on_rollouter(event)
            case events.SetEvaluated():
                self._on_evaluation(event, step)
            case events.EvaluationStarted() | events.EvaluationFailed() | events.EvaluationSkipped():
                self._on_beside(event, step)
            case events.ReplicaEvent() | events.FleetResized():
                self._on_fleet(event)

    # -- its lives ---------------------------------------------------------------------------------------------------

    def start(self, limits: Limits, *, resumed: bool) -> None:
        self.life, self._limits, self._resumed = "started", limits, resumed
        self._replicas.clear()
        self._wanted = limits.replicas
        self._restarts.clear()
        self._checkpoint = -1
        self._takes_turns = False

    def end(self, outcome: str, step: int) -> None:
        if self.life in ("none", "ended"):
            self._find(f"the run {outcome}, but it was not running")
        if self.trains:
            self.settled(f"its end ({outcome})")
            if (outcome == "finished") != (step >= self._limits.max_steps):
                self._find(f"the run {outcome} after step {step} of {self._limits.max_steps}")
            if self._captured is not None or self._checkpoint != step:
                self._find(f"the run {outcome} after step {step}, but its last checkpoint is of {self._checkpoint}")
        elif outcome == "finished":
            self._find("the run finished without having published anything since it resumed")
        self.life = "ended"

    def undo(self, step: int, version: int) -> None:
        """Returns to the state of that step; -1: the state before the run."""
        self.version = version
        # Results are reported at the end of a step, before its snapshot; a run at step 0 evaluates again.
        self.evaluated = {told: found for told, found in self.evaluated.items() if told <= step and step > 0}
        self.failed = {told: found for told, found in self.failed.items() if told <= step and step > 0}

    def queue_acts(self, what: str, *, by_rollouter: bool = False) -> None:
        """Checks that a training is in progress when the queue acts; the queue may outlive its driver for a moment."""
        if self.life in ("none", "started", "restarted"):
            self._expect(what, "training")
        elif by_rollouter and self.life == "training" and self._published is None:
            self._find(f"{what} before anything was published since the run resumed")

    def _expect(self, kind: str, *lives: str) -> None:
        if self.life not in lives:
            found = {"none": "before any `start`", "started": "before any `resume`", "ended": "after the end"}
            self._find(f"{kind} {found.get(self.life, f'while the training side is {self.life}')}")

    def _on_resume(self, step: int, checkpoint: str | None) -> None:
        self._expect("resume", "started", "restarted")
        if self.life == "restarted" and checkpoint != self._restarted_from:
            self._find(f"resume from {checkpoint}; the training side was restarted from {self._restarted_from}")
        if self.life == "started" and self._resumed != (checkpoint is not None):
            self._find(f"resume from {checkpoint}, where `start` has resumed {self._resumed}")
        if checkpoint is not None and checkpoint.startswith("step_") and checkpoint != f"step_{step}":
            self._find(f"resume at step {step} from {checkpoint}")
        self.life = "training"
        self._checkpoint = -1 if checkpoint is None else step
        self._published = self._captured = self._beside = self._turn = None
        self._is_due = self._rollouter_is_gone = False
        self._joined = self._left = 0
        self._versions.clear()
        self._told.clear()

    def _on_life(self, event: _Life) -> None:
        match event:
            case events.RunFaulted():
                self.life = "ended"
            case events.TrainingResumed():
                self._on_resume(event.step, event.checkpoint)
            case events.TrainingRestarted():
                self._expect(event.kind, "lost")
                self.life, self._restarted_from = "restarted", event.checkpoint
            case events.TrainingFailed():
                if self.life in ("none", "ended"):
                    self._expect(event.kind)
                self.life = "lost"
                # The replicas' weights belong to steps that may be undone: they wait for the next publish.
                self._replicas |= {i: "new" for i, now in self._replicas.items() if now in ("serving", "leased")}

    def _on_rollouter(self, event: events.RollouterFailed | events.RollouterRestarted) -> None:
        if isinstance(event, events.RollouterFailed):
            self._count_restarts("the rollouter", event.restarts)
        elif not self._rollouter_is_gone:
            self._find("the rollouter was restarted, but it had not failed")
        self._rollouter_is_gone = isinstance(event, events.RollouterFailed)

    def _count_restarts(self, what: str, restarts: int) -> None:
        if restarts != self._restarts[what]:
            self._find(f"{what} failed after {restarts} restarts; told were {self._restarts[what]}")
        self._restarts[what] = restarts + 1

    # -- replicas and publishes --------------------------------------------------------------------------------------

    def saw_version(self, version: int, step: int) -> None:
        """A group has a new version."""
        if version != step or version < self.version:
            self._find(f"version {version} after {step} steps; published was {self.version}")
        self.version = version
        self._is_due = self.life == "training"

    def settled(self, before: str) -> None:
        """Checks that no sequence of events is incomplete."""
        if self._is_due:
            self._find(f"version {self.version} is in use before {before}, but no `publish` event tells of it")
        if self._joined:
            self._find(f"{self._joined} replicas began to serve before {before}, but no publish reached them")
        self._is_due, self._joined = False, 0

    def _on_publish(self, event: events.WeightsPublished, step: int) -> None:
        version, replicas, verified = event.version, event.replicas, event.verified
        serving = sum(state == "serving" for state in self._replicas.values())
        if version != step:
            self._find(f"publish of version {version} after {step} steps")
        if version == self._published:  # serving replicas already have it: this publish was for newcomers
            least, most = max(0, self._joined - self._left), self._joined
            if not (self._joined or self._left):
                self._find(f"version {version} is published again, and no replica has joined since")
        else:
            least, most = serving, serving + self._left
        if not least <= replicas <= most:
            self._find(f"publish of version {version} to {replicas} replicas; told were {least} to {most}")
        if event.attempts < 1:
            self._find(f"publish of version {version} without a transfer")
        # With `first`, the first publish and every publish to newcomers carry digests.
        verify = self._limits.verify
        is_owed = verify == "always" or (verify == "first" and (self._joined > 0 or self._published is None))
        if (is_owed and not verified) or (verify == "off" and verified):
            how = "verified" if verified else "not verified"
            self._find(f"publish of version {version} is {how} with weights.verify={verify}")
        self._turn = None
        self.version = self._published = version
        self._versions.add(version)
        self._is_due, self._joined, self._left = False, 0, 0

    def _on_turn(self, event: events.EnginesSlept, step: int) -> None:
        asleep = set(event.replicas)
        up = {i for i, state in self._replicas.items() if state not in ("down", "suspended", "away")}
        if event.step != step + 1 or self._turn is not None:
            self._find(f"engines sleep for step {event.step} after step {step}, without a publish since {self._turn}")
        if len(asleep) < len(event.replicas) or not asleep <= up:
            self._find(f"engines of replicas {list(event.replicas)} sleep; up were {sorted(up)}")
        self._takes_turns, self._turn = True, event.step

    def _on_fleet(self, event: events.ReplicaEvent | events.FleetResized) -> None:
        known = self.life not in ("none", "ended")
        if isinstance(event, events.FleetResized):
            if known and event.former != self._wanted:
                self._find(f"{event.replicas} replicas are wanted in place of {event.former}; it were {self._wanted}")
            self._wanted = event.replicas
            return
        replica = event.replica
        allowed, after = _REPLICA[type(event)]
        unseen = "new" if replica < self._limits.replicas else "away"
        before = self._replicas.get(replica, unseen if known else allowed[0])
        if before not in allowed:
            self._find(f"{event.kind} of replica {replica}, which is {before}, of {self._limits.replicas}")
        if isinstance(event, events.ReplicaJoined) and known and self._num_there >= self._wanted:
            self._find(f"replica {replica} joins {self._num_there} others; {self._wanted} are wanted")
        if isinstance(event, events.ReplicaFailed):
            self._count_restarts("a replica", event.restarts)
        self._replicas[replica] = after
        self._joined += after == "serving"
        self._left += before != "away" and after in ("down", "suspended", "away")

    @property
    def _num_there(self) -> int:
        """Replicas of the fleet, whatever their state."""
        seen = self._replicas
        return sum(state != "away" for state in seen.values()) + len(set(range(self._limits.replicas)) - seen.keys())

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def snapshot(self, step: int) -> None:
        """The queue has captured its state between two steps."""
        if self.life != "training":
            return  # a late call, after the driver has continued without this queue
        self.settled("a snapshot")
        if self._captured is not None:
            self._find(f"snapshot of step {step}, but nothing tells what became of the checkpoint of {self._captured}")
        self._captured = step

    def _on_checkpoint(self, event: events.CheckpointSaved | events.CheckpointFailed | events.CheckpointLate) -> None:
        step = event.step
        if step != self._captured:
            found = "none was begun" if self._captured is None else f"that of step {self._captured} was begun"
            self._find(f"{event.kind} of step {step}, but {found}")
        if isinstance(event, events.CheckpointLate):
            return
        self._captured = None
        if isinstance(event, events.CheckpointSaved):
            self._checkpoint = step
            if event.path != f"step_{step}":
                self._find(f"the checkpoint of step {step} is called {event.path}")

    # -- evaluations -------------------------------------------------------------------------------------------------

    def _on_evaluation(self, event: events.SetEvaluated, step: int) -> None:
        at, name, accuracy, (low, high) = event.step, event.name, event.accuracy, event.interval
        if (at, name) in self._told:
            self._find(f"the evaluation of {name} after step {at} is told twice")
        if at != step and (self._beside is None or at != self._beside.step):
            self._find(f"an evaluation after step {at}; the run is at step {step}")
        if event.version not in self._versions:
            self._find(f"an evaluation of version {event.version}, which was not published since the run resumed")
        if not low - 1e-9 <= accuracy <= high + 1e-9:
            self._find(f"the accuracy {accuracy} of {name} after step {at} lies outside its interval")
        if event.failed > event.prompts * max(1, event.samples):
            self._find(f"{event.failed} responses of {name} failed after step {at}; there were fewer")
        if self._beside is not None and at == self._beside.step:
            self._beside.runs = False
        self._told.add((at, name))
        self.evaluated.setdefault(step, {}).setdefault(at, {})[name] = event

    def _on_beside(
        self, event: events.EvaluationStarted | events.EvaluationFailed | events.EvaluationSkipped, step: int
    ) -> None:
        runs = self._beside if self._beside is not None and self._beside.runs else None
        if isinstance(event, events.EvaluationStarted):
            leased = sorted(i for i, state in self._replicas.items() if state == "leased")
            if runs is not None or list(event.replicas) != leased or not leased:
                self._find(f"an evaluation begins on replicas {event.replicas}; leased are {leased}, {runs} is running")
            if (event.step, event.version) != (step, self._published):
                self._find(f"an evaluation of version {event.version} begins after step {step}")
            self._beside = _Beside(event.step, event.version)
            return
        if isinstance(event, events.EvaluationSkipped):
            if runs is None or (event.step, event.running) != (step, runs.step):
                self._find(f"an evaluation after step {event.step} is skipped for {event.running}; {runs} runs")
            return
        at, version = event.step, event.version
        if runs is not None and (at, version) == (runs.step, runs.version):
            runs.runs = False
        elif at != step or version not in self._versions:
            self._find(f"an evaluation of version {version} after step {at} has failed; running is {runs}")
        self.failed.setdefault(step, set()).add(at)
