"""The audit of a run: legal logs are clean, what is wrong in one is named, and no file is too much for it. What becomes
of every kind of damage, `test_audit_mutations.py` says."""

import io
import json
import math
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.audit import Audit, AuditReport, Finding, audit_run, main
from asyncrl.audit.log import read_log
from asyncrl.checkpoint.digests import seal
from asyncrl.errors import ConfigError
from asyncrl.observability.events import EventLog
from asyncrl.types.events import EVENTS, RunFaulted
from tests.unit.audit_model import (
    COUNTS,
    LIMITS,
    OF_QUEUE,
    STEPS,
    Event,
    Run,
    broken_promise,
    replay,
    sealed,
)


def unconfirmed(log: bytes) -> list[Finding]:
    """What the hashes do not confirm."""
    return read_log(io.BytesIO(log), Audit(LIMITS))


SEEDS = st.integers(0, 2**32)


@settings(max_examples=50, deadline=None)
@given(seed=SEEDS, crashes=st.booleans())
def test_a_legal_log_is_clean_and_agrees_with_the_model(seed, crashes):
    run = Run(seed, crashes=crashes)
    assert broken_promise(run.events) == ""
    audit = replay(run.events)
    assert audit.findings == []
    assert audit.counts == run.state.all_counts()
    assert (audit.step, audit.outcome, audit.unfinished) == (STEPS, "finished", ())
    assert audit.replaced.total() == len(run.late)


# -- the running hash -----------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(seed=SEEDS, place=st.integers(0, 10**6), how=st.sampled_from(["edited", "torn"]))
def test_the_hashes_tell_of_any_line_that_is_not_as_it_was_written_while_another_follows(seed, place, how):
    lines = sealed(Run(seed, crashes=True).events).splitlines(keepends=True)
    assert unconfirmed(b"".join(lines)) == []
    at = place % (len(lines) - 1)
    line = lines[at]
    byte = place % (len(line) - 1)
    lines[at] = line[:byte] if how == "torn" else line[:byte] + bytes([line[byte] ^ 1]) + line[byte + 1 :]
    assert unconfirmed(b"".join(lines))


def test_the_last_line_vouches_for_itself():
    lines = sealed(Run(1, crashes=False).events).splitlines(keepends=True)
    lines[-1] = lines[-1].replace(b"finished", b"interrupted")
    (found,) = unconfirmed(b"".join(lines))
    assert found.line == len(lines)


def test_a_line_that_was_never_hashed_is_found():
    lines = [*sealed(Run(1, crashes=False).events).splitlines(keepends=True), b'{"event": "fault"}\n']
    (found,) = unconfirmed(b"".join(lines))
    assert (found.line, "no running hash" in found.text) == (len(lines), True)


WRITER = """
import os, sys
from pathlib import Path
from asyncrl.observability.events import EventLog
from asyncrl.types.events import RunFaulted
log = EventLog(Path(sys.argv[1]))
for number in range(int(sys.argv[2])):
    log.write(RunFaulted("note", "x" * (number % 50)))
os.kill(os.getpid(), 9)
"""


def test_writers_that_race_die_and_tear_lines_leave_hashes_that_fit(tmp_path):
    path, count = tmp_path / "events.jsonl", 1500
    log = EventLog(path)
    for _ in range(2):
        writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(count)]) for _ in range(2)]
        while any(writer.poll() is None for writer in writers):
            log.write(RunFaulted("own", ""))
        with path.open("ab") as torn:
            torn.write(b'{"event": "gro')
        log.write(RunFaulted("glued", "to a torn line"))
        with path.open("ab") as torn:
            torn.write(b'{"event": "gro')
    EventLog(path).write(RunFaulted("after", "a restart"))
    assert log.chain in path.read_text()
    assert path.read_bytes().count(b'"note"') == 4 * count
    assert unconfirmed(path.read_bytes()) == []


# -- by hand ------------------------------------------------------------------------------------------------------


def event(kind: str, **fields: Any) -> Event:
    return {"event": kind, "time_s": 0.0, "monotonic_s": 0.0, **fields}


def group(transition: str, ordinal: int, step: int, version: int, oldest: int, attempt: int = 0) -> Event:
    names = {"trainer_version": step, "version": version, "oldest_version": oldest}
    return event("group", transition=transition, ordinal=ordinal, attempt=attempt, **names, detail="")


