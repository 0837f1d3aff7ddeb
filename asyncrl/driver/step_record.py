"""Assembles the metrics record of one optimizer step from the reports of all parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import numpy as np

from asyncrl.remote.waits import WaitTotals
from asyncrl.types import (
    EndShares,
    GroupSummary,
    LeaseManifest,
    LedgerCounts,
    PublishReport,
    ReplicaStats,
    RolloutStats,
    RunServerReport,
    TrainMetrics,
)
from asyncrl.types.guard import LAG_BUCKETS, lag_bucket, lag_buckets_to
from asyncrl.types.metrics import QUEUE_METRICS, REPLICA_TIME, Metric

TRAINER_TIME = tuple(metric for metric in Metric if metric.group == "trainer_time")


class ReplicaShares:
    """Turns the rollouter's counts since its start into shares of the time since the last look."""

    def __init__(self, num_replicas: Callable[[], int]) -> None:
        """`num_replicas`: returns the present number of replicas."""
        self._num_replicas = num_replicas
        self._before: tuple[int, Mapping[str, float]] = (0, {})
        self._paused_s = 0.0

    def paused(self, seconds: float) -> None:
        """A publish paused the replicas for this long. The rollouter only sees that they have requests."""
        self._paused_s += seconds * self._num_replicas()

    def since_last(self, stats: RolloutStats) -> dict[str, float]:
        """The metrics `replica_time/` and `SPARE_REPLICAS`; empty if no time has passed."""
        pid, before = self._before
        if pid != stats.pid or any(s < before.get(c, 0.0) for c, s in stats.replica_s.items()):
            before = {}  # a new rollouter, or one that has just begun to run, counts from 0
        spent = {c: s - before.get(c, 0.0) for c, s in stats.replica_s.items()}
        self._before, paused_s, self._paused_s = (stats.pid, stats.replica_s), self._paused_s, 0.0
        if (total := sum(spent.values())) <= 0:
            return {}
        # The rollouter counts a pause as generating: book it as gate_closed.
        gate_s = min(paused_s, spent["generating"])
        spent["generating"] -= gate_s
        spent["gate_closed"] += gate_s
        shares: dict[str, float] = {REPLICA_TIME[cause]: seconds / total for cause, seconds in spent.items()}
        return shares | {Metric.SPARE_REPLICAS: shares.get(Metric.REPLICA_SLOTS, 0.0) * self._num_replicas()}


class StepClock:
    """Wall time of a run and of its current step.

    Args:
        elapsed_s: seconds of earlier processes of the run.
    """

    def __init__(self, elapsed_s: float = 0.0) -> None:
        self._began = time.monotonic() - elapsed_s
        self._marked_at = self._lapped_at = time.monotonic()
        self.time = TimeAccount(Metric.TRAINER_PLANNING)
        """Time of the training loop by cause; the causes are metric names."""
        self.publish_tokens = 0
        """Tokens that the replicas sampled during publishes since the last mark."""
        self.tokens = self.external_tokens = 0
        """Tokens that the replicas sampled in the last interval, and the part for clients outside the run."""
        self.preemptions: int | None = None
        """Preemptions of the engines in the last interval; None if they do not report them."""
        self.decode_steps = 0
        """Decode steps of the engines in the last interval; 0 also if they do not report them."""
        self._counted: dict[tuple[int, int], tuple[float, int, int, int, int]] = {}
        """Busy seconds, tokens, external tokens, preemptions and decode steps of each replica process at the last
        mark."""

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def resume(self, elapsed_s: float) -> None:
        """Goes on from the seconds of a checkpoint, unless more have elapsed already."""
        self._began = min(self._began, time.monotonic() - elapsed_s)

    def start(self) -> None:
        self._lapped_at = time.monotonic()

    def lap(self) -> float:
        """Seconds since `start` or the last lap."""
        now = time.monotonic()
        lapped, self._lapped_at = now - self._lapped_at, now
        return lapped

    def mark(self, stats: Sequence[ReplicaStats]) -> tuple[float, float, int]:
        """Ends an interval: wall seconds, busy seconds of all replicas and tokens they sampled since the last mark."""
        now = time.monotonic()
        totals = {}
        for s in stats:
            health, preemptions = s.health, s.health.preemptions or 0
            counts = health.generated_tokens, s.external_tokens, preemptions, health.decode_steps or 0
            totals[s.replica_id, s.pid] = (health.busy_s, *counts)
        # A replica process seen for the first time counts from 0.
        gained = [np.subtract(total, self._counted.get(key, 0)) for key, total in totals.items()]
        busy_s, *counts = sum(gained, np.zeros(5)).tolist()
        tokens, self.external_tokens, preemptions, self.decode_steps = map(int, counts)
        self.tokens, self._counted = tokens, totals
        self.preemptions = preemptions if any(s.health.preemptions is not None for s in stats) else None
        wall_s, self._marked_at = now - self._marked_at, now
        return wall_s, busy_s, tokens


