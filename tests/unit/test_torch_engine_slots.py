"""The dense table of running requests against a model of it that keeps one Python object per request."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.inference.torch_engine.sampling import stream_key, uniforms
from asyncrl.inference.torch_engine.slots import SlotTable
from asyncrl.types import GenerationRequest, SamplingParams

VOCABULARY = 12


@dataclass
class Expected:
    request: GenerationRequest
    tokens: list = field(default_factory=list)
    taken: int = 0
    cache: str = ""

    @property
    def ended(self):
        if self.tokens and self.tokens[-1] in self.request.sampling.stop_token_ids:
            return "stopped"
        return "exhausted" if len(self.tokens) == self.request.sampling.max_tokens else None


class SlotTableMachine(RuleBasedStateMachine):
    @initialize(num_slots=st.integers(1, 6), chunk_tokens=st.integers(1, 5))
    def set_up(self, num_slots, chunk_tokens):
        self.table = SlotTable(num_slots, chunk_tokens, (1, 2))
        self.chunk_tokens = chunk_tokens
        self.expected = {}
        self.cache = [""] * num_slots  # stands for the keys and values, which follow `Moves`
        self.count = 0

    def end(self, ids):
        moves = self.table.remove(self.table.rows_of(ids))
        for source, target in zip(moves.source, moves.target, strict=True):
            self.cache[target] = self.cache[source]
        for request_id in ids:
            del self.expected[request_id]

    def take(self, request_id):
        row = int(self.table.rows_of([request_id])[0])
        extra = self.table.extra(row)
        ids, logprobs = self.table.take(row)
        expected = self.expected[request_id]
        sampling = expected.request.sampling
        asked = {name for name in ("experts", "kept") if getattr(sampling, name) and len(ids)}
        assert {name.removesuffix("_ids") for name in extra} == asked
        if "experts" in asked:
            assert extra["experts"].tolist() == [[[i, i + 1]] for i in ids.tolist()]
        if "kept" in asked:
            assert extra["kept_ids"].tolist() == [[i + n for n in range(sampling.top_k)] for i in ids.tolist()]
        assert ids.tolist() == expected.tokens[expected.taken :]
        np.testing.assert_array_equal(logprobs, -np.array(ids, np.float32) / 8)
        expected.taken = len(expected.tokens)

    @precondition(lambda self: self.table.n < self.table.num_slots)
    @rule(
        prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4),
        max_tokens=st.integers(1, 9),
        stop=st.lists(st.integers(0, VOCABULARY - 1), max_size=3),
        seed=st.integers(),
        first=st.integers(0, 50),
    )
    def add(self, prompt, max_tokens, stop, seed, first):
        name = f"r{self.count}"
        self.count += 1
        sampling = SamplingParams(
            temperature=self.count / 8, top_p=1 / self.count, top_k=self.count, max_tokens=max_tokens,
            stop_token_ids=tuple(stop), experts=bool(seed % 2), kept=bool(seed % 3),
        )  # fmt: skip
        request = GenerationRequest(name, np.array(prompt, np.int32), sampling, seed=seed, first_position=first)
        self.cache[self.table.add(request)] = name
        self.expected[name] = Expected(request)

    @precondition(lambda self: self.table.n > 0)
    @rule(data=st.data())
    def step(self, data):
        table = self.table
        tokens = np.array(data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=table.n, max_size=table.n)))
        assert table.records == any(self.expected[i].request.sampling.experts for i in table.request_ids)
        experts = np.stack([tokens, tokens + 1], 1)[:, None].astype(np.int16) if table.records else None
        asking = [
            e.request.sampling.top_k for e in map(self.expected.get, table.request_ids) if e.request.sampling.kept
        ]
        assert table.most_kept == max(asking, default=0)
        kept = tokens[:, None] + np.arange(table.most_kept) if table.most_kept else None
        due = table.advance(tokens, (-tokens / 8).astype(np.float32), experts, kept)
        for request_id, token in zip(table.request_ids, tokens.tolist(), strict=True):
            self.expected[request_id].tokens.append(token)
        named = {k: {table.request_ids[r] for r in getattr(due, k)} for k in ("stopped", "exhausted", "full")}
        for kind in ("stopped", "exhausted"):
            assert named[kind] == {i for i, e in self.expected.items() if e.ended == kind}
        going_on = {i: e for i, e in self.expected.items() if e.ended is None}
        assert named["full"] == {i for i, e in going_on.items() if len(e.tokens) - e.taken == self.chunk_tokens}
        for request_id in set().union(*named.values()):
            self.take(request_id)
        self.end(named["stopped"] | named["exhausted"])

    @precondition(lambda self: self.table.n > 0)
    @rule(data=st.data())
    def abort(self, data):
        some = data.draw(st.lists(st.sampled_from(sorted(self.expected)), unique=True))
        assert len(self.table.rows_of([*some, *some, "unknown"])) == len(some)
        for request_id in some:
            self.take(request_id)
        self.end(some)

    @rule()
    def flush(self):
        names = {self.table.request_ids[row] for row in self.table.buffered_rows()}
        assert names == {i for i, e in self.expected.items() if len(e.tokens) > e.taken}
        for name in names:
            self.take(name)

    @invariant()
    def every_row_is_that_of_its_request(self):
        if not hasattr(self, "table"):
            return
        table = self.table
        assert sorted(table.request_ids) == sorted(self.expected)
        assert self.cache[: table.n] == table.request_ids
        in_order = [self.expected[i] for i in table.request_ids]
        prompts = [e.request.prompt_ids.tolist() for e in in_order]
        assert table.tokens.tolist() == [(p + e.tokens)[-1] for p, e in zip(prompts, in_order, strict=True)]
        assert table.lengths.tolist() == [len(p) - 1 + len(e.tokens) for p, e in zip(prompts, in_order, strict=True)]
        sampling = table.sampling()
        requests = [e.request for e in in_order]
        np.testing.assert_array_equal(sampling.temperature, [np.float32(r.sampling.temperature) for r in requests])
        np.testing.assert_array_equal(sampling.top_p, [np.float32(r.sampling.top_p) for r in requests])
        assert sampling.top_k.tolist() == [r.sampling.top_k for r in requests]
        keys = np.array([stream_key(r.seed) for r in requests], np.uint64)
        at = np.array([r.first_position + len(e.tokens) for r, e in zip(requests, in_order, strict=True)], np.int64)
        np.testing.assert_array_equal(sampling.uniforms, uniforms(keys, at))


TestSlotTable = SlotTableMachine.TestCase
TestSlotTable.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
