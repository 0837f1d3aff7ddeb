"""The pure admission and lease decisions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.queue.ledger import Ledger
from asyncrl.queue.staleness import Candidate, StalenessPolicy


def candidates(deadlines, first=0):
    return [Candidate(first + i, d) for i, d in enumerate(deadlines)]


def is_feasible(policy, deadlines, step):
    """docs/staleness.md: n(d) <= (d - g + 1) * B for every d >= g."""
    return all(n <= (d - step + 1) * policy.groups_per_step for n, d in enumerate(sorted(deadlines), 1))


@pytest.mark.parametrize(
    ("max_lag", "step", "version", "active", "expected"),
    [
        (0, 0, 0, 0, 4),  # sync: one batch
        (0, 1, 0, 0, 0),  # sync, trained but not published: nothing
        (1, 0, 0, 0, 8),  # one step off starts with two batches
        (1, 1, 0, 4, 0),  # the trained batch gives its slots back only with the publish
        (1, 1, 1, 4, 4),
        (2, 5, 5, 12, 0),
        (2, 5, 5, 11, 1),
        (2, 7, 5, 4, 0),
    ],
)
def test_slots(max_lag, step, version, active, expected):
    policy = StalenessPolicy(groups_per_step=4, max_lag=max_lag)
    assert policy.admissible(step=step, version=version, active=active) == expected


def test_a_straggler_delays_nobody_before_its_time():
    policy = StalenessPolicy(groups_per_step=2, max_lag=2)
    straggler = [Candidate(0, deadline=2)]
    ready = candidates([2, 2, 2, 3, 3], first=1)
    assert policy.select(step=1, version=1, ready=ready, unready=straggler).chosen == (1, 2)
    # At its deadline the step waits for it, although two others are ready.
    selection = policy.select(step=2, version=2, ready=candidates([3, 3], first=5), unready=straggler)
    assert selection.chosen == ()
    assert selection.overdue == 1


def test_missing_counts_the_groups_short_of_a_batch():
    policy = StalenessPolicy(groups_per_step=3, max_lag=1)
    selection = policy.select(step=0, version=0, ready=candidates([1]), unready=candidates([1, 1], first=1))
    assert (selection.chosen, selection.missing) == ((), 2)


states = st.tuples(
    st.integers(1, 4),
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=16),
)


@given(states)
def test_a_lease_keeps_a_feasible_state_feasible_and_takes_the_earliest_deadlines(state):
    size, max_lag, groups = state
    policy, step = StalenessPolicy(size, max_lag), 2
    deadlines = [step + d for d, _ in groups]
    if not is_feasible(policy, deadlines, step):
        return
    ready = [Candidate(i, step + d) for i, (d, is_ready) in enumerate(groups) if is_ready]
    unready = [Candidate(i, step + d) for i, (d, is_ready) in enumerate(groups) if not is_ready]
    selection = policy.select(step=step, version=step, ready=ready, unready=unready)
    if selection.chosen:
        rest = [step + d for i, (d, _) in enumerate(groups) if i not in selection.chosen]
        assert len(selection.chosen) == size
        assert is_feasible(policy, rest, step + 1)
        left = [c.deadline for c in ready if c.ordinal not in selection.chosen]
        assert not left or max(step + groups[o][0] for o in selection.chosen) <= min(left)
    else:
        assert selection.missing or selection.overdue
    if not unready and len(ready) >= size:
        assert selection.chosen, "with every active group ready a feasible state never waits"


@given(states, st.integers(0, 3))
def test_refill_gives_up_the_fewest_groups_and_then_the_step_has_its_batch(state, behind):
    size, max_lag, groups = state
    policy, step = StalenessPolicy(size, max_lag, "refill"), 3
    version = step - min(behind, max_lag)
    latest = policy.deadline(version)
    groups = [(min(step + d, latest), is_ready) for d, is_ready in groups]
    if not is_feasible(policy, [d for d, _ in groups], step):
        return
    ready = [Candidate(i, d) for i, (d, is_ready) in enumerate(groups) if is_ready]
    unready = [Candidate(i, d) for i, (d, is_ready) in enumerate(groups) if not is_ready]
    waits = StalenessPolicy(size, max_lag).select(step=step, version=version, ready=ready, unready=unready)
    selection = policy.select(step=step, version=version, ready=ready, unready=unready)
    if not waits.overdue or waits.missing:
        assert selection == waits
        return
    assert selection.expire, "a feasible state never has to wait for a group while B others are ready"

    def after(expired):
        again = [Candidate(c.ordinal, latest) if c.ordinal in expired else c for c in unready]
        return policy.select(step=step, version=version, ready=ready, unready=again)

    assert set(selection.expire) <= {c.ordinal for c in unready if c.deadline < latest}
    assert after(selection.expire).chosen
    oldest = sorted(unready, key=lambda c: (c.deadline, c.ordinal))
    assert not after([c.ordinal for c in oldest[: len(selection.expire) - 1]]).chosen, "one fewer is not enough"


def test_refill_gives_nothing_up_that_would_be_as_late_again():
    policy = StalenessPolicy(1, 1, "refill")
    ready, straggler = [Candidate(0, 2)], [Candidate(1, 1)]
    assert policy.select(step=1, version=1, ready=ready, unready=straggler).expire == (1,)
    # Version 1 is not published yet, as far as the ledger knows: admitted again now, it would be due as soon.
    selection = policy.select(step=1, version=0, ready=ready, unready=straggler)
    assert (selection.chosen, selection.expire, selection.overdue) == ((), (), 1)


@given(states)
def test_mask_waits_for_nobody(state):
    size, max_lag, groups = state
    policy = StalenessPolicy(size, max_lag, "mask")
    ready = [Candidate(i, d) for i, (d, is_ready) in enumerate(groups) if is_ready]
    unready = [Candidate(i, d) for i, (d, is_ready) in enumerate(groups) if not is_ready]
    selection = policy.select(step=4, version=4, ready=ready, unready=unready)
    assert len(selection.chosen) == (size if len(ready) >= size else 0)
    assert (selection.overdue, selection.expire) == (0, ())
    left = [c.deadline for c in ready if c.ordinal not in selection.chosen]
    assert not left or not selection.chosen or max(groups[o][0] for o in selection.chosen) <= min(left)


@given(states)
def test_without_the_surplus_the_rest_is_feasible(state):
    size, max_lag, groups = state
    step = 2
    candidates = [Candidate(i, d) for i, (d, _) in enumerate(groups)]
    surplus = StalenessPolicy(size, max_lag).surplus(candidates, step)
    rest = [c.deadline for c in candidates if c.ordinal not in surplus]
    policy = StalenessPolicy(size, max_lag)
    assert is_feasible(policy, rest, step)
    assert bool(surplus) != is_feasible(policy, [c.deadline for c in candidates], step)
    assert StalenessPolicy(size, max_lag, "mask").surplus(candidates, step) == ()


@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 3), st.integers(0, 20))
def test_admission_keeps_the_state_feasible(size, max_lag, behind, active):
    policy, version = StalenessPolicy(size, max_lag), 5
    step = version + min(behind, max_lag)
    # Active groups with the latest deadlines that exist: those admitted at the published version.
    deadlines = [version + max_lag] * active
    if not is_feasible(policy, deadlines, step):
        return
    room = policy.admissible(step=step, version=version, active=active)
    assert is_feasible(policy, [*deadlines, *[version + max_lag] * room], step)
    assert not is_feasible(policy, [*deadlines, *[version + max_lag] * (room + 1)], step)


@pytest.mark.parametrize(
    ("on_overdue", "second", "third", "admitted", "expired"),
    [("wait", (1, 3), (4, 5), 8, 0), ("refill", (3, 4), (1, 5), 9, 1), ("mask", (3, 4), (1, 5), 8, 0)],
)
def test_the_example_of_the_documentation(on_overdue, second, third, admitted, expired):
    """docs/staleness.md: B = 2, max_lag = 1, group 1 is slow."""
    ledger, tickets = Ledger(StalenessPolicy(2, 1, on_overdue)), {}

    def admit():
        tickets.update({t.ordinal: t for t in ledger.admit(100)})

    def put(*ordinals):
        for ordinal in ordinals:
            ledger.put(tickets[ordinal], tickets[ordinal].version)

    def train(step):
        chosen = ledger.lease(step).chosen
        assert all(step - ledger.record(o).version <= 1 for o in chosen)
        admit()
        ledger.commit(step)
        ledger.published(step + 1)
        admit()
        return chosen

    admit()
    put(0, 2, 3)
    assert train(0) == (0, 2)
    put(4, 5)
    if on_overdue == "wait":
        assert ledger.lease(1).overdue == 1
        put(1)
    assert train(1) == second
    put(6, 7)
    if on_overdue != "wait":
        put(1)
    assert ledger.lease(2).chosen == third
    counts = ledger.counts
    assert (counts.admitted, counts.expired) == (admitted, expired)