def publish(version: int, **changed: Any) -> Event:
    seconds = dict.fromkeys(("publish_s", "pause_s", "transfer_s"), 0.1)
    fields = {"version": version, "bytes": 1, "verified": True, "attempts": 1, "replicas": 1}
    return event("publish", **seconds, **fields | changed)


def one_step(first: int, step: int) -> list[Event]:
    """Two groups, from admission to the step that trains them, and its publish."""
    ordinals = range(first, first + 2)
    passing = ("admitted", "ready", "leased")
    events = [group(t, o, step, step, step) for t in passing for o in ordinals]
    events.append(event("step", step=step + 1, ordinals=list(ordinals), lag_max=0))
    return [*events, *(group("trained", o, step, step, step) for o in ordinals), publish(step + 1)]


def counts(trained: int) -> dict[str, int]:
    return dict.fromkeys(COUNTS, 0) | {"admitted": trained, "trained": trained}


def saved(step: int, name: str, **changed: int) -> list[Event]:
    snapshot = event("snapshot", snapshot=name, step=step, counts=counts(2 * step) | changed)
    return [snapshot, event("checkpoint", step=step, path=f"step_{step}", save_s=0.1, capture_s=0.1)]


def begin(*, resumed: bool, **changed: Any) -> Event:
    limits = {"groups_per_step": 2, "max_lag": 1, "max_steps": 2, "replicas": 1, "verify": "first"} | changed
    return event("start", name="hand", resumed=resumed, pid=1, **limits)


def metrics_line(step: int) -> dict[str, float]:
    return {"step": step, "staleness/lag_max": 0} | {f"queue/{n}": c for n, c in counts(2 * step).items()}


SERVING = event("replica_serving", replica=0)
ANEW = [event("resume", step=0, checkpoint=None), SERVING, publish(0)]
START = [begin(resumed=False), *ANEW]
SNAPSHOT = saved(1, "1-aa")
RESUMED = begin(resumed=True)
RESUME = event("resume", step=1, checkpoint="step_1")
RESTORED = event("restored", snapshot="1-aa", step=1, counts=counts(2))
AGAIN = [SERVING, publish(1)]
END = event("end", outcome="finished", step=2)
FINISHED = [*saved(2, "2-bb"), END]
LOST = event("training_failed", process="message queue", error="gone", step=1)
CONFIG = {
    "recipe": {
        "batch": {"groups_per_step": 2},
        "run": {"max_steps": 2},
        "rollout": {"num_replicas": 1},
        "weights": {"verify": "first"},
    },
    "resolved": {"max_lag": 1},
}


