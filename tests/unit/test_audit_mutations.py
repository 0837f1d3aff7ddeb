"""Every kind of damage to every kind of event is found, or stands in a table of what is harmless.

Twice: with the hashes as they were written, and by a forger who makes them fit. For the forger the replay's own rules
count, and a mutation of a group may pass only where no promise is broken.
"""

import io
import json
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from asyncrl.audit import Audit, Finding
from asyncrl.audit.log import read_log
from asyncrl.audit.metrics import check_metrics
from asyncrl.audit.replay import read_event
from asyncrl.observability.events import EventLog
from asyncrl.types.events import ENVELOPE, EVENTS
from tests.unit.audit_model import LIMITS, Event, Run, broken_promise, edited, mutations, sealed, surviving

RUNS = 40
PLACES = 8
"""Of each kind of mutation."""
UNDONE = "undone"

LIVES = ("start", "resume", "restored", "training_failed", "training_restarted", "fault", "end")
GROUP = ("admitted", "reissued", "ready", "leased", "released", "requeued", "trained", "filtered", "expired", "failed")
REPLICA = ("replica_failed", "replica_started", "replica_serving", "replica_suspended", "replica_rejoined")
FLEET = ("fleet_resized", "replica_joined", "replica_left")
AT_ANY_TIME = ("model_replica", *FLEET)
"""Their writers do not wait for those of other events."""
_REASONS: dict[str, dict[str, tuple[str, ...]]] = {
    "the two lines tell of things that do not depend on each other": {
        "exchanged": (
            *(*GROUP, "evaluation", "evaluation_failed", "evaluation_skipped", "evaluation_started", "publish"),
            *(*REPLICA, "engines_slept", "replica_returned", "restored", "rollouter_failed", "rollouter_restarted"),
            "snapshot",
        ),
    },
    "the next line is of a queue that was given up; or its own queue was, before it wrote any": {
        "exchanged": ("resume", "training_restarted"),
        "queue": ("resume",),
    },
    "what is left is the log of a process that died, failed to start or was given up at this moment": {
        "deleted": (
            *("end", "fault", "restored", "rollouter_restarted", "evaluation_started"),
            *("replica_failed", "replica_rejoined"),
        ),
        "doubled": ("fault", "start", "training_failed"),
        "groups_per_step": ("start",),  # of a start whose work was all undone by another one
        "max_lag": ("start",),
    },
    "a group may end while it is running, and with any version since its admission": {
        "deleted": ("ready", "reissued"),
        "oldest_version": ("filtered", "reissued"),
    },
    "the queue hears of a version a moment before the publish is told of": {
        "version": ("failed", "filtered", "ready", "reissued"),
    },
    "replicas were lost or joined at the same moment, so that a publish may have reached some more or less": {
        "deleted": ("publish",),
        "replica": ("replica_failed",),
        "replicas": ("publish",),
        "verified": ("publish",),
    },
    "metrics.jsonl has the mean and the newest version over all sets, and no single set before step 1": {
        **dict.fromkeys(("deleted", "accuracy", "name", "pass_at", "samples", "step", "version"), ("evaluation",)),
    },
    "that an evaluation failed is counted where no other one of that step was told": {
        **dict.fromkeys(("deleted", "doubled", "step", "version"), ("evaluation_failed",)),
    },
    "the guard may set any limit that the run allows, and a lower one may not have been needed": {
        **dict.fromkeys(("deleted", "doubled", "exchanged", "limit", "acted"), ("guard_changed",)),
    },
    "a run may be told to go on for longer, or on more replicas, than it needs": {
        "max_steps": ("start",),
        "replicas": ("start",),
    },
    "fleets change at any moment, and nothing later in the log depends on this number or this replica": {
        "deleted": (*FLEET, "replica_suspended"),
        "exchanged": FLEET,
        "replica": ("replica_joined", "replica_left", "replica_suspended"),
        "replicas": ("fleet_resized",),
    },
    "it is the first of a start, which may as well be one of parts that have devices of their own": {
        "deleted": ("engines_slept",),
    },
    "other models are no part of what is proven: nothing depends on their replicas but attempts at groups": {
        **dict.fromkeys(("deleted", "doubled", "exchanged", "pool", "replica", "change", "error"), ("model_replica",)),
    },
    "a snapshot that nothing was restored from may have any name": {"snapshot": ("snapshot",)},
    "for people: nothing is proven from it": {
        "deleted": ("checkpoint_late", "evaluation_skipped", "replica_returned"),
        "doubled": ("checkpoint_late", "evaluation_skipped"),
        "detail": GROUP,
        "error": (
            *("checkpoint_failed", "checkpoint_late", "evaluation_failed", "fault", "replica_failed"),
            *("replica_suspended", "rollouter_failed", "training_failed"),
        ),
        "message": ("fault",),
        **dict.fromkeys(("replicas", "begin_s"), ("engines_slept",)),
        **dict.fromkeys(("action", "reason"), ("guard_changed",)),
        "name": ("start",),
        "pid": ("start",),
        "process": ("training_failed", "training_restarted"),
        "step": ("guard_changed", "training_failed"),
        "seconds": ("rollouter_restarted", "training_restarted"),
        "groups": ("rollouter_restarted",),
        **dict.fromkeys(("capture_s", "save_s"), ("checkpoint",)),
        **dict.fromkeys(("publish_s", "pause_s", "transfer_s", "bytes", "attempts"), ("publish",)),
        **dict.fromkeys(("interval", "prompts", "questions", "failed"), ("evaluation",)),
        "tries": ("evaluation_failed",),
    },
}
HARMLESS = {(kind, how): why for why, of in _REASONS.items() for how, kinds in of.items() for kind in kinds}
"""(kind or transition, mutation or field) -> why a forger may do it, where the rest of the log allows it. What a
restart undid is in no table: there all may be that could have been."""


