from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from annotated_types import Ge, Lt

from asyncrl.config.checks import section
from asyncrl.ranges import NonNegativeInt, Positive, PositiveInt, PositiveShare


@section("staleness.guard_rules.")
class GuardConfig:
    min_effective_samples: Annotated[float, Ge(0), Lt(1)] = 0.5
    """A step whose `train/effective_samples` is below this share is too far off-policy. 0.5 is where sequential Monte
    Carlo resamples (Liu and Chen 1995)."""
    max_ratio_tails: PositiveShare = 0.1
    """The same for a larger share of tokens with a ratio outside [1/2, 2] (`train/ratio_tails`)."""
    max_kl_nats: Positive = 0.1
    """The same for a larger divergence of the policy from the behaviour policy per token (`train/kl_behavior`)."""
    max_clip_fraction: PositiveShare = 0.35
    """The same for a larger share of clipped tokens (`train/clip_fraction`)."""
    min_lag: NonNegativeInt = 1
    """Lowest limit on the lag that the guard sets, or publish_every_steps - 1 if larger. 0 makes the rollout wait for
    every publish."""
    trip_steps: PositiveInt = 2
    """Steps too far off-policy, without a healthy one between them, after which the guard acts."""
    relax_steps: PositiveInt = 20
    """Healthy steps in a row after which the limit rises by 1; at least 2 more than the limit. Doubles with each rise
    that had to be undone."""
    stop_steps: PositiveInt = 10
    """Steps too far off-policy at the lowest limit and with raised corrections after which the run stops."""
    raised_bounds: PositiveShare = 0.5
    """Raised corrections have this share of their bounds' distance from the neutral point: 1 for a ratio, 0 for a
    divergence."""


@section("staleness.")
class StalenessConfig:
    max_lag: NonNegativeInt = 2
    """Limit on the lag of every trained token, in optimizer steps. Read in mode fully_async; sync has 0, one_step_off
    has 1."""
    publish_every_steps: PositiveInt = 1
    """Optimizer steps between publishes; at most max_lag + 1. With placement=colocated always 1."""
    on_overdue: Literal["wait", "refill", "mask"] = "wait"
    """What a step does if a group that it must train is not ready but enough others are. wait: wait for it. refill: end
    the group as `expired` and generate its prompt again. mask: train the group in a later step, without the tokens that
    are over the limit by then."""
    pacing: Literal["eager", "just_in_time"] = "eager"
    """When groups are admitted, within max_lag. eager: as soon as it allows. just_in_time: just early enough to be
    ready when a step asks for them; tokens are younger if training is slower than generation. Read in mode
    fully_async."""
    parity: Literal["stop", "warn"] = "stop"
    """What the first step with tokens of lag 0 does if replicas and trainer do not compute the same log-probabilities
    for them (bounds: docs/staleness.md). stop: the run ends, with exit code 2 and the suspects. Later steps
    warn."""
    guard: Literal["off", "watch", "act"] = "off"
    """Off-policy guard, which checks the training metrics of every step. act: while the run is too far off-policy,
    lower the limit on the lag below max_lag, then raise the algorithm's corrections, then stop the run with a
    checkpoint. watch: only record what act would do. In modes sync and one_step_off the limit stays."""
    guard_rules: GuardConfig = field(default_factory=GuardConfig)
    """When the guard acts, and how fast it relaxes."""
    overdue_timeout_s: Positive = 600.0
    """Longest wait for the groups of one step, or for a drain before a publish; then the run ends with an error."""
