from __future__ import annotations

import re
from dataclasses import field

from asyncrl.config.checks import require, section
from asyncrl.ranges import NonNegative, NonNegativeInt, Positive, PositiveInt


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
        require(
            self.name is None or re.fullmatch(r"(?!\.)[^/\\\x00-\x1f]{1,60}", self.name) is not None,
            asked=f"run.name={self.name!r}",
            found="no name that a directory below runs/ can have",
            do="use letters, digits, - and _; a place elsewhere is run.dir",
        )


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
            require(
                re.fullmatch(r"(?!ASYNCRL_|RAY_)[A-Za-z_][A-Za-z0-9_]*", name) is not None,
                asked=f"ray.env.{name}",
                found="no name of an environment variable, or one that asyncrl or Ray sets for each process",
                do="remove it; what Ray reads is set where the cluster is started",
            )


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
        require(
            1 <= self.num_minibatches <= self.groups_per_step,
            asked=f"batch.num_minibatches={self.num_minibatches} of batch.groups_per_step={self.groups_per_step}",
            found="every update needs a group",
            do="set batch.num_minibatches between 1 and batch.groups_per_step",
        )

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
        require(
            not unknown,
            asked=f"observability.sinks={list(self.sinks)}",
            found=f"unknown sinks {unknown}; metrics.jsonl is always written",
            do=f"choose from {list(SINKS)}",
        )


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