def tokens_between(before: Sequence[ReplicaStats], after: Sequence[ReplicaStats]) -> int:
    """Tokens sampled between the two lists, by replica processes in both."""
    counted = {(s.replica_id, s.pid): s.health.generated_tokens for s in before}
    return sum(s.health.generated_tokens - counted.get((s.replica_id, s.pid), s.health.generated_tokens) for s in after)


class StepRecord:
    """Collects the metrics of one step; `values` is complete once every `of_*` was called."""

    def __init__(self, step: int, *, max_lag: int = 0, keeps_cache: bool = False) -> None:
        """`keeps_cache`: the KV caches of running requests outlive a publish."""
        self.values: dict[str, float] = {Metric.STEP: step}
        self._buckets, self._keeps_cache = lag_buckets_to(max_lag), keeps_cache

    def of_batch(self, manifest: LeaseManifest) -> None:
        groups = manifest.groups
        rewards = np.concatenate([np.asarray(g.rewards, np.float64) for g in groups])
        trajectories = len(rewards)
        masked = sum(g.masked_tokens for g in groups)
        tokens = max(1, sum(g.trained_tokens for g in groups))
        lag_mean = sum(g.lag_sum for g in groups) / tokens
        in_flight_mean = sum(g.lag_in_flight_sum for g in groups) / tokens
        continued = sum(g.continued_tokens for g in groups) if self._keeps_cache else 0
        self._of_lags(groups)
        self.values |= {
            Metric.REWARD_MEAN: float(rewards.mean()),
            Metric.REWARD_STD: float(rewards.std()),
            Metric.REWARD_ZERO_SIGNAL: float(np.mean([min(g.rewards) == max(g.rewards) for g in groups])),
            Metric.LAG_MAX: max(g.lag_max for g in groups),
            Metric.LAG_MEAN: lag_mean,
            Metric.LAG_IN_FLIGHT: in_flight_mean,
            Metric.LAG_IN_QUEUE: lag_mean - in_flight_mean,
            Metric.OVERDUE_WAIT: manifest.overdue_wait_s,
            Metric.MASKED_TOKENS: masked / (masked + tokens),
            Metric.SEGMENTS: sum(g.segments for g in groups) / trajectories,
            Metric.INTERRUPTED: sum(g.interrupted for g in groups) / trajectories,
            Metric.VERSION_SPAN: sum(g.version_span for g in groups) / trajectories,
            Metric.STALE_CACHE: continued / tokens,
            Metric.TRUNCATED: sum(g.truncated for g in groups) / trajectories,
            Metric.RESPONSE_TOKENS: sum(n.response for g in groups for n in g.lengths) / trajectories,
        }

        names = sorted({name for g in groups for name, _ in g.reward_parts})
        for name in names:
            means = [dict(g.reward_parts)[name] for g in groups if name in dict(g.reward_parts)]
            self.values[Metric.REWARD_PART.of(name)] = float(np.mean(means))

    def _of_lags(self, groups: Sequence[GroupSummary]) -> None:
        """The metrics `lag/` of the lease. The trainer adds the ones computed in the loss."""
        for family, parts in (
            (Metric.LAG_TOKENS, [(part.lag, part.tokens) for g in groups for part in g.lags]),
            (Metric.LAG_GAINED_IN_FLIGHT, [(part.in_flight, part.tokens) for g in groups for part in g.lags]),
            (Metric.LAG_GAINED_IN_QUEUE, [(p.lag - p.in_flight, p.tokens) for g in groups for p in g.lags]),
            (Metric.LAG_GROUPS, [(g.lag_max, 1) for g in groups if g.lags]),
        ):
            counts = dict.fromkeys(self._buckets, 0)
            for lag, count in parts:
                counts[LAG_BUCKETS[lag_bucket(lag)]] += count
            total = max(1, sum(counts.values()))
            self.values |= {family.of(bucket): count / total for bucket, count in counts.items()}
        # Mean reward by the largest lag of each trajectory's tokens.
        rewards: dict[str, list[float]] = {}
        for g in groups:
            oldest: dict[int, int] = {}
            for part in g.lags:
                oldest[part.trajectory] = max(part.lag, oldest.get(part.trajectory, 0))
            for trajectory, lag in oldest.items():
                rewards.setdefault(LAG_BUCKETS[lag_bucket(lag)], []).append(g.rewards[trajectory])
        self.values |= {Metric.LAG_REWARD.of(bucket): float(np.mean(found)) for bucket, found in rewards.items()}

    def of_training(self, metrics: TrainMetrics, step_s: float) -> None:
        self.values |= {
            Metric.LOSS: metrics.loss,
            Metric.GRAD_NORM: metrics.grad_norm,
            Metric.LEARNING_RATE: metrics.lr,
            Metric.TRAIN_SPEED: metrics.packed_tokens / step_s,
            Metric.TRAIN_TIME: step_s,
            Metric.TRAINED_TOKENS: metrics.trained_tokens,
            Metric.RATIO_MAX: metrics.ratio_max,
            Metric.SKIPPED_UPDATES: metrics.skipped_updates,
            **dict(metrics.means),
        }

    def of_publish(self, *reports: PublishReport) -> None:
        """`reports`: publishes that ended in this step; times, bytes and transfers are summed."""
        sent = sum(report.sent_bytes for report in reports)
        self.values |= {
            Metric.PUBLISH_TIME: sum(report.publish_s for report in reports),
            Metric.PUBLISH_PAUSE: sum(report.pause_s for report in reports),
            Metric.PUBLISH_TRANSFER: sum(report.transfer_s for report in reports),
            Metric.PUBLISH_REST: sum(max(0.0, report.publish_s - report.transfer_s) for report in reports),
            Metric.PUBLISH_BYTES: sent,
            Metric.PUBLISH_SHARE: sent / max(1, sum(report.nbytes for report in reports)),
            Metric.PUBLISH_ATTEMPTS: sum(report.attempts for report in reports),
            Metric.PUBLISH_REPLICAS: reports[-1].replicas if reports else 0,
        }

    def of_queue(self, counts: LedgerCounts, shares: EndShares, slots: int) -> None:
        """`slots`: groups that the limit on the lag admits."""
        self.values[Metric.SLOTS] = counts.active / max(1, slots)
        self.values |= {QUEUE_METRICS[name]: count for name, count in asdict(counts).items()}
        self.values |= {Metric.FILTERED_SHARE: shares.filtered, Metric.FAILED_SHARE: shares.failed}

    def of_time(self, clock: StepClock, stats: Sequence[ReplicaStats], waited_s: float) -> None:
        """`waited_s`: seconds that the trainer waited for groups in this step."""
        wall_s, busy_s, tokens = clock.mark(stats)
        self.values |= {
            Metric.TIME: clock.elapsed_s,
            Metric.ROLLOUT_SPEED: tokens / wall_s,
            Metric.PUBLISH_TOKENS: clock.publish_tokens / max(1, tokens),
            Metric.IDLE_TRAINER: min(1.0, waited_s / wall_s),
            Metric.IDLE_ROLLOUT: max(0.0, 1.0 - busy_s / (wall_s * max(1, len(stats)))),
        }
        if clock.decode_steps:
            self.values[Metric.DECODE_BATCH] = tokens / clock.decode_steps
        if clock.preemptions is not None:
            self.values[Metric.PREEMPTIONS] = clock.preemptions
        spent = clock.time.take()
        total = sum(spent.values()) or 1.0
        self.values |= {cause: spent.get(cause, 0.0) / total for cause in TRAINER_TIME}
        clock.publish_tokens = 0

    def of_server(self, report: RunServerReport | None, clock: StepClock) -> None:
        """Call after `of_time`. `report` None: the run has no server."""
        if report is not None:
            self.values |= {
                Metric.SERVE_UP: float(report.up),
                Metric.SERVE_RUNNING: report.running,
                Metric.SERVE_WAITING: report.waiting,
                Metric.SERVE_REFUSED: report.refused,
                Metric.SERVE_RESTARTS: report.restarts,
                Metric.SERVE_TOKENS: clock.external_tokens,
                Metric.SERVE_SHARE: min(1.0, clock.external_tokens / max(1, clock.tokens)),
            }

    def of_waits(self, totals: WaitTotals) -> None:
        self.values |= {Metric.WAITS_LONGEST: totals.longest_s, Metric.WAITS_DEADLINE: totals.deadline_used}

    def of_processes(self, stats: Sequence[ReplicaStats], health: Mapping[str, float]) -> None:
        """`health`: metrics of the last health check."""
        self.values |= {
            Metric.CPU_COORDINATOR: time.process_time(),
            Metric.CPU_REPLICAS: sum(s.cpu_s for s in stats),
            **health,
        }


