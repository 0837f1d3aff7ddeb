"""The standard charts of a run, drawn by the HTML report, the W&B run and the W&B workspace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.types.guard import LAG_BUCKETS
from asyncrl.types.metrics import Metric

ChartKind = Literal["lines", "stack"]


@dataclass(frozen=True, slots=True)
class Chart:
    """Metrics over the optimizer steps, as lines or stacked areas."""

    title: str
    kind: ChartKind
    keys: tuple[str, ...]


def _by_lag(title: str, kind: ChartKind, family: Metric) -> Chart:
    return Chart(title, kind, tuple(family.of(bucket) for bucket in LAG_BUCKETS))


def _all_of(group: str) -> tuple[Metric, ...]:
    return tuple(metric for metric in Metric if metric.group == group and not metric.is_family)


SECTIONS = {
    "Learning": (
        Chart("Reward and accuracy", "lines", (Metric.REWARD_MEAN, Metric.EVAL_ACCURACY)),
        Chart("Loss", "lines", (Metric.LOSS,)),
        Chart("Gradient norm", "lines", (Metric.GRAD_NORM,)),
        Chart("Divergence and entropy", "lines", (Metric.KL_BEHAVIOR, Metric.KL_REFERENCE, Metric.ENTROPY)),
        Chart("Length of the responses", "lines", (Metric.RESPONSE_TOKENS,)),
    ),
    "Staleness": (
        Chart(
            "Lag of the trained tokens",
            "lines",
            (Metric.LAG_MEAN, Metric.LAG_IN_FLIGHT, Metric.LAG_IN_QUEUE, Metric.LAG_MAX),
        ),
        _by_lag("Trained tokens by lag", "stack", Metric.LAG_TOKENS),
        _by_lag("Trained groups by the lag of their oldest token", "stack", Metric.LAG_GROUPS),
        _by_lag("Trained tokens by the lag gained in flight", "stack", Metric.LAG_GAINED_IN_FLIGHT),
        _by_lag("Trained tokens by the lag gained in the queue", "stack", Metric.LAG_GAINED_IN_QUEUE),
        Chart("Slots in use", "lines", (Metric.SLOTS, Metric.MASKED_TOKENS)),
        Chart("Interrupted and truncated", "lines", (Metric.INTERRUPTED, Metric.TRUNCATED, Metric.STALE_CACHE)),
        Chart("Segments and versions of a trajectory", "lines", (Metric.SEGMENTS, Metric.VERSION_SPAN)),
    ),
    "Off-policy": (
        Chart("Importance ratio", "lines", (Metric.RATIO_MEAN, Metric.EFFECTIVE_SAMPLES, Metric.RATIO_TAILS)),
        Chart("Off-policy guard", "lines", (Metric.GUARD_LIMIT, Metric.GUARD_STATE, Metric.GUARD_SEVERITY)),
        Chart("Clipped tokens", "stack", (Metric.CLIPPED_POSITIVE, Metric.CLIPPED_NEGATIVE)),
        _by_lag("Importance ratio by lag", "lines", Metric.LAG_RATIO),
        _by_lag("Effective sample size by lag", "lines", Metric.LAG_EFFECTIVE),
        _by_lag("Tails of the ratio by lag", "lines", Metric.LAG_TAILS),
        _by_lag("Clipped at the upper bound by lag", "lines", Metric.LAG_CLIPPED_POSITIVE),
        _by_lag("Clipped at the lower bound by lag", "lines", Metric.LAG_CLIPPED_NEGATIVE),
        _by_lag("Divergence from the behaviour policy by lag", "lines", Metric.LAG_KL),
        _by_lag("Reward by lag", "lines", Metric.LAG_REWARD),
    ),
    "Time": (
        Chart("Where the trainer's time goes", "stack", _all_of("trainer_time")),
        Chart("Where the replicas' time goes", "stack", _all_of("replica_time")),
        Chart("Replicas that could be given back", "lines", (Metric.SPARE_REPLICAS,)),
        Chart("Tokens per second", "lines", (Metric.ROLLOUT_SPEED, Metric.TRAIN_SPEED)),
    ),
    "Queue and publish": (
        Chart("Groups in the queue", "stack", (Metric.QUEUE_RUNNING, Metric.QUEUE_READY, Metric.QUEUE_LEASED)),
        Chart("Publish", "stack", (Metric.PUBLISH_TRANSFER, Metric.PUBLISH_REST)),
        Chart("Replicas that took the publish", "lines", (Metric.PUBLISH_REPLICAS,)),
    ),
}
"""Title of a section -> its charts."""

CHARTS = tuple(chart for charts in SECTIONS.values() for chart in charts)
