from __future__ import annotations

import re
from dataclasses import dataclass, field

from asyncrl.config.checks import check_ranges, require
from asyncrl.ranges import NonNegativeInt, Positive, PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
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
        check_ranges("run.", self)
        require(
            self.name is None or re.fullmatch(r"(?!\.)[^/\\\x00-\x1f]{1,60}", self.name) is not None,
            asked=f"run.name={self.name!r}",
            found="no name that a directory below runs/ can have",
            do="use letters, digits, - and _; a place elsewhere is run.dir",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    address: str | None = None
    """auto or host:port joins a running cluster, as RAY_ADDRESS in the environment does. Without either the run starts
    a local cluster and ends it."""
    start_timeout_s: Positive = 300.0
    """Longest time for the start of one part (all trainer ranks, a replica, the rollouter)."""
    gpu_memory_gib: Positive | None = None
    """Memory of one GPU of the cluster. What does not fit is refused before anything starts, with a layout that does.
    None takes that of this machine's GPUs, where there are any and no cluster is joined; else nothing is refused."""
    health_interval_s: Positive = 2.0
    """Seconds between two health checks of every actor."""
    health_timeout_s: Positive = 20.0
    """A process that does not answer a health check for this long counts as late; docs/operations.md says what
    follows."""

    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of all processes of the run, on every node, such as NCCL_SOCKET_IFNAME or NCCL_IB_HCA. They
    take precedence over those of the machine, but not over what asyncrl or an engine sets for a kind of process."""

    def __post_init__(self) -> None:
        check_ranges("ray.", self)
        for name in self.env:
            require(
                re.fullmatch(r"(?!ASYNCRL_|RAY_)[A-Za-z_][A-Za-z0-9_]*", name) is not None,
                asked=f"ray.env.{name}",
                found="no name of an environment variable, or one that asyncrl or Ray sets for each process",
                do="remove it; what Ray reads is set where the cluster is started",
            )
