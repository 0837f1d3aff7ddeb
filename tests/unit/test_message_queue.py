"""The broker's shell: long polls, tokens, files."""

import asyncio
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import LedgerError, RunFailed
from asyncrl.queue.masking import StoredGroup, mask_older, oldest_trained, summarize
from asyncrl.queue.message_queue import MessageQueue
from asyncrl.types import EndShares, LeaseManifest, LeaseWait, Segment
from tests.make import begun, changed, group, put, queue_spec, train


@pytest.fixture
def spec(tmp_path):
    return queue_spec(tmp_path)


@pytest.fixture
def queue(spec):
    return MessageQueue(spec)


async def fill(queue, count=10, **options):
    tickets = await admit(queue, count)
    await put(queue, *tickets, **options)
    return tickets


async def admit(queue, count=10, client=""):
    return (await queue.admit(count, 0, client)).tickets


async def test_the_round_of_a_group(queue):
    tickets = await fill(queue)
    assert [t.ordinal for t in tickets] == [0, 1, 2, 3]
    manifest = await queue.lease(0, 0)
    assert [g.ordinal for g in manifest.groups] == [0, 1]
    assert manifest.groups[0].rewards == (0.0, 1.0)
    assert manifest.groups[0].trained_tokens == 8
    fetched = await queue.fetch([(1, 1), (0, 0)])
    assert [t.reward for t in fetched] == [1.0, 0.0]
    with pytest.raises(LedgerError, match="fetch"):
        await queue.fetch([(0, 0), (2, 0)])
    counts = (await queue.commit(0)).counts
    assert (counts.trained, counts.ready) == (2, 2)
    assert await admit(queue) == (), "the slots come back with the publish"
    await queue.published(1)
    assert [t.version for t in await admit(queue, 10)] == [1, 1]


async def test_lags_are_split_by_where_they_arose(spec):
    queue = MessageQueue(changed(spec, max_lag=2))
    tickets = await admit(queue, 6)
    await put(queue, *tickets[:2])
    await train(queue, 0)
    for t in tickets[2:]:
        await queue.put(t, group(t.ordinal, versions=(0, 1)))
    manifest = await queue.lease(1, 0)
    (first, _) = manifest.groups
    assert (first.lag_max, first.lag_sum, first.lag_in_flight_sum, first.trained_tokens) == (1, 4, 4, 8)
    assert (first.segments, first.interrupted) == (4, 2)


async def test_a_lease_waits_for_the_last_group_and_says_what_is_missing(queue):
    first, second, *_ = await admit(queue, 4)
    await queue.put(first, group(first.ordinal))
    answer = await queue.lease(0, 0.01)
    assert isinstance(answer, LeaseWait)
    assert (answer.missing, answer.counts.running) == (1, 3)
    waiting = await begun(queue.lease(0, 10))
    await queue.put(second, group(second.ordinal))
    assert isinstance(await asyncio.wait_for(waiting, 5), LeaseManifest)


async def test_admission_wakes_up_with_the_publish(queue):
    await fill(queue)
    await queue.lease(0, 0)
    await queue.commit(0)
    waiting = await begun(queue.admit(10, 10))
    await queue.published(1)
    assert len((await asyncio.wait_for(waiting, 5)).tickets) == 2


async def test_groups_without_signal_are_filtered_and_their_slot_is_free(spec):
    queue = MessageQueue(changed(spec, dynamic_sampling=True))
    assert len(await fill(queue, rewards=(1.0, 1.0))) == 4
    assert (await queue.counts()).filtered == 4
    assert len(await admit(queue, 10)) == 4


async def test_wait_idle(queue):
    tickets = await admit(queue, 10)
    assert not await queue.wait_idle(0.01)
    await put(queue, *tickets)
    assert await queue.wait_idle(0.01)


