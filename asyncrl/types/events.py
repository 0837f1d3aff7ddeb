"""The events of a run: one record per kind. `events.jsonl` has their fields by the same names.

A field declares what it may be, and the audit derives its checks of the file from that. Three names mean the same in
every event:

* `step` is an optimizer step, counted from 1; the event is about it or about the state that it left. 0: before step 1.
* `version` is a policy version, which is the number of optimizer steps that made it.
* `restarts` is how often a process of this role had been restarted before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from asyncrl.types.groups import LedgerCounts
from asyncrl.types.ranges import Seconds, Share, Whole

Transition = Literal[
    "admitted", "reissued", "ready", "leased", "released", "requeued", "trained", "filtered", "expired", "failed"
]


ENVELOPE = ("event", "time_s", "monotonic_s", "writer", "at", "chain")
"""What each line of the file has besides the fields of its event."""


@dataclass(frozen=True)
class Event:
    """`kind`: the value of `event` in the file. The docstring of a kind says when it is written."""

    kind: ClassVar[str]


@dataclass(frozen=True)
class RunStarted(Event):
    """Every process has started. From `groups_per_step` on: what the audit holds the run to; `verify` is
    `weights.verify`."""

    kind = "start"
    name: str
    resumed: bool
    pid: Whole
    groups_per_step: Whole
    max_lag: Whole
    max_steps: Whole
    replicas: Whole
    verify: Literal["off", "first", "always"]


@dataclass(frozen=True)
class TrainingResumed(Event):
    """Training begins, or begins again after a loss. `checkpoint` null: it starts at step 0 and undoes everything
    before."""

    kind = "resume"
    step: Whole
    checkpoint: str | None


@dataclass(frozen=True)
class SnapshotTaken(Event):
    """The queue captured its state for a checkpoint; `snapshot` is its id."""

    kind = "snapshot"
    snapshot: str
    step: Whole
    counts: LedgerCounts


@dataclass(frozen=True)
class SnapshotRestored(Event):
    """The queue went back to that snapshot; what came after it is undone."""

    kind = "restored"
    snapshot: str
    step: Whole
    counts: LedgerCounts


@dataclass(frozen=True)
class StepTrained(Event):
    """Optimizer step `step` trained these groups; `lag_max` is the largest lag of a token."""

    kind = "step"
    step: Whole
    ordinals: tuple[Whole, ...]
    lag_max: Whole


@dataclass(frozen=True)
class GroupChanged(Event):
    """A group changes its state, see the transitions below."""

    kind = "group"
    transition: Transition
    ordinal: Whole
    attempt: Whole
    trainer_version: Whole
    version: Whole
    oldest_version: Whole
    detail: str


@dataclass(frozen=True)
class WeightsPublished(Event):
    """`replicas` of the replicas serve `version` from now on. `attempts` counts transfers of `bytes` bytes each."""

    kind = "publish"
    version: Whole
    publish_s: Seconds
    pause_s: Seconds
    transfer_s: Seconds
    bytes: Whole
    verified: bool
    attempts: Whole
    replicas: Whole


@dataclass(frozen=True)
class ReplicaFailed(Event):
    """The replica is killed and, within `recovery.max_replica_restarts`, replaced."""

    kind = "replica_failed"
    replica: Whole
    error: str
    restarts: Whole


@dataclass(frozen=True)
class ReplicaStarted(Event):
    """The replacement has started and waits for its first publish."""

    kind = "replica_started"
    replica: Whole


@dataclass(frozen=True)
class ReplicaServing(Event):
    """The replica has committed weights and gets requests, at the start too."""

    kind = "replica_serving"
    replica: Whole


@dataclass(frozen=True)
class ReplicaSuspended(Event):
    """The replica answers too late; nothing waits for it any more."""

    kind = "replica_suspended"
    replica: Whole
    error: str


@dataclass(frozen=True)
class ReplicaRejoined(Event):
    """The suspended replica answers again and waits for a publish."""

    kind = "replica_rejoined"
    replica: Whole


@dataclass(frozen=True)
class ReplicaLeased(Event):
    """An evaluation has the replica for itself."""

    kind = "replica_leased"
    replica: Whole


@dataclass(frozen=True)
class ReplicaReturned(Event):
    """The evaluation has ended its lease; the replica waits for the current version."""

    kind = "replica_returned"
    replica: Whole


@dataclass(frozen=True)
class RollouterFailed(Event):
    """The rollouter has died or does not answer."""

    kind = "rollouter_failed"
    error: str
    restarts: Whole


@dataclass(frozen=True)
class RollouterRestarted(Event):
    """Another rollouter works; `groups` were requeued, and it took `seconds`."""

    kind = "rollouter_restarted"
    seconds: Seconds
    groups: Whole


@dataclass(frozen=True)
class TrainingFailed(Event):
    """The message queue or a trainer rank is lost."""

    kind = "training_failed"
    process: str
    error: str
    step: Whole


@dataclass(frozen=True)
class TrainingRestarted(Event):
    """The training side goes back to `checkpoint` (null: to the start); it took `seconds`."""

    kind = "training_restarted"
    process: str
    seconds: Seconds
    checkpoint: str | None


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """The checkpoint of `step` is complete; training waited for `capture_s`."""

    kind = "checkpoint"
    step: Whole
    path: str
    save_s: Seconds
    capture_s: Seconds


@dataclass(frozen=True)
class CheckpointFailed(Event):
    """The checkpoint of `step` could not be written."""

    kind = "checkpoint_failed"
    step: Whole
    error: str


@dataclass(frozen=True)
class SetEvaluated(Event):
    """`version` has answered the held-out set `name`, in the evaluation after `step`."""

    kind = "evaluation"
    step: Whole
    version: Whole
    name: str
    accuracy: Share
    interval: tuple[Share, Share]
    pass_at: Mapping[str, Share]
    samples: Whole
    prompts: Whole
    questions: Whole
    failed: Whole


@dataclass(frozen=True)
class EvaluationStarted(Event):
    """The evaluation after `step` begins on these leased replicas."""

    kind = "evaluation_started"
    step: Whole
    version: Whole
    replicas: tuple[Whole, ...]


@dataclass(frozen=True)
class EvaluationFailed(Event):
    """A set, or the whole evaluation on leased replicas, has no answer; `tries` includes this one."""

    kind = "evaluation_failed"
    step: Whole
    version: Whole
    tries: Whole
    error: str


@dataclass(frozen=True)
class EvaluationSkipped(Event):
    """No evaluation after `step`: the one after step `running` goes on."""

    kind = "evaluation_skipped"
    step: Whole
    running: Whole


@dataclass(frozen=True)
class RunFaulted(Event):
    """An error of class `error` ends the run."""

    kind = "fault"
    error: str
    message: str


@dataclass(frozen=True)
class RunEnded(Event):
    """The run ended without an error."""

    kind = "end"
    outcome: Literal["finished", "interrupted"]
    step: Whole


EVENTS: dict[str, type[Event]] = {event.kind: event for event in Event.__subclasses__()}
"""Kind -> its record."""
