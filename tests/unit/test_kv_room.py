"""Admission by room in the KV cache: a queue before a small engine that decodes one token of each request in a step."""

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.inference.shared.engine_queue import EngineQueue
from asyncrl.inference.shared.kv_admission import KvAdmission
from asyncrl.inference.shared.kv_room import HISTORY, KvCapacity, KvRoom, Occupant
from asyncrl.inference.shared.streams import RequestStream
from asyncrl_testing.engine_client import make_request

BLOCK = 16


@dataclass(frozen=True)
class Ask:
    """A request with this prompt whose response ends by itself after `length` tokens."""

    prompt: int
    length: int
    max_tokens: int
    first_position: int = 0
    group: int = 0


class Engine:
    """Prompts take a step too. A full cache is counted and lets everybody go on."""

    def __init__(self, asks, *, mode, tokens, places, shares_prompts=False):
        self.admission = KvAdmission(mode)
        self.admission.learn(KvCapacity(tokens, BLOCK, shares_prompts))
        self.tokens, self.shares_prompts = tokens, shares_prompts
        self.started, self.ended, self.overfull, self.alone, self.steps, self.busy = [], [], 0, 0, 0, 0
        self.lengths, self.asked = {}, []
        self.queue = EngineQueue(places, self.start, lambda: 0.0, self.fits)
        for number, ask in enumerate(asks):
            prompt = [ask.group] * ask.prompt
            request = make_request(prompt=prompt, max_tokens=ask.max_tokens, first_position=ask.first_position)
            stream = RequestStream(replace(request, request_id=f"request-{number}"))  # what is drawn depends on it
            self.lengths[stream] = ask.length
            self.asked.append(stream)

    def fits(self, stream, running):
        return self.admission.fits(stream, running, 0)

    def start(self, stream):
        self.started.append(stream)

    def used(self):
        blocks, seen = 0, set()
        for stream in self.queue.running:
            prompt = len(stream.request.prompt_ids)
            blocks += -(-(prompt + stream.num_tokens) // BLOCK)
            if self.shares_prompts and stream.prompt_key is not None:
                blocks -= (prompt - 1) // BLOCK if stream.prompt_key in seen else 0
                seen.add(stream.prompt_key)
        return blocks * BLOCK

    def step(self):
        self.steps += 1
        self.busy += len(self.queue.running)
        for stream in self.queue.running:
            stream.num_tokens += 1
        if self.used() > self.tokens:
            self.overfull += len(self.queue.running) > 1
            self.alone += len(self.queue.running) == 1
        for stream in [s for s in self.queue.running if s.num_tokens >= self.lengths[s]]:
            self.admission.ended(stream)
            self.ended.append(stream)
            self.queue.leave(stream)
        if self.admission.sampled(max(1, len(self.queue.running))):
            self.queue.ask_again()

    def run(self):
        for stream in self.asked:
            self.queue.enter(stream)
        self.queue.set_open(True)
        while self.queue.running or self.queue.waiting:
            assert self.queue.running, "requests wait before an empty engine: they would wait for ever"
            self.step()
        return self


@st.composite
def asks(draw):
    max_tokens = draw(st.integers(1, 200))
    lengths = st.integers(1, max_tokens)
    return Ask(draw(st.integers(1, 300)), draw(lengths), max_tokens, draw(st.integers(0, 50)), draw(st.integers(0, 3)))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(asks(), min_size=1, max_size=25),
    st.sampled_from(["expected", "full"]),
    st.integers(16, 800),
    st.integers(1, 8),
    st.booleans(),
)
def test_every_request_enters_in_its_turn_and_ends(found, mode, tokens, places, shares):
    """Also those that alone exceed the cache, which enter when it is empty."""
    engine = Engine(found, mode=mode, tokens=tokens, places=places, shares_prompts=shares).run()
    assert engine.started == engine.asked
    assert set(engine.ended) == set(engine.asked)
    if mode == "full":
        assert engine.overfull == 0


