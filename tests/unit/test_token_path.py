"""What happens to tokens between an engine and a response: chunks that are merged in the outbox, the growing draft."""

import asyncio
import gc
import os
import pickle
import subprocess
import sys
import time
import weakref

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.inference.cpu_time import CpuTime
from asyncrl.inference.replica import Outbox
from asyncrl.remote.garbage import PauselessCollector
from asyncrl.rollout.draft import Draft
from asyncrl.rollout.replica_link import COLLECT_S, COLLECT_SHARE, collection_interval_s
from asyncrl.types import TokenChunk
from tests.make import begun, quickstart


@st.composite
def streams(draw):
    """Chunks of a few requests as engines send them: versions grow, a request ends once, an error is alone; and after
    how many chunks the client collects."""
    open_requests, version, chunks = [f"r{i}" for i in range(draw(st.integers(1, 4)))], 0, []
    while open_requests and len(chunks) < 60:
        request = draw(st.sampled_from(open_requests))
        version += draw(st.integers(0, 1))
        kind = draw(st.sampled_from(["tokens"] * 6 + ["final", "error"]))
        count = draw(st.integers(0 if kind == "final" else 1, 3)) if kind != "error" else 0
        ids = np.array(draw(st.lists(st.integers(0, 99), min_size=count, max_size=count)), np.int32)
        reason = draw(st.sampled_from(["stop", "length", "abort"])) if kind == "final" else None
        error = "refused" if kind == "error" else None
        cached = 7 if kind == "final" else 0
        extra = {"top_ids": np.stack([ids, ids + 1], 1)} if count else {}
        chunks.append(TokenChunk(request, ids, -ids.astype(np.float32), version, reason, error, cached, extra=extra))
        if kind != "tokens":
            open_requests.remove(request)
    return chunks, draw(st.sets(st.integers(0, len(chunks))))


def tokens_of(chunks, request):
    """Every token of a request with its log-probability and version, and how it ended."""
    own = [chunk for chunk in chunks if chunk.request_id == request]
    rows = [(c, c.extra["top_ids"]) for c in own if len(c.token_ids)]
    tokens = [
        (int(i), float(p), c.version, top.tolist())
        for c, found in rows
        for i, p, top in zip(c.token_ids, c.logprobs, found, strict=True)
    ]
    ends = [(c.finish_reason, c.error, c.cached_tokens, c.version) for c in own if c.finish_reason or c.error]
    return tokens, ends


@given(streams())
async def test_merging_loses_and_reorders_nothing_of_a_request(stream):
    chunks, collections = stream
    outbox, taken, sizes = Outbox(), [], []
    for place, chunk in enumerate(chunks):
        outbox.add(chunk)
        if place in collections:
            sizes.append(await outbox.take(1.0))
            taken += sizes[-1]
    taken += await outbox.take(0.001)
    for request in {chunk.request_id for chunk in chunks}:
        assert tokens_of(taken, request) == tokens_of(chunks, request)
    for together in sizes:
        keys = [(c.request_id, c.version) for c in together if c.error is None]
        assert len(keys) == len(set(keys)), "one chunk for each request and version"
    assert await outbox.take(0.001) == []


@given(streams(), st.sets(st.integers(0, 60)))
async def test_while_tokens_gather_only_ended_requests_are_handed_out_and_at_once(stream, collections):
    chunks, outbox, taken = stream[0], Outbox(), []
    for place, chunk in enumerate(chunks):
        outbox.add(chunk)
        ends = chunk.finish_reason is not None or chunk.error is not None
        if ends and place in collections:
            asked = time.monotonic()
            found = await outbox.take(30.0, gather_s=30.0)
            assert time.monotonic() - asked < 10
            taken += found
            ended = {c.request_id for c in chunks[: place + 1] if c.finish_reason or c.error}
            assert chunk.request_id in {c.request_id for c in found} <= ended
    found = await outbox.take(0.001, gather_s=30.0)
    ended = {c.request_id for c in chunks if c.finish_reason or c.error}
    assert {c.request_id for c in found} <= ended, "the end of a wait is no reason to hand out what still gathers"
    taken += found + await outbox.take(0.001)
    for request in {chunk.request_id for chunk in chunks}:
        assert tokens_of(taken, request) == tokens_of(chunks, request)


