"""What a checkpoint keeps of the queue, partial groups with it, and what a restored queue does with that."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from asyncrl.errors import LedgerError
from asyncrl.queue.message_queue import MessageQueue
from asyncrl.queue.saved_state import CALL_ARRAYS, load_partials, save_partials
from asyncrl.types import (
    EndShares,
    Generation,
    LeaseManifest,
    LeaseWait,
    PartialGroup,
    PartialTrajectory,
    Segment,
    Ticket,
)
from tests.make import changed, group, put, queue_spec, train, trajectory


@pytest.fixture
def spec(tmp_path):
    return queue_spec(tmp_path, max_lag=2, max_attempts=3, max_failed_fraction=0.5)


@pytest.fixture
def queue(spec):
    return MessageQueue(spec)


def call(*versions, seed=0, finish_reason="abort"):
    """Two tokens of each version."""
    rng = np.random.default_rng(seed)
    segments = tuple(Segment(2 * i, 2 * i + 2, version, i) for i, version in enumerate(versions))
    tokens = rng.integers(0, 100, 2 * len(versions)).astype(np.int32)
    logprobs = -rng.random(2 * len(versions)).astype(np.float32)
    return Generation(rng.integers(0, 100, 5).astype(np.int32), tokens, logprobs, segments, finish_reason)


def partial(ticket, *versions):
    """A complete trajectory, one in its second call, and one that has not begun."""
    calls = (call(*versions, seed=1, finish_reason="stop"), call(versions[-1], seed=2))
    done = trajectory(versions=versions, reward=1.0)
    return PartialGroup(ticket, (PartialTrajectory(done=done), PartialTrajectory(calls), PartialTrajectory()))


def same(a, b):
    assert (a.ticket, a.num_tokens, len(a.trajectories)) == (b.ticket, b.num_tokens, len(b.trajectories))
    for x, y in zip(a.trajectories, b.trajectories, strict=True):
        assert (x.done is None) == (y.done is None)
        if x.done and y.done:
            assert (x.done.segments, x.done.reward) == (y.done.segments, y.done.reward)
            np.testing.assert_array_equal(x.done.response_ids, y.done.response_ids)
        for p, q in zip(x.calls, y.calls, strict=True):
            assert (p.segments, p.finish_reason) == (q.segments, q.finish_reason)
            for name, dtype in CALL_ARRAYS.items():
                np.testing.assert_array_equal(getattr(p, name), getattr(q, name))
                assert getattr(q, name).dtype == dtype


@pytest.mark.parametrize("count", [0, 1, 3])
def test_partial_groups_survive_a_round_trip(tmp_path, count):
    partials = [partial(Ticket(i, 1, 2), 2, 3 + i) for i in range(count)]
    save_partials(tmp_path, partials)
    loaded = load_partials(tmp_path)
    assert len(loaded) == count
    for before, after in zip(partials, loaded, strict=True):
        same(before, after)


def test_files_in_which_null_stands_for_abort_are_read(tmp_path):
    before = partial(Ticket(0, 0, 2), 2, 3)
    save_partials(tmp_path, [before])
    described = tmp_path / "partials.json"
    assert '"abort"' in described.read_text()
    described.write_text(described.read_text().replace('"abort"', "null"))
    same(before, load_partials(tmp_path)[0])


def test_arrays_that_do_not_belong_to_their_description_are_refused(tmp_path):
    save_partials(tmp_path, [partial(Ticket(0, 0, 2), 2, 3)])
    described = (tmp_path / "partials.json").read_text()
    save_partials(tmp_path, [])
    (tmp_path / "partials.json").write_text(described)
    with pytest.raises(ValueError, match="its description needs"):
        load_partials(tmp_path)


async def put_rest(queue):
    """All that is running but ticket 0."""
    await put(queue, *(t for t in (await queue.admit(100, 0)).tickets if t.ordinal))


async def step(queue, number):
    """Puts what is running but ticket 0, trains and publishes one step."""
    await put_rest(queue)
    await train(queue, number)


async def reloaded(queue, spec, directory, partials=()):
    """A queue from the checkpoint that this one saves, and its counts."""
    await queue.capture([*partials])
    await queue.save(directory)
    restored = MessageQueue(spec)
    return restored, await restored.load(directory)


async def test_a_running_group_gets_its_tokens_back_once_under_its_new_ticket(spec, queue, tmp_path):
    await step(queue, 0)
    kept = partial(Ticket(0, 0, 0), 0, 1)
    restored, _ = await reloaded(queue, spec, tmp_path / "a", [kept])
    # What was not handed out yet is in the next checkpoint too, with its age.
    again, counts = await reloaded(restored, spec, tmp_path / "b")
    assert (counts.trained, counts.ready, counts.running) == (2, 3, 1)
    admission = await again.admit(1, 0)
    assert admission.tickets == (Ticket(0, 2, 0),)
    same(admission.partials[0], replace(kept, ticket=Ticket(0, 2, 0)))
    assert (await again.admit(100, 0)).partials == ()
    await again.put(admission.tickets[0], group(0, 2, versions=(0, 1)))
    assert await again.take_back_all("it died", "") == 2


async def test_a_resumed_group_is_as_old_as_its_tokens(spec, queue, tmp_path):
    await step(queue, 0)
    await step(queue, 1)
    restored, _ = await reloaded(queue, spec, tmp_path / "a", [partial(Ticket(0, 0, 0), 0, 1)])
    (ticket,) = (await restored.admit(1, 0)).tickets
    await put_rest(restored)
    assert isinstance(await restored.lease(2, 0), LeaseWait), "step 2 is the last that may train version 0"
    await restored.put(ticket, group(0, ticket.attempt, versions=(0, 2)))
    manifest = await restored.lease(2, 0)
    assert (manifest.groups[0].ordinal, manifest.groups[0].lag_max) == (0, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        partial(Ticket(0, 1, 0), 0, 1),  # another attempt
        partial(Ticket(1, 0, 0), 0, 1),  # has been put
        partial(Ticket(77, 0, 0), 0, 1),  # unknown
        partial(Ticket(0, 0, 0), 0, 5),  # of weights that do not exist
        PartialGroup(Ticket(0, 0, 0), (PartialTrajectory(),)),  # nothing
    ],
)
async def test_tokens_of_groups_that_do_not_run_are_not_kept(spec, queue, tmp_path, wrong):
    await step(queue, 0)
    restored, _ = await reloaded(queue, spec, tmp_path / "a", [wrong])
    admission = await restored.admit(1, 0)
    assert (admission.tickets, admission.partials) == ((Ticket(0, 1, 1),), ())


async def test_a_checkpoint_is_of_the_moment_of_its_capture(spec, queue, tmp_path):
    with pytest.raises(LedgerError, match="capture comes first"):
        await queue.save(tmp_path / "none")
    captured = await queue.capture([])
    saving = asyncio.create_task(queue.save(tmp_path / "a"))
    await step(queue, 0)
    await saving
    restored = MessageQueue(spec)
    assert await restored.load(tmp_path / "a") == captured
    assert captured.admitted == 0


async def test_the_events_say_what_a_restore_undoes(spec, queue, tmp_path):
    await step(queue, 0)
    await queue.nack((await queue.admit(1, 0)).tickets[0], "boom")
    counts = await queue.capture([])
    await queue.save(tmp_path / "a")
    await MessageQueue(spec).load(tmp_path / "a")
    events = [json.loads(line) for line in spec.events_path.read_text().splitlines()]
    (snapshot,) = [e for e in events if e["event"] == "snapshot"]
    at = [e["event"] for e in events].index("restored")
    assert (events[at]["snapshot"], events[at]["step"]) == (snapshot["snapshot"], 1)
    assert snapshot["snapshot"].startswith("1-")
    assert json.loads((tmp_path / "a" / "ledger.json").read_text())["chain"] == snapshot["chain"]
    assert events[at]["counts"] == snapshot["counts"]
    assert snapshot["counts"]["admitted"] == counts.admitted
    assert {e["transition"] for e in events[at + 1 :]} == {"requeued"}, "what the restore itself does follows it"


async def test_the_windows_are_kept(spec, queue, tmp_path):
    for _ in range(spec.recipe.rollout.max_attempts):
        await queue.nack((await queue.admit(1, 0)).tickets[0], "boom")
    restored, _ = await reloaded(queue, spec, tmp_path / "a")
    shares = []
    for each in (queue, restored):
        await put(each, *(await each.admit(100, 0)).tickets)
        await each.lease(0, 0)
        shares.append((await each.commit(0)).shares)
    assert shares == [EndShares(filtered=0.0, failed=1 / 3)] * 2


async def test_a_checkpoint_made_under_mask_can_be_gone_on_with_under_wait(spec, tmp_path):
    queue = MessageQueue(changed(spec, groups_per_step=1, max_lag=1, on_overdue="mask"))
    (late,) = (await queue.admit(1, 0)).tickets
    for number in range(2):
        await step(queue, number)
    await queue.put(late, group(0, versions=(0, 2)))
    restored, counts = await reloaded(queue, changed(spec, groups_per_step=1, max_lag=1), tmp_path / "a")
    assert counts.expired == 1
    await step(restored, 2)


async def test_a_lease_that_was_out_is_ready_again(spec, queue, tmp_path):
    await step(queue, 0)
    assert isinstance(await queue.lease(1, 0), LeaseManifest)
    restored, counts = await reloaded(queue, spec, tmp_path / "a")
    assert (counts.leased, counts.ready) == (0, 3)
    with pytest.raises(LedgerError, match="nothing is leased"):
        await restored.commit(1)
