from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge

from asyncrl.config.checks import check_ranges, require
from asyncrl.ranges import NonNegative, NonNegativeInt, Positive, PositiveInt

_END_S = 3.0
"""Time that it may take to kill a program after its timeout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRewardConfig:
    """Limits of one run of the policy's program. It has no network and no access to other files."""

    timeout_s: Positive = 6.0
    """Wall time of all tests of one response together; at least 3 s below reward.timeout_s, to leave time to kill the
    program."""
    cpu_s: PositiveInt = 5
    """CPU seconds of one process."""
    memory_bytes: Annotated[int, Ge(1 << 26)] = 536870912
    """Address space of one process."""
    file_bytes: NonNegativeInt = 1048576
    """Largest file that it may write, in a directory that is deleted afterwards."""
    max_processes: PositiveInt = 16
    """Processes and threads that it may have at once."""
    allow_basic_sandbox: bool = False
    """Run programs even where the machine offers less confinement than Landlock and seccomp (docs/rewards.md)."""

    def __post_init__(self) -> None:
        check_ranges("reward.code.", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRewardConfig:
    """A reward model behind HTTP: it gets one JSON object with the response and its row, and answers with one."""

    url: str = ""
    """URL to which requests are posted."""
    timeout_s: Positive = 20.0
    """Longest time for one request."""
    retries: NonNegativeInt = 3
    """Retries of a request after a failed connection, a timeout or an answer of 429 or 5xx."""
    backoff_s: Positive = 0.5
    """Pause before the first retry; it doubles each time."""

    def __post_init__(self) -> None:
        check_ranges("reward.remote.", self)
        require(
            not self.url or self.url.startswith(("http://", "https://")),
            asked=f"reward.remote.url={self.url}",
            found="no http address",
            do="write http://HOST:PORT/PATH",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    function: str = "math"
    """A name from asyncrl.rewards, or custom `package.module:function`, which may be async."""
    parts: dict[str, float] = field(default_factory=dict)
    """Several rewards in place of function: name -> weight. The reward is their weighted sum."""
    timeout_s: Positive = 30.0
    """Longest time for one reward; after it the process is killed and the attempt at the group fails."""
    workers: PositiveInt = 2
    """Processes that compute rewards, of each rollouter."""
    pattern: str = ""
    """For reward regex: a Python regular expression that must match in the response; {truth} stands for the ground
    truth."""
    tolerance: NonNegative = 1e-6
    """For reward numeric: largest relative error of a correct number."""
    code: CodeRewardConfig = field(default_factory=CodeRewardConfig)
    """Settings of reward code."""
    remote: RemoteRewardConfig = field(default_factory=RemoteRewardConfig)
    """Settings of reward remote."""

    def __post_init__(self) -> None:
        check_ranges("reward.", self)
        for name, weight in self.parts.items():
            require(
                math.isfinite(weight),
                asked=f"reward.parts.{name}={weight}",
                found="no finite weight",
                do="give it a number",
            )
        require(
            not self.parts or any(self.parts.values()),
            asked=f"reward.parts={dict(self.parts)}",
            found="every weight is 0: nothing is rewarded",
            do="give one of them another weight",
        )
        used = self.names
        require(
            "remote" not in used or bool(self.remote.url),
            asked="reward remote",
            found="reward.remote.url is not set",
            do="set it to the address of the reward model",
        )
        require(
            "regex" not in used or bool(self.pattern),
            asked="reward regex",
            found="reward.pattern is not set",
            do="set it to a regular expression",
        )
        require(
            "code" not in used or self.code.timeout_s + _END_S <= self.timeout_s,
            asked=f"reward.code.timeout_s={self.code.timeout_s}",
            found=f"reward.timeout_s={self.timeout_s}: a slow program would fail the attempt in place of getting 0",
            do=f"make reward.timeout_s at least {_END_S:g} s longer",
        )

    @property
    def asked(self) -> str:
        """The keys that choose the reward, for messages."""
        return f"reward.parts={dict(self.parts)}" if self.parts else f"reward.function={self.function}"

    @property
    def names(self) -> tuple[str, ...]:
        """The rewards in use."""
        return tuple(self.parts) or (self.function,)
