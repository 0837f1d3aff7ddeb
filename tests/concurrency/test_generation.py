"""Generation client, router and replica around a scripted engine: nothing is lost or doubled by interruptions."""

import asyncio
import time

import numpy as np
import pytest

from asyncrl.data.stop_strings import StopTexts
from asyncrl.errors import GenerationError, ProcessDied, WeightTransferError
from asyncrl.inference.replica import Replica
from asyncrl.rollout.active_clock import ActiveClock
from asyncrl.rollout.draft import Draft
from asyncrl.rollout.generation import GenerationClient
from asyncrl.types import Generation, Manifest, SamplingParams, Segment
from asyncrl_testing.fake_engine import FakeEngine, FakeScript
from asyncrl_testing.local import NO_SOURCE, LocalReplicaChannel, Rows, publish
from tests.waiting import until

PROMPT = np.array([7, 8, 9], np.int32)


class Fleet:
    """Replicas that serve `version`, if any, and their client."""

    def __init__(
        self,
        count=2,
        *,
        version=0,
        gate_timeout_s=5.0,
        request_timeout_s=20.0,
        poll_interval_s=0.0001,
        waits=False,
        **script,
    ):
        script = {"tick_s": 0.0, "chunk_tokens": 3, **script}
        self.engines = [FakeEngine(FakeScript(start_version=None, **script)) for _ in range(count)]
        self.replicas = [
            Replica(i, lambda e=engine: e, gate_timeout_s=gate_timeout_s) for i, engine in enumerate(self.engines)
        ]
        self.channels = {i: LocalReplicaChannel(r) for i, r in enumerate(self.replicas)}
        self.rows = Rows(self.channels)
        self.request_timeout_s = request_timeout_s
        self.poll_interval_s = poll_interval_s
        self.waits = waits
        self.publishes, self._first = 0, version

    async def __aenter__(self):
        for replica in self.replicas:
            await replica.start()
        self.client = GenerationClient(
            "test",
            self.rows.table,
            request_timeout_s=self.request_timeout_s,
            poll_interval_s=self.poll_interval_s,
            waits_for_replacements=self.waits,
        )
        if self._first is not None:
            await self.publish(self._first)
        return self

    async def __aexit__(self, *_):
        await self.client.close()
        for replica in self.replicas:
            await replica.stop()

    async def sampled(self, count):
        """Waits until the engines have sampled `count` tokens in all."""
        await until(lambda: sum(engine.health().generated_tokens for engine in self.engines) >= count)

    async def idle(self):
        """Waits until the engines have nothing to sample."""
        await until(lambda: not any(engine.health().running for engine in self.engines))

    async def publish(self, version, mode="abort"):
        self.publishes += 1
        await asyncio.gather(*(publish(r, self.publishes, version, mode) for r in self.replicas))


def check(generation, prompt=PROMPT):
    """Every token says which version wrote it where: nothing is missing, doubled or stamped wrongly."""
    at = 0
    for segment in generation.segments:
        assert segment.start == at
        for i in range(segment.start, segment.stop):
            token = int(generation.token_ids[i])
            assert token // 1_000_000 == segment.version % 1000
            assert token % 1000 == len(prompt) + i
        at = segment.stop
    assert at == len(generation.token_ids) == len(generation.logprobs)


async def whole(running, tokens):
    """The responses; each has so many tokens, and each of them once."""
    generations = await asyncio.wait_for(asyncio.gather(*running), 60)
    for generation in generations:
        check(generation)
        assert len(generation.token_ids) == tokens
    return generations


@pytest.mark.parametrize("mode", ["abort", "keep", "drain"])
async def test_publishes_in_the_middle_of_generation(mode):
    async with Fleet(tick_s=0.0005) as fleet:
        sampling = SamplingParams(max_tokens=120)
        running = [asyncio.create_task(fleet.client.generate(PROMPT, sampling)) for _ in range(20)]
        for version in range(1, 5):
            await fleet.sampled(300 * version)  # of 2400
            await fleet.publish(version, mode)
        generations = await whole(running, 120)
        assert {generation.finish_reason for generation in generations} == {"length"}
        assert mode == "abort" or not any(generation.interruptions for generation in generations)
        versions = {s.version for g in generations for s in g.segments}
        assert len(versions) > 1 or mode == "drain"
        if mode == "drain":
            assert all(len({s.version for s in g.segments}) == 1 for g in generations)


