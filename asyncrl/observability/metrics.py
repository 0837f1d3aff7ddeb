"""The metrics of one optimizer step, declared once with unit and meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

DECLARED: dict[str, str] = {
    "step": "global_steps after the step",
    "time_s": "seconds since the run began, over all restarts, time between them left out",
    "reward/mean": "mean reward of the trained trajectories",
    "reward/std": "standard deviation of the rewards of the trained trajectories",
    "reward/zero_signal_fraction": "share of trained groups whose rewards are all equal",
    "eval/accuracy": "share of correct held-out responses by eval/version; on the steps at whose end it was known",
    "eval/initial_accuracy": "the same before the first optimizer step; on the line of step 1",
    "eval/version": "policy version that the evaluation on this line asked: with leased replicas one of earlier steps",
    "eval/failed": "1 where an evaluation (step 1: or the one before it) was given up: a set was not answered in time",
    "eval/response_tokens_mean": "mean length of the held-out responses, tokens",
    "eval/time_s": "seconds that the evaluation took",
    "staleness/lag_max": "largest lag of a token trained in this step, optimizer steps",
    "staleness/lag_mean": "mean lag over the tokens trained in this step, optimizer steps",
    "staleness/lag_in_flight_mean": "the part of lag_mean that arose while the group was being generated",
    "staleness/lag_in_queue_mean": "the part of lag_mean that arose while the group was ready",
    "staleness/overdue_wait_s": "seconds that the step waited only for groups that it had to train",
    "staleness/masked_tokens_fraction": "share of the step's tokens that were masked for being over the limit",
    "rollout/tokens_per_s": "tokens sampled by all replicas per second of wall time",
    "rollout/segments_mean": "mean number of segments of a trained trajectory",
    "rollout/interrupted_fraction": "share of trained trajectories with tokens of more than one version",
    "rollout/truncated_fraction": "share of trained trajectories that were cut off at their token limit",
    "rollout/response_tokens_mean": "mean length of the trained responses, tokens",
    "rollout/reprefilled_tokens": "tokens sent again after interruptions since the rollouter started, as of the last "
    "health check",
    "queue/admitted": "groups admitted since the run began",
    "queue/running": "groups being generated",
    "queue/ready": "groups that wait to be trained",
    "queue/leased": "groups leased to a step",
    "queue/trained": "groups trained since the run began",
    "queue/filtered": "groups without learning signal since the run began",
    "queue/expired": "groups given up for being overdue since the run began",
    "queue/failed": "groups that spent their retry budget since the run began",
    "queue/filtered_fraction": "share of the last algorithm.filtered_window ended groups that were filtered",
    "queue/failed_fraction": "share of the last rollout.failed_window ended groups that failed",
    "weights/publish_s": "seconds of the whole publish after this step; 0 when none followed",
    "weights/pause_s": "seconds from pause to commit, of each transfer times the share of the fleet that it held up",
    "weights/transfer_s": "seconds of its transfer",
    "weights/bytes": "bytes sent to each replica",
    "weights/attempts": "times that the weights were sent",
    "weights/replicas": "replicas that took this publish",
    "weights/publish_tokens_fraction": "share of the step's sampled tokens that were sampled during its publishes",
    "train/loss": "loss over the global batch",
    "train/grad_norm": "global gradient norm before clipping",
    "train/lr": "learning rate",
    "train/tokens_per_s": "tokens packed (prompts too) per second of the optimizer step",
    "train/step_s": "seconds of the optimizer step",
    "train/trained_tokens": "tokens in the loss",
    "train/clip_fraction": "share of trained tokens whose ratio was clipped",
    "train/clip_fraction_positive": "the part of it with positive advantage: at the upper bound",
    "train/clip_fraction_negative": "the part of it with negative advantage: at the lower bound, or over dual_clip",
    "train/ratio_mean": "mean ratio of policy to behaviour probability over the trained tokens",
    "train/ratio_max": "largest such ratio",
    "train/skipped_updates": "updates of the step without a trained token on any rank, which moved nothing",
    "train/kl_behavior": "mean of behaviour minus policy log-probability (k1)",
    "train/entropy": "mean entropy of the policy at the trained tokens, nats",
    "train/kl_reference": "mean divergence of the policy from the reference model (k3), nats per trained token",
    "train/router_balance": "load-balancing loss of a mixture's routers; experts per token where the load is even",
    "train/advantage_mean": "mean of the token advantages before whitening, with advantage gae or reinforce_plus_plus",
    "critic/loss": "loss of the critic over the update",
    "critic/grad_norm": "gradient norm of the critic before clipping",
    "critic/value_mean": "mean value over the trained tokens, before the update",
    "critic/explained_variance": "share of the variance of the returns that the values explain",
    "critic/clip_fraction": "share of trained tokens whose value was clipped",
    "waits/longest_s": "longest wait of the driver on another process that ended in this step, seconds",
    "waits/deadline_used": "largest share of its deadline that such a wait used; 1: it was missed",
    "idle/trainer_fraction": "share of the step's wall time in which the trainer waited for groups",
    "idle/rollout_fraction": "share of the step's wall time in which replicas decoded nothing, mean over replicas",
    "sinks/failed_records": "records that observability.sinks have not taken since the run began or resumed",
    "cpu/coordinator_s": "CPU seconds of the driver since it started",
    "cpu/queue_s": "CPU seconds of the message queue since it started, as of the last health check",
    "cpu/rollouter_s": "the same of the rollouter",
    "cpu/replicas_s": "CPU seconds of all replicas since they started",
    "cpu/trainers_s": "the same of all trainer ranks",
}
"""Name -> unit and meaning."""

DECLARED_FAMILIES: dict[str, str] = {
    "eval/accuracy/": "eval/accuracy of one held-out set",
    "eval/pass@": "with a set's name: unbiased estimate of the share of prompts that one of k responses gets right",
    "eval/mean@": "with a set's name: mean share of right responses to a prompt",
    "reward/part/": "mean of a part of the reward over the trained trajectories",
    "train/touched_fraction/": "share of trained tokens that a correction weighed down or dropped",
}
"""Beginnings of names that are made by the recipe: what follows is a set, a part or a correction."""

_SOMETIMES = ("reward/zero_signal_fraction", "rollout/reprefilled_tokens", "train/kl_reference", "train/advantage_mean")
_SOMETIMES += ("train/router_balance",)
REQUIRED = frozenset(
    name for name in DECLARED if name.partition("/")[0] not in ("eval", "cpu", "critic") and name not in _SOMETIMES
)
"""The names that every line of `metrics.jsonl` has."""

Record = Mapping[str, float]


class Sink(Protocol):
    """May raise whatever it likes and block as long as it likes: `SinkFeed` calls it, in a thread of its own."""

    def write(self, step: int, record: Record) -> None: ...

    def close(self) -> None: ...

    def abandon(self) -> None:
        """Gives up what keeps the process from ending well. Called, in another thread, when `close` does not return."""
        ...
