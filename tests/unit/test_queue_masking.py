"""Which tokens of a group a step trains: masks, summaries, what the trainer fetches."""

from dataclasses import replace

import numpy as np
import pytest

from asyncrl.queue.masking import StoredGroup, mask_older, oldest_trained, summarize
from asyncrl.queue.message_queue import MessageQueue
from asyncrl.types import LeaseWait, Segment
from tests.make import group, put, queue_spec, train


@pytest.fixture
def spec(tmp_path):
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


async def test_a_straggler_is_trained_without_its_old_tokens(spec):
    queue = MessageQueue(spec)
    (summary,) = (await straggle(queue, (0, 1, 2, 2))).groups
    assert (summary.ordinal, summary.trained_tokens, summary.masked_tokens) == (0, 6, 2)
    assert (summary.lag_max, summary.lag_sum, summary.lag_in_flight_sum) == (1, 2, 2)
    assert [length.trained for length in summary.lengths] == [3, 3]
    trained = await queue.fetch([(0, 0), (0, 1)])
    assert lags(trained, 2) == [1, 0, 0] * 2
    await queue.commit(2)
    text = spec.events_path.read_text().splitlines()
    assert '"transition": "trained", "ordinal": 0' in text[-1]
    assert '"oldest_version": 1' in text[-1]


async def test_a_group_without_a_token_left_expires_and_the_lease_looks_again(spec):
    queue = MessageQueue(spec)
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
