"""Prefill in pieces, and what interrupts it: the decode loop driven step by step, without its thread."""

import queue

import numpy as np
import pytest
import torch

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import TorchEngineConfig
from asyncrl.inference.torch_engine.loop import DecodeLoop
from asyncrl.inference.torch_engine.runner import ModelRunner, load_model
from asyncrl_testing.engine_suite import make_request
from asyncrl_testing.random_model import greedy_continuation, random_qwen3, write_random_qwen3

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16, "intermediate_size": 128}


class RecordingRunner(ModelRunner):
    """Remembers the shape of every prefill pass."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.passes = []

    def prefill(self, prefill):
        self.passes.append((len(prefill.prompts), prefill.done, prefill.width))
        super().prefill(prefill)


class Driven:
    """A decode loop without its thread: after report number k it is sent `script[k]`; then it ends."""

    def __init__(self, path, requests, script, *, prefill_tokens=8, chunk_tokens=1):
        model = load_model(ModelConfig(path=str(path)), torch.device("cpu"), real_weights=True, seed=0)
        settings = TorchEngineConfig(num_slots=8, max_model_len=256)
        self.runner = RecordingRunner(model, settings, prefill_tokens=prefill_tokens)
        self.commands = queue.SimpleQueue()
        self.script = script
        self.reports = 0
        self.chunks = {request.request_id: [] for request in requests}
        self.open = set(self.chunks)
        for request in requests:
            self.commands.put(lambda loop, request=request: loop.submit(request))
        with torch.inference_mode():
            self.runner.warm_up()
        self.runner.passes.clear()
        DecodeLoop(self.runner, self.commands, self.on_report, num_slots=8, chunk_tokens=chunk_tokens, version=0).run()

    def on_report(self, report):
        for chunk in report.chunks:
            self.chunks[chunk.request_id].append(chunk)
            if chunk.finish_reason is not None:
                self.open.discard(chunk.request_id)
        for command in self.script.get(self.reports, ()):
            self.commands.put(command)
        self.reports += 1
        if not self.open:
            self.commands.put(DecodeLoop.stop)

    def ids(self, request):
        return [int(i) for chunk in self.chunks[request.request_id] for i in chunk.token_ids]


@pytest.fixture(scope="module")
def small_path(tmp_path_factory):
    return write_random_qwen3(tmp_path_factory.mktemp("small"), **SMALL)


def greedy_pair():
    short = make_request(prompt=(1, 2), max_tokens=60, temperature=0.0)
    long = make_request(prompt=np.random.default_rng(1).integers(0, 128, 100).tolist(), max_tokens=20, temperature=0.0)
    return short, long


def test_a_long_prompt_is_prefilled_in_pieces_while_others_decode(small_path):
    short, long = greedy_pair()
    model = random_qwen3(**SMALL)
    driven = Driven(small_path, [short, long], {})
    starts = [start for prompts, start, width in driven.runner.passes if width == 99]
    assert starts == list(range(0, 99, 8))
    assert driven.ids(short) == greedy_continuation(model, short.prompt_ids, 60)
    assert driven.ids(long) == greedy_continuation(model, long.prompt_ids, 20)


def test_a_publish_in_the_middle_of_a_prefill_starts_it_over(small_path):
    short, long = greedy_pair()
    new = random_qwen3(seed=5, **SMALL)

    def publish(loop):
        loop.pause("keep", 0)
        for old, fresh in zip(loop.runner.model.parameters(), new.parameters(), strict=True):
            old.copy_(fresh)
        loop.commit(1, 1)
        loop.resume(2)

    driven = Driven(small_path, [short, long], {4: [publish]})
    starts = [start for _, start, width in driven.runner.passes if width == 99]
    assert starts.count(0) == 2
    assert driven.ids(long) == greedy_continuation(new, long.prompt_ids, 20)
    assert {chunk.version for chunk in driven.chunks[long.request_id]} == {1}
    assert {chunk.version for chunk in driven.chunks[short.request_id]} == {0, 1}


def test_a_commit_hands_over_what_the_old_version_sampled(small_path):
    """The long prompt takes 13 passes after the short one's, so that its chunks of four end a round after the other's;
    report 7 is of the short one."""
    short, long = greedy_pair()
    driven = Driven(small_path, [short, long], {7: [lambda loop: loop.commit(1, 0)]}, chunk_tokens=4)
    chunks = [(len(c.token_ids), c.version) for c in driven.chunks[long.request_id]]
    last_old = [version for _, version in chunks].index(1) - 1
    assert 0 < chunks[last_old][0] < 4
    assert {size for size, _ in chunks[:last_old]} <= {4}
    assert sum(size for size, _ in chunks) == 20


def test_an_abort_in_the_middle_of_a_prefill_ends_only_its_request(small_path):
    short, long = greedy_pair()
    driven = Driven(small_path, [short, long], {3: [lambda loop: loop.abort((long.request_id,), 0)]})
    assert [(len(c.token_ids), c.finish_reason) for c in driven.chunks[long.request_id]] == [(0, "abort")]
    assert driven.ids(short) == greedy_continuation(random_qwen3(**SMALL), short.prompt_ids, 60)
    assert len([1 for _, _, width in driven.runner.passes if width == 99]) < 13


def test_the_samples_of_one_prompt_share_its_prefill(small_path):
    group = [make_request(prompt=(3, 1, 4, 1, 5), max_tokens=12, seed=i) for i in range(4)]
    other = [make_request(prompt=(2, 7, 1, 8), max_tokens=12, seed=i) for i in range(3)]
    driven = Driven(small_path, [*group, *other], {}, prefill_tokens=64)
    assert driven.runner.passes == [(2, 0, 4)]
    assert len({tuple(driven.ids(request)) for request in group}) > 1
    for request in (*group, *other):
        alone = Driven(small_path, [request], {}, prefill_tokens=64)
        assert alone.ids(request) == driven.ids(request)


def test_prompts_of_like_lengths_are_prefilled_together_and_the_oldest_first(small_path):
    """In the order of their arrival the seven prompts would take three passes, of 245 places in place of 156."""
    rng = np.random.default_rng(2)
    requests = [
        make_request(prompt=rng.integers(0, 128, 1 + length).tolist(), max_tokens=8, temperature=0.0)
        for length in (40, 8, 38, 0, 39, 7, 9, 8)
    ]
    driven = Driven(small_path, requests, {}, prefill_tokens=120)
    assert driven.runner.passes == [(3, 0, 40), (4, 0, 9)]
    for request in requests:
        assert driven.ids(request) == greedy_continuation(random_qwen3(**SMALL), request.prompt_ids, 8)
