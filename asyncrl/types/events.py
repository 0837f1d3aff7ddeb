"""The events of a run: one record per kind. `events.jsonl` has their fields by the same names.

The audit derives its checks of the file from the fields' types. Three names mean the same in every event:

* `step` is an optimizer step, counted from 1, or the state after it. 0: before step 1.
* `version` is a policy version: the number of optimizer steps behind it.
* `restarts` counts earlier restarts of processes of this role.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, dataclass_transform

from asyncrl.ranges import NonNegative, Share, Whole
from asyncrl.types.groups import LedgerCounts
from asyncrl.types.guard import GuardAction

Transition = Literal[
    "admitted", "reissued", "ready", "leased", "released", "requeued", "trained", "filtered", "expired", "failed"
]

Departure = Literal["scaled", "preempted", "no_place"]

ENVELOPE = ("event", "time_s", "monotonic_s", "writer", "at", "chain")
"""Keys of every line in addition to the fields of its event."""


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Event:
    """`kind`: the value of `event` in the file. Every subclass becomes a frozen dataclass; the docstring of a kind says
    when it is written."""

    kind: ClassVar[str]

    def __init_subclass__(cls, kind: str = "") -> None:
        dataclass(frozen=True)(cls)
        if kind:
            cls.kind = kind
            EVENTS[kind] = cls


EVENTS: dict[str, type[Event]] = {}
"""Kind -> its record."""


class ReplicaEvent(Event):
    """Of one replica."""

    replica: Whole


class RunStarted(Event, kind="start"):
    """Every process has started. The fields from `groups_per_step` on are limits that the audit checks; `verify` is
    `weights.verify`."""

    name: str
    resumed: bool
    pid: Whole
    groups_per_step: Whole
    max_lag: Whole
    max_steps: Whole
    replicas: Whole
    verify: Literal["off", "first", "always"]


class TrainingResumed(Event, kind="resume"):
    """Training begins, or begins again after a loss. `checkpoint` null: it starts at step 0 and undoes everything
    before. `queue`: `writer` of the message queue's lines from here on. Lines of an earlier queue, whose process was
    given up and still ran, change nothing."""

    step: Whole
    checkpoint: str | None
    queue: str = ""


class SnapshotTaken(Event, kind="snapshot"):
    """The queue captured its state for a checkpoint; `snapshot` is its id."""

    snapshot: str
    step: Whole
    counts: LedgerCounts


class SnapshotRestored(Event, kind="restored"):
    """The queue went back to that snapshot; later changes are undone."""

    snapshot: str
    step: Whole
    counts: LedgerCounts


class StepTrained(Event, kind="step"):
    """Optimizer step `step` trained these groups; `lag_max` is the largest lag of a token."""

    step: Whole
    ordinals: tuple[Whole, ...]
    lag_max: Whole


class GroupChanged(Event, kind="group"):
    """A group changes its state, see the transitions below."""

    transition: Transition
    ordinal: Whole
    attempt: Whole
    trainer_version: Whole
    version: Whole
    oldest_version: Whole
    detail: str


class GuardChanged(Event, kind="guard_changed"):
    """The off-policy guard has acted after `step`. `acted` false: it would have (staleness.guard=watch). From now on no
    token over lag `limit` is trained. stopped: the run ends for this `reason`."""

    step: Whole
    action: GuardAction
    limit: Whole
    acted: bool
    reason: str


class WeightsPublished(Event, kind="publish"):
    """`replicas` is the number of replicas that now serve `version`; `attempts` counts transfers of `bytes` bytes."""

    version: Whole
    publish_s: NonNegative
    pause_s: NonNegative
    transfer_s: NonNegative
    bytes: Whole
    verified: bool
    attempts: Whole
    replicas: Whole


class EnginesSlept(Event, kind="engines_slept"):
    """With placement=colocated: the trainer has the devices for `step`. These `replicas` have released their memory,
    which took `begin_s`; processes of other replicas have exited. The next publish wakes them."""

    step: Whole
    replicas: tuple[Whole, ...]
    begin_s: NonNegative


class ReplicaFailed(ReplicaEvent, kind="replica_failed"):
    """The replica is killed and, within `recovery.max_replica_restarts`, replaced."""

    error: str
    restarts: Whole


class ReplicaStarted(ReplicaEvent, kind="replica_started"):
    """The replacement, or the replica that has joined, has started and waits for its first publish."""


class ReplicaServing(ReplicaEvent, kind="replica_serving"):
    """The replica has committed weights and gets requests (also at the start)."""


class ReplicaSuspended(ReplicaEvent, kind="replica_suspended"):
    """The replica answers too late; nothing waits for it any more."""

    error: str


class ReplicaRejoined(ReplicaEvent, kind="replica_rejoined"):
    """The suspended replica answers again and waits for a publish."""


class ReplicaLeased(ReplicaEvent, kind="replica_leased"):
    """An evaluation has leased the replica."""


class ReplicaReturned(ReplicaEvent, kind="replica_returned"):
    """The evaluation has ended its lease; the replica waits for the current version."""


class FleetResized(Event, kind="fleet_resized"):
    """The target is now `replicas` replicas instead of `former`. `asked_by` recipe: at the start, by
    rollout.max_replicas; command: by asyncrl-scale."""

    replicas: Whole
    former: Whole
    asked_by: Literal["recipe", "command"]


class ReplicaJoined(ReplicaEvent, kind="replica_joined"):
    """A new replica, or one that had left, has a place and starts."""


class ReplicaLeft(ReplicaEvent, kind="replica_left"):
    """The replica gets no more requests, and its process ends. `why` scaled: fewer are wanted; preempted: its process
    or its node was asked to end; no_place: no node has room for its replacement."""

    why: Departure


class ModelReplicaChanged(Event, kind="model_replica"):
    """A replica of a model other than the policy, in the recipe's section `pool`. `change` is the event's kind for a
    policy replica."""

    pool: str
    replica: Whole
    change: str
    error: str


class RollouterFailed(Event, kind="rollouter_failed"):
    """The rollouter has died or does not answer."""

    error: str
    restarts: Whole


class RollouterRestarted(Event, kind="rollouter_restarted"):
    """A new rollouter has started after `seconds`; `groups` were requeued."""

    seconds: NonNegative
    groups: Whole


class TrainingFailed(Event, kind="training_failed"):
    """The message queue or a trainer rank is lost."""

    process: str
    error: str
    step: Whole


class TrainingRestarted(Event, kind="training_restarted"):
    """The training side has restarted from `checkpoint` (null: from the start); it took `seconds`."""

    process: str
    seconds: NonNegative
    checkpoint: str | None


class CheckpointSaved(Event, kind="checkpoint"):
    """The checkpoint of `step` is complete; training waited for `capture_s`."""

    step: Whole
    path: str
    save_s: NonNegative
    capture_s: NonNegative


class CheckpointFailed(Event, kind="checkpoint_failed"):
    """The checkpoint of `step` could not be written."""

    step: Whole
    error: str


class CheckpointLate(Event, kind="checkpoint_late"):
    """Writing the checkpoint of `step` has taken another `checkpoint.timeout_s`; it continues."""

    step: Whole
    error: str


class SetEvaluated(Event, kind="evaluation"):
    """`version` has answered the held-out set `name`, in the evaluation after `step`."""

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


class EvaluationStarted(Event, kind="evaluation_started"):
    """The evaluation after `step` begins on these leased replicas."""

    step: Whole
    version: Whole
    replicas: tuple[Whole, ...]


class EvaluationFailed(Event, kind="evaluation_failed"):
    """A set, or the whole evaluation on leased replicas, has no answer; `tries` includes this one."""

    step: Whole
    version: Whole
    tries: Whole
    error: str


class EvaluationSkipped(Event, kind="evaluation_skipped"):
    """No evaluation after `step`, because the evaluation after step `running` is still in progress."""

    step: Whole
    running: Whole


class RunFaulted(Event, kind="fault"):
    """An error of class `error` ends the run."""

    error: str
    message: str


class RunEnded(Event, kind="end"):
    """The run ended without an error."""

    outcome: Literal["finished", "interrupted"]
    step: Whole


FAULTS = tuple(event.kind for event in (ReplicaFailed, ReplicaSuspended, RollouterFailed, TrainingFailed, RunFaulted))
"""The kinds of events that tell of a fault."""