async def test_too_many_failures_end_the_run(spec):
    queue = MessageQueue(changed(spec, max_attempts=1))
    for _ in range(8):
        for t in await admit(queue, 4):
            await queue.nack(t, "Traceback: boom")
    with pytest.raises(RunFailed, match="32 of the last 32"):
        await queue.lease(0, 0)


async def test_a_restored_queue_trains_the_same_ordinals_once(spec, queue, tmp_path):
    tickets = await admit(queue, 4)
    await put(queue, *tickets[:3])
    await queue.lease(0, 0)
    await queue.commit(0)
    await queue.capture([])
    await queue.save(tmp_path / "saved")
    restored = MessageQueue(spec)
    counts = await restored.load(tmp_path / "saved")
    assert (counts.trained, counts.ready, counts.running) == (2, 1, 1)
    with pytest.raises(LedgerError):
        await restored.put(tickets[3], group(3))
    await restored.published(1)
    again = await admit(restored, 10)
    assert [(t.ordinal, t.attempt) for t in again] == [(3, 1), (4, 0), (5, 0)]
    await restored.put(again[0], group(3, attempt=1, versions=(1,)))
    manifest = await restored.lease(1, 0)
    assert [g.ordinal for g in manifest.groups] == [2, 3]
    assert len(await restored.fetch([(2, 0), (3, 1)])) == 2


async def test_every_transition_is_an_event(spec, queue):
    tickets = await admit(queue, 3)
    await queue.nack(tickets[0], "Traceback ...\nValueError: bad reward")
    await put(queue, *tickets[1:])
    await queue.lease(0, 0)
    await queue.commit(0)
    events = [json.loads(line) for line in spec.events_path.read_text().splitlines()]
    seen = [(e["transition"], e["ordinal"]) for e in events]
    assert seen[:4] == [("admitted", 0), ("admitted", 1), ("admitted", 2), ("requeued", 0)]
    assert seen[-2:] == [("trained", 1), ("trained", 2)]
    assert "bad reward" in events[3]["detail"]
    assert all({"time_s", "monotonic_s", "trainer_version", "version"} <= set(e) for e in events)


async def test_a_straggler_is_given_up_told_once_and_generated_again(spec, monkeypatch):
    queue = MessageQueue(changed(spec, groups_per_step=1, on_overdue="refill"))
    late, other = await admit(queue)
    await queue.put(other, group(1))
    await train(queue, 0)
    (third,) = await admit(queue)
    await queue.put(third, group(2, versions=(1,)))
    waiting = await begun(queue.admit(10, 10))
    manifest = await queue.lease(1, 0)
    assert [g.ordinal for g in manifest.groups] == [2]
    admission = await asyncio.wait_for(waiting, 5)
    assert admission.cancelled == (late,)
    assert [(t.ordinal, t.attempt, t.version) for t in admission.tickets] == [(0, 1, 1)]
    later = await queue.admit(10, 0)
    assert (later.tickets, later.cancelled) == ((), ())
    told: list[int] = []
    monkeypatch.setattr(queue._pacing, "ready", lambda ordinal, now: told.append(ordinal))
    await queue.put(late, group(0))  # it was on its way
    assert told == [], "the pacing would take it for the attempt that runs now"
    with pytest.raises(LedgerError):
        await queue.put(late, group(0))
    counts = await queue.counts()
    assert (counts.admitted, counts.expired, counts.running, counts.leased) == (4, 1, 1, 1)
    events = [json.loads(line) for line in spec.events_path.read_text().splitlines()]
    mine = [(e["transition"], e["attempt"]) for e in events if e["ordinal"] == 0]
    assert mine == [("admitted", 0), ("expired", 0), ("admitted", 1), ("reissued", 1)]


