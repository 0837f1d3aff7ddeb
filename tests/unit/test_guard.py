"""The off-policy guard: its rules against runs on paper, and its loop over a scripted queue."""

import json
import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.algorithm import CorrectionConfig
from asyncrl.config.algorithm_parts import CORRECTIONS
from asyncrl.config.run import GuardConfig
from asyncrl.driver.off_policy import GuardLoop
from asyncrl.errors import ConfigError, NoParity, RunFailed
from asyncrl.json_records import from_plain
from asyncrl.observability.events import EventLog
from asyncrl.queue.guard import MAX_SEVERITY, GuardReading, LagReading, OffPolicyGuard
from asyncrl.types import LedgerCounts
from asyncrl.types.guard import LAG_BUCKETS, LAST_OF_BUCKET, GuardState
from asyncrl.types.metrics import Metric
from asyncrl_testing.local import LocalActor
from tests.make import quickstart

SICK, BETWEEN, WELL = 2.0, 0.8, 0.1


@st.composite
def guards(draw):
    max_lag = draw(st.integers(0, 20))
    config = GuardConfig(
        trip_steps=draw(st.integers(1, 4)), relax_steps=draw(st.integers(1, 12)), stop_steps=draw(st.integers(1, 12))
    )
    return OffPolicyGuard(config, max_lag, draw(st.integers(0, max_lag)), draw(st.booleans()))


def reading(severity, lag_max=0, by_lag=()):
    return GuardReading(severity, "KL", lag_max, by_lag)


def play(guard, readings, state=None):
    """The state after these readings, and every decision with the number of its step, counted from 1."""
    state, decisions = state or guard.begin(), []
    for step, seen in enumerate(readings, 1):
        state, decision = guard.step(state, seen)
        if decision is not None:
            decisions.append((step, decision))
    return state, decisions


severities = st.lists(st.sampled_from([SICK, BETWEEN, WELL]), max_size=150)


@given(guards(), severities, st.data())
def test_the_limit_stays_between_the_floor_and_that_of_the_run(guard, values, data):
    state = guard.begin()
    for severity in values:
        parts = data.draw(st.lists(st.tuples(st.integers(0, 20), st.sampled_from([SICK, WELL])), max_size=3))
        by_lag = tuple(LagReading(*part) for part in sorted(parts))
        before = state
        state, decision = guard.step(state, reading(severity, data.draw(st.integers(0, 25)), by_lag))
        assert guard.floor <= state.limit <= guard.max_lag
        assert state.is_raised <= guard.can_raise
        moves = {"tightened": state.limit < before.limit, "relaxed": state.limit == before.limit + 1}
        moves |= {"raised": state.is_raised > before.is_raised, "eased": state.is_raised < before.is_raised}
        if decision is None or decision.action == "stopped":
            assert not any(moves.values())
        else:
            assert [action for action, moved in moves.items() if moved] == [decision.action]
            assert decision.limit == state.limit
            assert (severity >= 1) == (decision.action in ("tightened", "raised"))


@given(guards(), severities, st.integers(0, 150))
def test_a_run_that_resumes_decides_as_if_it_had_not_ended(guard, values, at):
    readings = [reading(value, guard.max_lag) for value in values]
    whole, decisions = play(guard, readings)
    half, first = play(guard, readings[:at])
    restored = from_plain(GuardState, json.loads(json.dumps(asdict(half))))
    end, second = play(guard, readings[at:], guard.begin(restored))
    assert end == whole
    assert [d for _, d in (*first, *second)] == [d for _, d in decisions]


@given(guards(), st.lists(st.sampled_from([BETWEEN, WELL]), max_size=300))
def test_a_run_that_is_never_sick_is_left_alone(guard, values):
    state, decisions = play(guard, [reading(value, guard.max_lag) for value in values])
    assert decisions == []
    assert (state.limit, state.is_raised) == (guard.max_lag, False)


@given(guards(), st.integers(0, 25))
def test_a_run_that_stays_sick_is_held_to_the_floor_then_corrected_then_stopped(guard, lag):
    config, rounds = guard.config, guard.max_lag.bit_length()
    steps = (rounds + 1) * config.trip_steps + config.stop_steps
    state, decisions = guard.begin(), []
    for _ in range(steps):
        state, decision = guard.step(state, reading(SICK, min(lag, state.limit)))
        decisions += [decision.action] if decision else []
        if decisions[-1:] == ["stopped"]:
            break
    tightened = decisions.count("tightened")
    assert tightened <= rounds
    assert (tightened > 0) == (guard.floor < guard.max_lag)
    assert decisions == ["tightened"] * tightened + ["raised"] * guard.can_raise + ["stopped"]
    assert (state.limit, state.sick_steps) == (guard.floor, 0), "a resumed run has all its steps again"


