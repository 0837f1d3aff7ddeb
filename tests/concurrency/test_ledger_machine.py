"""Ledger and staleness under random interleavings: the bound, conservation, one end per admission, progress."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field, replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from asyncrl.errors import LedgerError
from asyncrl.json_records import from_plain
from asyncrl.queue.ledger import Ledger, LedgerSnapshot
from asyncrl.queue.staleness import Selection, StalenessPolicy
from asyncrl.types import LedgerCounts, Ticket
from tests.unit.test_staleness import is_feasible

MAX_STEPS = 100
ENDS = ("trained", "filtered", "expired", "failed")


@dataclass
class Books:
    """What the events so far say, kept apart from the ledger. `ends`: per ordinal, in order; `running`, `ready`: of
    every open ordinal, the attempt that is open and where it stands; `trained_from`: version of the oldest trained
    token."""

    attempts: dict[int, int] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)
    ends: dict[int, tuple[str, ...]] = field(default_factory=dict)
    totals: Counter = field(default_factory=Counter)
    trained_from: dict[int, int] = field(default_factory=dict)

    def copy(self):
        parts = (self.attempts, self.states, self.ends, self.totals, self.trained_from)
        return Books(*(part.copy() for part in parts))

    def add(self, event, max_attempts):
        ordinal, kind = event.ordinal, event.transition
        if kind == "admitted":
            assert ordinal not in self.states, "admitted while it is active"
            assert set(self.ends.get(ordinal, ())) <= {"expired"}, "admitted after its end"
            if ordinal in self.attempts:
                assert event.attempt == self.attempts[ordinal] + 1 < max_attempts
            else:
                assert (event.attempt, ordinal) == (0, len(self.attempts)), "an ordinal was left out"
            self.totals["admitted"] += 1
            self.states[ordinal] = "running"
        elif kind in ENDS:
            self.totals[kind] += 1
            del self.states[ordinal]  # KeyError: it ended twice
            self.ends[ordinal] = (*self.ends.get(ordinal, ()), kind)
            if kind == "trained":
                self.trained_from[ordinal] = event.oldest_version
        elif kind in ("ready", "leased"):
            self.states[ordinal] = kind
        elif kind == "released":
            assert self.states[ordinal] == "leased"
            self.states[ordinal] = "ready"
        elif kind == "requeued":
            assert (self.states[ordinal], event.attempt) == ("running", self.attempts[ordinal] + 1)
        self.attempts[ordinal] = event.attempt

    def counts(self):
        states = Counter(self.states.values())
        named = {name: states[name] for name in ("running", "ready", "leased")}
        return LedgerCounts(**named, **{name: self.totals[name] for name in ("admitted", *ENDS)})


class Script:
    """Two scripted rollouters, a trainer and a supervisor around a real ledger; a byte is one transition.

    `running`: the tickets that the rollouters hold (`owners`), each with the versions of the tokens that it has
    sampled. `groups`: those versions for every group that is ready. `served`: what the replicas sample with. `policy`
    is that of the run; the ledger's own may have a lower limit on the lag.
    """

    def __init__(self, policy, every, max_attempts, seen):
        self.policy, self.max_attempts, self.every = policy, max_attempts, min(every, policy.max_lag + 1)
        self.seen = seen
        self.books = Books()
        self.ledger = self.fresh()
        self.running: dict[Ticket, list[int]] = {}
        self.owners: dict[Ticket, str] = {}
        self.pending: dict[int, tuple[Ticket, list[int]]] = {}
        self.groups: dict[int, list[int]] = {}
        self.cancelled: set[Ticket] = set()
        self.served = 0
        self.saved = ()
        self.capture(0)

    def fresh(self):
        max_groups = MAX_STEPS * self.policy.groups_per_step
        return Ledger(self.policy, max_attempts=self.max_attempts, max_groups=max_groups, on_event=self.hear)

    def hear(self, event):
        self.books.add(event, self.max_attempts)
        self.seen[event.transition] += 1

    def apply(self, byte):
        mixed = byte * 167 + 83 & 255  # small bytes, which hypothesis likes, are to be all kinds of transitions
        OPERATIONS[mixed >> 3](self, mixed & 7)
        self.check()

    def check(self):
        ledger, policy = self.ledger, self.ledger.policy
        assert policy.max_lag <= self.policy.max_lag
        assert ledger.counts == self.books.counts()
        assert sum(ledger.held().values()) == sum(r.issued for r in ledger.running())
        assert ledger.counts.admitted == ledger.counts.active + ledger.counts.ended
        deadlines = []
        for r in ledger.snapshot().records:
            anew = r.state == "running" and not r.issued and not r.kept
            deadlines.append(policy.deadline(ledger.version if anew else r.version))
            if r.state == "running":
                assert r.version <= ledger.version
        if policy.on_overdue == "mask":  # only the total is limited, and nothing ends where the limit is lowered
            policy = self.policy
            latest = policy.deadline(ledger.version)
            deadlines = [max(latest, deadline) for deadline in deadlines]
        assert is_feasible(policy, deadlines, ledger.step)

    # -- the rollouter

    def admit(self, arg):
        ledger, owner = self.ledger, "ab"[arg % 2]
        kept = {r.ordinal for r in ledger.running() if r.kept}
        for ticket in ledger.admit(1 + 2 * arg, owner=owner):
            self.owners[ticket] = owner
            partial, versions = self.pending.pop(ticket.ordinal, (None, []))
            assert (partial == ticket) == (ticket.ordinal in kept)
            assert ticket.version == ledger.version or (partial == ticket and ticket.version <= ledger.version)
            if partial == ticket:
                assert min(versions) >= ticket.version
                self.seen["resumed"] += 1
            self.running[ticket] = list(versions) if partial == ticket else []
        for ticket in ledger.take_cancelled(owner):
            assert ticket in self.cancelled
            assert self.owners[ticket] == owner, "it is told of another one's ticket"
            self.running.pop(ticket, None)
        assert not ledger.take_cancelled(owner)

    def pick(self, arg):
        return list(self.running)[arg % len(self.running)]

    def fast(self):
        """All but the stragglers."""
        return [ticket for ticket in self.running if ticket.ordinal % 4 != 3]

    def sample_one(self, arg):
        if self.running:
            self.running[self.pick(arg)].append(self.served)

    def sample_all(self, arg):
        for ticket in self.fast() if arg > 2 else self.running:
            self.running[ticket].append(self.served)

    def put(self, ticket, *, has_signal=True):
        versions = self.running.pop(ticket)
        if ticket in self.cancelled:  # the news of it and this put have crossed
            before = self.ledger.counts
            assert not self.ledger.put(ticket, min(versions, default=None))
            assert self.ledger.counts == before
            return
        assert self.ledger.put(ticket, min(versions, default=None), has_signal=has_signal) == has_signal
        if has_signal:
            self.groups[ticket.ordinal] = versions or [ticket.version]
        with pytest.raises(LedgerError):
            self.ledger.put(ticket, min(versions, default=None))

    def put_fast(self, arg):
        if fast := self.fast():
            self.put(fast[arg % len(fast)])

    def put_any(self, arg):
        if self.running and arg < {"wait": 8, "refill": 1, "mask": 3}[self.policy.on_overdue]:
            self.put(self.pick(arg % 3))  # mostly a straggler

    def put_all_fast(self, arg):
        for ticket in self.fast():
            self.put(ticket)

    def fail_or_filter(self, arg):
        tickets = self.fast() or list(self.running)
        if not tickets:
            return
        ticket = tickets[arg // 2 % len(tickets)]
        if arg % 2:
            self.put(ticket, has_signal=False)
            return
        del self.running[ticket]
        again = self.ledger.nack(ticket, "scripted")
        if ticket in self.cancelled:
            assert again
            return
        with pytest.raises(LedgerError):
            self.ledger.nack(ticket, "again")

    def rollouter_dies(self, arg):
        if arg > 1:
            return self.sample_all(arg)
        dead, other = "ab"[arg], "ba"[arg]
        lost = [t for t in self.running if self.owners[t] == dead]
        alive = [t for t in lost if t not in self.cancelled]
        held = self.ledger.held()
        assert self.ledger.take_back_all("scripted death", dead) == len(alive) == held[dead]
        assert self.ledger.held() == {other: held[other]} if held[other] else not self.ledger.held()
        assert not self.ledger.take_cancelled(dead), "a new rollouter hears nothing of its predecessor's tickets"
        for ticket in lost[:2]:
            with pytest.raises(LedgerError):
                self.ledger.put(ticket, ticket.version)
        self.running = {t: v for t, v in self.running.items() if self.owners[t] != dead}
        self.cancelled = {t for t in self.cancelled if self.owners[t] != dead}

    # -- the trainer

    def lease(self):
        """Leases; checks every token that would be trained. Returns the ordinals."""
        ledger, policy = self.ledger, self.ledger.policy
        step = ledger.step
        issued = {r.ordinal: r.ticket for r in ledger.running() if r.issued}
        floor = step - policy.max_lag

        def oldest(ordinal, version):
            assert policy.on_overdue == "mask"
            assert version == floor
            return min((v for v in self.groups[ordinal] if v >= version), default=None)

        before = ledger.counts
        selection = ledger.lease(step, oldest)
        self.drop(issued)
        if ledger.counts.expired > before.expired:
            assert policy.on_overdue != "wait"
            assert policy.on_overdue == "mask" or selection.chosen, "given up for nothing"
        assert selection.chosen or selection.missing or policy.on_overdue != "mask"
        for ordinal in selection.chosen:
            versions = self.groups[ordinal]
            trained = [v for v in versions if v >= floor] if policy.on_overdue == "mask" else versions
            assert trained, "nothing of it is left"
            assert max(step - v for v in trained) <= policy.max_lag
            assert ledger.record(ordinal).version == min(trained)
            self.seen["masked"] += len(trained) < len(versions)
        assert len(selection.chosen) in (0, policy.groups_per_step)
        assert set(ledger.lease(step, oldest).chosen) == set(selection.chosen), "it is idempotent"
        return selection.chosen

    def drop(self, issued):
        """What the ledger has ended of `issued` is cancelled; of the groups that it has ended no tokens are kept."""
        for ordinal, ticket in issued.items():
            record = self.ledger.record(ordinal)
            if record is None or record.attempt != ticket.attempt:
                self.cancelled.add(ticket)
                self.pending.pop(ordinal, None)
        for stored in (self.groups, self.pending):
            for ordinal in [o for o in stored if self.ledger.record(o) is None]:
                del stored[ordinal]

    def limit(self, arg):
        """The guard sets another limit, after a step and its publish."""
        ledger, limit = self.ledger, max(self.every - 1, arg % (self.policy.max_lag + 1))
        if ledger.step - ledger.version >= self.every:
            self.publish(arg)
        before, was, held = ledger.counts, ledger.policy.max_lag, [r.ordinal for r in ledger.snapshot().records]
        issued = {r.ordinal: r.ticket for r in ledger.running() if r.issued}
        expired = ledger.limit_lag(limit)
        assert ledger.policy == replace(self.policy, max_lag=limit)
        assert ledger.counts.expired == before.expired + expired
        assert [r.ordinal for r in ledger.snapshot().records if r.ordinal not in held] == []
        if limit >= was or self.policy.on_overdue == "mask":
            assert ledger.counts == before
        with pytest.raises(ValueError, match="above"):
            ledger.limit_lag(self.policy.max_lag + 1)
        self.drop(issued)
        self.seen["over a lowered limit"] += expired

    def train(self, arg):
        ledger = self.ledger
        if ledger.step - ledger.version >= self.every:
            return  # the coordinator publishes before it trains on
        chosen = self.lease()
        if not chosen:
            return
        if arg == 0:
            ledger.rollback(ledger.step)
            return
        step, oldest = ledger.step, {o: ledger.record(o).version for o in chosen}
        assert set(ledger.commit(step)) == set(chosen)
        for ordinal in chosen:
            assert self.books.ends[ordinal][-1] == "trained"
            assert self.books.trained_from[ordinal] == oldest[ordinal] >= step - ledger.policy.max_lag
            del self.groups[ordinal]

    def swap(self, arg):
        """The replicas serve the newest version a moment before the ledger hears of it."""
        self.served = self.ledger.step

    def publish(self, arg):
        self.served = self.ledger.step
        self.ledger.published(self.ledger.step)

    # -- the supervisor

    def capture(self, arg):
        ledger = self.ledger
        partials = {t.ordinal: (t, list(v)) for t, v in self.running.items() if v and t.ordinal % 4 != arg % 4}
        partials |= self.pending
        kept = {o: (t, v) for o, (t, v) in partials.items() if (r := ledger.record(o)) is not None and r.ticket == t}
        snapshot = from_plain(LedgerSnapshot, json.loads(json.dumps(asdict(ledger.snapshot()))))
        tokens = {o: list(v) for o, v in self.groups.items()}
        self.saved = (snapshot, kept, tokens, self.books.copy(), ledger.policy.max_lag)

    def restart(self, arg):
        """Ledger and trainer are those of the last checkpoint; replicas and rollouter know nothing of it."""
        if arg > 1:
            return self.capture(arg)
        snapshot, kept, groups, books, limit = self.saved
        self.books = books.copy()
        self.ledger = self.fresh()
        self.ledger.restore(snapshot, kept=kept)
        dead, self.running, self.cancelled = self.running, {}, set()
        self.groups = {o: list(v) for o, v in groups.items()}
        self.pending = {
            o: (r.ticket, v) for o, (_, v) in kept.items() if (r := self.ledger.record(o)) is not None and r.kept
        }
        assert len(self.pending) == len(kept)
        for ticket in list(dead)[:2]:
            with pytest.raises(LedgerError):  # nothing is issued, whoever holds an old ticket
                self.ledger.put(ticket, ticket.version)
        assert self.ledger.limit_lag(limit) == 0, "what was within the limit still is"
        assert self.ledger.counts == replace(snapshot.counts, leased=0)
        self.publish(arg)

    def finish(self):
        """From any state, finishing what runs and training what is ready reaches the end."""
        ledger, goal = self.ledger, MAX_STEPS * self.policy.groups_per_step
        for _ in range(3 * MAX_STEPS):
            if ledger.counts.trained == goal:
                break
            self.publish(0)
            self.admit(100)
            self.admit(101)
            self.sample_all(0)
            for ticket in list(self.running):
                self.put(ticket)
            before = ledger.counts
            self.train(1)
            self.check()
            assert ledger.counts != before, (ledger.counts, "it stands still")
            if self.policy.on_overdue != "mask":
                assert ledger.counts.trained == before.trained + self.policy.groups_per_step
        assert ledger.counts.trained == goal
        assert ledger.counts.active == 0
        assert not self.books.states
        assert sum(ends[-1] == "trained" for ends in self.books.ends.values()) == goal
        assert sorted(self.books.ends) == list(range(len(self.books.ends))), "every ordinal has ended"
        assert sum(len(ends) for ends in self.books.ends.values()) == ledger.counts.admitted


OPERATIONS = (
    *[Script.admit] * 4,
    Script.limit,
    *[Script.sample_one] * 2,
    *[Script.sample_all] * 3,
    *[Script.put_fast] * 3,
    *[Script.put_all_fast] * 3,
    *[Script.put_any] * 2,
    *[Script.train] * 6,
    *[Script.publish] * 4,
    Script.swap,
    Script.fail_or_filter,
    Script.rollouter_dies,
    Script.restart,
)


def test_random_transitions():
    """At least 100,000 of them, and each kind of event often enough to mean something."""
    seen = Counter()

    class LedgerMachine(RuleBasedStateMachine):
        script = None

        @initialize(
            size=st.integers(1, 3),
            max_lag=st.integers(0, 3),
            every=st.integers(1, 4),
            max_attempts=st.integers(1, 4),
            on_overdue=st.sampled_from(["wait", "refill", "refill", "mask", "mask"]),
        )
        def setup(self, size, max_lag, every, max_attempts, on_overdue):
            self.script = Script(StalenessPolicy(size, max_lag, on_overdue), every, max_attempts, seen)

        @rule(transitions=st.binary(min_size=40, max_size=80))
        def go(self, transitions):
            for byte in transitions:
                self.script.apply(byte)
            seen["transitions"] += len(transitions)

        def teardown(self):
            if self.script is not None:
                self.script.finish()

    run_state_machine_as_test(
        LedgerMachine,
        settings=settings(
            max_examples=200,
            stateful_step_count=14,
            deadline=None,
            phases=[Phase.generate],  # shrinking takes minutes: add Phase.shrink to look into a failure
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
    assert seen["transitions"] >= 100_000, seen
    kinds = "expired", "masked", "resumed", "requeued", "failed", "filtered", "over a lowered limit"
    often = {kind: seen[kind] for kind in kinds}
    assert min(often.values()) >= 10, often


def test_the_ends_of_a_group():
    ledger = Ledger(StalenessPolicy(1, 1), max_attempts=2)
    first, second = ledger.admit(10)
    assert ledger.admit(10) == []
    assert ledger.nack(first, "boom")
    (again,) = ledger.admit(10)
    assert (again.ordinal, again.attempt) == (first.ordinal, 1)
    assert not ledger.nack(again, "boom again")
    ledger.put(second, 0, has_signal=False)
    counts = ledger.counts
    assert (counts.admitted, counts.failed, counts.filtered, counts.active) == (2, 1, 1, 0)


def test_a_group_cannot_claim_tokens_older_than_its_admission():
    ledger = Ledger(StalenessPolicy(1, 1))
    (ticket, other) = ledger.admit(2)
    ledger.put(ticket, 0)
    ledger.lease(0)
    ledger.commit(0)
    ledger.published(1)
    (late,) = ledger.admit(1)
    with pytest.raises(LedgerError, match="oldest token"):
        ledger.put(late, 0)
    assert other.version == 0


def test_no_more_groups_are_admitted_than_the_run_trains():
    ledger = Ledger(StalenessPolicy(2, 3), max_groups=4)
    assert len(ledger.admit(100)) == 4
    assert ledger.admit(100) == []


def test_a_rule_that_leaves_a_group_until_it_is_too_old_does_not_train_it():
    class NewestFirst(StalenessPolicy):
        def select(self, *, ready, **_):
            return Selection((max(candidate.ordinal for candidate in ready),))

    ledger = Ledger(NewestFirst(1, 1))
    for step in range(2):
        for ticket in ledger.admit(2):
            ledger.put(ticket, ticket.version)
        assert ledger.lease(step).chosen == (step + 1,)
        ledger.commit(step)
        ledger.published(step + 1)
    with pytest.raises(LedgerError, match="group 0 would be trained with lag 2 > 1"):
        ledger.lease(2)
