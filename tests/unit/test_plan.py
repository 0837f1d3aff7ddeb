"""The planner's simulation: against closed forms, against a replica that is simulated tick by tick, and what holds of
every run."""

import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.plan import Forecast, predict, read_costs, write_costs
from asyncrl.plan.costs import CostModel, GenerationCosts, LengthCosts, PublishCosts, TrainingCosts
from asyncrl.plan.shared_replica import SharedReplica, SimulatedGroup, SimulatedRequest
from asyncrl.plan.simulation import Simulation, Workload, threads_of
from benchmarks.verl_table import ROWS, costs, prediction
from tests.make import planned, quickstart, remade

DRAIN = ("rollout.interrupt=drain", "rollout.request_timeout_s=1")
TOKENS, STEP_S = 100.0, 0.01


def model(*, training_s=1.0, publish_s=0.25, running_s=0.0, loop_s=0.05, cores=None, tokens=(TOKENS,) * 2):
    """Every response is TOKENS long, and every decode step takes STEP_S."""
    generation = GenerationCosts(
        decode_step_s=((1, STEP_S),), prompt_tokens=20, lengths=LengthCosts(quantiles=tokens), latency_s=0.02
    )
    return CostModel(
        source="test",
        generation=generation,
        training=TrainingCosts(token_s=0, step_s=training_s),
        publish=PublishCosts(bytes=100, bytes_per_s=1000, fixed_s=publish_s - 0.1, running_s=running_s),
        reward_s=0.1,
        loop_s=loop_s,
        cores=cores,
    )


def forecast(costs, *overrides) -> Forecast:
    return predict(planned("trainer.num_threads=1", *overrides), costs, steps=24)


# -- closed forms ------------------------------------------------------------------------------------------------------

GROUP_S = TOKENS * STEP_S + 0.02 + 0.1
"""From the admission of a group to its put."""


def test_in_sync_everything_happens_in_turn():
    found = forecast(model(), "mode=sync")
    # The next groups are admitted with the publish, so the rest of the loop runs beside their generation.
    assert found.step_s == pytest.approx(GROUP_S + 1.0 + 0.25)
    assert found.trainer_idle * found.step_s == pytest.approx(GROUP_S - 0.05)
    assert (found.lag_mean, found.lag_max) == (0, 0)
    assert found.publish_s == pytest.approx(0.25)


@pytest.mark.parametrize("training_s", [0.2, 5.0])
def test_one_step_off_takes_the_longer_of_both(training_s):
    found = forecast(model(training_s=training_s), "mode=one_step_off")
    assert found.step_s == pytest.approx(max(GROUP_S, training_s + 0.05) + 0.25)
    assert found.lag_mean == pytest.approx(1.0)


def test_fully_async_where_training_is_slower():
    found = forecast(model(training_s=5.0))
    assert found.step_s == pytest.approx(5.0 + 0.25 + 0.05)
    assert found.trainer_idle == pytest.approx(0.0)
    assert found.samples_per_s == pytest.approx(8 / 5.3)
    assert found.lag_max == 2
    assert found.replica_idle == pytest.approx(1 - TOKENS * STEP_S / 5.3)


def test_just_in_time_is_younger_at_the_same_speed():
    costs, words = model(training_s=5.0), ("staleness.max_lag=4", "staleness.pacing=just_in_time")
    eager, paced = forecast(costs, *words[:1]), forecast(costs, *words)
    assert paced.lag_mean < eager.lag_mean - 1
    assert paced.step_s == pytest.approx(eager.step_s, rel=0.02)


def test_where_slots_are_too_few_requests_take_turns():
    """8 requests, two at a time: four rounds."""
    found = forecast(model(), "rollout.torch.num_slots=2", "mode=sync")
    assert found.step_s == pytest.approx(4 * TOKENS * STEP_S + 0.12 + 1.0 + 0.25)


def test_processes_that_share_a_core_slow_each_other_down():
    """One core for a trainer and a replica that are both always busy: their times add up."""
    busy = {"training_s": 3.0, "publish_s": 0.11, "loop_s": 0, "tokens": (400.0, 400.0)}
    alone, shared, enough = (forecast(model(**busy, cores=cores), "staleness.max_lag=4") for cores in (None, 1.0, 2.0))
    assert enough == alone
    assert shared.step_s > 1.3 * alone.step_s