async def test_tokens_wait_no_longer_than_they_may_gather_and_not_at_all_for_a_lost_engine():
    outbox = Outbox()
    token = np.ones(1, np.int32), np.zeros(1, np.float32)
    taking = await begun(outbox.take(30.0, gather_s=0.05))
    outbox.add(TokenChunk("r", *token, 0))
    assert len(await asyncio.wait_for(taking, 10)) == 1
    taking = await begun(outbox.take(30.0, gather_s=30.0))
    outbox.add(TokenChunk("r", *token, 0))
    await asyncio.sleep(0.01)
    assert not taking.done()
    outbox.release()
    assert len(await asyncio.wait_for(taking, 10)) == 1
    assert await asyncio.wait_for(outbox.take(30.0, gather_s=30.0), 10) == []


@given(streams(), st.integers(0, 2))
def test_a_draft_is_its_chunks_one_behind_the_other(stream, replica):
    chunks = [chunk for chunk in stream[0] if chunk.error is None]
    draft, ids, sources = Draft(), [], []
    for place, chunk in enumerate(chunks):
        source = (chunk.version, replica + place % 2)
        draft.add(chunk, source[1])
        ids += chunk.token_ids.tolist()
        sources += [source] * len(chunk.token_ids)
        assert draft.token_ids.tolist() == ids
        assert draft.logprobs.tolist() == [-float(i) for i in ids]
        assert {name: array.tolist() for name, array in draft.extra.items()} == (
            {"top_ids": [[i, i + 1] for i in ids]} if ids else {}
        )
        of_segments = [(s.version, s.replica_id) for s in draft.segments for _ in range(s.start, s.stop)]
        assert of_segments == sources
        assert all(a.stop == b.start for a, b in zip(draft.segments, draft.segments[1:], strict=False))
    kept = draft.token_ids
    draft.add(TokenChunk("r", np.array([1] * 100, np.int32), np.zeros(100, np.float32), 99), 0)
    assert kept.tolist() == ids, "a copy"


def test_an_array_that_a_chunk_lacks_is_not_of_the_response():
    """A response of two engines, one of which did not record, does not pretend that all of it was recorded."""
    draft, ids = Draft(), np.array([4, 5], np.int32)
    draft.add(TokenChunk("r", ids, np.zeros(2, np.float32), 0, extra={"top_ids": ids[:, None]}), 0)
    whole = draft.generation(np.array([1], np.int32))
    assert whole.extra["top_ids"].tolist() == [[4], [5]]
    again = Draft(pickle.loads(pickle.dumps(whole)))
    again.add(pickle.loads(pickle.dumps(TokenChunk("r", ids, np.zeros(2, np.float32), 1, extra=whole.extra))), 1)
    assert again.extra["top_ids"].tolist() == [[4], [5], [4], [5]]
    draft.add(TokenChunk("r", ids, np.zeros(2, np.float32), 1), 0)
    assert draft.generation(np.array([1], np.int32)).extra == {}


def test_a_token_in_flight_takes_eight_bytes_and_an_eighth():
    draft = Draft()
    for count in range(1, 5000):
        draft.add(TokenChunk("r", np.array([count], np.int32), np.zeros(1, np.float32), 0), 0)
        held = sum(map(sys.getsizeof, (draft._ids, draft._logprobs, draft._ends)))
        assert held <= 9 * count + 400


