"""Prompt groups between rollouter, message queue and trainer: tickets, partial groups, counts and leases.

Frequent records have a fast `__reduce__`, see `types.trajectories`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from asyncrl.ranges import Whole
from asyncrl.types.generation import Generation
from asyncrl.types.trajectories import Trajectory


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to generate group `(ordinal, attempt)`; `version` is the published version at admission."""

    ordinal: int
    attempt: int
    version: int


@dataclass(frozen=True, slots=True, eq=False)
class PartialTrajectory:
    """A trajectory in progress: `done` if complete, else its calls in order, the last possibly unfinished. Replaying
    the calls restores the environment's state."""

    calls: tuple[Generation, ...] = ()
    done: Trajectory | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PartialGroup:
    """A running group in a checkpoint: one entry per trajectory, in order.

    `ticket`: the tokens were sampled under it; its version is a lower bound of theirs.
    """

    ticket: Ticket
    trajectories: tuple[PartialTrajectory, ...]

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(
            sum(len(s.response_ids) for s in t.done.sequences) if t.done else sum(len(c.token_ids) for c in t.calls)
            for t in self.trajectories
        )


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """Work for the rollout side: groups to generate (`tickets`), and tickets of ended groups to cancel (`cancelled`).

    `partials`: restored tokens of groups among `tickets`, with their present ticket; the other groups start empty.
    """

    tickets: tuple[Ticket, ...] = ()
    cancelled: tuple[Ticket, ...] = ()
    partials: tuple[PartialGroup, ...] = ()


class Lengths(NamedTuple):
    """The lengths of a sequence that packing needs: token counts, and how many of the tokens are trained."""

    prompt: int
    response: int
    trained: int

    def __reduce__(self) -> tuple[Any, ...]:
        return Lengths, tuple(self)

    def fits(self, sequence: Trajectory) -> bool:
        """True if these are the lengths of the sequence. Masks of a sequence are nested, so equal counts mean equal
        masks."""
        own = len(sequence.prompt_ids), len(sequence.response_ids), sequence.num_trained_tokens
        return own == (self.prompt, self.response, self.trained)

    @property
    def total(self) -> int:
        return self.prompt + self.response


class TokenLag(NamedTuple):
    """`tokens` of one trajectory, branches included, will be trained with this lag (optimizer steps, at the leasing
    step). `in_flight`: the part of the lag from before the group was put."""

    trajectory: int
    lag: int
    in_flight: int
    tokens: int

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenLag, tuple(self)


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """A leased group without its tokens, for planning: one entry per trajectory in `rewards`, and per sequence
    (`TrajectoryGroup.sequences`) in `lengths` and `owners`. Without `owners` no trajectory has branches.

    `lags` has every token of the group that will be trained. `masked_tokens` were sampled by the policy and are not
    trained because they are over the limit. `interrupted` trajectories have tokens of more than one version;
    `version_span` is newest minus oldest version, summed over the trajectories. `continued_tokens` will be trained and
    follow tokens of an older version in the same unbroken run of one replica. `truncated` trajectories were cut off at
    their token limit. `reward_parts`: the mean of each, over the trajectories that have it.
    """

    ordinal: int
    attempt: int
    lengths: tuple[Lengths, ...]
    rewards: tuple[float, ...]
    lags: tuple[TokenLag, ...]
    segments: int
    interrupted: int
    version_span: int = 0
    continued_tokens: int = 0
    masked_tokens: int = 0
    truncated: int = 0
    reward_parts: tuple[tuple[str, float], ...] = ()
    owners: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.owners:
            object.__setattr__(self, "owners", tuple(range(len(self.rewards))))

    @property
    def trained_tokens(self) -> int:
        return sum(length.trained for length in self.lengths)

    @property
    def lag_max(self) -> int:
        """0 if no token will be trained."""
        return max((part.lag for part in self.lags), default=0)

    @property
    def lag_sum(self) -> int:
        return sum(part.tokens * part.lag for part in self.lags)

    @property
    def lag_in_flight_sum(self) -> int:
        return sum(part.tokens * part.in_flight for part in self.lags)


@dataclass(frozen=True, slots=True)
class LeaseManifest:
    """The groups that step `step` trains, oldest deadline first. `overdue_wait_s`: time waited for mandatory groups."""

    step: int
    groups: tuple[GroupSummary, ...]
    overdue_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """Groups: `admitted` and the four ends are cumulative, the three states are current."""

    admitted: Whole = 0
    running: Whole = 0
    ready: Whole = 0
    leased: Whole = 0
    trained: Whole = 0
    filtered: Whole = 0
    expired: Whole = 0
    failed: Whole = 0

    @property
    def active(self) -> int:
        return self.running + self.ready + self.leased

    @property
    def ended(self) -> int:
        return self.trained + self.filtered + self.expired + self.failed


@dataclass(frozen=True, slots=True)
class LeaseWait:
    """Why a step has no groups yet: how many are `missing`, or else how many mandatory ones are `overdue`."""

    missing: int
    overdue: int
    counts: LedgerCounts


@dataclass(frozen=True, slots=True)
class EndShares:
    """Shares of the last ended groups, each over its own window; 0 before the first end."""

    filtered: float = 0.0
    failed: float = 0.0


@dataclass(frozen=True, slots=True)
class Committed:
    """The queue after a commit: `counts` and `shares` before the next lease. `lease`: the next step's groups, if
    requested and ready."""

    counts: LedgerCounts = LedgerCounts()
    shares: EndShares = EndShares()
    lease: LeaseManifest | None = None


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """`groups` in progress; `replicas` that get requests; `cpu_s`: of this process, `workers_cpu_s`: of its child
    processes. Since the start: `reprefilled_tokens`, sent again after interruptions; `cancelled_groups`, ended by the
    queue; `replica_s`, seconds summed over replicas by cause (`rollout.replica_time`). `sandboxes`: of agents,
    by state."""

    pid: int
    groups: int
    requests: int
    replicas: tuple[int, ...]
    cpu_s: float
    reprefilled_tokens: int = 0
    cancelled_groups: int = 0
    replica_s: Mapping[str, float] = field(default_factory=dict)
    workers_cpu_s: float = 0.0
    sandboxes: Mapping[str, int] = field(default_factory=dict)