def test_a_rank_wants_a_core_for_each_thread():
    """Training alone, from the first step to the last: with more threads than cores nothing is gained."""
    costs = model(training_s=10.0, publish_s=0.11, loop_s=0, cores=2.0)
    alone, two, four = (forecast(costs, f"trainer.num_threads={n}").step_s - 0.11 for n in (1, 2, 4))
    assert alone == pytest.approx(10.0, rel=0.02)
    assert two == pytest.approx(10.0 / 2 / 0.65, rel=0.1)
    assert four > two


@pytest.mark.parametrize("who", ["rollouter_s", "beside_s"])
def test_the_rollouter_and_what_works_beside_it_take_their_share_of_the_cores(who):
    """Work of 0.2 s for each of 8 responses a step, on a core that training wants alone."""
    costs = model(training_s=3.0, publish_s=0.11, loop_s=0, tokens=(2.0, 2.0), cores=1.0)
    without, with_it = forecast(costs), forecast(replace(costs, **{who: 0.2}))
    assert with_it.step_s == pytest.approx(without.step_s + 8 * 0.2, rel=0.02)
    assert forecast(replace(costs, **{who: 0.2}, cores=4.0)).step_s == pytest.approx(3.11, rel=0.01)


def test_the_rollouter_takes_one_response_after_the_other():
    """In sync, whose groups come all at once, a batch waits for 8 times 0.2 s; what works beside it holds up nobody."""
    without, with_it, beside = (
        forecast(replace(model(), **{who: 0.2}), "mode=sync") for who in ("loop_s", "rollouter_s", "beside_s")
    )
    assert with_it.step_s == pytest.approx(GROUP_S + 8 * 0.2 + 1.0 + 0.25)
    assert beside.step_s == pytest.approx(GROUP_S + 1.0 + 0.25)
    assert without.step_s == pytest.approx(GROUP_S + 1.0 + 0.25)


def test_ranks_share_the_tokens_less_what_each_doubling_costs():
    training = TrainingCosts(token_s=1e-3, step_s=0.5, num_ranks=2, efficiency=0.8)
    assert training.seconds(1000, 2) == pytest.approx(1.5)
    assert training.seconds(1000, 8) == pytest.approx(0.5 + 1.0 / 4 / 0.8**2)
    assert training.seconds(1000, 1) == pytest.approx(0.5 + 2.0 * 0.8)
    threaded = replace(training, num_threads=2, thread_efficiency=0.6)
    assert threaded.seconds(1000, 2, 2) == threaded.seconds(1000, 2) == pytest.approx(1.5)
    assert threaded.seconds(1000, 2, 1) == pytest.approx(1.5 * 2 * 0.6)
    assert threaded.seconds(1000, 2, 8) == pytest.approx(1.5 / 4 / 0.6**2)


def test_a_drained_publish_waits_for_the_longest_response():
    costs = model(training_s=0.3, tokens=(100.0, 1000.0))
    kept, drained = forecast(costs, "rollout.interrupt=keep"), forecast(costs, *DRAIN)
    assert kept.publish_s == pytest.approx(0.25)
    assert drained.publish_s > 3.0


def test_a_publish_beside_training_costs_no_time_unless_it_is_the_longer_one():
    waits, beside = (forecast(model(), f"weights.overlap={overlaps}") for overlaps in ("false", "true"))
    assert (waits.step_s, beside.step_s) == (pytest.approx(1.0 + 0.25 + 0.05), pytest.approx(1.0 + 0.05))
    assert beside.publish_s == pytest.approx(0.25)
    assert forecast(model(publish_s=2.0, running_s=1.9), "weights.overlap=true").step_s == pytest.approx(2.0)


def test_a_rolling_publish_holds_up_a_wave_at_a_time():
    four, rolls = "rollout.num_replicas=4", ("weights.rolling=true", "weights.rolling_replicas=2")
    whole, rolling = forecast(model(training_s=4.0), four), forecast(model(training_s=4.0), four, *rolls)
    assert rolling.publish_s == pytest.approx(2 * whole.publish_s)
    assert rolling.paused_s == pytest.approx(whole.paused_s)


def test_replicas_generate_while_a_publish_prepares():
    assert forecast(model(running_s=0.15)).paused_s == pytest.approx(0.10)