async def test_a_lost_replica_keeps_every_token_that_was_streamed():
    async with Fleet(tick_s=0.001) as fleet:
        running = [asyncio.create_task(fleet.client.generate(PROMPT, SamplingParams(max_tokens=60))) for _ in range(8)]
        pending = fleet.client._pending
        await until(lambda: {p.link.replica_id for p in pending.values() if p.draft.num_tokens} == {0, 1})
        fleet.channels[0].die()
        generations = await whole(running, 60)
        resumed = [g for g in generations if {s.replica_id for s in g.segments} == {0, 1}]
        assert resumed, "tokens of the dead replica are kept and continued on the other"


async def test_without_replicas_pending_requests_end_with_an_error_and_the_watch_raises():
    async with Fleet(1, tick_s=0.01) as fleet:
        running = asyncio.create_task(fleet.client.generate(PROMPT, SamplingParams(max_tokens=1000)))
        watch = asyncio.create_task(fleet.client.watch())
        await asyncio.sleep(0.03)
        fleet.channels[0].die()
        with pytest.raises(GenerationError, match="no replica"):
            await asyncio.wait_for(running, 20)
        with pytest.raises(GenerationError, match="no replica"):
            await asyncio.wait_for(watch, 20)


async def test_a_refused_request_raises_its_reason():
    async with Fleet(max_model_len=16) as fleet:
        with pytest.raises(GenerationError, match="max_model_len=16"):
            await fleet.client.generate(PROMPT, SamplingParams(max_tokens=100))


async def test_a_response_has_a_deadline_and_the_replica_is_told():
    async with Fleet(1, request_timeout_s=0.1, tick_s=0.005) as fleet:
        with pytest.raises(GenerationError, match=r"within 0\.1 s"):
            await fleet.client.generate(PROMPT, SamplingParams(max_tokens=3000))
        await fleet.idle()
        assert fleet.client.in_flight == 0


async def test_the_wait_for_a_place_does_not_count():
    """Responses one after the other, as many as it takes for the last one to wait longer than one may take."""
    limit_s, elapsed_s, count = 2.0, 0.0, 32
    async with Fleet(1, request_timeout_s=limit_s, tick_s=0.005, num_slots=1) as fleet:

        async def one():
            clock = ActiveClock(limit_s)  # of a trajectory
            check(await fleet.client.generate(PROMPT, SamplingParams(max_tokens=8), clock=clock))
            return clock.left_s

        while elapsed_s < 1.2 * limit_s:
            count, began = 3 * count // 2, time.monotonic()
            left_s = await asyncio.gather(*(one() for _ in range(count)))
            elapsed_s = time.monotonic() - began
            assert min(left_s) > 0


async def test_the_wait_for_a_place_has_an_end_at_a_replica_that_streams_other_responses(monkeypatch):
    monkeypatch.setattr("asyncrl.rollout.replica_link.LONGEST_QUEUE", 1.0)
    async with Fleet(1, request_timeout_s=0.5, tick_s=0.005, num_slots=1) as fleet:
        asked = (fleet.client.generate(PROMPT, SamplingParams(max_tokens=20)) for _ in range(100))
        found = await asyncio.gather(*asked, return_exceptions=True)
        failed = [str(error) for error in found if isinstance(error, GenerationError)]
        assert 0 < len(failed) < 100
        assert all("within 0.5 s" in error for error in failed), failed
        assert fleet.client.in_flight == 0


async def test_the_wait_for_a_place_at_a_replica_that_streams_nothing_has_a_deadline():
    async with Fleet(1, request_timeout_s=0.3, num_slots=1) as fleet:
        fleet.engines[0].stall()
        failed = await asyncio.gather(
            *(fleet.client.generate(PROMPT, SamplingParams(max_tokens=40)) for _ in range(3)), return_exceptions=True
        )
        assert all("within 0.3 s" in str(error) for error in failed), failed
        assert fleet.client.in_flight == 0


