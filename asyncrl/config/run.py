from __future__ import annotations

import re
from dataclasses import field
from typing import Annotated, Literal

from annotated_types import Ge, Lt

from asyncrl.config.checks import require_temperature, section
from asyncrl.errors import ConfigError, explain
from asyncrl.ranges import NonNegative, NonNegativeInt, Positive, PositiveInt, PositiveShare


@section("run.")
class RunSection:
    name: str | None = None
    """Name of the run; None takes the recipe's file name."""
    dir: str | None = None
    """Run directory; None takes `runs/<name>`."""
    max_steps: PositiveInt = 100
    """Optimizer steps of the whole run, over all restarts."""
    seed: NonNegativeInt = 0
    """Seed of the prompt order, of sampling and of initialisation."""
    shutdown_timeout_s: Positive = 8.0
    """Longest time that an interrupted run waits for the step in progress before it abandons that step."""

    def __post_init__(self) -> None:
        if self.name is not None and re.fullmatch(r"(?!\.)[^/\\\x00-\x1f]{1,60}", self.name) is None:
            do = "use letters, digits, - and _; a place elsewhere is run.dir"
            raise ConfigError(explain(f"run.name={self.name!r}", "no name that a directory below runs/ can have", do))


@section("ray.")
class RayConfig:
    address: str | None = None
    """auto or host:port joins a running cluster, as does RAY_ADDRESS. Without either the run starts and ends a local
    cluster."""
    start_timeout_s: Positive = 300.0
    """Longest time for the start of one part (all trainer ranks, a replica, the rollouter)."""
    gpu_memory_gib: Positive | None = None
    """Memory of one GPU of the cluster. A layout that does not fit is refused before the start, with one that fits.
    None: this machine's GPUs, unless a cluster is joined; without GPUs nothing is refused."""
    health_interval_s: Positive = 2.0
    """Seconds between two health checks of every actor."""
    health_timeout_s: Positive = 20.0
    """A process that does not answer a health check for this long counts as late; docs/operations.md says what
    follows."""

    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of all processes of the run, on every node, such as NCCL_SOCKET_IFNAME or NCCL_IB_HCA. They
    take precedence over those of the machine, but not over what asyncrl or an engine sets for a kind of process."""

    def __post_init__(self) -> None:
        for name in self.env:
            if re.fullmatch(r"(?!ASYNCRL_|RAY_)[A-Za-z_][A-Za-z0-9_]*", name) is None:
                found = "no name of an environment variable, or one that asyncrl or Ray sets for each process"
                do = "remove it; what Ray reads is set where the cluster is started"
                raise ConfigError(explain(f"ray.env.{name}", found, do))


@section("batch.")
class BatchConfig:
    groups_per_step: PositiveInt = 16
    """Prompt groups that one step trains."""
    group_size: PositiveInt = 8
    """Trajectories per prompt group."""
    num_minibatches: int = 1
    """Optimizer updates per epoch of a step, each over its share of the groups. global_steps counts steps."""
    num_epochs: PositiveInt = 1
    """Passes of a step over its groups."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_minibatches <= self.groups_per_step:
            asked = f"batch.num_minibatches={self.num_minibatches} of batch.groups_per_step={self.groups_per_step}"
            do = "set batch.num_minibatches between 1 and batch.groups_per_step"
            raise ConfigError(explain(asked, "every update needs a group", do))

    @property
    def num_trajectories(self) -> int:
        """Trajectories that one step trains."""
        return self.groups_per_step * self.group_size


@section("checkpoint.")
class CheckpointConfig:
    every_steps: NonNegativeInt = 20
    """Optimizer steps between checkpoints; one is always written at the end. 0 writes only that one."""
    every_minutes: NonNegative = 0.0
    """A checkpoint also after the first step that ends this long after the last one; 0: no. For long steps."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep; older ones are deleted."""
    background: bool = True
    """Write while training continues, from a copy of the trainer's state in host memory. False: training waits."""
    timeout_s: Positive = 1800.0
    """Time for writing one checkpoint. Writing continues beyond it while the processes answer; each such period counts
    as a failure."""
    max_failures: NonNegativeInt = 2
    """Failed checkpoints in a row (full disk, for example) that the run tolerates; one more stops it."""