def test_groups_without_a_signal_are_generated_and_not_trained():
    costs = replace(model(training_s=0.1), filtered_share=0.5)
    words = "rollout.torch.num_slots=4", "algorithm.dynamic_sampling=true"
    plain, filtered = forecast(costs, *words[:1]), forecast(costs, *words)
    assert filtered.step_s > 1.5 * plain.step_s


def test_prefilling_again_takes_time():
    costs = model(training_s=0.1, publish_s=0.2, loop_s=0)
    costs = replace(costs, generation=replace(costs.generation, prefill_tokens_per_s=500.0))
    kept, resumed = (forecast(costs, f"rollout.interrupt={how}") for how in ("keep", "abort_resume"))
    assert resumed.step_s > kept.step_s


# -- a replica ---------------------------------------------------------------------------------------------------------


def ticked(arrivals, swaps, slots, step_s, tick):
    """(end, {version: tokens}) of each request, in short ticks. `arrivals`: (time, tokens), by time."""
    done = [0.0] * len(arrivals)
    parts: list[dict[int, float]] = [{} for _ in arrivals]
    ends: list[float | None] = [None] * len(arrivals)
    seated: list[int] = []
    queue = list(range(len(arrivals)))
    now, version = 0.0, 0
    while any(end is None for end in ends):
        version = sum(at <= now for at in swaps)
        while queue and len(seated) < slots and arrivals[queue[0]][0] <= now:
            seated.append(queue.pop(0))
        if seated:
            speed = tick / step_s(len(seated))
            for i in list(seated):
                made = min(speed, arrivals[i][1] - done[i])
                done[i] += made
                parts[i][version] = parts[i].get(version, 0.0) + made
                if done[i] >= arrivals[i][1] - 1e-9:
                    ends[i] = now
                    seated.remove(i)
        now += tick
    return list(zip(ends, parts, strict=True))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 120)), min_size=1, max_size=8),
    st.lists(st.integers(1, 600), max_size=2, unique=True),
    st.integers(1, 4),
    st.floats(0, 1),
)
def test_a_replica_is_what_ticks_make_it(given_arrivals, given_swaps, slots, slope):
    arrivals = sorted((at / 100, float(tokens)) for at, tokens in given_arrivals)
    swaps = sorted(at / 100 for at in given_swaps)

    def step_s(n):
        return 0.01 * (1 + slope * (n - 1))

    replica = SharedReplica(0, step_s, decodes_at_once=slots, prefill_s=lambda group, known: 0.0)
    requests = [SimulatedRequest(SimulatedGroup(i, 0, 0), tokens) for i, (_, tokens) in enumerate(arrivals)]
    todo = sorted([(at, 0, i) for i, (at, _) in enumerate(arrivals)] + [(at, 1, 0) for at in swaps])
    ends: dict[int, float] = {}
    version = 0
    while todo or replica.running:
        at = replica.next_end()
        if todo and (at is None or todo[0][0] <= at):
            now, swap, i = todo.pop(0)
            if swap:
                version += 1
                replica.commit(version, now, prefills_again=False, prefill_tokens_per_s=None)
            else:
                replica.send(requests[i], now)
            continue
        for request in replica.ended(at):
            ends[request.group.ordinal] = at
    tick = 0.0005
    for i, (end, parts) in enumerate(ticked(arrivals, swaps, slots, step_s, tick)):
        assert ends[i] == pytest.approx(end, abs=len(arrivals) * 4 * tick + 0.01)
        own = requests[i].group
        assert sum(own.parts.values()) == pytest.approx(own.tokens) == pytest.approx(arrivals[i][1])
        for number in own.parts.keys() | parts.keys():
            assert own.parts.get(number, 0.0) == pytest.approx(parts.get(number, 0.0), abs=1.5)


# -- every run ---------------------------------------------------------------------------------------------------------


def drawn_recipe(mode, rolling, **of):
    """`of`: key -> value, without its section where several keys would have the same name."""
    lag, key = {"sync": 0, "one_step_off": 1}.get(mode, of["staleness.max_lag"]), "staleness.publish_every_steps"
    of[key] = min(of[key], lag + 1)
    of |= {"mode": mode, "rollout.request_timeout_s": 1.0, "rollout.sampling.max_response_tokens": 400}
    if rolling is not None:
        of |= {"weights.rolling": True, "weights.rolling_replicas": rolling}
    return remade(planned(), of)


