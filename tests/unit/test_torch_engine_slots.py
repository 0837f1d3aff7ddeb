"""The dense table of running requests against a model of it that keeps one Python object per request."""

from dataclasses import dataclass, field, fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.inference.torch_engine.sampling import SamplingRows, sample, sample_with_sets, stream_key, uniforms
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


# -- the random stream and the sampler of the embedded engine ----------------------------------------------------------


def keys(*seeds):
    return np.array([stream_key(seed) for seed in seeds], dtype=np.uint64)


def rows(n, *, temperature=1.0, top_p=1.0, top_k=0, draws=0.5):
    return SamplingRows(
        np.broadcast_to(np.asarray(temperature, np.float32), n).copy(),
        np.broadcast_to(np.asarray(top_p, np.float32), n).copy(),
        np.broadcast_to(np.asarray(top_k, np.int64), n).copy(),
        np.broadcast_to(np.asarray(draws, np.float64), n).copy(),
    )


def logits_of(*probabilities):
    return torch.tensor([probabilities], dtype=torch.float32).log()


def assert_sampled(logits, settings, token, probability):
    """This token is drawn, with the logarithm of this probability."""
    ids, logprobs = sample(logits, settings)
    assert ids.tolist() == [token]
    assert logprobs.item() == pytest.approx(np.log(probability), abs=1e-6)


def test_the_stream_is_the_same_in_every_release():
    """A checkpoint resumed with another version of this package must go on with the same stream."""
    drawn = uniforms(keys(0, 1, -1, 2**70), np.array([0, 1, 2, 2**40]))
    np.testing.assert_array_equal(
        drawn, [0.8833108082136425, 0.37239342287916566, 0.31821586879124175, 0.09849682405779547]
    )


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63), st.integers(0, 2**31)), min_size=1, max_size=20))
def test_a_draw_depends_on_its_own_seed_and_position_alone(pairs):
    seeds, positions = zip(*pairs, strict=True)
    together = uniforms(keys(*seeds), np.array(positions))
    apart = [uniforms(keys(s), np.array([p]))[0] for s, p in pairs]
    assert together.tolist() == apart
    assert (together >= 0).all()
    assert (together < 1).all()


@pytest.mark.parametrize("axis", ["positions", "seeds"])
def test_draws_are_uniform_and_uncorrelated(axis):
    n = 20_000
    if axis == "positions":
        drawn = uniforms(np.repeat(keys(3), n), np.arange(n))
    else:
        drawn = uniforms(keys(*range(n)), np.zeros(n, np.int64))
    counts = np.histogram(drawn, bins=50, range=(0, 1))[0]
    chi_square = ((counts - n / 50) ** 2 / (n / 50)).sum()
    assert chi_square < 100  # 49 degrees of freedom: p < 2e-5
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 5 / np.sqrt(n)


@pytest.mark.parametrize(
    ("draw", "token"), [(0.0, 0), (0.0999, 0), (0.1001, 2), (0.3999, 2), (0.4001, 3), (1 - 2**-52, 3)]
)
def test_a_draw_picks_by_inverse_cdf_and_never_an_impossible_token(draw, token):
    assert_sampled(logits_of(0.1, 0.0, 0.3, 0.6, 0.0), rows(1, draws=draw), token, [0.1, 0, 0.3, 0.6, 0][token])


def test_a_draw_on_the_edge_skips_an_impossible_token():
    assert sample(logits_of(0.0, 0.5, 0.0, 0.5), rows(1, draws=0.0))[0].tolist() == [1]
    assert sample(logits_of(0.0, 0.5, 0.0, 0.5), rows(1, draws=0.5))[0].tolist() == [3]


def test_top_k_then_top_p_renormalise():
    logits = logits_of(0.4, 0.3, 0.2, 0.1)
    # top_k=3 leaves 4/9, 3/9, 2/9; top_p=0.5 then needs the first two: 4/7 and 3/7.
    for draw, token in [(0.57, 0), (0.58, 1), (0.9999, 1)]:
        assert_sampled(logits, rows(1, top_k=3, top_p=0.5, draws=draw), token, [4 / 7, 3 / 7][token])
    # Top-p alone at 0.5 needs 0.4 + 0.3 as well; at 0.4 the first token is enough.
    assert sample(logits, rows(1, top_p=0.39, draws=0.99))[0].tolist() == [0]


def test_temperature_scales_before_the_filters():
    assert_sampled(logits_of(0.8, 0.2), rows(1, temperature=0.5, draws=0.97), 1, 0.04 / 0.68)


def test_greedy_ignores_draw_and_filters_and_reports_temperature_one():
    settings = rows(1, temperature=0.0, top_k=1, top_p=0.1, draws=0.0)
    assert_sampled(logits_of(0.2, 0.5, 0.3), settings, 1, 0.5)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(2, 40))