@pytest.fixture
def run_dir(tmp_path):
    """run_dir(events, metrics=2) -> report; an event or a metrics line may be bytes, to be written as they are."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def call(events: list, metrics: list | None = None) -> AuditReport:
        (tmp_path / "events.jsonl").write_bytes(sealed(events))
        lines = [metrics_line(1), metrics_line(2)] if metrics is None else metrics
        raw = [x if isinstance(x, bytes) else json.dumps(x).encode() + b"\n" for x in lines]
        (tmp_path / "metrics.jsonl").write_bytes(b"".join(raw))
        return audit_run(tmp_path)

    call.path = tmp_path
    return call


def test_a_clean_run(run_dir, capsys):
    report = run_dir([*START, *one_step(0, 0), *SNAPSHOT, *one_step(2, 1), *FINISHED])
    assert report.clean
    assert report.counts["trained"] == 4
    assert (report.step, report.starts, report.crashes, report.outcome) == (2, 1, 0, "finished")
    assert main([str(run_dir.path)]) == 0
    assert "CLEAN" in capsys.readouterr().out
    assert main([str(run_dir.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["clean"] is True


def test_a_crash_and_what_it_undid(run_dir):
    """The second step was trained, the driver died in the middle of a line, and the step was trained again."""
    torn = b'{"event": "group", "transit'
    again = [b"\n", RESUMED, RESUME, RESTORED, *AGAIN, *one_step(2, 1), *FINISHED]
    report = run_dir([*START, *one_step(0, 0), *SNAPSHOT, *one_step(2, 1), torn, *again])
    assert report.findings == ()
    assert (report.starts, report.crashes, report.torn_lines) == (2, 1, 1)
    assert [(r.before, r.after, r.trained) for r in report.rollbacks] == [(2, 1, 2)]


def by(writer: str, events: list) -> list:
    return [{**e, "writer": writer} if e["event"] in OF_QUEUE else e for e in events]


def test_a_queue_that_was_given_up_and_wakes_spoils_nothing(run_dir):
    """It was stopped in the middle of its commit and goes on wherever a restart may be."""
    restarted = event("training_restarted", process="message queue", seconds=1.0, checkpoint="step_1")
    *trained, published = one_step(2, 1)
    rest = by("old", trained[-2:])
    before = [*by("old", [*START[:1], event("resume", step=0, checkpoint=None, queue="old"), *START[2:]])]
    before += by("old", [*one_step(0, 0), *SNAPSHOT, *trained[:-2]])
    resume = RESUME | {"queue": "new"}
    for lives in ([LOST, restarted], [RESUMED]):
        back = [*lives, resume, *by("new", [RESTORED]), *AGAIN, *by("new", [*trained, published, *FINISHED])]
        for at in range(len(lives), len(back) + 1):
            report = run_dir([*before, *back[:at], *rest, *back[at:]])
            assert (report.findings, report.replaced) == ((), {"old": 2}), back[at - 1]
    assert "2 lines of old" in report.text()
    twice = run_dir([*before, *back, RESUMED, RESUME | {"queue": "old"}, *rest])
    assert any("queue old, which was replaced before" in finding.text for finding in twice.findings)
    unnamed = run_dir([*before, LOST, restarted, RESUME, *by("new", [RESTORED]), *rest])
    assert unnamed.replaced == {"old": 2}, "also where the next queue is not named"


def test_a_line_torn_in_the_middle_of_a_run_is_a_finding(run_dir):
    report = run_dir([*START, *one_step(0, 0), b'{"event": "publ\n', *one_step(2, 1), *FINISHED])
    assert [(f.line, "no JSON" in f.text) for f in report.findings] == [(15, True)]


def test_a_line_glued_to_a_torn_one_is_read(run_dir):
    events = [*START, *one_step(0, 0), *SNAPSHOT]
    fault = event("fault", error="StorageError", message="no space")
    report = run_dir([*events, b'{"event": "gro', fault, RESUMED, RESUME, RESTORED, *AGAIN, *one_step(2, 1), *FINISHED])
    assert report.findings == ()
    assert report.troubles == {"fault StorageError": 1}
    assert report.crashes == 0


def test_a_run_that_began_anew(run_dir):
    restarted = event("training_restarted", process="message queue", seconds=1.0, checkpoint=None)
    report = run_dir([*START, *one_step(0, 0), LOST, restarted, *ANEW, *one_step(0, 0), *one_step(2, 1), *FINISHED])
    assert report.findings == ()
    assert [r.trained for r in report.rollbacks] == [2]


def test_a_run_that_was_stopped_while_its_training_side_was_gone(run_dir):
    """The queue died with a step that it may or may not have committed."""
    stopped = event("end", outcome="interrupted", step=1)
    report = run_dir([*START, *one_step(0, 0), *SNAPSHOT, *one_step(2, 1), LOST, stopped], [metrics_line(1)])
    assert report.findings == ()
    report = run_dir([*START, *one_step(0, 0), *SNAPSHOT, *one_step(2, 1)[:-3], LOST, stopped], [metrics_line(1)])
    assert report.findings == ()
    assert report.troubles == {"training_failed (message queue)": 1}


def test_a_run_that_goes_on_has_unfinished_groups_and_no_findings(run_dir):
    report = run_dir([*START, *one_step(0, 0), group("admitted", 2, 1, 1, 1)], [metrics_line(1)])
    assert report.clean
    assert (report.unfinished, report.outcome) == ((2,), "unknown")
    assert "1 groups" in report.text()


def asleep(step: int, **changed: Any) -> Event:
    return event("engines_slept", step=step, begin_s=0.1, **{"replicas": [0]} | changed)


def test_engines_that_take_turns_with_the_trainer_sleep_before_every_step(run_dir):
    first, second = one_step(0, 0), one_step(2, 1)
    turns = asleep(1), asleep(2)

    def found(*events: Event) -> list[str]:
        return [finding.text for finding in run_dir([*START, *events, *FINISHED]).findings]

    assert found(*first[:6], turns[0], *first[6:], *second[:6], turns[1], *second[6:]) == []
    assert found(*first, *second) == [], "a run whose parts have devices of their own"
    never = found(*first[:6], turns[0], *first[6:], *second)
    assert never == ["step 2 is trained, but nothing tells that the engines slept for it"]
    woken = found(*first[:6], turns[0], publish(0), *first[6:], *second[:6], turns[1], *second[6:])
    assert "step 1 is trained, but nothing tells that the engines slept for it" in woken
    twice = found(*first[:6], turns[0], *first[6:-1], asleep(2), *second[:6], turns[1], *second[6:])
    assert any("engines sleep for step 2 after step 1, without a publish since" in text for text in twice)
    strange = found(*first[:6], asleep(1, replicas=[0, 7]), *first[6:], *second[:6], turns[1], *second[6:])
    assert strange == ["engines of replicas [0, 7] sleep; up were [0]"]


def test_a_run_resumed_with_fewer_steps_keeps_the_groups_that_it_cannot_train(run_dir):
    """Five groups were admitted when the checkpoint was written; the two steps of the shortened run train four."""
    ahead = [group("admitted", o, 1, 1, 1) for o in (2, 3, 4)]
    held = counts(2) | {"admitted": 5, "running": 3}
    kept = saved(1, "1-aa", admitted=5, running=3)
    before = [*START, *one_step(0, 0), *ahead, *kept, RESUMED, RESUME, RESTORED | {"counts": held}, *AGAIN]
    last = [*saved(2, "2-bb", admitted=5, running=1), END]
    lines = [metrics_line(1), metrics_line(2) | {"queue/admitted": 5, "queue/running": 1}]
    report = run_dir([*before, *one_step(2, 1)[2:], *last], lines)
    assert (report.findings, report.unfinished) == ((), (4,))
    report = run_dir([*before, *one_step(2, 1)[2:], *last[:-1], group("admitted", 5, 2, 2, 2), END], lines)
    assert any("2 groups that had not ended" in finding.text for finding in report.findings)


def test_what_the_report_names(run_dir):
    """Each kind of broken promise with the line and the words that name it."""
    lost = [*START, *one_step(0, 0), *SNAPSHOT, *one_step(2, 1), *FINISHED]
    cases: list[tuple[list, list | None, int, str]] = [
        ([*lost[:-1], group("admitted", 4, 2, 2, 2), END], None, 30, "had not ended"),
        ([*lost, group("admitted", 4, 2, 2, 2)], None, 30, "after the run had finished"),
        ([*START, *one_step(0, 0), RESUMED, *one_step(2, 1), *FINISHED], None, 16, "no `restored` event"),
        ([*START, *one_step(0, 0), RESUMED, RESTORED, *one_step(2, 1), *FINISHED], None, 16, "does not have"),
        ([*START, *one_step(0, 0), *saved(1, "1-aa", admitted=3)], None, 15, "admitted 3"),
        (lost, [metrics_line(1)], 0, "1 steps; the events have 2"),
        (lost, [metrics_line(1), metrics_line(2), metrics_line(3)], 0, "3 steps; the events have 2"),
        (lost, [metrics_line(1), metrics_line(2) | {"queue/ready": 1}], 2, "does not balance"),
        (lost, [metrics_line(1), metrics_line(2) | {"staleness/lag_max": 1}], 2, "lag 1"),
        (lost, [metrics_line(1), metrics_line(1)], 2, "step 1 where step 2"),
        (lost, [metrics_line(1), b'{"step": 2'], 2, "no JSON"),
        (lost, [metrics_line(1), {"step": 2}], 2, "malformed"),
        ([*lost, {"event": "group"}], None, 30, "malformed"),
        ([*lost, {"no": 1}], None, 30, "malformed"),
    ]
    for events, metrics, line, words in cases:
        report = run_dir(events, metrics)
        assert any(f.line == line and words in f.text for f in report.findings), (words, report.findings)


def test_what_a_group_may_not_do(run_dir):
    """Lines of the group itself; the other events do not give it away."""
    fresh = [group("admitted", 2, 1, 1, 1), group("ready", 2, 1, 1, 1)]
    expired = [group("admitted", 2, 1, 1, 1), group("expired", 2, 1, 1, 1)]
    cases: list[tuple[list[Event], str]] = [
        ([*fresh, group("leased", 2, 1, 1, 0)], "was ready with 1"),
        ([*fresh, group("trained", 2, 1, 1, 1)], "it is ready"),
        ([*fresh, group("leased", 2, 1, 1, 1), group("released", 2, 1, 1, 0)], "it was leased with 1"),
        ([*fresh, group("requeued", 2, 1, 1, 1, attempt=1)], "it is ready"),
        ([*fresh, group("released", 2, 1, 1, 1)], "it is ready"),
        ([*fresh, group("leased", 2, 1, 1, 1), group("requeued", 2, 1, 1, 1, attempt=1)], "it is leased"),
        ([*expired, group("admitted", 2, 1, 1, 1, attempt=2)], "it is expired, attempt 0"),
        ([*expired, group("admitted", 2, 1, 1, 1)], "it is expired, attempt 0"),
        ([group("admitted", 2, 1, 1, 1), group("admitted", 2, 1, 1, 1, attempt=1)], "it is running, attempt 0"),
        ([group("admitted", 2, 1, 1, 1), group("requeued", 2, 1, 1, 1)], "it is running, attempt 0"),
        ([group("admitted", 2, 1, 1, 1), group("ready", 2, 1, 1, 2)], "outside"),
        ([group("admitted", 2, 1, 1, 1), group("ready", 2, 1, 1, 0)], "outside"),
    ]
    for lines, words in cases:
        found = run_dir([*START, *one_step(0, 0), *lines], [metrics_line(1)]).findings
        assert [words in f.text for f in found] == [True], (words, found)
    twice = [e | {"ordinals": [0, 0]} if e["event"] == "step" else e for e in one_step(0, 0)]
    found = run_dir([*START, *twice], [metrics_line(1)]).findings
    assert ["announced other groups" in f.text for f in found] == [True]


def test_a_group_over_the_limit_is_named(run_dir):
    early = [group(t, o, 0, 0, 0) for t in ("admitted", "ready") for o in (0, 1)]
    late = [group(t, o, 2, 2, 0) for t in ("leased", "trained") for o in (0, 1)]
    events = [*START, *early, *one_step(2, 0), *one_step(4, 1), *late]
    found = run_dir(events, []).findings
    assert any(f.text == "group 0 is trained with lag 2; the limit is 1" for f in found), found


def test_what_is_no_run_directory(tmp_path, capsys):
    with pytest.raises(ConfigError, match="name the directory of a run"):
        audit_run(tmp_path)
    assert main([str(tmp_path)]) == 2
    (tmp_path / "config.json").write_text("{}")
    assert main([str(tmp_path)]) == 2
    assert "asked:" in capsys.readouterr().err


def test_the_replay_is_linear_also_with_many_rollbacks():
    """Going back again and again to an early snapshot costs what was done since, not what is there."""

    def replay_s(rounds: int) -> float:
        audit, line = Audit(LIMITS), 0
        began = time.process_time()
        audit.feed(0, begin(resumed=False, max_steps=10**6))
        for one in ANEW:
            audit.feed(0, one)
        for step in range(rounds):
            snapshot, checkpoint = saved(step, f"{step}")
            lost = event("training_restarted", process="queue", seconds=1.0, checkpoint=f"step_{step}")
            resume = event("resume", step=step, checkpoint=f"step_{step}")
            back = [LOST, lost, resume, snapshot | {"event": "restored"}, SERVING, publish(step)]
            trained = one_step(2 * step, step)
            for one in (snapshot, checkpoint, *trained, *back, *trained):
                line += 1
                audit.feed(line, one)
        assert audit.findings == []
        return time.process_time() - began

    # the least of several runs is that of the work itself, whatever else the machine does; quadratic would be 64
    small, large = (min(replay_s(rounds) for _ in range(3)) for rounds in (200, 1600))
    assert large < 32 * small


CHECKPOINT = ("checkpoints/step_1/state.json", "checkpoints/step_1/queue/ledger.json", "checkpoints/step_1/files.json")


def write_checkpoint(directory: Path, value: Any = None, **changed: Any) -> None:
    """The one that SNAPSHOT is of, with `value` for its counts and changes to its ledger."""
    path = directory / "checkpoints" / "step_1"
    (path / "queue").mkdir(parents=True, exist_ok=True)
    line = next(x for x in (directory / "events.jsonl").read_text().splitlines() if '"1-aa"' in x)
    ledger = {
        "step": 1,
        "version": 1,
        "next_ordinal": 2,
        "counts": counts(2) if value is None else value,
        "records": [],
    }
    saved = {"snapshot": "1-aa", "chain": json.loads(line)["chain"], "ledger": ledger | changed}
    (path / "state.json").write_text(json.dumps({"groups_per_step": 2, "max_lag": 1}))
    (path / "queue" / "ledger.json").write_text(json.dumps(saved))
    seal(path)


def test_what_the_checkpoints_say(run_dir):
    good = [*START, *one_step(0, 0), *SNAPSHOT, *one_step(2, 1), *FINISHED]
    run_dir(good)
    record = {"ordinal": 1, "attempt": 0, "version": 1, "state": "running", "issued": True}
    for changed, words in (
        ({}, ""),
        ({"version": 0}, "(1, 0, 2)"),
        ({"next_ordinal": 3}, "(1, 1, 3)"),
        ({"counts": counts(4)}, "admitted 4"),
        ({"records": [record]}, "1 other groups"),
    ):
        write_checkpoint(run_dir.path, **changed)
        report = audit_run(run_dir.path)
        assert report.checkpoints == ("step_1",)
        assert [words in f.text for f in report.findings] == ([True] if words else []), report.findings
    write_checkpoint(run_dir.path)
    for events, words in (
        ([*START, *one_step(0, 0)], "lines are missing"),
        ([], "lines are missing"),
        ([*START[:-1], {**publish(0), "bytes": 7}, *good[4:]], "not what was written"),
    ):
        found = run_dir(events, [metrics_line(1)]).findings
        assert any(words in f.text for f in found), found
    data = run_dir.path / CHECKPOINT[1]
    data.write_bytes(data.read_bytes()[:-1])
    assert run_dir([*START, *one_step(0, 0)], [metrics_line(1)]).checkpoints == ()


def test_a_limit_that_was_raised_later_is_seen(run_dir):
    run_dir([*START, *one_step(0, 0), *SNAPSHOT, *one_step(2, 1), *FINISHED])
    config = run_dir.path / "config.json"
    config.write_text(json.dumps(CONFIG | {"resolved": {"max_lag": 2}}))
    (found,) = audit_run(run_dir.path).findings
    assert (found.file, "max_lag 2" in found.text) == ("config.json", True)
    found = run_dir([begin(resumed=False, max_lag=2), *ANEW, *one_step(0, 0), *SNAPSHOT, RESUMED]).findings
    assert any("it had (2, 2)" in f.text for f in found), found


@pytest.mark.parametrize("lag", [math.nan, math.inf, -1, 1, None, "0", [0], 10**400])
def test_a_lag_that_is_none_or_another_than_was_announced_is_found(run_dir, lag):
    lines = [metrics_line(1), metrics_line(2) | {"staleness/lag_max": lag}]
    report = run_dir([*START, *one_step(0, 0), *SNAPSHOT, *one_step(2, 1), *FINISHED], lines)
    assert [f.line for f in report.findings] == [2]


def test_nothing_replayed_proves_nothing(run_dir):
    assert ["nothing is proven" in f.text for f in run_dir([], []).findings] == [True]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just(10**4299),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
KIND = st.sampled_from(sorted(EVENTS))


@given(seed=SEEDS, place=st.integers(0, 10**6), kind=KIND, others=st.lists(JSON, max_size=3), data=st.data())
def test_no_event_is_too_much_for_it(seed, place, kind, others, data):
    """Events of all kinds with any values, among others that may make sense of them."""
    events = Run(seed, crashes=True).events
    names = [*(field.name for field in fields(EVENTS[kind])), "time_s", "monotonic_s"]
    wrong = {"event": kind} | {name: data.draw(st.integers(-1, 9) | st.text() | JSON) for name in names}
    at = place % len(events)
    for event in (wrong, *({"event": other} for other in others), data.draw(st.dictionaries(st.text(), JSON))):
        events.insert(at, event)
    assert replay(events).findings


@settings(max_examples=66, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(["events.jsonl", "metrics.jsonl", "config.json", *CHECKPOINT]))
def test_no_file_is_too_much_for_it(run_dir, data, name):
    """A file that is replaced, by bytes or by JSON, or that has some other bytes: a report, or no run directory."""
    (run_dir.path / "config.json").write_text(json.dumps(CONFIG))
    run_dir([*START, *one_step(0, 0), *SNAPSHOT, *one_step(2, 1), *FINISHED])
    write_checkpoint(run_dir.path, data.draw(JSON))
    path = run_dir.path / name
    good = path.read_bytes()
    at = data.draw(st.integers(0, len(good)))
    line = JSON.map(lambda value: json.dumps(value).encode() + b"\n")
    deep = st.sampled_from([b"[" * 200_000 + b"\n", b'{"a": ' * 200_000, b"9" * 5000 + b"\n"])
    junk = data.draw(st.binary(max_size=30) | line | deep)
    path.write_bytes(data.draw(st.sampled_from([junk, good[:at] + junk + good[at:], good[:at] + junk])))
    assert main([str(run_dir.path)]) in (0, 1, 2)
    assert main([str(run_dir.path), "--json"]) in (0, 1, 2)
