"""Ledger and staleness under random interleavings: the bound, conservation, no double training, progress."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.errors import LedgerError
from asyncrl.queue.ledger import Ledger, LedgerSnapshot
from asyncrl.queue.staleness import StalenessPolicy
from asyncrl.types import Ticket

pytestmark = pytest.mark.concurrency


class LedgerMachine(RuleBasedStateMachine):
    """A scripted rollouter and trainer around a real ledger. `tickets` are those that the rollouter holds; each
    carries the versions of the tokens that it has sampled so far."""

    @initialize(
        size=st.integers(1, 3), max_lag=st.integers(0, 3), every=st.integers(1, 4), max_attempts=st.integers(1, 3)
    )
    def setup(self, size, max_lag, every, max_attempts):
        self.policy = StalenessPolicy(size, max_lag)
        self.every = min(every, max_lag + 1)
        self.max_attempts = max_attempts
        self.events = []
        self.ledger = self.fresh()
        self.tickets: dict[Ticket, int | None] = {}
        self.ready_versions: dict[int, int] = {}
        self.trained: list[int] = []
        self.checkpoint = (self.ledger.snapshot(), dict(self.ready_versions), list(self.trained))

    def fresh(self):
        return Ledger(self.policy, max_attempts=self.max_attempts, max_groups=60, on_event=self.events.append)

    @rule(limit=st.integers(1, 8))
    def admit(self, limit):
        for ticket in self.ledger.admit(limit):
            assert ticket.version == self.ledger.version
            self.tickets[ticket] = None

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def sample_first_token(self, data):
        ticket = data.draw(st.sampled_from(list(self.tickets)))
        if self.tickets[ticket] is None:
            self.tickets[ticket] = self.ledger.version

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), has_signal=st.booleans())
    def put(self, data, has_signal):
        ticket = data.draw(st.sampled_from(list(self.tickets)))
        oldest = self.tickets.pop(ticket)
        oldest = self.ledger.version if oldest is None else oldest
        self.ledger.put(ticket, oldest, has_signal=has_signal)
        if has_signal:
            self.ready_versions[ticket.ordinal] = oldest
        with pytest.raises(LedgerError):
            self.ledger.put(ticket, oldest)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def nack(self, data):
        ticket = data.draw(st.sampled_from(list(self.tickets)))
        del self.tickets[ticket]
        self.ledger.nack(ticket, "scripted")
        with pytest.raises(LedgerError):
            self.ledger.nack(ticket, "again")

    @rule()
    def rollouter_dies(self):
        self.ledger.take_back(list(self.tickets), "scripted death")
        dead, self.tickets = self.tickets, {}
        for ticket in dead:
            with pytest.raises(LedgerError):
                self.ledger.put(ticket, ticket.version)

    @rule(fails=st.booleans())
    def train(self, fails):
        ledger = self.ledger
        step = ledger.step
        if step - ledger.version >= self.every:
            return  # the coordinator publishes before it trains on
        selection = ledger.lease(step)
        if not selection.chosen:
            return
        assert len(selection.chosen) == self.policy.groups_per_step
        for ordinal in selection.chosen:
            assert step - self.ready_versions[ordinal] <= self.policy.max_lag
        if fails:
            ledger.rollback(step)
            return
        assert ledger.lease(step).chosen == selection.chosen or set(ledger.lease(step).chosen) == set(selection.chosen)
        self.trained += ledger.commit(step)
        assert len(set(self.trained)) == len(self.trained)

    @rule()
    def publish(self):
        self.ledger.published(self.ledger.step)

    @rule()
    def save(self):
        snapshot = LedgerSnapshot.from_json(self.ledger.snapshot().to_json())
        self.checkpoint = (snapshot, dict(self.ready_versions), list(self.trained))

    @rule()
    def crash_and_resume(self):
        snapshot, self.ready_versions, self.trained = (
            self.checkpoint[0],
            dict(self.checkpoint[1]),
            list(self.checkpoint[2]),
        )
        dead, self.tickets = self.tickets, {}
        self.ledger = self.fresh()
        self.ledger.restore(snapshot)
        self.ledger.published(self.ledger.step)
        for ticket in dead:
            record = self.ledger.record(ticket.ordinal)
            if record is not None and record.attempt == ticket.attempt:
                with pytest.raises(LedgerError):  # it is not issued, whoever holds an old ticket
                    self.ledger.put(ticket, ticket.version)

    @invariant()
    def balanced_and_feasible(self):
        if not hasattr(self, "ledger"):
            return
        counts = self.ledger.counts
        assert counts.admitted == counts.active + counts.ended
        assert counts.trained == len(self.trained)
        deadlines = [
            self.policy.deadline(r.version if r.issued or r.state != "running" else self.ledger.version)
            for r in self.ledger.snapshot().records
            if r.state != "leased"
        ]
        assert self.policy.is_feasible(deadlines, self.ledger.step)

    def teardown(self):
        """Progress: from any state, finishing what runs and training what is ready always reaches the end."""
        if not hasattr(self, "ledger"):
            return
        ledger = self.ledger
        for _ in range(400):
            if ledger.counts.trained >= 60 - 60 % self.policy.groups_per_step:
                break
            ledger.published(ledger.step)
            for ticket in ledger.admit(100):
                self.tickets[ticket] = None
            for ticket, oldest in list(self.tickets.items()):
                ledger.put(ticket, ledger.version if oldest is None else oldest)
            self.tickets = {}
            selection = ledger.lease(ledger.step)
            assert selection.chosen, (selection, ledger.counts)
            self.trained += ledger.commit(ledger.step)
        assert len(set(self.trained)) == len(self.trained) == ledger.counts.trained
        assert ledger.counts.trained >= 60 - 60 % self.policy.groups_per_step


LedgerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
TestLedger = LedgerMachine.TestCase
TestLedger.pytestmark = [pytest.mark.concurrency]


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
