"""A replica over a fake engine: what it forgets, and what it does when calls of former owners arrive late."""

import asyncio

import numpy as np
import pytest
import pytest_asyncio

from asyncrl.errors import DeadlineExceeded, GenerationError, ProcessDied, WeightTransferError
from asyncrl.inference.replica import Outbox, Replica
from asyncrl.inference.sleep import EngineSleep
from asyncrl.types import GenerationRequest, Manifest, SamplingParams, TokenChunk
from asyncrl_testing.fake_engine import FakeEngine, FakeScript, fake_token
from asyncrl_testing.local import NO_SOURCE, publish

LONG = 1_000_000


class Loading:
    """A load hook. `begun` is set when a transfer begins; it ends when `may_end` is set."""

    def __init__(self):
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def __call__(self, manifest, source, timeout_s):
        self.begun.set()
        await asyncio.wait_for(self.may_end.wait(), timeout_s)
        return (manifest.publish_id,)


@pytest_asyncio.fixture
async def start():
    """Starts replicas, which the end of the test stops."""
    made = []

    async def start(version=1, engine=FakeEngine, **script):
        script = FakeScript(start_version=None, max_model_len=10 * LONG, **script)
        made.append(Replica(0, lambda: engine(script), gate_timeout_s=5))
        await made[-1].start()
        if version is not None:
            await publish(made[-1], 1, version)
        return made[-1]

    yield start
    for replica in made:
        await replica.stop()


async def started_before_loading(start):
    """A replica that serves version 1, and the hook of its next transfer."""
    loading = Loading()
    loading.may_end.set()
    replica = await start(load_hook=loading)
    loading.begun.clear()
    loading.may_end.clear()
    return replica, loading


def staged(publish_id, version):
    return Manifest(publish_id, version, (), (), is_staged=True)


def request(name, max_tokens=LONG, prompt=7):
    return GenerationRequest(name, np.array([prompt], np.int32), SamplingParams(max_tokens=max_tokens))


async def answer(replica, client, name, max_tokens=8):
    """All chunks that a client gets until the end of this request, whatever request they are of."""
    await replica.submit(client, [request(name, max_tokens)])
    chunks = []
    async with asyncio.timeout(20):
        while not any(c.request_id == name and c.finish_reason for c in chunks):
            chunks += await replica.collect(client, 1.0)
    return chunks


async def generating(replica, count=3):
    async with asyncio.timeout(20):
        while (await replica.stats()).health.running < count:
            await asyncio.sleep(0)


async def test_a_reset_ends_what_was_asked_before_and_nothing_of_it_reaches_anybody(start):
    replica = await start()
    await replica.submit("client", [request(f"old-{i}") for i in range(3)])
    await generating(replica)
    polling = asyncio.create_task(replica.collect("client", 5.0))
    await polling  # some chunks have been collected, others wait
    await asyncio.sleep(0.01)
    await replica.reset(5, 1)
    health = (await replica.stats()).health
    assert (health.running, health.waiting) == (0, 0)
    assert await replica.collect("client", 0.02) == []
    asking = asyncio.create_task(answer(replica, "client", "new"))
    await asyncio.sleep(0.02)
    assert not asking.done(), "the gate is closed until weights are committed"
    await publish(replica, 2, 2)
    chunks = await asking
    assert {c.request_id for c in chunks} == {"new"}
    assert {c.version for c in chunks} == {2}


async def test_requests_that_were_sent_before_a_reset_and_arrive_after_it_are_refused(start):
    """As a process that was stopped finds them when it goes on."""
    replica = await start()
    await replica.reset(5, 3)
    with pytest.raises(DeadlineExceeded, match=r"for incarnation 2 of it, and it is 3"):
        await replica.submit("client", [request("late", 8)], incarnation=2)
    await replica.submit("client", [request("new", 8)], incarnation=3)
    await publish(replica, 2, 2)
    async with asyncio.timeout(20):
        while not (chunks := await replica.collect("client", 1.0)) or chunks[-1].finish_reason is None:
            assert {c.request_id for c in chunks} <= {"new"}
    assert (await replica.stats()).health.generated_tokens == 8


async def test_a_poll_from_before_a_reset_gets_nothing_of_what_comes_after(start):
    replica = await start()
    stale = asyncio.create_task(replica.collect("client", 0.3))
    await asyncio.sleep(0)
    await replica.reset(5, 1)
    await publish(replica, 2, 2)
    assert (await answer(replica, "client", "new"))[-1].finish_reason == "length"
    assert await stale == []


async def test_requests_that_wait_at_the_gate_end_with_a_reset_too(start):
    replica = await start()
    await replica.pause("abort")
    await replica.submit("client", [request("waiting")])
    await replica.reset(5, 1)
    await publish(replica, 2, 2)
    await asyncio.sleep(0.01)
    assert (await replica.stats()).health.generated_tokens == 0