def responses(count, *, seed, mean=300, max_tokens=2000, prompt=64):
    """Lengths spread as those of reasoning models are: some ten times as long as most."""
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - 0.5, 1.0, count)
    return [Ask(prompt, int(min(max(x, 1), max_tokens)), max_tokens, group=i // 8) for i, x in enumerate(drawn)]


def test_expected_lengths_fill_the_cache_and_hardly_overfill_it():
    found = responses(1500, seed=1)
    runs = {mode: Engine(found, mode=mode, tokens=16_384, places=256).run() for mode in ("off", "expected", "full")}
    overfull = {mode: run.overfull / run.steps for mode, run in runs.items()}
    decoding = {mode: run.busy / run.steps for mode, run in runs.items()}
    assert overfull["off"] > 0.5, "the cache is too small for this test"
    assert overfull["full"] == 0
    assert overfull["expected"] < 0.15
    assert decoding["expected"] > 3 * decoding["full"]


def test_a_shared_prompt_takes_its_room_once():
    found = [Ask(1024, 32, 32, group=7) for _ in range(8)]
    alone = Engine(found, mode="expected", tokens=4096, places=8).run()
    shared = Engine(found, mode="expected", tokens=4096, places=8, shares_prompts=True).run()
    assert shared.steps == 32 < alone.steps
    assert shared.overfull == alone.overfull == 0


def test_a_prompt_of_more_than_half_the_cache_is_shared_by_its_group():
    run = Engine(
        [Ask(3000, 32, 32, group=7) for _ in range(8)], mode="expected", tokens=4096, places=8, shares_prompts=True
    )
    assert run.run().steps == 32


def test_a_prompt_that_was_computed_with_other_weights_is_not_shared():
    room, key = KvAdmission("expected"), []
    room.learn(KvCapacity(1000, BLOCK))
    for weights in (1, 1, 2):
        stream = RequestStream(make_request(prompt=[5] * 40))
        assert room.fits(stream, [], weights)
        key.append(stream.prompt_key)
    assert key[0] == key[1] != key[2]
    assert room.fits(stream, [], 1), "it starts again with other weights"
    assert stream.prompt_key == key[0]
    room = KvAdmission("full")
    room.learn(KvCapacity(1000, BLOCK))
    room.fits(stream, [], 1)
    assert stream.prompt_key is None, "mode full promises room also where a prompt is computed twice"


def occupant(held=100, response=0, remaining=100, quantile=0.5):
    return Occupant(held, response, remaining, None, held, quantile)


def test_without_a_history_a_response_may_reach_its_limit():
    room = KvRoom(KvCapacity(10_000, BLOCK), full=False)
    assert room.peak_tokens([occupant(quantile=0.0)]) >= 200
    for _ in range(HISTORY):
        room.ended(10)
    assert room.peak_tokens([occupant(quantile=0.9)]) <= 110 + BLOCK
    assert room.peak_tokens([occupant(quantile=0.9999)]) >= 200, "the limit stays possible"
    late = occupant(held=120, response=20, remaining=80, quantile=0.0)
    assert room.peak_tokens([late]) >= 200, "longer than all before it: nothing but the limit is known"


def test_the_history_forgets_and_resumed_responses_count_whole():
    room = KvRoom(KvCapacity(10_000, BLOCK), full=False)
    for length in [10] * HISTORY + [50] * HISTORY:
        room.ended(length)
    assert 150 <= room.peak_tokens([occupant()]) <= 150 + BLOCK
    resumed = occupant(held=140, response=40, remaining=60)
    assert 150 <= room.peak_tokens([resumed]) <= 150 + BLOCK
    admission = KvAdmission("expected")
    admission.learn(KvCapacity(240, BLOCK, shares_prompts=False))
    asked, running = (RequestStream(make_request(prompt=[1] * n, max_tokens=100)) for n in (20, 50))
    assert not admission.fits(asked, [running], 0)
    for _ in range(HISTORY):
        stream = RequestStream(make_request(max_tokens=100, first_position=30))
        stream.num_tokens = 20
        admission.ended(stream)
    assert admission.fits(asked, [running], 0), "20 + 50 tokens, and 50 more for each"


def test_those_who_end_early_make_room_for_those_who_stay():
    """The peak is not the sum of all lengths: who ends first is gone when the last one is at its longest."""
    room = KvRoom(KvCapacity(10_000, 1), full=False)
    together = [occupant(held=100, response=90, remaining=10), occupant(held=10, remaining=1000)]
    peak = room.peak_tokens(together)
    assert 1010 <= peak <= 1015
    assert room.peak_tokens([occupant(held=100, remaining=1000), occupant(held=10, remaining=1000)]) >= 2110


def test_an_engine_that_tells_no_size_admits_by_places_only():
    admission = KvAdmission("expected")
    admission.learn(None)
    running = [RequestStream(make_request(prompt=[1] * 10_000)) for _ in range(9)]
    assert admission.fits(RequestStream(make_request()), running, 0)
    assert not admission.sampled(1 << 30)