async def test_a_lowered_limit_ends_groups_at_once_and_a_waiting_admission_hears_of_it(spec):
    queue = MessageQueue(changed(spec, max_lag=2))
    trained, late = await admit(queue, 4), await admit(queue)
    await put(queue, *trained)
    for step in (0, 1):
        assert isinstance(await queue.lease(step, 0), LeaseManifest)
        with pytest.raises(LedgerError, match="are leased"):
            await queue.limit_lag(1)
        await queue.commit(step)
        await queue.published(step + 1)
        await admit(queue)
    waiting = await begun(queue.admit(10, 10))
    counts = await queue.limit_lag(1)
    assert (counts.expired, counts.running) == (2, 4)
    admission = await asyncio.wait_for(waiting, 5)
    assert (set(admission.cancelled), admission.tickets) == (set(late), ())
    with pytest.raises(ValueError, match="above max_lag 2"):
        await queue.limit_lag(3)
    assert (await queue.limit_lag(2)).expired == 2
    assert len(await admit(queue)) == 2, "a higher limit admits more groups"


async def test_nothing_goes_to_a_rollouter_that_is_gone(queue):
    tickets = await admit(queue, 3, "one")
    await queue.put(tickets[0], group(0))
    (of_other,) = await admit(queue, 1, "other")
    waiting = await begun(queue.admit(10, 10, "one"))
    assert await queue.take_back_all("it died", "one") == 2
    assert (await asyncio.wait_for(waiting, 5)).tickets == ()
    assert await admit(queue, 10, "one") == (), "it counts as dead"
    assert [(t.ordinal, t.attempt) for t in await admit(queue, 10, "its replacement")] == [(1, 1), (2, 1)]
    with pytest.raises(LedgerError):
        await queue.put(tickets[1], group(1))
    await queue.put(of_other, group(of_other.ordinal))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(1, 9))