@given(guards(), st.integers(0, 20), st.integers(0, 400))
def test_the_limit_settles_and_does_not_oscillate(guard, bearable, steps):
    """Tokens up to some lag are healthy, older ones make a step sick: the limit ends at most one above that lag, and
    ever fewer steps are sick."""
    config, state, sick, changes = guard.config, guard.begin(), 0, 0
    for _ in range(steps):
        severity = SICK if state.limit > bearable else WELL
        sick += severity == SICK
        state, decision = guard.step(state, reading(severity, state.limit))
        changes += decision is not None
        assert decision is None or decision.action != "stopped" or guard.floor > bearable
    if guard.floor > bearable:
        return
    rounds = guard.max_lag.bit_length()
    trials = math.log2(1 + steps / config.relax_steps) + 1
    assert sick <= config.trip_steps * (rounds + trials)
    assert changes <= rounds + bearable + 2 * trials
    assert state.failed_trials <= trials
    if sick < steps and steps > rounds * config.trip_steps:
        assert state.limit <= bearable + 1


@given(st.integers(2, 16), st.integers(0, 16))
def test_the_youngest_lags_that_are_healthy_are_kept(limit, last):
    guard = OffPolicyGuard(GuardConfig(trip_steps=1), 16, 1, can_raise=False)
    parts = tuple(LagReading(lag, WELL if lag <= last else SICK) for lag in range(17))
    state, (first,) = play(guard, [reading(SICK, limit, parts[: limit + 1])], GuardState(limit))
    assert state.limit == first[1].limit == max(1, min(limit // 2, last))


def test_two_sick_steps_count_together_where_no_healthy_one_is_between_them():
    guard = OffPolicyGuard(GuardConfig(trip_steps=2), 8, 1, can_raise=False)
    acted = [
        bool(play(guard, [reading(s, 8) for s in values])[1]) for values in ((SICK, BETWEEN, SICK), (SICK, WELL, SICK))
    ]
    assert acted == [True, False]


# -- what a step says ----------------------------------------------------------------------------------------------


def line(*, effective=1.0, tails=0.0, kl=0.0, clipped=0.0, lag_max=3, **more):
    return {
        Metric.LAG_MAX: lag_max,
        Metric.EFFECTIVE_SAMPLES: effective,
        Metric.RATIO_TAILS: tails,
        Metric.KL_BEHAVIOR: kl,
        Metric.CLIPPED: clipped,
        **more,
    }


GUARD = OffPolicyGuard(GuardConfig(), 16, 1, can_raise=True)


@given(*[st.floats(0, 1) for _ in range(4)])
def test_a_step_is_as_severe_as_its_worst_signal(effective, tails, kl, clipped):
    config = GUARD.config
    found = GUARD.read(line(effective=effective, tails=tails, kl=kl, clipped=clipped))
    parts = {
        "effective samples": (1 - effective) / (1 - config.min_effective_samples),
        "tails": tails / config.max_ratio_tails,
        "KL": kl / config.max_kl_nats,
        "clipped": clipped / config.max_clip_fraction,
    }
    assert found.severity == pytest.approx(max(parts.values()))
    assert any(name in found.worst and share == pytest.approx(found.severity) for name, share in parts.items())
    assert GUARD.read(line()).severity == 0


@pytest.mark.parametrize("name", ["effective", "tails", "kl", "clipped"])
def test_a_figure_that_is_not_finite_is_as_bad_as_can_be(name):
    assert GUARD.read(line(**{name: math.nan})).severity == MAX_SEVERITY
    assert GUARD.read(line(kl=math.inf)).severity == MAX_SEVERITY
    assert GUARD.read(line(kl=-0.01)).severity == 0


def test_lags_are_read_apart_and_those_with_few_tokens_not_at_all():
    more = {}
    for bucket, share, kl in (("1", 0.6, 0.01), ("5-8", 0.39, 0.3), ("3", 0.01, 9.0)):
        values = {Metric.LAG_TOKENS: share, Metric.LAG_EFFECTIVE: 0.9, Metric.LAG_TAILS: 0.0, Metric.LAG_KL: kl}
        values |= {Metric.LAG_CLIPPED_POSITIVE: 0.0, Metric.LAG_CLIPPED_NEGATIVE: 0.1}
        more |= {family.of(bucket): value for family, value in values.items()}
    found = GUARD.read(line(lag_max=7, **more))
    config = GUARD.config
    young = max(0.1 / (1 - config.min_effective_samples), 0.1 / config.max_clip_fraction)
    assert [part.last_lag for part in found.by_lag] == [1, 7]
    assert [part.severity for part in found.by_lag] == pytest.approx([young, 0.3 / config.max_kl_nats])
    assert len(LAG_BUCKETS) == len(LAST_OF_BUCKET) + 1


# -- the recipe ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "floor", "can_raise"),
    [
        (["staleness.max_lag=8"], 1, False),
        (["staleness.max_lag=8", "staleness.guard_rules.min_lag=0"], 0, False),
        (["staleness.max_lag=8", "staleness.publish_every_steps=4"], 3, False),
        (["staleness.max_lag=2", "staleness.guard_rules.min_lag=5"], 2, False),
        (["mode=one_step_off"], 1, False),
        (["mode=sync"], 0, False),
        (["algorithm.corrections=[{name: m2po}]"], 1, True),
    ],
)
def test_the_lowest_limit_admits_groups_in_every_recipe(overrides, floor, can_raise):
    guard = OffPolicyGuard.of(quickstart(*overrides))
    assert (guard.floor, guard.can_raise) == (floor, can_raise)


def test_off_is_a_word_and_thresholds_have_ranges(tmp_path):
    assert quickstart("staleness.guard=off").staleness.guard == "off"
    for wrong in ("min_effective_samples=1", "max_kl_nats=0", "trip_steps=0", "raised_bounds=0", "max_ratio_tails=2"):
        with pytest.raises(ConfigError, match=wrong.partition("=")[0]):
            quickstart(f"staleness.guard_rules.{wrong}")


@given(st.sampled_from(sorted(CORRECTIONS)), st.floats(0.01, 1))
def test_closer_bounds_touch_what_the_others_touch_and_more(name, share):
    config = CorrectionConfig(name=name)
    low, high = config.bounds
    closer_low, closer_high = config.closer(share).bounds
    untouched = 0.0 if CORRECTIONS[name].measure is not None else 1.0
    assert closer_high - untouched == pytest.approx((high - untouched) * share)
    assert closer_low == pytest.approx(1 - (1 - low) * share if low else 0.0)
    assert config.closer(1.0).bounds == pytest.approx(config.bounds)


# -- its loop --------------------------------------------------------------------------------------------------------


class Queue:
    def __init__(self):
        self.limits = []

    async def limit_lag(self, limit):
        self.limits.append(limit)
        return LedgerCounts(expired=len(self.limits))


def loop_of(tmp_path, *overrides):
    recipe = quickstart("staleness.max_lag=8", *overrides)
    queue, events = Queue(), EventLog(tmp_path / "events.jsonl")

    def told():
        return [json.loads(text) for text in (tmp_path / "events.jsonl").read_text().splitlines()]

    return GuardLoop(recipe, LocalActor(queue), events), queue, told


def far(lag_max):
    return line(kl=0.35, lag_max=lag_max)


async def test_it_acts_on_the_queue_tells_of_it_and_stops_the_run(tmp_path):
    rules = "staleness.guard_rules.trip_steps=1", "staleness.guard_rules.stop_steps=2"
    corrected = "algorithm.corrections=[{name: off_policy_mask}]", "staleness.guard_rules.raised_bounds=0.25"
    loop, queue, told = loop_of(tmp_path, "staleness.guard=act", *rules, *corrected)
    seen = []
    for step in range(1, 7):
        assert loop.stopped is None
        seen.append((loop.limit, loop.correction_bounds))
        metrics, counts = await loop.after_step(step, far(loop.limit))
        assert metrics[Metric.GUARD_SEVERITY] == pytest.approx(3.5)
        assert (counts is None) == (step > 4)
        if step == 6:
            assert (metrics[Metric.GUARD_LIMIT], metrics[Metric.GUARD_STATE]) == (1, 3)
    assert seen == [(8, 1.0), (4, 1.0), (2, 1.0), (1, 1.0), (1, 0.25), (1, 0.25)]
    assert queue.limits == [4, 2, 1, 1]
    assert [(e["action"], e["limit"], e["step"]) for e in told()] == [
        *(("tightened", 4, 1), ("tightened", 2, 2), ("tightened", 1, 3)),
        *(("raised", 1, 4), ("stopped", 1, 6)),
    ]
    assert isinstance(loop.stopped, RunFailed)
    assert "after step 6: KL 0.35 nats" in str(loop.stopped)
    # A run that goes on from this checkpoint begins with the lowest limit and with all its steps.
    again, fresh, told = loop_of(tmp_path, "staleness.guard=act", *rules, *corrected)
    await again.resume(loop.state, 6)
    assert (fresh.limits, again.limit, again.correction_bounds, again.stopped) == ([1], 1, 0.25, None)
    assert told()[-1]["action"] == "resumed"


async def test_watching_only_records(tmp_path):
    loop, queue, told = loop_of(tmp_path, "staleness.guard=watch", "staleness.guard_rules.stop_steps=2")
    levels = []
    for step in range(1, 12):
        metrics, counts = await loop.after_step(step, far(8))
        levels.append((metrics[Metric.GUARD_LIMIT], metrics[Metric.GUARD_STATE]))
        assert (counts, loop.limit, loop.correction_bounds, loop.stopped) == (None, 8, 1.0, None)
    assert queue.limits == []
    assert [e["action"] for e in told()] == ["tightened"] * 3 + ["stopped"] * 2
    assert not any(e["acted"] for e in told())
    assert levels[:6] == [(8, 0), (4, 1), (4, 1), (2, 1), (2, 1), (1, 1)]


async def test_switched_off_it_does_nothing_whatever_a_checkpoint_says(tmp_path):
    loop, queue, _ = loop_of(tmp_path)
    await loop.resume(GuardState(1, is_raised=True), 3)
    assert await loop.after_step(4, {}) == ({}, None)
    assert (loop.state, loop.limit, loop.correction_bounds, queue.limits) == (None, 8, 1.0, [])


async def test_a_checkpoint_at_the_full_limit_changes_nothing(tmp_path):
    loop, queue, _ = loop_of(tmp_path, "staleness.guard=act")
    await loop.resume(replace(GuardState(8), healthy_steps=5), 3)
    assert (queue.limits, loop.state.healthy_steps) == ([], 5)


def of_lag_0(nats, tails):
    return {Metric.LAG_TOKENS.of("0"): 1.0, Metric.LAG_KL.of("0"): nats, Metric.LAG_TAILS.of("0"): tails}


@pytest.mark.parametrize(
    ("overrides", "nats", "tails", "stops"),
    [
        ((), 1e-6, 0.0, False),
        ((), 0.03, 0.0, True),  # ties, dropout: a small difference everywhere
        ((), 0.0005, 0.01, True),  # rotary factors of some positions: a large difference somewhere
        (("model.inference_dtype=bfloat16",), 0.003, 0.01, False),
        (("model.inference_dtype=bfloat16",), 0.5, 0.01, True),
        (("batch.num_minibatches=4",), 0.01, 0.01, False),
        (("rollout.sampling.top_p=0.5",), 0.5, 0.3, False),  # another distribution by intention
        (("staleness.parity=warn",), 0.5, 0.3, False),
    ],
)
async def test_the_first_step_with_tokens_of_lag_0_shows_whether_both_compute_one_policy(
    tmp_path, caplog, overrides, nats, tails, stops
):
    loop, _, _ = loop_of(tmp_path, *overrides)
    await loop.after_step(1, {Metric.LAG_TOKENS.of("1"): 1.0, Metric.LAG_KL.of("1"): 2.0})
    assert loop.stopped is None
    await loop.after_step(2, of_lag_0(nats, tails))
    assert isinstance(loop.stopped, NoParity) == stops
    assert not stops or "in step 2, over the tokens of lag 0" in str(loop.stopped)
    assert ("different policies" in caplog.text) == ("staleness.parity=warn" in overrides)


async def test_parity_of_servers_that_digest_nothing_is_judged_at_every_step(tmp_path):
    """A server that was replaced has its first tokens in a later step."""
    remote = ("rollout.engine=remote", "rollout.num_replicas=1", "rollout.remote.urls=[http://a]")
    native = ("rollout.remote.weights=native", "weights.transport=collective", "weights.verify=off")
    loop, _, _ = loop_of(tmp_path, *remote, *native, "trainer.device=cuda")
    for step, nats in enumerate((0.0, 0.0, 0.5)):
        assert loop.stopped is None
        await loop.after_step(step, of_lag_0(nats, 0.0))
    assert isinstance(loop.stopped, NoParity)


async def test_parity_that_is_lost_later_is_a_warning(tmp_path, caplog):
    loop, _, _ = loop_of(tmp_path)
    for step, nats in enumerate((0.0, 0.5, 0.5, 0.0, 0.5)):
        await loop.after_step(step, of_lag_0(nats, 0.0))
    assert (loop.stopped, caplog.text.count("different policies")) == (None, 2)