def test_a_row_does_not_depend_on_its_neighbours(seed, n, vocabulary):
    rng = np.random.default_rng(seed)
    logits = torch.tensor(rng.normal(size=(n, vocabulary)) * 3, dtype=torch.float32)
    mixed = rows(
        n,
        temperature=rng.choice([0.0, 0.7, 1.0], n),
        top_p=rng.choice([1.0, 0.9, 0.3], n),
        top_k=rng.choice([0, 1, 5], n),
        draws=rng.random(n),
    )
    mixed = replace(mixed, barred=rng.choice([-1, 0, 1, vocabulary + 5], (n, 1)))
    ids, logprobs = sample(logits, mixed)
    for i in range(n):
        one = SamplingRows(*(getattr(mixed, f.name)[i : i + 1] for f in fields(SamplingRows)))
        alone, alone_logprob = sample(logits[i : i + 1], one)
        assert alone.tolist() == ids[i : i + 1].tolist()
        assert alone_logprob.item() == pytest.approx(logprobs[i].item(), abs=1e-6)


def barring(settings, *tokens):
    return replace(settings, barred=np.array([tokens]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_barred_token_is_not_drawn_and_its_probability_goes_to_the_others(temperature):
    logits = logits_of(0.1, 0.6, 0.3)
    for draw, token in [(0.2499, 0), (0.2501, 2)]:
        expected = 2 if temperature == 0 else token
        settings = barring(rows(1, temperature=temperature, draws=draw), 1)
        assert_sampled(logits, settings, expected, [0.25, 0, 0.75][expected])
    assert logits.isfinite().all()  # the caller's logits are left alone


def test_tokens_are_barred_before_the_filters_count_them():
    logits = logits_of(0.4, 0.3, 0.2, 0.1)
    # Without token 0, top_k=2 leaves tokens 1 and 2: 3/5 and 2/5; of those top_p=0.5 leaves token 1.
    for top_p, draw, token, probability in [(1.0, 0.59, 1, 0.6), (1.0, 0.61, 2, 0.4), (0.5, 0.99, 1, 1.0)]:
        assert_sampled(logits, barring(rows(1, top_k=2, top_p=top_p, draws=draw), 0), token, probability)


def test_barred_ids_outside_the_vocabulary_mean_nothing():
    logits = logits_of(0.1, 0.6, 0.3)
    plain = sample(logits, rows(1, draws=0.5))
    barred = sample(logits, barring(rows(1, draws=0.5), -1, 3, 10**6))
    assert [t.tolist() for t in barred] == [t.tolist() for t in plain]


def guarded(max_tokens, min_tokens, stop):
    sampling = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stop)
    return GenerationRequest(f"{max_tokens}-{min_tokens}-{stop}", np.array([1], np.int32), sampling)


def test_a_slot_bars_its_stop_tokens_for_as_long_as_it_must():
    table = SlotTable(num_slots=4, chunk_tokens=8)
    for request in (guarded(9, 0, (5,)), guarded(9, 2, (6, 7)), guarded(9, 3, ())):
        table.add(request)
    for _ in range(2):
        np.testing.assert_array_equal(table.sampling().barred, [[-1, -1], [6, 7], [-1, -1]])
        table.advance(np.array([1, 2, 3]), np.zeros(3, np.float32))
    assert table.sampling().barred is None
    table.remove(np.array([0]))
    table.add(guarded(1, 1, (8,)))  # in the row that the move has freed
    np.testing.assert_array_equal(table.sampling().barred, [[-1, -1], [-1, -1], [8, -1]])


def test_rows_that_may_stop_pay_nothing_for_min_tokens():
    table = SlotTable(num_slots=2, chunk_tokens=8)
    table.add(guarded(9, 0, (5,)))
    table.add(guarded(9, 9, ()))
    assert table.sampling().barred is None


def test_the_sets_are_what_the_filters_kept():
    """Beside rows of other filters, and wider than the vocabulary."""
    logits = torch.log(torch.tensor([[0.4, 0.1, 0.3, 0.2]] * 3))
    settings_of = rows(3, top_p=[0.6, 1.0, 1.0], top_k=[3, 2, 6], draws=[0.9, 0.1, 0.5])
    ids, logprobs, kept = sample_with_sets(logits, settings_of, 6)
    plain_ids, plain_logprobs = sample(logits, settings_of)
    assert ids.tolist() == plain_ids.tolist()
    assert logprobs.tolist() == plain_logprobs.tolist()
    assert kept.tolist() == [[0, 2, -1, -1, -1, -1], [0, 2, -1, -1, -1, -1], [0, 2, 3, 1, -1, -1]]
    for row, token in enumerate(ids.tolist()):
        among = [i for i in kept[row].tolist() if i >= 0]
        own = logits[row, among].log_softmax(-1)[among.index(token)]
        assert logprobs[row].item() == pytest.approx(own.item(), abs=1e-6)
