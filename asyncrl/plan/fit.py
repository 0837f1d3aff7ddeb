"""The cost model of a finished run, from the files that every run writes. Pure.

Training, publishes and the loop are in the metrics and events. Generation is fitted to the spans. A request of T tokens
that shared its replica with c requests on average (itself included) took, publishes excluded,

    latency + T (a + d c) max(1, c / slots)

seconds; the three unknowns are the non-negative least-squares fit over all requests. Prefill counts as latency: spans
do not separate them. If the engine counts decode steps, S steps with N tokens took

    a S + d N

busy seconds per optimizer step, which determines a and d better than short responses do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import numpy as np

from asyncrl.config.recipe import Recipe
from asyncrl.errors import ConfigError, explain
from asyncrl.plan.costs import CostModel, GenerationCosts, LengthCosts, PublishCosts, TrainingCosts
from asyncrl.plan.forecast import WARM_UP_SHARE, Forecast, num_steps
from asyncrl.plan.simulation import SimulatedStep, Simulation, check_modelled, threads_of
from asyncrl.report.run_files import Line, RunFiles
from asyncrl.types.events import WeightsPublished
from asyncrl.types.metrics import Metric

NUM_QUANTILES = 21
FEWEST_STEPS = 4
FEWEST_REQUESTS = 20
BESIDE = (Metric.CPU_COORDINATOR, Metric.CPU_QUEUE, Metric.CPU_WORKERS)
"""CPU times of the processes, besides the rollouter, that work on every response."""
_ROUNDS = 8
"""Iterations of the adjustment to shared cores; each leaves a small part of the error."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request in `spans.jsonl`; times are seconds since the epoch."""

    replica_id: int
    start: float
    stop: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Traced:
    """The data in the spans of some groups.

    Attributes:
        lengths: tokens of each trajectory.
        rests_s: seconds of each trajectory without a request: its environment and reward.
    """

    requests: tuple[TracedRequest, ...]
    lengths: tuple[int, ...]
    rests_s: tuple[float, ...]

    @classmethod
    def of(cls, recorded: Iterable[Mapping[str, Any]]) -> Traced:
        """From the lines of spans.jsonl, without those of the warm-up."""
        lines = list(recorded)
        requests, lengths, rests = [], [], []
        for line in lines[int(WARM_UP_SHARE * len(lines)) :]:
            for spans in line["trajectories"]:
                own = [
                    TracedRequest(made["replica"], start, stop, made["tokens"])
                    for kind, start, stop, made in spans
                    if kind == "request"
                ]
                whole = [stop - start for kind, start, stop, _ in spans if kind == "trajectory"]
                if own and whole:
                    requests += own
                    lengths.append(sum(r.tokens for r in own))
                    rests.append(max(0.0, whole[0] - sum(r.stop - r.start for r in own)))
        return cls(tuple(requests), tuple(lengths), tuple(rests))


def late_steps(run: RunFiles) -> tuple[Line, Sequence[Line]]:
    """The last line of the warm-up and the lines after it. Raises ConfigError if there are too few."""
    if len(run.metrics) < FEWEST_STEPS:
        found = f"{len(run.metrics)} optimizer steps"
        do = f"name a run with {FEWEST_STEPS} or more, or give the costs with --costs FILE"
        raise ConfigError(explain(f"the costs of the run {run.directory}", found, do))
    first = max(1, int(WARM_UP_SHARE * len(run.metrics)))
    return run.metrics[first - 1], run.metrics[first:]


def measured(run: RunFiles) -> Forecast:
    """The run's own figures, in the terms of a prediction, without the time in which training waited for
    evaluations."""
    begun, late = late_steps(run)

    def mean(metric: Metric) -> float:
        return fmean(line.get(metric) or 0.0 for line in late)

    seconds = sum(wall_s * (1.0 - (line.get(Metric.TRAINER_EVALUATION) or 0.0)) for wall_s, line in _walls(begun, late))
    samples = int(run.settings["batch.groups_per_step"]) * int(run.settings["batch.group_size"])
    return Forecast(
        step_s=seconds / len(late),
        samples_per_s=samples * len(late) / seconds,
        trainer_idle=mean(Metric.IDLE_TRAINER),
        replica_idle=mean(Metric.IDLE_ROLLOUT),
        lag_mean=mean(Metric.LAG_MEAN),
        lag_max=int(max(line.get(Metric.LAG_MAX) or 0 for line in late)),
        publish_s=mean(Metric.PUBLISH_TIME),
        paused_s=mean(Metric.PUBLISH_PAUSE),
        masked=mean(Metric.MASKED_TOKENS),
    )