recipes = st.builds(
    drawn_recipe,
    mode=st.sampled_from(["sync", "one_step_off", "fully_async", "fully_async"]),
    rolling=st.sampled_from([None, 1, 2]),
    **{
        "batch.groups_per_step": st.integers(1, 6),
        "batch.group_size": st.sampled_from([2, 4]),
        "staleness.max_lag": st.integers(0, 4),
        "staleness.publish_every_steps": st.integers(1, 3),
        "weights.overlap": st.booleans(),
        "rollout.interrupt": st.sampled_from(["abort_resume", "keep", "drain"]),
        "staleness.on_overdue": st.sampled_from(["wait", "refill", "mask"]),
        "staleness.pacing": st.sampled_from(["eager", "just_in_time"]),
        "rollout.num_replicas": st.integers(1, 5),
        "rollout.torch.num_slots": st.integers(1, 20),
        "trainer.num_ranks": st.integers(1, 2),
        "trainer.num_threads": st.integers(1, 3),
        "algorithm.dynamic_sampling": st.booleans(),
        "run.seed": st.integers(0, 1000),
    },
)
cost_models = st.builds(
    lambda slope, training_s, sigma, prefill, publish_s, cores, share: CostModel(
        source="drawn",
        generation=GenerationCosts(
            decode_step_s=((1, 0.01), (8, 0.01 * (1 + slope))),
            prompt_tokens=30,
            lengths=LengthCosts(median=60.0, sigma=sigma, straggler_share=0.05, straggler_factor=5.0),
            prefill_tokens_per_s=prefill,
        ),
        training=TrainingCosts(token_s=training_s / 1000, step_s=training_s),
        publish=PublishCosts(bytes=0, bytes_per_s=1, fixed_s=publish_s, running_s=publish_s / 3),
        reward_s=0.05,
        loop_s=0.01,
        filtered_share=share,
        cores=cores,
        rollouter_s=0.02,
        beside_s=0.01,
    ),
    st.floats(0, 3),
    st.floats(0.01, 3),
    st.floats(0, 1.2),
    st.sampled_from([None, 1000.0]),
    st.floats(0, 0.5),
    st.sampled_from([None, 1.0, 2.0]),
    st.sampled_from([0.0, 0.4]),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(recipes, cost_models)
def test_what_holds_of_every_run(recipe, costs):
    steps = Simulation(recipe, costs).run(10)
    assert len(steps) == 10
    ended, before = 0.0, None
    for step in steps:
        assert ended == pytest.approx(step.asked)
        assert step.asked <= step.leased <= step.trained <= step.published_from <= step.ended + 1e-9
        assert not before or before.published_from + before.publish_s <= step.trained + 1e-9, "it ends first"
        assert 0 <= step.lag_max <= recipe.max_lag, "the bound holds here as it does in a run"
        assert step.masked == 0 or recipe.staleness.on_overdue == "mask"
        assert step.waited_s >= 0
        trained = (step.tokens + step.masked) + 30 * recipe.batch.num_trajectories
        least = costs.training.seconds(trained, recipe.trainer.num_ranks, threads_of(recipe, costs.cores))
        assert step.trained - step.leased >= least * (1 - 1e-9)
        if costs.cores is None and not recipe.overlaps_publish:
            assert step.trained - step.leased == pytest.approx(least)
        ended, before = step.ended, step
    forecast = Forecast.of(steps, recipe)
    assert 0 <= forecast.trainer_idle <= 1
    assert 0 <= forecast.replica_idle <= 1
    assert forecast.lag_mean <= forecast.lag_max
    assert steps == Simulation(recipe, costs).run(10), "the same seed gives the same run"


def test_a_run_trains_what_it_generates():
    """Nothing is lost between the draw of the lengths and the tokens of the steps."""
    recipe = planned("mode=sync")
    costs = model(tokens=(10.0, 500.0))
    drawn = Workload(recipe, costs)
    for number, step in enumerate(Simulation(recipe, costs).run(3)):
        due = sum(sum(drawn.lengths(ordinal, 2)) for ordinal in range(4 * number, 4 * number + 4))
        assert step.tokens == pytest.approx(due)


def test_a_thousand_replicas():
    many = "batch.groups_per_step=64", "batch.group_size=16", "staleness.max_lag=1", "rollout.num_replicas=1000"
    found = predict(planned(*many), model(), steps=6)
    assert found.step_s == pytest.approx(1.0 + 0.25 + 0.05, rel=0.3)
    assert found.replica_idle > 0.5


# -- records -----------------------------------------------------------------------------------------------------------


def digits(low, high):
    return st.floats(low, high).map(lambda value: float(f"{value:.5g}"))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 999), digits(1e-5, 10)), min_size=1, max_size=4, unique_by=lambda p: p[0]),
    st.one_of(
        st.lists(digits(0, 1e5), min_size=2, max_size=9).map(lambda q: LengthCosts(quantiles=tuple(sorted(q)))),
        st.builds(LengthCosts, median=digits(1, 1e4), sigma=digits(0, 3), straggler_share=digits(0, 1)),
    ),
    digits(1e-9, 1),
    st.one_of(st.none(), digits(0.5, 512)),
)
def test_a_cost_model_is_read_as_it_was_written(points, lengths, token_s, cores):
    generation = GenerationCosts(decode_step_s=tuple(sorted(points)), prompt_tokens=7.0, lengths=lengths)
    training = TrainingCosts(token_s=token_s, num_ranks=4)
    written = replace(model(cores=cores), generation=generation, training=training)
    assert read_costs(write_costs(written), "file") == written


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (("token_s", "tokens_s"), "training.token_s is missing"),
        (("bytes_per_s: 1000", "bytes_per_s: 0"), "publish.bytes_per_s is 0"),
        (("[1, 0.01]", "[1, 0.01], [1, 0.02]"), "rising numbers of requests"),
        (("quantiles: [100.0, 100.0]", "quantiles: []"), "either two or more quantiles, or median and sigma"),
        (("quantiles: [100.0, 100.0]", "quantiles: [9.0, 2.0]"), "must not fall"),
        (("source: test", "source: [test"), "while parsing"),
        (("efficiency: 0.9", "efficiency: fast"), "training.efficiency is a str"),
    ],
)
def test_a_wrong_cost_model_is_refused_with_its_place(change, found):
    text = write_costs(model()).replace("bytes_per_s: 1000.0", "bytes_per_s: 1000")
    text = text.replace("- [1, 0.01]", "- [1, 0.01]\n  - [2, 0.01]" if "rising" in found else "- [1, 0.01]")
    wrong = text.replace("[2, 0.01]", "[1, 0.02]") if "rising" in found else text.replace(*change)
    assert wrong != write_costs(model())
    with pytest.raises(ConfigError, match=r"(?s)the cost model file.*do:") as raised:
        read_costs(wrong, "file")
    assert found in str(raised.value)