async def test_a_replica_that_comes_back_is_sent_requests_again():
    async with Fleet(tick_s=0.001, waits=True) as fleet:
        running = [asyncio.create_task(fleet.client.generate(PROMPT, SamplingParams(max_tokens=60))) for _ in range(8)]
        await fleet.sampled(40)
        fleet.channels[0].die()
        await whole(running, 60)
        assert fleet.client.loads == {1: 0}
        back = fleet.channels[0] = LocalReplicaChannel(fleet.replicas[0])
        fleet.client.set_replicas(fleet.rows.put(0, back))
        assert fleet.client.loads == {0: 0, 1: 0}
        asked = [fleet.client.generate(PROMPT, SamplingParams(max_tokens=10)) for _ in range(6)]
        assert {g.segments[0].replica_id for g in await whole(asked, 10)} == {0, 1}
        assert fleet.client.loads == {0: 0, 1: 0}, "requests of the lost replica are not counted for the new one"


async def test_a_replaced_replica_ends_what_the_former_one_had_and_starts_from_no_load():
    async with Fleet(1, tick_s=0.001, waits=True) as fleet:
        watch = asyncio.create_task(fleet.client.watch())
        running = asyncio.create_task(fleet.client.generate(PROMPT, SamplingParams(max_tokens=200)))
        await fleet.sampled(20)
        fleet.client.set_replicas(fleet.rows.put(0, LocalReplicaChannel(fleet.replicas[0], client_id="second")))
        generation = await asyncio.wait_for(running, 20)
        check(generation)
        assert (len(generation.token_ids), generation.interruptions) == (200, 1)
        assert fleet.client.loads == {0: 0}
        assert not watch.done(), "the last replica was replaced, not lost"
        watch.cancel()


async def test_a_connection_that_was_lost_to_a_replica_that_serves_is_made_again():
    async with Fleet(tick_s=0.001, waits=True) as fleet:
        fleet.channels[0].die()
        check(await fleet.client.generate(PROMPT, SamplingParams(max_tokens=6)))
        check(await fleet.client.generate(PROMPT, SamplingParams(max_tokens=6)))
        assert fleet.client.loads == {1: 0}
        fleet.channels[0]._dead = False
        fleet.client.set_replicas(fleet.rows.table)
        assert fleet.client.loads == {0: 0, 1: 0}
        check(await fleet.client.generate(PROMPT, SamplingParams(max_tokens=6)))


async def test_a_removed_replica_gets_nothing_more_and_its_requests_resume():
    async with Fleet(tick_s=0.001) as fleet:
        running = [asyncio.create_task(fleet.client.generate(PROMPT, SamplingParams(max_tokens=60))) for _ in range(4)]
        await fleet.sampled(40)
        fleet.client.set_replicas(fleet.rows.put(1, state="suspended"))
        fleet.client.set_replicas(fleet.rows.table)
        assert {g.segments[-1].replica_id for g in await whole(running, 60)} == {0}
        assert fleet.client.loads == {0: 0}


@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_tokens_are_handed_on_as_they_arrive_also_over_a_publish(mode):
    async with Fleet(1, tick_s=0.001) as fleet:
        seen = []
        running = asyncio.create_task(
            fleet.client.generate(
                PROMPT,
                SamplingParams(max_tokens=60),
                on_chunk=lambda chunk, replica: seen.append((chunk.token_ids.tolist(), chunk.version, replica)),
            )
        )
        await fleet.sampled(20)
        await fleet.publish(1, mode)
        assert not running.done()
        assert seen, "nothing was handed on before the end"
        generation = await running
        assert [i for ids, _, _ in seen for i in ids] == generation.token_ids.tolist()
        assert sorted({version for _, version, _ in seen}) == [0, 1]