def costs_of_run(run: RunFiles, traced: Traced, recipe: Recipe, cores: float | None) -> CostModel:
    """The costs that reproduce the run's own times.

    Args:
        recipe: of the run.
        cores: shared by its trainer ranks and replicas; None: each had its own.

    Raises ConfigError if the run is too short, has published nothing, recorded too few requests, or is not modelled.
    """
    check_modelled(recipe)
    begun, late = late_steps(run)
    costs = CostModel(
        source=f"asyncrl-plan --from-run {run.directory}, {len(late)} steps",
        generation=_generation(run, traced, recipe, begun, late),
        training=_training(late, recipe, cores),
        publish=_publish(run, recipe),
        reward_s=fmean(traced.rests_s),
        loop_s=_loop_s(begun, late, recipe),
        filtered_share=late[-1].get(Metric.FILTERED_SHARE) or 0.0,
        cores=cores,
        rollouter_s=_cpu_s(late, Metric.CPU_ROLLOUTER) / recipe.batch.num_trajectories,
        beside_s=_cpu_s(late, *BESIDE) / recipe.batch.num_trajectories,
    )
    return costs if cores is None else uncontended(costs, late, recipe)


def _training(late: Sequence[Line], recipe: Recipe, cores: float | None) -> TrainingCosts:
    """A straight line through (tokens, seconds) of the steps; through the origin if their tokens hardly differ."""
    seconds = [line.get(Metric.TRAIN_TIME) or 0.0 for line in late]
    tokens = [(line.get(Metric.TRAIN_SPEED) or 0.0) * s for line, s in zip(late, seconds, strict=True)]
    step_s, token_s = _fit(np.column_stack([np.ones(len(tokens)), tokens]), np.asarray(seconds))
    if np.std(tokens) < 0.05 * np.mean(tokens):
        step_s, token_s = 0.0, sum(seconds) / max(1.0, sum(tokens))
    threads = threads_of(recipe, cores) or 1
    return TrainingCosts(step_s=step_s, token_s=token_s, num_ranks=recipe.trainer.num_ranks, num_threads=threads)


