"""Assembles the metrics record of one optimizer step from what each part reports."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np

from asyncrl.remote.waits import WaitTotals
from asyncrl.types import EndShares, LeaseManifest, LedgerCounts, PublishReport, ReplicaStats, TrainMetrics


class StepClock:
    """Wall time of a run and of its current step.

    Args:
        elapsed_s: seconds of earlier processes of the run.
    """

    def __init__(self, elapsed_s: float = 0.0) -> None:
        self._began = time.monotonic() - elapsed_s
        self._marked_at = self._lapped_at = time.monotonic()
        self.publish_tokens = 0
        """Tokens that the replicas sampled during publishes since the last mark."""
        self._counted: dict[tuple[int, int], tuple[float, int]] = {}
        """Busy seconds and tokens of each replica process at the last mark."""

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

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
        busy_s, tokens = 0.0, 0
        for s in stats:
            busy_before_s, tokens_before = self._counted.get((s.replica_id, s.pid), (0.0, 0))
            busy_s += s.health.busy_s - busy_before_s
            tokens += s.health.generated_tokens - tokens_before
        self._counted = {(s.replica_id, s.pid): (s.health.busy_s, s.health.generated_tokens) for s in stats}
        wall_s, self._marked_at = now - self._marked_at, now
        return wall_s, busy_s, tokens


def tokens_between(before: Sequence[ReplicaStats], after: Sequence[ReplicaStats]) -> int:
    """Tokens that the replicas in both lists sampled between them."""
    counted = {(s.replica_id, s.pid): s.health.generated_tokens for s in before}
    return sum(s.health.generated_tokens - counted.get((s.replica_id, s.pid), s.health.generated_tokens) for s in after)


class StepRecord:
    """Collects the metrics of one step; `values` is the record when every `of_*` was called."""

    def __init__(self, step: int) -> None:
        self.values: dict[str, float] = {"step": step}

    def add(self, name: str, value: float) -> None:
        self.values[name] = value

    def of_batch(self, manifest: LeaseManifest) -> None:
        groups = manifest.groups
        rewards = np.concatenate([np.asarray(g.rewards, np.float64) for g in groups])
        trajectories = len(rewards)
        masked = sum(g.masked_tokens for g in groups)
        tokens = max(1, sum(g.trained_tokens for g in groups))
        lag_mean = sum(g.lag_sum for g in groups) / tokens
        in_flight_mean = sum(g.lag_in_flight_sum for g in groups) / tokens
        self.values |= {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "reward/zero_signal_fraction": float(np.mean([min(g.rewards) == max(g.rewards) for g in groups])),
            "staleness/lag_max": max(g.lag_max for g in groups),
            "staleness/lag_mean": lag_mean,
            "staleness/lag_in_flight_mean": in_flight_mean,
            "staleness/lag_in_queue_mean": lag_mean - in_flight_mean,
            "staleness/overdue_wait_s": manifest.overdue_wait_s,
            "staleness/masked_tokens_fraction": masked / (masked + tokens),
            "rollout/segments_mean": sum(g.segments for g in groups) / trajectories,
            "rollout/interrupted_fraction": sum(g.interrupted for g in groups) / trajectories,
            "rollout/truncated_fraction": sum(g.truncated for g in groups) / trajectories,
            "rollout/response_tokens_mean": float(np.mean([n.response for g in groups for n in g.lengths])),
        }

        names = sorted({name for g in groups for name, _ in g.reward_parts})
        for name in names:
            means = [dict(g.reward_parts)[name] for g in groups if name in dict(g.reward_parts)]
            self.values[f"reward/part/{name}"] = float(np.mean(means))

    def of_training(self, metrics: TrainMetrics, step_s: float) -> None:
        self.values |= {
            "train/loss": metrics.loss,
            "train/grad_norm": metrics.grad_norm,
            "train/lr": metrics.lr,
            "train/tokens_per_s": metrics.packed_tokens / step_s,
            "train/step_s": step_s,
            "train/trained_tokens": metrics.trained_tokens,
            "train/ratio_max": metrics.ratio_max,
            "train/skipped_updates": metrics.skipped_updates,
            **dict(metrics.means),
        }

    def of_publish(self, report: PublishReport | None) -> None:
        self.values |= {
            "weights/publish_s": report.publish_s if report else 0.0,
            "weights/pause_s": report.pause_s if report else 0.0,
            "weights/transfer_s": report.transfer_s if report else 0.0,
            "weights/bytes": report.nbytes if report else 0,
            "weights/attempts": report.attempts if report else 0,
            "weights/replicas": report.replicas if report else 0,
        }

    def of_queue(self, counts: LedgerCounts, shares: EndShares) -> None:
        self.values |= {f"queue/{name}": count for name, count in asdict(counts).items()}
        self.values |= {"queue/filtered_fraction": shares.filtered, "queue/failed_fraction": shares.failed}

    def of_time(self, clock: StepClock, stats: Sequence[ReplicaStats], waited_s: float) -> None:
        """`waited_s`: how long the trainer waited for groups in this step."""
        wall_s, busy_s, tokens = clock.mark(stats)
        self.values |= {
            "time_s": clock.elapsed_s,
            "rollout/tokens_per_s": tokens / wall_s,
            "weights/publish_tokens_fraction": clock.publish_tokens / max(1, tokens),
            "idle/trainer_fraction": min(1.0, waited_s / wall_s),
            "idle/rollout_fraction": max(0.0, 1.0 - busy_s / (wall_s * max(1, len(stats)))),
        }
        clock.publish_tokens = 0

    def of_waits(self, totals: WaitTotals) -> None:
        self.values |= {"waits/longest_s": totals.longest_s, "waits/deadline_used": totals.deadline_used}

    def of_processes(self, stats: Sequence[ReplicaStats], health: Mapping[str, float]) -> None:
        """`health`: what the last health check found, by the names of the metrics."""
        own = os.times()
        self.values |= {
            "cpu/coordinator_s": own.user + own.system,
            "cpu/replicas_s": sum(s.cpu_s for s in stats),
            **health,
        }