@pytest.mark.parametrize("end", ["of itself", "cancelled", "late"])
async def test_tokens_are_gathered_while_nobody_looks_at_them(end):
    async with Fleet(1, tick_s=0.001, request_timeout_s=0.3 if end == "late" else 20.0) as fleet:
        asked, collect = [], fleet.channels[0].collect

        async def recording(wait_s, gather_s):
            asked.append(gather_s)
            return await collect(wait_s, gather_s)

        async def followed():
            number = 60 if end == "of itself" else 4000
            await fleet.client.generate(PROMPT, SamplingParams(max_tokens=number), on_chunk=lambda chunk, _: False)

        fleet.channels[0].collect = recording
        for _ in range(2):  # and again after one that somebody followed
            asked.clear()
            await fleet.client.generate(PROMPT, SamplingParams(max_tokens=20))
            assert {round(gather_s, 6) for gather_s in asked} == {0.004}, "of 40 intervals"
            asked.clear()
            running = asyncio.create_task(followed())
            await fleet.sampled(fleet.engines[0].health().generated_tokens + 20)
            if end == "cancelled":
                running.cancel()
            await asyncio.wait([running])
            assert running.cancelled() == (end == "cancelled")
            assert running.cancelled() or isinstance(running.exception(), GenerationError) == (end == "late")
            assert set(asked) == {0.0}


async def test_a_caller_that_has_enough_ends_its_response_on_the_replica_too():
    async with Fleet(1, tick_s=0.001) as fleet:
        generation = await asyncio.wait_for(
            fleet.client.generate(PROMPT, SamplingParams(max_tokens=4000), on_chunk=lambda chunk, _: True), 5
        )
        check(generation)
        assert generation.finish_reason == "stop"
        assert 3 <= len(generation.token_ids) < 4000
        assert fleet.engines[0].health().running == 0


async def test_the_least_number_of_tokens_holds_over_all_attempts():
    async with Fleet(1, tick_s=0.001, response_tokens=lambda request: 10) as fleet:
        sampling = SamplingParams(max_tokens=60, min_tokens=40)
        running = asyncio.create_task(fleet.client.generate(PROMPT, sampling))
        await fleet.sampled(20)
        await fleet.publish(1)
        generation = await running
        assert generation.interruptions == 1
        assert (len(generation.token_ids), generation.finish_reason) == (41, "stop")


async def test_a_request_that_is_abandoned_at_once_never_runs():
    async with Fleet(1) as fleet:
        running = asyncio.create_task(fleet.client.generate(PROMPT, SamplingParams(max_tokens=50)))
        asyncio.get_running_loop().call_soon(running.cancel)
        with pytest.raises(asyncio.CancelledError):
            await running
        await fleet.client.generate(PROMPT, SamplingParams(max_tokens=5))
        assert fleet.engines[0].health().generated_tokens == 5


async def test_a_dead_engine_is_a_lost_replica_and_its_requests_go_on_elsewhere():
    async with Fleet(2, tick_s=0.001) as fleet:
        running = [asyncio.create_task(fleet.client.generate(PROMPT, SamplingParams(max_tokens=200))) for _ in range(8)]
        await asyncio.sleep(0.05)
        fleet.engines[0].crash("out of memory")
        generations = await whole(running, 200)
        moved = [g for g in generations if {s.replica_id for s in g.segments} == {0, 1}]
        assert len(moved) == 4
        assert all(g.interruptions == 1 for g in moved)
        with pytest.raises(ProcessDied, match="out of memory"):
            await fleet.replicas[0].stats()


async def test_when_the_last_engine_dies_its_requests_fail_with_the_reason_or_wait_for_a_replacement():
    async with Fleet(1, tick_s=0.01) as fleet:
        running = asyncio.create_task(fleet.client.generate(PROMPT, SamplingParams(max_tokens=1000)))
        await asyncio.sleep(0.05)
        fleet.engines[0].crash("out of memory")
        with pytest.raises(GenerationError, match="out of memory"):
            await asyncio.wait_for(running, 20)
    async with Fleet(1, tick_s=0.001, waits=True) as fleet:
        running = asyncio.create_task(fleet.client.generate(PROMPT, SamplingParams(max_tokens=200)))
        await fleet.sampled(20)
        fleet.channels[0].die()
        await asyncio.sleep(0.05)
        assert not running.done()
        fleet.client.set_replicas(fleet.rows.put(0, LocalReplicaChannel(fleet.replicas[0], "second")))
        assert len((await asyncio.wait_for(running, 20)).token_ids) == 200


