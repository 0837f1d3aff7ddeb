"""Replays the events of a run against the rules that every group must obey. Pure: no files, no clock."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from asyncrl.audit.audit_report import COUNTS, STATES, Finding, Limits, Rollback
from asyncrl.audit.driver import Driver
from asyncrl.audit.saved import NOTHING, Announced, GroupNow, Mark, Saved
from asyncrl.json_records import from_plain
from asyncrl.ranges import is_finite
from asyncrl.types import LedgerCounts, events
from asyncrl.types.events import ENVELOPE, Event

# Parses an event from the JSON object of a line.


def read_event(line: Mapping[str, Any]) -> Event | str:
    """The event, or the reason why the line is malformed."""
    kind = line.get("event")
    record = events.EVENTS.get(kind) if isinstance(kind, str) else None
    if record is None:
        return f"malformed: there is no event {json.dumps(kind)[:80]}"
    try:
        for time in ("time_s", "monotonic_s"):
            if type(line.get(time)) not in (int, float) or not is_finite(line[time]):
                raise ValueError(f"{time} is no time")
        return from_plain(record, {name: value for name, value in line.items() if name not in ENVELOPE})
    except ValueError as error:
        return f"malformed: {error} in {json.dumps(line)[:200]}"


EVENTS = "events.jsonl"
# `waiting`: a running group that waits to be reissued.
_MOVES: dict[str, tuple[tuple[str, ...], str]] = {
    "reissued": (("waiting",), "running"),
    "ready": (("running",), "ready"),
    "leased": (("ready",), "leased"),
    "released": (("leased",), "ready"),
    "trained": (("leased",), "trained"),
    "filtered": (("running",), "filtered"),
    "failed": (("running",), "failed"),
    "expired": (("waiting", "running", "ready"), "expired"),
}
_TROUBLE = ("failed", "suspended")


class Audit:
    """Replays the events of a run: call `feed` or `torn` for every line, then `close`.

    An illegal transition is a finding but is still applied, so that one fault is reported once. A rollback walks back a
    journal of the transitions, so the whole replay is linear in the number of events.
    """

    def __init__(self, limits: Limits, saved: Iterable[Saved] = ()) -> None:
        """
        Args:
            limits: of the recipe; each `start` event replaces them.
            saved: the checkpoints next to the log.
        """
        self.limits = limits
        self._max_lag = limits.max_lag
        """The present limit on the lag: the run's, or a lower one of the off-policy guard."""
        self.findings: list[Finding] = []
        self.rollbacks: list[Rollback] = []
        self.troubles: Counter[str] = Counter()
        self.recoveries: Counter[str] = Counter()
        self._lost: set[int | None] = set()
        """Replicas that have failed."""
        self.replaced: Counter[str] = Counter()
        """Writer -> its lines that were ignored, because another queue had replaced it."""
        self.starts = self.crashes = self.num_torn = self.events = 0
        self.max_lag = -1
        self.step = 0
        self.is_lost = False
        """True if the state from which the run continued is unknown: until the next restart only lags are checked."""
        self.goes_back = False
        """No step was completed since the last rollback: the metrics may still have lines of undone steps."""
        self.outcome = "unknown"
        self.counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
        self._held = 0
        """Groups that were trained or active when the run resumed: a shortened run may train fewer."""
        self.lags: dict[int, tuple[int, int | None]] = {}
        """Trained step -> (largest lag of its groups, lag stated by its `step` event)."""
        self._saved = {each.snapshot: each for each in saved}
        self.driver = Driver(limits, lambda text: None if self.is_lost else self._find(text))
        self._next_ordinal = 0
        self._groups: dict[int, GroupNow] = {}
        self._journal: list[tuple[int, GroupNow | None]] = []
        self._marks: dict[str, Mark] = {}
        self._torn: list[int] = []
        self._last_life = 0
        self._training: list[tuple[int, int]] = []  # (ordinal, lag) trained so far by the step in commit
        self._announced: Announced | None = None
        self._any_announced = False
        self._unannounced: list[tuple[int, int]] = []  # (line, step)
        self._awaiting: tuple[int, int | None] | None = None  # (line, step) of a resume, until its `restored`
        self.unsure = False
        """True if the queue or a trainer was lost, and nothing was restored since."""
        self._line = 0
        self._queue = ""
        """Writer of the queue's lines, from the last `resume` on; empty if it is not known."""
        self._former_queues: set[str] = set()

    @property
    def unfinished(self) -> tuple[int, ...]:
        return tuple(o for o, g in sorted(self._groups.items()) if g.state == "waiting" or g.state in STATES)

    def feed(self, number: int, line: Mapping[str, Any]) -> None:
        """Replays the JSON object of line `number`. A malformed object is a finding."""
        self._line = number
        self.events += 1
        match read_event(line):
            case str(wrong):
                self._find(wrong)
            case events.GroupChanged() | events.SnapshotTaken() | events.SnapshotRestored() if self._is_replaced(
                writer := str(line.get("writer"))
            ):
                self.replaced[writer] += 1
            case events.GroupChanged() as event:
                self._on_group(event)
            case event:
                self._on_other(event, line.get("chain"))

    def torn(self, line: int) -> None:
        """Records a line that a crash left incomplete: not a finding if everything after it was undone."""
        self.num_torn += 1
        self._torn.append(line)

    def close(self) -> None:
        """Checks the end of the log."""
        self._line = 0
        if not self.events:
            self._find("it holds no event: nothing is proven")
        for saved in self._saved.values():
            self._find(f"the snapshot {saved.snapshot} of checkpoints/{saved.name} is not in it: lines are missing")
        for line in self._torn:
            if line < self._last_life:
                self._line = line
                self._find("no JSON, and the run went on without undoing it: something may be missing here")
        if self._any_announced:
            for line, step in self._unannounced:
                self._line = line
                self._find(f"the queue committed step {step}, which the coordinator never announced (no `step` event)")

    def _is_replaced(self, writer: str) -> bool:
        """True for a queue that was given up: its process may still run, for example after a SIGCONT."""
        return writer in self._former_queues or self._queue not in ("", writer)

    def _give_up_queue(self) -> None:
        """The present queue has no part in what follows."""
        self._former_queues |= {self._queue} - {""}
        self._queue = ""

    # -- groups ------------------------------------------------------------------------------------------------------

    def _on_group(self, event: events.GroupChanged) -> None:
        kind, ordinal, attempt = event.transition, event.ordinal, event.attempt
        step, oldest = event.trainer_version, event.oldest_version
        self._lives()
        if self.is_lost:
            if kind == "trained":
                self._check_lag(ordinal, step - oldest)
            return
        if self.outcome == "finished":
            self._find(f"group {ordinal} is {kind} after the run had finished")
        self.driver.queue_acts(f"group {ordinal} is {kind}", by_rollouter=kind in ("admitted", "reissued", "ready"))
        # The queue's step and version come first: the transition is judged by them.
        if step != self.step:
            self._step_differs(step)
        if event.version != self.driver.version:
            self.driver.saw_version(event.version, self.step)
        before = self._groups.get(ordinal)
        if kind == "admitted":
            after = self._admitted(before, ordinal, attempt, oldest)
        elif kind == "requeued":
            after = self._requeued(before, ordinal, attempt, oldest)
        else:
            allowed, state = _MOVES[kind]
            if before is None or before.state not in allowed or before.attempt != attempt:
                self._find(f"group {ordinal}.{attempt} is {kind}, but {_was(before)}")
            else:
                self._check_version(kind, ordinal, before, oldest)
            after = GroupNow(state, attempt, oldest)
        self._set(ordinal, before, after)
        if kind == "trained":
            self._trained(ordinal, oldest)

    def _admitted(self, before: GroupNow | None, ordinal: int, attempt: int, oldest: int) -> GroupNow:
        if before is None and attempt == 0:
            if ordinal != self._next_ordinal:
                self._find(f"group {ordinal} is admitted, but the next ordinal is {self._next_ordinal}")
            if oldest != self.driver.version:
                self._find(f"group {ordinal} is admitted at version {oldest}; published is {self.driver.version}")
            self._next_ordinal = max(self._next_ordinal, ordinal + 1)
            return GroupNow("running", attempt, oldest)
        if before is None or before.state != "expired" or attempt != before.attempt + 1:
            self._find(f"group {ordinal}.{attempt} is admitted, but {_was(before)}")
        elif oldest != self.driver.version:
            self._find(f"group {ordinal} is admitted again at version {oldest}; published is {self.driver.version}")
        return GroupNow("waiting", attempt, oldest)

    def _requeued(self, before: GroupNow | None, ordinal: int, attempt: int, oldest: int) -> GroupNow:
        if before is None or before.state not in ("running", "waiting") or attempt != before.attempt + 1:
            self._find(f"group {ordinal}.{attempt} is requeued, but {_was(before)}")
        elif oldest != min(before.version, self.driver.version):
            self._find(f"group {ordinal} is requeued with version {oldest}; it had {before.version}")
        return GroupNow("waiting", attempt, oldest)

    def _check_version(self, kind: str, ordinal: int, before: GroupNow, oldest: int) -> None:
        name = f"group {ordinal}.{before.attempt} is {kind} with version {oldest}"
        if kind == "reissued":
            if oldest not in (before.version, self.driver.version):
                self._find(f"{name}; it had {before.version}, published is {self.driver.version}")
        elif kind in ("ready", "filtered"):
            if not before.version <= oldest <= self.step:
                self._find(f"{name}, outside [its admission {before.version}, the trained steps {self.step}]")
        elif kind == "leased":
            # The mask may have removed the older tokens of a group over the limit: no remaining token is over it.
            masked = before.version < self.step - self._max_lag <= oldest <= self.step
            if oldest != before.version and not masked:
                self._find(f"{name}, but it was ready with {before.version}")
        elif oldest != before.version:
            self._find(f"{name}, but it was {before.state} with {before.version}")

    def _trained(self, ordinal: int, oldest: int) -> None:
        lag = self.step - oldest
        self._check_lag(ordinal, lag)
        self._training.append((ordinal, lag))
        if len(self._training) == self.limits.groups_per_step:
            self._complete()

    def _check_lag(self, ordinal: int, lag: int) -> None:
        self.max_lag = max(self.max_lag, lag)
        if not 0 <= lag <= self._max_lag:
            self._find(f"group {ordinal} is trained with lag {lag}; the limit is {self._max_lag}")

    def _complete(self) -> None:
        """The queue has committed a step."""
        ordinals = tuple(sorted(ordinal for ordinal, _ in self._training))
        lag_max = max((lag for _, lag in self._training), default=0)
        if self.counts["leased"]:
            self._find(f"step {self.step + 1} is complete while {self.counts['leased']} groups are still leased")
        announced, self._announced = self._announced, None
        if announced is None:
            self._unannounced.append((self._line, self.step + 1))
        elif announced.ordinals != ordinals:
            wrong = sorted(set(announced.ordinals) ^ set(ordinals))
            self._find(f"step {self.step + 1} announced other groups than were committed: {wrong[:8]}")
        elif announced.lag_max > lag_max:
            self._find(f"step {self.step + 1} announced lag {announced.lag_max}; of its groups it is {lag_max}")
        self._forget_lags(self.step)
        self.lags[self.step] = lag_max, None if announced is None else announced.lag_max
        self._training.clear()
        self.step += 1
        self.goes_back = False

    def _step_differs(self, step: int) -> None:
        if step < self.step:
            self._find(f"an event of trainer version {step} after step {self.step} was complete")
        else:
            found, asked = len(self._training), self.limits.groups_per_step
            self._find(f"step {self.step + 1} trained {found} groups, not {asked}, and trainer version {step} goes on")
        self._training.clear()
        self._announced = None
        self.step = step

    # -- everything else ---------------------------------------------------------------------------------------------

    def _on_other(self, event: events.Event, chain: Any) -> None:
        if not isinstance(event, events.RunStarted | events.RunEnded | events.SnapshotTaken | events.SnapshotRestored):
            self.driver.on(event, self.step)
        match event:
            case events.StepTrained() if not self.is_lost:
                self._on_step(event.step, tuple(sorted(event.ordinals)), event.lag_max)
            case events.SnapshotTaken():
                self._on_snapshot(event, chain)
            case events.SnapshotRestored():
                self._on_restored(event)
            case events.TrainingResumed():
                self._on_resume(event)
            case events.RunStarted():
                self._on_start(event)
            case events.RunEnded():
                self._on_end(event.outcome, event.step)
            case events.TrainingRestarted():
                self._give_up_queue()
                self._note(event)
            case events.GuardChanged():
                self._on_guard(event)
            case _:
                self._note(event)

    def _on_guard(self, event: events.GuardChanged) -> None:
        if event.limit > self.limits.max_lag:
            self._find(
                f"the guard has set the limit {event.limit} on the lag; that of the run is {self.limits.max_lag}"
            )
        elif event.acted:
            self._max_lag = event.limit

    def _note(self, event: events.Event) -> None:
        """Counts troubles and recoveries for the report."""
        if isinstance(event, events.RunFaulted):
            self.outcome = "failed"
            self.troubles[f"{event.kind} {event.error}"] += 1
        elif event.kind.endswith(_TROUBLE):
            self.unsure |= isinstance(event, events.TrainingFailed)
            self.troubles[_named(event)] += 1
            self._lost.add(getattr(event, "replica", None))
        elif event.kind.endswith(("restarted", "rejoined")) or (
            isinstance(event, events.ReplicaServing) and event.replica in self._lost
        ):
            self.recoveries[_named(event)] += 1

    def _on_start(self, event: events.RunStarted) -> None:
        limits = event.groups_per_step, event.max_lag, event.max_steps, event.replicas, event.verify
        before, self.limits = self.limits, Limits(*limits, self.limits.sandboxes)
        self._max_lag = self.limits.max_lag
        fixed = [(limits.groups_per_step, limits.max_lag) for limits in (before, self.limits)]
        if self.starts and event.resumed and fixed[0] != fixed[1]:
            self._find(f"the run goes on with groups_per_step and max_lag {fixed[1]}; it had {fixed[0]}")
        if self.starts and self.outcome == "unknown":
            self.crashes += 1
        self.starts += 1
        self.outcome = "unknown"
        self._give_up_queue()
        self.driver.start(self.limits, resumed=event.resumed)
        if event.resumed:
            self._awaiting = self._line, None
        else:
            self._undo(NOTHING)

    def _on_resume(self, event: events.TrainingResumed) -> None:
        step, checkpoint = event.step, event.checkpoint
        self._give_up_queue()
        if event.queue in self._former_queues:
            self._find(f"resume with the queue {event.queue}, which was replaced before")
        self._queue = event.queue
        self._max_lag = self.limits.max_lag  # a guard that continues with a lower limit says so
        if checkpoint is not None:
            self._awaiting = self._line, step
            return
        if step != 0:
            self._find(f"resume without a checkpoint at step {step}")
        self._undo(NOTHING)

    def _on_snapshot(self, event: events.SnapshotTaken, chain: Any) -> None:
        name, step = event.snapshot, event.step
        saved = self._saved.pop(name, None)
        if self.is_lost:
            return
        self._lives()
        self.driver.queue_acts(f"snapshot {name}")
        self.driver.snapshot(step)
        if name in self._marks:
            self._find(f"snapshot {name} was taken before")
        if step != self.step or self._training:
            self._find(f"snapshot {name} of step {step}; the replay is at step {self.step}")
        self._same_counts(f"snapshot {name}", event.counts)
        if saved is not None:
            self._same_as(saved, chain)
        self._marks.pop(name, None)
        self._marks[name] = Mark(
            self._line, len(self._journal), self.step, self.driver.version, self._next_ordinal, dict(self.counts)
        )

    def _on_restored(self, event: events.SnapshotRestored) -> None:
        name, step = event.snapshot, event.step
        awaited, self._awaiting = self._awaiting, None
        if awaited is None or awaited[1] != step:
            found = "did not resume from a checkpoint" if awaited is None else f"resumed at step {awaited[1]}"
            self._find(f"restored {name} of step {step}; the run {found}")
        mark = self._marks.get(name)
        if mark is None:
            self._lose(f"restored snapshot {name}, which this log does not have or a later restart had undone")
            return
        self._undo(mark)
        if step != self.step:
            self._find(f"restored snapshot {name} of step {step}; it was taken at step {self.step}")
        self._same_counts(f"restored {name}", event.counts)

    def _on_step(self, step: int, ordinals: tuple[int, ...], lag_max: int) -> None:
        self._lives()
        self._any_announced = True
        if step != self.step + 1 or self._announced is not None:
            self._find(f"step {step} is announced; the step in progress is {self.step + 1}")
            return
        wrong = [o for o in ordinals if (g := self._groups.get(o)) is None or g.state != "leased"]
        if wrong or len(ordinals) != self.limits.groups_per_step:
            self._find(f"step {step} is announced with {len(ordinals)} groups; not leased: {wrong[:8]}")
        if lag_max > self._max_lag:
            self._find(f"step {step} is announced with lag {lag_max}; the limit is {self._max_lag}")
        self._announced = Announced(self._line, ordinals, lag_max)

    def _on_end(self, outcome: str, step: int) -> None:
        unsure = outcome == "interrupted" and (self.unsure or self._awaiting is not None)
        if not unsure:  # otherwise the run was stopped before it could go back to a checkpoint
            self._lives()
        if not unsure and not self.is_lost and (step != self.step or self._training or self._announced is not None):
            self._find(f"the run {outcome} at step {step}; the replay is at step {self.step}")
        active = 0 if self.is_lost else self.counts["running"] + self.counts["ready"] + self.counts["leased"]
        surplus = max(0, self._held - self.step * self.limits.groups_per_step)  # kept in the last checkpoint
        if outcome == "finished" and active > surplus:
            self._find(f"the run finished with {active} groups that had not ended: {self.unfinished[:8]}")
        self.driver.end(outcome, step)
        self.outcome = outcome

    # -- inside ------------------------------------------------------------------------------------------------------

    def _lives(self) -> None:
        """Records activity, which contradicts an earlier torn line or a missing rollback."""
        self._last_life = self._line
        if self._awaiting is not None:
            line, _ = self._awaiting
            self._awaiting = None
            self._lose(f"the run resumed in line {line}, but no `restored` event says what the queue went on from")

    def _lose(self, text: str) -> None:
        self.is_lost = True
        self._find(f"{text}; of what follows only the lag of each group is checked")

    def _set(self, ordinal: int, before: GroupNow | None, after: GroupNow) -> None:
        self._journal.append((ordinal, before))
        self._groups[ordinal] = after
        if before is None or (before.state == "expired" and after.state == "waiting"):
            self.counts["admitted"] += 1
            if before is not None:
                self.counts[_counted(after)] += 1
                return  # the end of the earlier admission stays counted
        else:
            self.counts[_counted(before)] -= 1
        self.counts[_counted(after)] += 1

    def _undo(self, mark: Mark) -> None:
        """Restores the state of `mark` and drops later snapshots."""
        transitions = len(self._journal) - mark.journal
        trained = self.counts["trained"] - mark.counts["trained"]
        if transitions:
            self.rollbacks.append(Rollback(self._line, self.step, mark.step, trained, transitions))
        # Walk back group by group, then restore the totals.
        while len(self._journal) > mark.journal:
            ordinal, before = self._journal.pop()
            if before is None:
                del self._groups[ordinal]
            else:
                self._groups[ordinal] = before
        while self._marks and next(reversed(self._marks.values())).line > mark.line:
            self._marks.popitem()
        self.counts = dict(mark.counts)
        self.step, self._next_ordinal = mark.step, mark.next_ordinal
        self.driver.undo(-1 if mark is NOTHING else mark.step, mark.version)
        self._forget_lags(self.step)
        self._training.clear()
        self._announced = self._awaiting = None
        self.unsure = self.is_lost = False
        self.goes_back = True
        self._held = sum(self.counts[state] for state in ("running", "ready", "leased", "trained"))
        self._torn = [line for line in self._torn if line < mark.line]
        self._unannounced = [(line, step) for line, step in self._unannounced if line < mark.line]
        self._last_life = mark.line

    def _forget_lags(self, step: int) -> None:
        """Drops the lags of this step and later ones."""
        while self.lags and next(reversed(self.lags)) >= step:
            self.lags.popitem()

    def _same_counts(self, what: str, counts: LedgerCounts) -> None:
        found = asdict(counts)
        wrong = [f"{n} {found[n]}, not {self.counts[n]}" for n in COUNTS if found[n] != self.counts[n]]
        if wrong:
            self._find(f"{what} does not agree with the events before it: {'; '.join(wrong)}")

    def _same_as(self, saved: Saved, chain: Any) -> None:
        """Compares the snapshot just taken with its checkpoint; `chain`: hash in the snapshot's line."""
        name = f"checkpoints/{saved.name}"
        if chain not in (None, saved.chain):
            self._find(f"{name} has another hash of this snapshot: something before it is not what was written")
        now = self.step, self.driver.version, self._next_ordinal
        if now != (saved.step, saved.version, saved.next_ordinal):
            found = saved.step, saved.version, saved.next_ordinal
            self._find(f"{name} has (step, version, next ordinal) {found}; by the events it is {now}")
        self._same_counts(name, saved.counts)
        groups = {o: g for o, g in self._groups.items() if g.state == "waiting" or g.state in STATES}
        wrong = sorted(o for o in groups.keys() | saved.groups.keys() if groups.get(o) != saved.groups.get(o))
        if wrong:
            o = wrong[0]
            self._find(f"{name} has {len(wrong)} other groups, such as {o}: {saved.groups.get(o)}, not {groups.get(o)}")
        if (saved.groups_per_step, saved.max_lag) != (self.limits.groups_per_step, self.limits.max_lag):
            self._find(f"{name} has groups_per_step {saved.groups_per_step}, max_lag {saved.max_lag}: {self.limits}")

    def _find(self, text: str) -> None:
        self.findings.append(Finding(EVENTS, self._line, text))


def _counted(group: GroupNow) -> str:
    return "running" if group.state == "waiting" else group.state


def _was(group: GroupNow | None) -> str:
    return "it was never admitted" if group is None else f"it is {group.state}, attempt {group.attempt}"


def _named(event: events.Event) -> str:
    """The event's kind, with the process that it names, if any."""
    match event:
        case events.ReplicaEvent(replica=replica):
            return f"{event.kind} (replica {replica})"
        case events.TrainingFailed(process=process) | events.TrainingRestarted(process=process):
            return f"{event.kind} ({process})"
    return event.kind