@given(st.integers(0, 5000), st.floats(0.001, 1.0))
def test_collections_take_a_bounded_share_of_the_process(num_busy, shortest_s):
    interval_s = collection_interval_s(shortest_s, num_busy)
    assert interval_s >= shortest_s
    assert num_busy * COLLECT_S <= COLLECT_SHARE * interval_s * 1.0001
    if num_busy * COLLECT_S <= COLLECT_SHARE * shortest_s:
        assert interval_s == shortest_s, "a few replicas are asked as often as the recipe says"


@pytest.mark.parametrize(
    ("overrides", "expected_s"),
    [
        ([], 0.05),
        (["rollout.environment=tool_use"], 0.005),
        (["rollout.environment=tool_use", "rollout.poll_interval_s=0.2"], 0.2),
    ],
)
def test_a_turn_that_the_next_one_waits_for_is_collected_soon(overrides, expected_s):
    assert quickstart(*overrides).rollout.poll_every_s == expected_s


class Cycle:
    def __init__(self):
        self.itself = self


@pytest.mark.parametrize(("first_mb", "little_mb", "much_mb"), [(200, 711, 713), (4000, 5199, 5201)])
async def test_old_objects_are_not_visited_and_old_cycles_are_found_when_memory_has_grown(first_mb, little_mb, much_mb):
    memory, thresholds = first_mb << 20, gc.get_threshold()
    collector = PauselessCollector(lambda: memory)
    running = asyncio.create_task(collector.run())
    try:
        await asyncio.sleep(0)
        old = [Cycle() for _ in range(100)]
        gone = weakref.ref(old[0])
        collector.tick()
        assert not any(isinstance(o, Cycle) for age in range(3) for o in gc.get_objects(age)), "set aside"
        assert gc.get_threshold()[1:] == (1_000_000, 1_000_000), "no collection visits more than the youngest"
        del old
        memory = little_mb << 20
        collector.tick()
        assert gone() is not None
        memory = much_mb << 20
        collector.tick()
        assert gone() is None
        assert collector.full_collections == 2
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() == 0


def test_the_cpu_time_of_an_engines_processes_is_counted_with_a_look_every_ten_seconds(monkeypatch, tmp_path):
    now, looks = 0.0, []
    monkeypatch.setattr("asyncrl.inference.cpu_time.PROC", tmp_path)  # a kernel that does not list children
    children = psutil.Process.children
    monkeypatch.setattr(psutil.Process, "children", lambda self, **how: looks.append(now) or children(self, **how))
    cpu = CpuTime(lambda: now)
    alone = cpu.total_s()
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        now = 5.0
        assert cpu.total_s() < alone + 5
        assert looks == [0.0]
        time.sleep(0.5)
        now = 10.0
        counted = cpu.total_s()
        assert looks == [0.0, 10.0]
        own = psutil.Process().cpu_times()
        assert counted > own.user + own.system, "the other process, too"
    finally:
        busy.kill()
        busy.wait(10)
    assert cpu.total_s() > 0, "it has ended"


def test_where_the_kernel_lists_children_no_other_process_is_looked_at(monkeypatch, tmp_path):
    """Files as those of a kernel that lists them: a child of each of two threads, a grandchild, one that has ended."""
    others = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(3)]
    this, first = os.getpid(), others[0].pid
    listed = {(this, this): f"{first} ", (this, 7): f"{others[1].pid} 4194303 ", (first, first): f"{others[2].pid} "}
    for (pid, thread), children in listed.items():
        directory = tmp_path / str(pid) / "task" / str(thread)
        directory.mkdir(parents=True)
        (directory / "children").write_text(children)
    monkeypatch.setattr("asyncrl.inference.cpu_time.PROC", tmp_path)
    monkeypatch.setattr(psutil.Process, "children", None)
    cpu = CpuTime()
    try:
        cpu.total_s()
        assert sorted(process.pid for process in cpu._below) == sorted(process.pid for process in others)
    finally:
        for process in others:
            process.kill()
            process.wait(10)