async def test_weights_that_were_not_received_or_differ_are_never_served():
    async with Fleet(1, version=None) as fleet:
        replica = fleet.replicas[0]
        with pytest.raises(WeightTransferError, match="received None"):
            await replica.commit(1, 0, None)
        await fleet.publish(0)
        with pytest.raises(WeightTransferError, match="without a pause"):
            await replica.receive_weights(Manifest(2, 1, (), ()), NO_SOURCE, 1.0)
        await replica.pause("abort")
        await replica.receive_weights(Manifest(2, 1, (), ()), NO_SOURCE, 1.0)
        with pytest.raises(WeightTransferError, match="digest"):
            await replica.commit(2, 1, (123,))
        waiting = asyncio.create_task(fleet.client.generate(PROMPT, SamplingParams(max_tokens=2)))
        await asyncio.sleep(0.02)
        assert not waiting.done(), "the gate stays closed"
        waiting.cancel()


async def test_a_publish_without_version_leaves_it_unchanged():
    async with Fleet(1, version=5) as fleet:
        await fleet.publish(None)
        generation = await fleet.client.generate(PROMPT, SamplingParams(max_tokens=2))
        assert generation.segments[0].version == 5


async def test_a_response_goes_on_from_tokens_of_another_process_and_draws_none_of_them_again():
    async with Fleet(1, version=3, chunk_tokens=1, response_tokens=lambda request: 14) as fleet:
        sampling = SamplingParams(max_tokens=20)
        whole = await fleet.client.generate(PROMPT, sampling)
        first = Generation(PROMPT, whole.token_ids[:8], whole.logprobs[:8], (Segment(0, 8, 3, 5),), "abort")
        await fleet.publish(4)
        before = fleet.engines[0].health().generated_tokens
        draft = Draft(first)
        resumed = await fleet.client.generate(PROMPT, sampling, draft=draft)
        check(resumed)
        assert resumed.token_ids[:8].tolist() == first.token_ids.tolist()
        assert resumed.segments == (Segment(0, 8, 3, 5), Segment(8, 14, 4, 0))
        assert fleet.engines[0].health().generated_tokens - before == 6
        assert draft.num_tokens == 14


async def test_a_response_whose_prior_is_complete_asks_no_replica():
    async with Fleet(1) as fleet:
        ids, segments = np.arange(4, dtype=np.int32), (Segment(0, 4, 0, 0),)
        whole = Generation(PROMPT, ids, np.zeros(4, np.float32), segments, "abort")
        made = await fleet.client.generate(PROMPT, SamplingParams(max_tokens=4), draft=Draft(whole))
        assert (made.token_ids.tolist(), made.finish_reason) == ([0, 1, 2, 3], "length")
        assert fleet.engines[0].health().generated_tokens == 0


async def test_a_draft_shows_the_tokens_while_they_arrive_over_a_publish():
    async with Fleet(1, tick_s=0.001, chunk_tokens=1) as fleet:
        draft = Draft()
        running = asyncio.create_task(fleet.client.generate(PROMPT, SamplingParams(max_tokens=60), draft=draft))
        await until(lambda: draft.num_tokens >= 10)
        cut = draft.generation(PROMPT)
        await fleet.publish(1)
        made = await running
        assert made.token_ids[: len(cut.token_ids)].tolist() == cut.token_ids.tolist()
        assert fleet.client.reprefilled_tokens == len(PROMPT) + made.segments[1].start


async def test_held_replicas_get_no_new_request_and_keep_what_they_work_on():
    async with Fleet(tick_s=0.001) as fleet:
        running = [asyncio.create_task(fleet.client.generate(PROMPT, SamplingParams(max_tokens=60))) for _ in range(4)]
        await fleet.sampled(20)
        assert fleet.client.loads == {0: 2, 1: 2}
        fleet.client.set_replicas(fleet.rows.put(0, state="held"))
        more = [asyncio.create_task(fleet.client.generate(PROMPT, SamplingParams(max_tokens=5))) for _ in range(4)]
        assert {s.replica_id for g in await asyncio.gather(*more) for s in g.segments} == {1}
        assert {s.replica_id for g in await asyncio.gather(*running) for s in g.segments} == {0, 1}
        await publish(fleet.replicas[0], 2, 1)
        fleet.client.set_replicas(fleet.rows.put(0, version=1))
        newest = await fleet.client.generate(PROMPT, SamplingParams(max_tokens=5))
        assert [(s.replica_id, s.version) for s in newest.segments] == [(0, 1)]