@pytest.mark.parametrize("is_staged", [False, True])
async def test_a_reset_waits_for_the_transfer_before_it_whose_weights_are_never_committed(start, is_staged):
    loading = Loading()
    replica = await start(version=None, load_hook=loading)
    if not is_staged:
        await replica.pause("abort")
    manifest = Manifest(5, 5, (), (), is_staged=is_staged)
    receiving = asyncio.create_task(replica.receive_weights(manifest, NO_SOURCE, 5))
    await loading.begun.wait()
    with pytest.raises(DeadlineExceeded, match="transfer of weights that began before"):
        await replica.reset(0.02, 1)
    resetting = asyncio.create_task(replica.reset(5, 1))
    await asyncio.sleep(0.01)
    assert not resetting.done()
    loading.may_end.set()
    with pytest.raises(WeightTransferError, match="reset"):
        await receiving
    await resetting
    with pytest.raises(WeightTransferError, match="received None"):
        await (replica.adopt(5, 5, (5,), "abort", 5) if is_staged else replica.commit(5, 5, (5,)))
    await publish(replica, 6, 6)
    assert (await answer(replica, "client", "new"))[0].version == 6


async def test_weights_are_staged_while_the_replica_serves_and_adopted_in_one_call(start):
    replica, loading = await started_before_loading(start)
    receiving = asyncio.create_task(replica.receive_weights(staged(2, 2), NO_SOURCE, 5))
    await loading.begun.wait()
    assert {c.version for c in await answer(replica, "client", "meanwhile")} == {1}
    loading.may_end.set()
    assert await receiving == (2,)
    assert {c.version for c in await answer(replica, "client", "before")} == {1}
    await replica.submit("client", [request("long")])
    await generating(replica, 1)
    paused_s = await replica.adopt(2, 2, (2,), "abort", 5)
    assert 0 < paused_s < 5
    assert (await replica.stats()).paused_s >= paused_s / 2
    assert {c.version for c in await answer(replica, "client", "after") if c.request_id == "after"} == {2}


@pytest.mark.parametrize(("number", "digest"), [(3, (2,)), (2, (9,))])
async def test_a_call_to_adopt_other_weights_than_were_staged_stops_nobody(start, number, digest):
    replica, loading = await started_before_loading(start)
    loading.may_end.set()
    await replica.receive_weights(staged(2, 2), NO_SOURCE, 5)
    with pytest.raises(WeightTransferError, match=r"received|digest"):
        await replica.adopt(number, 2, digest, "abort", 5)
    chunks = await answer(replica, "client", "after")
    assert ({c.version for c in chunks}, chunks[-1].finish_reason) == ({1}, "length")


async def test_an_adoption_that_a_reset_overtakes_does_not_open_the_gate(start):
    class Slow(FakeEngine):
        async def load_staged(self, timeout_s):
            loading.set()
            await may_end.wait()
            await super().load_staged(timeout_s)

    loading, may_end = asyncio.Event(), asyncio.Event()
    replica = await start(engine=Slow)
    await replica.receive_weights(staged(2, 2), NO_SOURCE, 5)
    adopting = asyncio.create_task(replica.adopt(2, 2, None, "abort", 5))
    await loading.wait()
    resetting = asyncio.create_task(replica.reset(5, 1))
    await asyncio.sleep(0.01)
    may_end.set()
    with pytest.raises(WeightTransferError, match="reset"):
        await adopting
    await resetting
    assert not replica._gate.is_set()


async def test_an_engine_that_cannot_stage_says_so(start):
    class Simple:
        def __init__(self, script):
            self._inner = FakeEngine(script)

        def __getattr__(self, name):
            if name in ("stage_weights", "load_staged"):
                raise AttributeError(name)
            return getattr(self._inner, name)

    replica = await start(engine=Simple)
    with pytest.raises(WeightTransferError, match=r"weights\.stage=false"):
        await replica.receive_weights(staged(2, 2), NO_SOURCE, 5)


async def test_a_commit_that_a_reset_overtakes_does_not_open_the_gate(start):
    committing, may_commit = asyncio.Event(), asyncio.Event()

    class Slow(FakeEngine):
        async def commit(self, version):
            committing.set()
            await may_commit.wait()
            await super().commit(version)

    replica = await start(version=None, engine=Slow)
    stale = asyncio.create_task(publish(replica, 1, 1))
    await committing.wait()
    await replica.reset(5, 1)
    may_commit.set()
    with pytest.raises(WeightTransferError, match="reset in the middle"):
        await stale
    asking = asyncio.create_task(answer(replica, "client", "new"))
    await asyncio.sleep(0.02)
    assert not asking.done()
    await publish(replica, 2, 2)
    assert (await asking)[0].version == 2


async def test_a_reset_of_a_dead_engine_says_so(start):
    replica = await start()
    replica._engine.crash("no memory")
    with pytest.raises(ProcessDied, match="no memory"):
        await replica.reset(5, 1)