def test_between_points_a_decode_step_follows_the_line():
    generation = replace(model().generation, decode_step_s=((2, 1.0), (4, 2.0), (8, 2.4)))
    assert [generation.step_s(n) for n in (1, 2, 3, 4, 6, 8, 12)] == pytest.approx([1, 1, 1.5, 2, 2.2, 2.4, 2.8])


@given(st.floats(0.001, 0.999), st.floats(0.001, 0.999))
def test_lengths_grow_with_their_share(a, b):
    for lengths in (LengthCosts(quantiles=(5, 10, 200)), LengthCosts(median=50.0, sigma=1.0)):
        low, high = (lengths.tokens(share, 0.5, 100) for share in sorted((a, b)))
        assert 1 <= low <= high <= 100
    assert LengthCosts(median=50.0, sigma=1.0).tokens(0.5, 0.5, math.inf) == pytest.approx(50)


def test_a_recipe_is_simulated_with_its_limits():
    recipe = quickstart("rollout.torch.num_slots=7")
    assert max(Workload(recipe, model(tokens=(10.0, 500.0))).lengths(0, 16)) == 64
    assert [threads_of(quickstart("trainer.num_ranks=2", "mode=sync"), cores) for cores in (None, 8.0)] == [None, 4]


# -- verl's table ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "error"), list(zip(ROWS, (0.03, 0.05, 0.13, 0.05, 0.05), strict=True)), ids=lambda v: getattr(v, "name", "")
)
def test_verls_published_steps(row, error):
    """At a quarter of the size. docs/plan.md says which inputs are assumed, and how the rows move with them."""
    assert prediction(row, costs(), scale=4).step_s == pytest.approx(row.step_s, rel=error)