async def test_when_all_replicas_are_held_requests_wait_at_a_gate():
    async with Fleet(1) as fleet:
        await fleet.replicas[0].pause("abort")
        fleet.client.set_replicas(fleet.rows.put(0, state="held"))
        waiting = asyncio.create_task(fleet.client.generate(PROMPT, SamplingParams(max_tokens=5)))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await publish(fleet.replicas[0], 2, 1)
        fleet.client.set_replicas(fleet.rows.put(0, version=1))
        assert (await asyncio.wait_for(waiting, 20)).segments[0].version == 1


async def test_what_a_lost_replica_still_sends_is_not_taken_twice():
    async with Fleet(tick_s=0.001, chunk_tokens=1) as fleet:
        taken_out = fleet.channels[0]
        collect = taken_out.collect

        async def collect_and_lose(wait_s, gather_s):
            chunks = await collect(wait_s, gather_s)
            if fleet.engines[0].health().generated_tokens > 40:
                fleet.client.set_replicas(fleet.rows.drop(0))  # its requests end here, before what just came
            return chunks

        taken_out.collect = collect_and_lose
        sampling = SamplingParams(max_tokens=60)
        await whole([fleet.client.generate(PROMPT, sampling) for _ in range(4)], 60)
        assert fleet.client.loads == {1: 0}


async def test_close_returns_when_a_chunk_arrives_in_the_very_turn_of_it():
    """A collector that lost its cancellation to the chunk would go on, and `close` would wait for it forever."""
    async with Fleet(1, tick_s=0.001) as fleet:
        running = asyncio.create_task(fleet.client.generate(PROMPT, SamplingParams(max_tokens=1000)))
        await fleet.sampled(3)
        outbox = fleet.replicas[0]._outboxes["test"]
        async with asyncio.timeout(20):
            while outbox._news.is_set() or not outbox._news._waiters:
                await asyncio.sleep(0)
            outbox._news.set()  # wakes the collection, whose cancellation comes in the same turn
            await fleet.client.close()
        with pytest.raises(GenerationError, match="closed"):
            await running


@pytest.mark.parametrize("chunk_tokens", [1, 3, 16])
async def test_a_stop_text_over_chunks_and_publishes_ends_the_response_with_its_last_token(chunk_tokens):
    """Token i of a response spells one letter: the text is abc... again and again, whatever the version."""

    def letters(ids):
        return "".join(chr(97 + (i % 1000 - len(PROMPT)) % 26) for i in ids)

    stop = StopTexts(["yzabcdefghijklmnopqrstuvwxyzabcdefgh", "never"], letters)
    end = 24 + len(stop.texts[0])
    async with Fleet(tick_s=0.0005, chunk_tokens=chunk_tokens) as fleet:
        drafts = [Draft(finder=stop.follow([])) for _ in range(8)]
        sampling = SamplingParams(max_tokens=400)
        running = [asyncio.create_task(fleet.client.generate(PROMPT, sampling, draft=d)) for d in drafts]
        for version in (1, 2):
            await fleet.sampled(8 * 20 * version)  # of the 60 tokens that each response gets
            await fleet.publish(version)
        generations = await whole(running, end)
        assert {generation.finish_reason for generation in generations} == {"stop"}
        assert max(len(g.segments) for g in generations) > 1, "no response was resumed"
        await fleet.idle()
        sampled = sum(engine.health().generated_tokens for engine in fleet.engines)
        assert sampled < 8 * 400, "the requests were not aborted"
        again = Draft(generations[0], finder=stop.follow([]))
        resumed = await fleet.client.generate(PROMPT, sampling, draft=again)
        assert resumed.token_ids.tolist() == generations[0].token_ids.tolist(), (
            "a record that has ended is not continued"
        )
        assert resumed.finish_reason == "stop"
