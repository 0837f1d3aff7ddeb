"""Pacing on a virtual clock, against admitting as early as the limit allows; and that the queue keeps to it."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.plan.costs import CostModel, GenerationCosts, LengthCosts, PublishCosts, TrainingCosts
from asyncrl.plan.simulation import SimulatedStep, Simulation
from asyncrl.queue.message_queue import MessageQueue
from asyncrl.queue.pacing import HISTORY_STEPS, JustInTime, Pacing, least_lead
from asyncrl.types import LeaseManifest
from tests.make import begun, planned, put, queue_spec, remade

RUNS = 60
TICKS = 1000
"""Tokens that a group has per second of work."""


@dataclass(frozen=True)
class Load:
    """A workload of the simulation. `work`: of a group, in seconds at full speed. `parallel`: groups that are generated
    at full speed together; more share it. `training`: seconds of a step."""

    groups_per_step: int
    max_lag: int
    work: Callable[[random.Random], float]
    parallel: float
    training: Callable[[random.Random, int], float]
    steps: int = 80
    seed: int = 0

    def lengths(self, ordinal: int, count: int) -> Sequence[float]:
        return [TICKS * self.work(random.Random(2 * (self.seed * 1_000_003 + ordinal)))]

    def is_filtered(self, ordinal: int) -> bool:
        return False

    def training_s(self, step: int, tokens: float) -> float:
        return self.training(random.Random(2 * (self.seed * 1_000_003 + step) + 1), step)


class Outcome:
    """Of the steps after the first quarter; `lags`: mean lag of the tokens of each step."""

    def __init__(self, steps: Sequence[SimulatedStep]) -> None:
        late = steps[len(steps) // 4 :]
        self.seconds = late[-1].trained - late[0].leased
        self.waited = sum(step.leased - step.asked for step in late[1:])
        self.lags = [step.lag_sum / step.tokens for step in steps]
        self.largest = max(step.lag_max for step in steps)

    def mean_lag(self) -> float:
        return fmean(self.lags[len(self.lags) // 4 :])


RECIPE = planned("batch.group_size=1", "algorithm.advantage=reinforce_plus_plus", "rollout.interrupt=keep")


def simulate(load: Load, pacing: Pacing) -> Outcome:
    """One replica of groups of one response each; publishes take no time."""
    most = load.groups_per_step * (load.max_lag + 1)
    decode = tuple((n, max(1.0, n / load.parallel) / TICKS) for n in range(1, most + 1))
    generation = GenerationCosts(decode_step_s=decode, prompt_tokens=0, lengths=LengthCosts(quantiles=(1, 1)))
    free = PublishCosts(bytes=0, bytes_per_s=1)
    costs = CostModel(source="", generation=generation, training=TrainingCosts(token_s=0), publish=free)
    limits = {"batch.groups_per_step": load.groups_per_step, "staleness.max_lag": load.max_lag}
    recipe = remade(RECIPE, limits | {"rollout.torch.num_slots": most})
    return Outcome(Simulation(recipe, costs, workload=load, pacing=pacing).run(load.steps))


def just_in_time(load: Load) -> JustInTime:
    return JustInTime(load.groups_per_step, load.max_lag)


class Watched(JustInTime):
    """Notes what it wanted."""

    def __init__(self, load: Load) -> None:
        super().__init__(load.groups_per_step, load.max_lag)
        self.found: list[float] = []

    def wanted(self, now: float) -> float:
        self.found.append(super().wanted(now))
        return self.found[-1]


def workload(seed: int) -> Load:
    """A random one: batch, limit, lengths with or without a long tail, enough replicas or too few, steps that jitter or
    come in bursts."""
    draw = random.Random(seed)
    size, max_lag = draw.choice([4, 8, 16]), draw.choice([1, 2, 4, 8])
    base, spread, long = draw.uniform(0.2, 3), draw.uniform(0, 0.6), draw.uniform(2, 6)
    tail = draw.choice([0, 0, 0.03, 0.1])
    step_s, jitter, burst = draw.uniform(0.3, 2), draw.uniform(0, 0.2), draw.choice([0, 0, 0, 7])
    return Load(
        size,
        max_lag,
        lambda rng: base * rng.uniform(1 - spread, 1 + spread) * (long if rng.random() < tail else 1),
        size * draw.uniform(0.5, 4),
        lambda rng, step: step_s * rng.uniform(1 - jitter, 1 + jitter) * (3 if burst and step % burst == 0 else 1),
        steps=100,
        seed=seed,
    )


@pytest.fixture(scope="module")
def outcomes():
    """(limit, eager, just in time) of each workload."""
    loads = [workload(seed) for seed in range(RUNS)]
    return [(load.max_lag, simulate(load, Pacing()), simulate(load, just_in_time(load))) for load in loads]


def test_no_token_is_over_the_limit_and_every_run_ends(outcomes):
    assert all(max(eager.largest, paced.largest) <= max_lag for max_lag, eager, paced in outcomes)


def test_it_costs_next_to_no_time(outcomes):
    ratios = sorted(paced.seconds / eager.seconds for _, eager, paced in outcomes)
    assert fmean(ratios) <= 1.005
    assert ratios[int(0.95 * RUNS)] <= 1.03
    assert ratios[-1] <= 1.08, "what eager has made before the measurement began is its head start"


def test_where_training_is_slower_tokens_are_far_younger(outcomes):
    bound = [(eager, paced) for _, eager, paced in outcomes if eager.waited < 0.01 * eager.seconds]
    assert len(bound) > RUNS / 5
    assert fmean(paced.mean_lag() for _, paced in bound) <= 0.55 * fmean(eager.mean_lag() for eager, _ in bound)
    assert fmean(paced.waited / paced.seconds for _, paced in bound) <= 0.01


def test_where_generation_is_slower_nothing_changes(outcomes):
    bound = [(eager, paced) for _, eager, paced in outcomes if eager.waited > 0.2 * eager.seconds]
    assert len(bound) > RUNS / 5
    ratios = [paced.seconds / eager.seconds for eager, paced in bound]
    assert fmean(ratios) <= 1.002
    assert sorted(ratios)[-2] <= 1.01
    assert max(ratios) <= 1.06, "a group took longer than any before it"


class Filtered(Load):
    """Half of the groups have no learning signal, and others take their places."""

    def is_filtered(self, ordinal: int) -> bool:
        return random.Random(7 * ordinal + self.seed).random() < 0.5


def test_groups_that_are_filtered_cost_no_time_either():
    drawn = [workload(seed) for seed in range(16)]
    loads = [Filtered(**{name: getattr(load, name) for name in load.__dataclass_fields__}) for load in drawn]
    ratios = [simulate(load, just_in_time(load)).seconds / simulate(load, Pacing()).seconds for load in loads]
    assert fmean(ratios) <= 1.005
    assert max(ratios) <= 1.04


@given(st.integers(0, 2**32), st.floats(0, 20))
def test_more_is_wanted_when_it_was_announced(seed, after):
    """Also of a step that waits: other groups may be ready before a straggler is."""
    draw, pacing, now = random.Random(seed), JustInTime(4, 4), 0.0
    for step in range(draw.randint(2, 6)):
        for ordinal in range(4 * step, 4 * step + 4):
            pacing.begun(ordinal, now)
            pacing.ready(ordinal, now + draw.uniform(0.1, 3))
        now += 3
        pacing.asked(now)
        now += draw.choice([0, 0, draw.uniform(0, 2)])
        pacing.leased(range(4 * step, 4 * step + 4), now)
        now += draw.uniform(0.1, 4)
    if draw.random() < 0.5:
        pacing.asked(now)
    now += after
    wanted, at = pacing.wanted(now), pacing.next_change(now)
    if at is None:
        assert pacing.wanted(now + 1e4) == wanted
    else:
        assert at > now - 1e-6
        assert pacing.wanted(now + 0.99 * (at - now)) == wanted or at - now < 1e-3
        assert pacing.wanted(at) > wanted or at - now < 1e-3


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_steady_times_settle_at_the_least_lag_without_a_wait(share):
    load = Load(16, 4, lambda rng: share, 64, lambda rng, step: 1.0, steps=60)
    pacing = Watched(load)
    paced = simulate(load, pacing)
    assert fmean(paced.lags[30:]) <= 1.2
    assert paced.waited <= 0.01 * paced.seconds
    assert max(pacing.found[len(pacing.found) // 2 :]) <= 2 * 16, "it does not swing"


async def test_the_queue_admits_when_it_is_time_and_a_waiting_step_at_once(tmp_path):
    now = 100.0
    queue = MessageQueue(queue_spec(tmp_path, max_lag=4, pacing="just_in_time"), clock=lambda: now)
    for step in range(16):
        lease = await begun(queue.lease(step, 50))
        tickets = (await queue.admit(100, 0)).tickets
        now += 1.0  # of generation
        await put(queue, *tickets)
        assert isinstance(await lease, LeaseManifest)
        now += 10.0  # of training
        await queue.commit(step)
        await queue.published(step + 1)
    while (await queue.counts()).ready:
        step += 1
        assert isinstance(await queue.lease(step, 0), LeaseManifest)
        assert (await queue.admit(100, 0)).tickets == (), "ten seconds are left, and one is enough"
        now += 10.0
        await queue.commit(step)
        await queue.published(step + 1)
    lease = await begun(queue.lease(step + 1, 50))
    first = (await queue.admit(100, 0)).tickets
    assert len(first) == 2, "a step that waits gets its groups"
    await put(queue, *first)
    assert isinstance(await lease, LeaseManifest)
    waiting = asyncio.create_task(queue.admit(100, 1.0))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    now += 9.6
    await queue.counts()
    queue._notify()
    assert len((await waiting).tickets) == 2


def test_a_step_that_waits_needs_what_its_groups_had_and_no_more():
    """Not the lead that was meant for it: that may be what groups took when all began at once."""
    pacing = JustInTime(2, 2)
    for ordinal in range(6):
        pacing.begun(ordinal, 0.0)
    for step in range(3):
        pacing.asked(6.0 * step)
        for ordinal in (2 * step, 2 * step + 1):
            pacing.ready(ordinal, 9.0 + 6.0 * step)
        pacing.leased((2 * step, 2 * step + 1), 9.0 + 6.0 * step)
    assert pacing._lead_s > 10
    for ordinal in (6, 7):
        pacing.begun(ordinal, 23.0)
    pacing.asked(24.0)
    for ordinal in (6, 7):
        pacing.ready(ordinal, 24.5)
    pacing.leased((6, 7), 24.5)
    assert pacing._lead_s == pytest.approx(1.5, abs=0.1)


def test_what_groups_took_beside_the_first_ones_is_forgotten_too():
    """Six groups begin at once, six more while those are generated, and the others when nothing else is."""
    pacing, now = JustInTime(2, 2), 0.0
    for ordinal in range(6):
        pacing.begun(ordinal, 0.0)
    for step in range(12):
        ordinals = (2 * step, 2 * step + 1)
        if step >= 6:
            for ordinal in ordinals:
                pacing.begun(ordinal, now + 0.5)
        for ordinal in ordinals:
            pacing.ready(ordinal, now + 0.9)
        now += 1.0
        pacing.asked(now)
        pacing.leased(ordinals, now)
        for ordinal in range(6, 12) if step == 1 else ():
            pacing.begun(ordinal, now)
    assert pacing._lead_s == pytest.approx(0.4, abs=0.05)


async def test_the_choice_of_groups_is_no_wait_for_them(tmp_path):
    now = 0.0
    queue = MessageQueue(queue_spec(tmp_path, max_lag=4, pacing="just_in_time"), clock=lambda: now)
    choose = queue._ledger.lease

    def slowly(step, oldest):
        nonlocal now
        now += 2.0
        return choose(step, oldest)

    queue._ledger.lease = slowly
    for step in range(8):
        await put(queue, *(await queue.admit(100, 0)).tickets)
        lease = await begun(queue.lease(step, 50))
        if not lease.done():
            await put(queue, *(await queue.admit(100, 0)).tickets)
        assert isinstance(await asyncio.wait_for(lease, 30), LeaseManifest)
        now += 10.0
        await queue.commit(step)
        await queue.published(step + 1)
    assert queue._pacing._lead_s <= 3, "ten seconds are left, and a tenth of one is enough"


class Later(Pacing):
    """Wants nothing before `at`, by the clock of asyncio."""

    def __init__(self, at: float) -> None:
        self.at = at

    def wanted(self, now: float) -> float:
        return 0 if now < self.at else 10

    def next_change(self, now: float) -> float | None:
        return self.at if now < self.at else None


async def test_an_admission_that_waits_wakes_up_by_itself(tmp_path):
    queue, started = MessageQueue(queue_spec(tmp_path)), time.monotonic()
    queue._pacing = Later(started + 0.2)
    assert (await queue.admit(1, 30)).tickets
    assert time.monotonic() - started < 15, "nobody notified it; it would have waited for 30 seconds"


async def test_a_group_that_will_not_become_ready_is_forgotten(tmp_path):
    queue = MessageQueue(queue_spec(tmp_path, pacing="just_in_time"))
    tickets = (await queue.admit(2, 0)).tickets
    assert queue._pacing._groups.keys() == {ticket.ordinal for ticket in tickets}
    await queue.nack(tickets[0], "boom")
    assert queue._pacing._groups.keys() == {tickets[1].ordinal}


async def test_a_filtered_group_is_forgotten(tmp_path):
    queue = MessageQueue(queue_spec(tmp_path, pacing="just_in_time", dynamic_sampling=True))
    (ticket,) = (await queue.admit(1, 0)).tickets
    await put(queue, ticket, rewards=(1.0, 1.0))
    assert (await queue.counts()).filtered == 1
    assert queue._pacing._groups == {}


@given(st.lists(st.floats(-10, 10), max_size=40), st.floats(0, 20))
def test_the_lead_is_the_smallest_that_waits_no_longer_than_allowed(needs, allowed):
    lead = least_lead(needs, allowed)
    waits = sum(max(0.0, need - lead) for need in needs)
    assert waits <= allowed + 1e-9
    assert lead == 0 or waits == pytest.approx(allowed)


def test_noise_does_not_make_groups_begin_ever_earlier():
    load = Load(16, 4, lambda rng: 0.3 * rng.uniform(0.5, 1.5), 64, lambda rng, step: rng.uniform(0.9, 1.1), steps=200)
    paced = simulate(load, just_in_time(load))
    assert paced.mean_lag() <= 1.05
    assert paced.waited <= 0.01 * paced.seconds


class OneLong(Load):
    """Group 80 takes six times as long as the others."""

    def lengths(self, ordinal: int, count: int) -> Sequence[float]:
        return [TICKS * (3.0 if ordinal == 80 else 0.5)]


def test_a_long_group_costs_a_reserve_and_is_forgotten():
    """For as many steps as are remembered there is one group more than a step needs, not a step more."""
    load = OneLong(4, 4, lambda rng: 0.5, 64, lambda rng, step: 1.0, steps=80)
    lags = simulate(load, just_in_time(load)).lags
    assert max(lags[10:20]) <= 1.05
    assert max(lags[20:23]) <= 1.7, "it is trained itself"
    assert 1.2 <= min(lags[23:40]) <= max(lags[23:40]) <= 1.3
    assert max(lags[25 + HISTORY_STEPS :]) <= 1.05


@pytest.mark.parametrize("tail", [0.005, 0.02])
def test_a_few_long_groups_in_a_step_make_it_no_older(tail):
    """Lengths have long tails: of sixteen groups one or none takes twice as long, which is over a step's time."""

    def work(rng):
        return 0.7 * rng.uniform(0.6, 1.0) * (2 if rng.random() < tail else 1)

    loads = [Load(16, 2, work, 64, lambda rng, step: rng.uniform(0.8, 1.2), seed=seed) for seed in range(4)]
    found = [simulate(load, just_in_time(load)) for load in loads]
    assert fmean(outcome.mean_lag() for outcome in found) <= 1.2
    assert fmean(outcome.waited / outcome.seconds for outcome in found) <= 0.015