# Wall time by cause: every second belongs to exactly one. Pure except for the clock.


class TimeAccount:
    """Books the time of one loop. Owns the present cause and the seconds of each cause since the last `take`."""

    def __init__(self, otherwise: str, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            otherwise: cause of time outside of `during`.
        """
        self._cause, self._clock = otherwise, clock
        self._since = clock()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def during(self, cause: str) -> Iterator[None]:
        """Books the block to `cause`, except for nested blocks."""
        self._settle()
        before, self._cause = self._cause, cause
        try:
            yield
        finally:
            self._settle()
            self._cause = before

    def move(self, seconds: float, source: str, target: str) -> None:
        """Rebooks seconds from `source` to `target`, at most as many as `source` has."""
        self._settle()
        moved = min(seconds, self._seconds.get(source, 0.0))
        self._seconds[source] = self._seconds.get(source, 0.0) - moved
        self._seconds[target] = self._seconds.get(target, 0.0) + moved

    def take(self) -> dict[str, float]:
        """Seconds of each cause since the last call; they add up to the elapsed time."""
        self._settle()
        taken, self._seconds = self._seconds, {}
        return taken

    def _settle(self) -> None:
        now = self._clock()
        self._seconds[self._cause] = self._seconds.get(self._cause, 0.0) + now - self._since
        self._since = now