SINKS = ("wandb", "tensorboard")


@section("observability.")
class ObservabilityConfig:
    sinks: list[str] = field(default_factory=list)
    """Metric sinks besides metrics.jsonl: wandb, tensorboard."""
    wandb_project: str = "asyncrl"
    """W&B project. Without a login the run is recorded offline."""
    samples_per_step: NonNegativeInt = 2
    """Trajectories per admission version that are written to samples.jsonl."""
    trace_every_groups: NonNegativeInt = 16
    """Every n-th group records in spans.jsonl when its requests and rewards ran, for `asyncrl-report --trace`; 0: none.
    """
    progress: bool = True
    """Live progress on a terminal; otherwise one line a step."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.sinks) - set(SINKS))
        if unknown:
            found = f"unknown sinks {unknown}; metrics.jsonl is always written"
            raise ConfigError(explain(f"observability.sinks={list(self.sinks)}", found, f"choose from {list(SINKS)}"))


LEAST_REPLICA_RESTARTS = 3


@section("recovery.")
class RecoveryConfig:
    max_replica_restarts: NonNegativeInt | None = None
    """Replacements of replicas (they died or got wrong weights) allowed within window_s; one more stops the run. None:
    as many as there are replicas, but at least 3."""
    max_restarts: NonNegativeInt = 3
    """The same for restarts of the rollouter, and of the training side (trainer ranks and message queue); each has its
    own count."""
    window_s: Positive = 3600.0
    """Seconds after which a restart no longer counts."""
    rejoin_timeout_s: NonNegative = 30.0
    """Time for a suspended replica to answer again before it is replaced; nothing waits for it. A replica is suspended
    if it answers too late, for example because its process is stopped."""
    stall_timeout_s: Positive | None = None
    """Without any progress for this long, the run writes the stacks of all processes and stops. None: twice the longest
    wait that the recipe allows. A smaller value may stop a run that waits for one long response."""

    def replica_restarts(self, num_replicas: int) -> int:
        """`max_replica_restarts`, set or derived."""
        if self.max_replica_restarts is not None:
            return self.max_replica_restarts
        return max(LEAST_REPLICA_RESTARTS, num_replicas)

    def replicas_per_response(self, num_replicas: int) -> int:
        """A response fails after this many replicas died while working on it, since it may be the cause. With a small
        restart budget the pool gives up first; a large budget must not be spent on one response."""
        return min(LEAST_REPLICA_RESTARTS, self.replica_restarts(num_replicas)) + 1


@section("eval.")
class EvalConfig:
    every_steps: NonNegativeInt = 0
    """Optimizer steps between held-out evaluations; also before the first step and after the last. 0: none."""
    max_prompts: PositiveInt = 256
    """Number of rows to evaluate from the start of each held-out set."""
    temperature: float = 0.0
    """0 is greedy."""
    samples: PositiveInt = 1
    """Responses to every prompt."""
    pass_at: list[int] = field(default_factory=list)
    """The values of k for which pass@k is reported, each at most samples."""
    leased_replicas: NonNegativeInt = 0
    """Number of replicas that an evaluation leases. They keep the version that it began with, and training continues
    with the others. 0: all replicas evaluate, and training waits."""
    timeout_s: Positive = 1800.0
    """Longest time for the evaluation of one held-out set."""

    def __post_init__(self) -> None:
        require_temperature("eval.temperature", self.temperature)
        if not all(1 <= k <= self.samples for k in self.pass_at):
            asked = f"eval.pass_at={self.pass_at} with eval.samples={self.samples}"
            raise ConfigError(explain(asked, "pass@k needs at least k responses", "raise eval.samples"))
        if self.samples != 1 and self.temperature <= 0:
            asked = f"eval.samples={self.samples} with eval.temperature=0"
            raise ConfigError(explain(asked, "greedy responses are all alike", "set eval.temperature above 0"))


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