@dataclass
class Case:
    """A run with what lies beside its log."""

    run: Run
    metrics: Path

    def findings(self, events: list[Event]) -> list[Finding]:
        """Of `events` in place of its own, with hashes that fit."""
        checkpoints = [self.run.checkpoints[name] for name, _ in self.run.saved if name in self.run.checkpoints]
        audit = Audit(LIMITS, checkpoints[-2:])
        for number, event in enumerate(events, 1):
            audit.feed(number, event)
        audit.close()
        found = [*audit.findings, *check_metrics(self.metrics, audit)]
        if (audit.limits.groups_per_step, audit.limits.max_lag) != (LIMITS.groups_per_step, LIMITS.max_lag):
            found.append(Finding("config.json", 0, "it has others"))
        return found


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> list[Case]:
    cases = []
    for seed in range(RUNS):
        case = Case(Run(seed, crashes=seed % 4 != 0), tmp_path_factory.mktemp("run") / "metrics.jsonl")
        case.metrics.write_text("".join(json.dumps(line) + "\n" for line in case.run.metrics.values()))
        assert case.findings(case.run.events) == []
        cases.append(case)
    return cases


def kind_of(event: Event) -> str:
    return event["transition"] if event["event"] == "group" else event["event"]


def places(cases: list[Case], count: int) -> Iterator[tuple[str, Case, int]]:
    """Some places of each kind of event that no restart undid, and of what one did, the same every time."""
    found = defaultdict(list)
    for case in cases:
        kept = {id(event) for event in surviving(case.run.events)}
        late = {id(event) for event in case.run.late}
        for at, event in enumerate(case.run.events):
            if id(event) in kept or (event["event"] in LIVES and id(event) not in late):
                found[kind_of(event)].append((case, at))
            elif event["event"] in ("group", "step", "snapshot") and id(event) not in late:
                found[UNDONE].append((case, at))
    for kind, of in found.items():
        wanted = count * (5 if kind == UNDONE else 1)
        for case, at in random.Random(0).sample(of, min(wanted, len(of))):
            yield kind, case, at


def test_the_model_has_every_kind_of_event(cases):
    assert {event["event"] for case in cases for event in case.run.events} == EVENTS.keys()


def test_what_is_read_of_a_line_is_written_as_that_line(cases, tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    lines = [dict(event) for case in cases[:4] for event in case.run.events]
    for line in lines:
        read = read_event(line)
        assert isinstance(read, EVENTS[line["event"]]), read
        log.write(read)
    written = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    for line in (*lines, *written):
        for name in ENVELOPE[1:]:
            line.pop(name, None)
    assert written == lines


def test_the_hashes_find_everything_but_what_is_cut_off_the_end(cases):
    for kind, case, at in places(cases, 2):
        events = case.run.events
        lines = sealed(events).splitlines(keepends=True)
        kept = {id(event): line for event, line in zip(events, lines, strict=True)}
        for how, mutated in mutations(events, at):
            if how == "deleted" and at + 1 == len(events):
                continue
            log = b"".join(kept.get(id(event)) or edited(event, lines[at]) for event in mutated)
            assert read_log(io.BytesIO(log), Audit(LIMITS)), (kind, how)


def test_a_forger_breaks_no_promise_unseen(cases):
    unseen: dict[tuple[str, str], int] = defaultdict(int)
    for kind, case, at in places(cases, PLACES):
        events = case.run.events
        for how, mutated in mutations(events, at):
            if mutated != events and not case.findings(mutated):
                assert broken_promise(mutated) == "", (kind, how, events[at])
                after = kind_of(events[at + 1]) if how == "exchanged" else ""
                if kind != UNDONE:
                    unseen[after if after in AT_ANY_TIME else kind, how] += 1
    assert set(unseen) <= set(HARMLESS), sorted(set(unseen) - set(HARMLESS))