async def test_rollouters_that_wait_get_equal_shares_of_what_comes_free(tmp_path_factory, held, others):
    size, clients = sum(held) + others, [f"client {i}" for i in range(len(held))]
    queue = MessageQueue(queue_spec(tmp_path_factory.mktemp("q"), groups_per_step=size, max_failed_fraction=1.0))
    await fill(queue, size)
    for client, count in zip((*clients, "busy"), (*held, others), strict=True):
        assert len(await admit(queue, count, client)) == count
    waiting = [asyncio.create_task(queue.admit(1000, 10, client)) for client in clients]
    await asyncio.sleep(0)
    await train(queue, 0)
    for _ in range(20):  # enough turns for all that were woken
        await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    have = queue._ledger.held()
    assert sum(have[client] for client in clients) == sum(held) + size
    assert max(have[client] for client in clients) <= max([*held, -(-(sum(held) + size) // len(held))])


async def test_a_group_of_a_version_that_does_not_exist_fails_with_that_reason(queue, spec):
    for attempt in range(spec.recipe.rollout.max_attempts):
        ticket = next(t for t in await admit(queue) if t.ordinal == 0)
        assert ticket.attempt == attempt
        await queue.put(ticket, group(0, attempt, versions=(0, 3)))
    counts = await queue.counts()
    assert (counts.ready, counts.failed) == (0, 1)
    events = [json.loads(line) for line in spec.events_path.read_text().splitlines()]
    (failed,) = [e for e in events if e.get("transition") == "failed"]
    assert "version 3" in failed["detail"]
    assert "0 steps are trained" in failed["detail"]


async def test_the_answer_to_a_commit_has_the_next_lease_where_its_groups_are_ready(queue):
    await fill(queue)
    await queue.lease(0, 0)
    committed = await queue.commit(0, leases_next=True)
    assert (committed.counts.ready, committed.counts.leased) == (2, 0), "as the commit left it"
    assert committed.shares == EndShares()
    assert [(g.ordinal, g.lag_max) for g in committed.lease.groups] == [(2, 1), (3, 1)]
    assert pickle.loads(pickle.dumps(committed)) == committed
    assert await queue.lease(1, 0) == committed.lease, "it is the lease of that step"
    assert len(await queue.fetch([(2, 0), (3, 1)])) == 2
    committed = await queue.commit(1, leases_next=True)
    assert (committed.counts.trained, committed.lease) == (4, None), "nothing is ready"
    await queue.published(2)
    await fill(queue)
    assert [g.lag_max for g in (await queue.lease(2, 0)).groups] == [0, 0]


async def test_what_the_next_step_would_lease_is_foreseen_and_fetched_without_a_change(spec):
    queue = MessageQueue(changed(spec, max_lag=2))
    tickets = await admit(queue, 6)

    await put(queue, *tickets[:3])
    await queue.lease(0, 0)
    assert await queue.foresee(1, 0) == (), "one more is needed"
    waiting = await begun(queue.foresee(1, 5))
    await put(queue, tickets[5])
    foreseen = await waiting
    assert [(g.ordinal, g.lag_max) for g in foreseen] == [(2, 1), (5, 1)]
    keys = [(2, 0), (5, 1), (3, 0)]
    ahead = await queue.fetch_ahead(keys)
    assert ahead.keys() == {(2, 0), (5, 1)}, "group 3 is not foreseen"
    with pytest.raises(LedgerError, match="fetch of group 2"):
        await queue.fetch([(2, 0)])
    await put(queue, tickets[3])
    assert [g.ordinal for g in await queue.foresee(1, 0)] == [2, 3], "as things are now"
    lease = (await queue.commit(0, leases_next=True)).lease
    assert lease.groups == (await queue.lease(1, 0)).groups
    assert [g.ordinal for g in lease.groups] == [2, 3]
    assert lease.groups[0] == foreseen[0]
    assert await queue.foresee(1, 5) == (), "that step is in training: an old question ends at once"


async def test_a_lease_that_was_foreseen_is_not_described_again_and_nothing_of_it_is_kept(spec, monkeypatch):
    described = []

    def counted(stored, leased, **options):
        described.append((leased.ordinal, leased.attempt))
        return summarize(stored, leased, **options)

    monkeypatch.setattr("asyncrl.queue.message_queue.summarize", counted)
    queue = MessageQueue(changed(spec, max_lag=2))
    await fill(queue, 6)
    await queue.lease(0, 0)
    foreseen = await queue.foresee(1, 0)
    described.clear()
    lease = (await queue.commit(0, leases_next=True)).lease
    assert lease.groups == foreseen
    assert not described, "the trainer waits meanwhile"
    assert queue._described, "an old lease may be asked for again"
    await queue.commit(1)
    assert not queue._described, "groups that are trained are not held"
    await queue.lease(2, 0)
    assert described == [(4, 0), (5, 0)], "of another step"


async def test_a_group_that_changed_since_it_was_foreseen_is_described_anew(spec):
    queue = MessageQueue(changed(spec, max_lag=2))
    await fill(queue, 4)
    await queue.lease(0, 0)
    (before, _) = await queue.foresee(1, 0)
    stored = queue._stored[2]
    again = StoredGroup(group(2, stored.group.attempt, versions=(0,), rewards=(0.5, 0.25)), stored.put_version)
    queue._stored[2] = again  # as a restart puts it back
    lease = (await queue.commit(0, leases_next=True)).lease
    assert lease.groups[0].rewards == (0.5, 0.25) != before.rewards


async def test_a_commit_leaves_it_to_the_lease_to_end_the_run(spec):
    limits = {"filtered_window": 4, "max_filtered_fraction": 0.4}
    queue = MessageQueue(changed(spec, dynamic_sampling=True, **limits))
    await fill(queue, 2)
    await queue.lease(0, 0)
    await fill(queue, rewards=(1.0, 1.0))
    committed = await queue.commit(0, leases_next=True)
    assert (committed.counts.trained, committed.lease) == (2, None)
    for call in (queue.lease(1, 0), queue.wait_idle(0)):
        with pytest.raises(RunFailed, match="2 of the last 4 ended groups had equal rewards"):
            await call


# -- which tokens a step trains ----------------------------------------------------------------------------------------


@pytest.fixture
def masking(tmp_path):
    return queue_spec(tmp_path, groups_per_step=1, on_overdue="mask")


def lags(trained, step):
    """The lag of every token in the loss."""
    return [step - s.version for t in trained for s in t.segments for m in t.loss_mask[s.start : s.stop] if m]


def test_a_group_that_never_had_a_token_to_train_is_not_over_the_limit():
    whole = group(versions=(3,))
    empty = replace(whole, trajectories=tuple(replace(t, loss_mask=np.zeros(4, np.bool_)) for t in whole.trajectories))
    assert oldest_trained(empty, 7) == 7
    assert summarize(StoredGroup(empty, 3), mask_older(empty, 7), step=8, max_lag=1).trained_tokens == 0


def test_the_environments_tokens_have_no_lag():
    (first, second) = group(versions=(3, 5)).trajectories
    segments = (Segment(0, 2, 3, 0, "environment"), Segment(2, 4, 5, 0))
    first = replace(first, segments=segments, loss_mask=np.array([False, False, True, True]))
    mixed = replace(group(versions=(5,)), trajectories=(first, second))
    assert oldest_trained(mixed, 4) == 5
    summary = summarize(StoredGroup(mixed, 5), mask_older(mixed, 4), step=5, max_lag=1)
    assert (summary.trained_tokens, summary.masked_tokens, summary.lag_max) == (4, 2, 0)
    assert [length.trained for length in summary.lengths] == [2, 2]


async def straggle(queue, versions):
    """Group 0 is put after two steps were trained without it; it has tokens of `versions`."""
    (late,) = (await queue.admit(1, 0)).tickets
    for step in range(2):
        await put(queue, *(await queue.admit(10, 0)).tickets)
        assert (await train(queue, step)).groups[0].masked_tokens == 0
    await queue.put(late, group(late.ordinal, versions=versions))
    return await queue.lease(2, 0)


async def test_a_straggler_is_trained_without_its_old_tokens(masking):
    queue = MessageQueue(masking)
    (summary,) = (await straggle(queue, (0, 1, 2, 2))).groups
    assert (summary.ordinal, summary.trained_tokens, summary.masked_tokens) == (0, 6, 2)
    assert (summary.lag_max, summary.lag_sum, summary.lag_in_flight_sum) == (1, 2, 2)
    assert [length.trained for length in summary.lengths] == [3, 3]
    trained = await queue.fetch([(0, 0), (0, 1)])
    assert lags(trained, 2) == [1, 0, 0] * 2
    await queue.commit(2)
    text = masking.events_path.read_text().splitlines()
    assert '"transition": "trained", "ordinal": 0' in text[-1]
    assert '"oldest_version": 1' in text[-1]


async def test_a_group_without_a_token_left_expires_and_the_lease_looks_again(masking):
    queue = MessageQueue(masking)
    answer = await straggle(queue, (0,))
    assert isinstance(answer, LeaseWait)
    assert (answer.missing, answer.counts.expired, answer.counts.active) == (1, 1, 0)
    assert len((await queue.admit(10, 0)).tickets) == 2, "its slot is free"


def test_tokens_that_went_on_under_newer_weights_without_a_new_request_are_counted():
    (first, second) = group(versions=(3, 5)).trajectories
    moved = (Segment(0, 2, 3, 0), Segment(2, 4, 5, 1))  # another replica has computed its cache anew
    turns = (Segment(0, 1, 3, 0), Segment(1, 2, 3, 0, "environment"), Segment(2, 4, 5, 0))
    asked = replace(first, segments=turns, loss_mask=np.array([True, False, True, True]))
    for trajectories, tokens in (
        ((first, second), 4),
        ((replace(first, segments=moved), second), 2),
        ((asked, second), 2),
    ):
        whole = replace(group(versions=(3, 5)), trajectories=trajectories)
        summary = summarize(StoredGroup(whole, 5), whole, step=6, max_lag=3)
        assert (summary.continued_tokens, summary.version_span, summary.interrupted) == (tokens, 4, 2)