def _publish(run: RunFiles, recipe: Recipe) -> PublishCosts:
    """Medians over the publishes. The first, which compares digests, counts only if it is the only one."""
    found = run.of_kind(WeightsPublished.kind)
    if not found:
        do = "name a run that has published, or give the costs with --costs FILE"
        raise ConfigError(explain(f"the costs of a publish in {run.directory}", "events.jsonl has none", do))
    found = found[1:] or found
    transfer_s = max(1e-6, median(event["transfer_s"] for event in found))
    rests = [max(0.0, event["publish_s"] - event["transfer_s"]) for event in found]
    # If publishes wait for responses, the shortest is closest to the cost of the publish itself.
    waits = recipe.interrupt == "drain" and not recipe.empties_queue
    waves = -(-recipe.rollout.num_replicas // recipe.weights.rolling_replicas) if recipe.rolls_publish else 1
    paused = median(event["publish_s"] - event["pause_s"] for event in found) if waves == 1 and not waits else 0.0
    nbytes = float(found[-1]["bytes"])
    return PublishCosts(
        bytes=nbytes,
        bytes_per_s=max(1.0, nbytes / transfer_s * waves),
        fixed_s=(min(rests) if waits else median(rests)) / waves,
        running_s=max(0.0, paused),
    )


def _cpu_s(late: Sequence[Line], *metrics: Metric) -> float:
    """CPU seconds of an optimizer step, from counters that are updated only now and then: slope between two updates.
    The counter of a replaced process restarts."""
    seconds = 0.0
    for metric in metrics:
        told = [(i, value) for i, line in enumerate(late) if (value := line.get(metric)) is not None]
        gains = [(i, value - was) for (_, was), (i, value) in itertools.pairwise(told) if value > was]
        if len(gains) >= 2:
            seconds += sum(gained for _, gained in gains[1:]) / (gains[-1][0] - gains[0][0])
    return seconds


def _loop_s(begun: Line, late: Sequence[Line], recipe: Recipe) -> float:
    """Seconds of the loop per step. With publishes during training, they include the copy of the weights."""
    causes = [Metric.TRAINER_PLANNING, Metric.TRAINER_CHECKPOINT]
    causes += [Metric.TRAINER_PUBLISH] if recipe.overlaps_publish else []
    return fmean(wall_s * sum(line.get(cause) or 0.0 for cause in causes) for wall_s, line in _walls(begun, late))


def _walls(begun: Line, late: Sequence[Line]) -> Iterator[tuple[float, Line]]:
    """(wall seconds since the previous line, line)."""
    for before, line in itertools.pairwise([begun, *late]):
        yield max(0.0, (line.get(Metric.TIME) or 0.0) - (before.get(Metric.TIME) or 0.0)), line


def _generation(run: RunFiles, traced: Traced, recipe: Recipe, begun: Line, late: Sequence[Line]) -> GenerationCosts:
    requests = [r for r in traced.requests if r.tokens > 0 and r.stop > r.start]
    if len(requests) < FEWEST_REQUESTS:
        found = f"spans.jsonl has {len(requests)} requests, and {FEWEST_REQUESTS} are needed"
        do = "run it with observability.trace_every_groups=1, or give the costs with --costs FILE"
        raise ConfigError(explain(f"the costs of generation in {run.directory}", found, do))
    # Only every `trace_every_groups`-th group is traced: scale the traced neighbours up.
    every = max(1, int(run.settings.get("observability.trace_every_groups") or 1))
    shared = np.minimum(every * _neighbours(requests), recipe.batch.num_trajectories * (recipe.max_lag + 1))
    slots = recipe.rollout.settings.decodes_at_once
    tokens = np.asarray([r.tokens for r in requests], float) * np.maximum(1.0, shared / slots)
    seconds = _without_publishes(requests, run)
    decoding = np.minimum(shared, slots)
    latency_s, token_s, shared_s = _fit(np.column_stack([np.ones(len(tokens)), tokens, tokens * decoding]), seconds)
    if counted := _decode_step(begun, late, recipe):
        token_s, shared_s = counted
    # Express the fit as two points of the decode step: 1 request and the most that were seen.
    most = max(2, round(float(decoding.max())))
    packed = fmean((line.get(Metric.TRAIN_SPEED) or 0.0) * (line.get(Metric.TRAIN_TIME) or 0.0) for line in late)
    response = fmean(line.get(Metric.RESPONSE_TOKENS) or 0.0 for line in late)
    quantiles = np.quantile(traced.lengths, np.linspace(0, 1, NUM_QUANTILES))
    return GenerationCosts(
        decode_step_s=((1, max(1e-9, token_s + shared_s)), (most, max(1e-9, token_s + shared_s * most))),
        prompt_tokens=max(0.0, packed / recipe.batch.num_epochs / recipe.batch.num_trajectories - response),
        lengths=LengthCosts(quantiles=tuple(float(q) for q in quantiles)),
        latency_s=latency_s,
    )


def _decode_step(begun: Line, late: Sequence[Line], recipe: Recipe) -> tuple[float, ...] | None:
    """Seconds of a decode step and of each of its tokens; None if the engine does not count its steps."""
    rows = []
    for wall_s, line in _walls(begun, late):
        if batch := line.get(Metric.DECODE_BATCH):
            tokens = (line.get(Metric.ROLLOUT_SPEED) or 0.0) * wall_s
            rows.append((tokens / batch, tokens, _busy_share(line, recipe) * wall_s))
    if len(rows) < FEWEST_STEPS:
        return None
    steps, tokens, busy_s = np.asarray(rows).T
    return _fit(np.column_stack([steps, tokens]), busy_s)


def _busy_share(line: Line, recipe: Recipe) -> float:
    """Mean number of busy replicas during the step."""
    replicas = max(line.get(Metric.PUBLISH_REPLICAS) or 0, recipe.rollout.num_replicas)  # more may have joined
    return (1.0 - (line.get(Metric.IDLE_ROLLOUT) or 0.0)) * replicas


def _neighbours(requests: Sequence[TracedRequest]) -> np.ndarray:
    """[requests]: mean number in flight at the same replica during each request, itself included."""
    found = np.ones(len(requests))
    for replica_id in {r.replica_id for r in requests}:
        own = [i for i, r in enumerate(requests) if r.replica_id == replica_id]
        # The integral of the number in flight over time, evaluated at both ends of each request.
        starts = np.asarray([requests[i].start for i in own])
        stops = np.asarray([requests[i].stop for i in own])
        times = np.sort(np.concatenate([starts, stops]))
        flying = np.searchsorted(np.sort(starts), times, "right") - np.searchsorted(np.sort(stops), times, "right")
        spent = np.concatenate([[0.0], np.cumsum(flying[:-1] * np.diff(times))])
        found[own] = (np.interp(stops, times, spent) - np.interp(starts, times, spent)) / (stops - starts)
    return np.maximum(1.0, found)


def _without_publishes(requests: Sequence[TracedRequest], run: RunFiles) -> np.ndarray:
    """[requests]: seconds of each, without the time in which a publish paused it."""
    # `held`: paused seconds until each edge, a piecewise linear function of time.
    edges, held = [0.0], [0.0]
    for event in sorted(run.of_kind(WeightsPublished.kind), key=lambda event: event["time_s"]):
        stop = event["time_s"]
        start = max(edges[-1], stop - event["pause_s"])
        edges += [start, max(start, stop)]
        held += [held[-1], held[-1] + edges[-1] - start]
    edges.append(edges[-1] + 1e9)
    held.append(held[-1])

    def until(moments: list[float]) -> np.ndarray:
        return np.interp(moments, edges, held)

    starts, stops = [r.start for r in requests], [r.stop for r in requests]
    lasted = np.asarray(stops) - np.asarray(starts)
    return np.maximum(0.0, lasted - (until(stops) - until(starts)))


def _fit(columns: np.ndarray, values: np.ndarray) -> tuple[float, ...]:
    """Non-negative least squares.

    Args:
        columns: [rows, unknowns].
        values: [rows].
    """
    unknowns, best, least = columns.shape[1], np.zeros(columns.shape[1]), float(values @ values)
    # With few unknowns, trying every subset is exact: the best subset fit without a negative coefficient.
    for size in range(1, unknowns + 1):
        for chosen in itertools.combinations(range(unknowns), size):
            found = np.linalg.lstsq(columns[:, chosen], values, rcond=None)[0]
            error = values - columns[:, chosen] @ found
            if (found >= 0).all() and float(error @ error) < least * (1 - 1e-12):
                least, best = float(error @ error), np.zeros(unknowns)
                best[list(chosen)] = found
    return tuple(float(value) for value in best)


def uncontended(costs: CostModel, late: Sequence[Line], recipe: Recipe) -> CostModel:
    """The costs without the slowdown by shared cores. A simulation that includes the slowdown then reproduces the run's
    times of training and decoding.

    In mode sync it also reproduces the trainer's wait, which is the time of a batch. There the rollouter and the other
    processes work before and after the decoding, and count as no load during it.

    Args:
        late: lines of metrics.jsonl after the warm-up.
    """
    # Fixed-point iteration: simulate, compare with the run, rescale the costs.
    in_turn = recipe.max_lag == 0
    trained_s = fmean(line.get(Metric.TRAIN_TIME) or 0.0 for line in late)
    waited = fmean(line.get(Metric.IDLE_TRAINER) or 0.0 for line in late)
    speed = fmean(line.get(Metric.ROLLOUT_SPEED) or 0.0 for line in late)
    speed /= max(1e-9, fmean(_busy_share(line, recipe) for line in late))
    for _ in range(_ROUNDS):
        steps = _late_steps(recipe, replace(costs, rollouter_s=0.0, beside_s=0.0) if in_turn else costs)
        late_s = fmean(step.computed - step.leased for step in steps[1:])
        busy_s = steps[-1].busy_s - steps[0].busy_s
        simulated = sum(step.tokens + step.masked for step in steps[1:]) / max(1e-9, busy_s)
        costs = _scaled(costs, trained_s / late_s if late_s else 1.0, simulated / speed if speed else 1.0)
        if in_turn:
            steps = _late_steps(recipe, costs)
            waited_s = fmean(step.waited_s for step in steps[1:])
            rest_s = (steps[-1].ended - steps[0].ended) / (len(steps) - 1) - waited_s
            later_s = costs.generation.latency_s + rest_s * waited / max(1e-9, 1.0 - waited) - waited_s
            costs = replace(costs, generation=replace(costs.generation, latency_s=max(0.0, later_s)))
    return costs


def _late_steps(recipe: Recipe, costs: CostModel) -> list[SimulatedStep]:
    """The last step of the warm-up and the steps after it."""
    steps = Simulation(recipe, costs).run(num_steps(recipe))
    return steps[max(1, int(WARM_UP_SHARE * len(steps))) - 1 :]


def _scaled(costs: CostModel, training: float, decoding: float) -> CostModel:
    generation, trained = costs.generation, costs.training
    points = tuple((n, seconds * decoding) for n, seconds in generation.decode_step_s)
    return replace(
        costs,
        generation=replace(generation, decode_step_s=points),
        training=replace(trained, step_s=trained.step_s * training, token_s=trained.token_s * training),
    )