async def test_tokens_that_gather_as_the_engine_dies_come_before_the_news(start):
    replica = await start()
    replica._outboxes["client"] = outbox = Outbox()
    outbox.add(TokenChunk("r", np.ones(1, np.int32), np.zeros(1, np.float32), 1))
    assert await replica.collect("client", 0.0, 30.0) == []
    replica._engine.crash("no memory")
    assert [len(chunk.token_ids) for chunk in await replica.collect("client", 0.0, 30.0)] == [1]
    with pytest.raises(ProcessDied, match="no memory"):
        await replica.collect("client", 0.0, 30.0)


async def test_a_forgotten_client_ends_alone_and_is_refused(start):
    replica = await start(num_slots=2)
    await replica.submit("gone", [request(f"gone-{i}") for i in range(3)])  # one of them waits for a slot
    await replica.submit("other", [request("other")])
    await generating(replica, 2)
    polling = asyncio.create_task(replica.collect("gone", 0.5))
    await asyncio.sleep(0)
    await replica.forget_client("gone")
    async with asyncio.timeout(20):
        while (health := (await replica.stats()).health).running != 1 or health.waiting:
            await asyncio.sleep(0)
    assert all(c.request_id.startswith("gone") for c in await polling)
    for call in (replica.submit("gone", [request("again")]), replica.collect("gone", 0.1)):
        with pytest.raises(GenerationError, match=r"(?s)work for gone.*counts as dead"):
            await call
    await replica.reset(5, 1)
    with pytest.raises(GenerationError, match="counts as dead"):
        await replica.submit("gone", [request("after a reset")])


async def test_an_unknown_client_can_be_forgotten_and_one_that_waits_at_the_gate(start):
    replica = await start(version=None)
    await replica.forget_client("never seen")
    await replica.submit("gone", [request("waiting")])
    await replica.forget_client("gone")
    await publish(replica, 1, 1)
    await asyncio.sleep(0.01)
    assert (await replica.stats()).health.generated_tokens == 0


async def test_a_lower_version_than_the_last_one_is_served_and_stamped(start):
    replica = await start(version=5)
    assert {c.version for c in await answer(replica, "client", "ahead")} == {5}
    await publish(replica, 2, 3)
    chunks = await answer(replica, "client", "behind")
    assert {c.version for c in chunks} == {3}
    assert np.concatenate([c.token_ids for c in chunks]).tolist() == [fake_token(3, 7, 1 + i) for i in range(8)]


async def test_stats_are_answered_in_the_middle_of_a_publish(start):
    loading = Loading()
    replica = await start(version=None, load_hook=loading)
    publishing = asyncio.create_task(publish(replica, 1, 1))
    await loading.begun.wait()
    before = await asyncio.wait_for(replica.stats(), 20)
    loading.may_end.set()
    await publishing
    await answer(replica, "client", "a", 8)
    after = await replica.stats()
    assert (before.health.generated_tokens, after.health.generated_tokens) == (0, 8)
    assert before.paused_s <= after.paused_s


@pytest.mark.parametrize("turns", range(4))
async def test_an_abort_as_the_gate_opens_ends_the_request_once(start, turns):
    replica = await start()
    replica._gate.clear()
    await replica.submit("client", [request("aborted", 8)])
    await asyncio.sleep(0)
    replica._gate.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    await replica.abort(["aborted"])
    await asyncio.sleep(0.01)
    chunks = await replica.collect("client", 0.1)
    assert [c.finish_reason for c in chunks if c.finish_reason] == ["abort"]
    assert chunks[-1].finish_reason == "abort"
    assert await replica.collect("client", 0.02) == []


class SlowSleeper(FakeEngine):
    """Takes its memory back slowly."""

    async def wake_up(self, tags=None):
        await asyncio.sleep(0.05)
        await super().wake_up(tags)


async def test_a_wake_whose_caller_gave_up_disturbs_no_later_one():
    engine = SlowSleeper(FakeScript())
    await engine.start()
    await engine.pause("abort")
    sleep = EngineSleep(engine)
    await sleep.begin()
    late = asyncio.create_task(sleep.wake_weights())  # as Ray leaves it when its caller's deadline has passed
    await asyncio.sleep(0.01)
    await asyncio.gather(sleep.wake_weights(), sleep.end(), sleep.begin(), late)
    await sleep.end()
    await engine.stop()


async def test_what_a_replica_that_leaves_was_writing_ends_as_an_abort_that_clients_resume(start):
    replica = await start()
    await replica.submit("client", [request("long")])
    await generating(replica, 1)
    polling = asyncio.create_task(replica.collect("client", 5.0))
    await polling
    await replica.stop()
    chunks = await replica.collect("client", 1.0)
    assert (chunks[-1].finish_reason, chunks[-1].error) == ("abort", None)
