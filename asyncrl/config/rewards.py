from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge

from asyncrl.config.checks import require_one_group, require_url, section
from asyncrl.errors import ConfigError, explain
from asyncrl.ranges import NonNegative, NonNegativeInt, Positive, PositiveInt

_END_S = 3.0
"""Longest time to kill a program after its timeout."""


@section("reward.code.")
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
    """Concurrent processes and threads."""
    allow_basic_sandbox: bool = False
    """Run programs even if the machine lacks Landlock or seccomp (docs/rewards.md)."""


@section("reward.remote.")
class RemoteRewardConfig:
    """A reward model behind HTTP: it gets a JSON object with response and row, and answers with a JSON object."""

    url: str = ""
    """URL to which requests are posted."""
    timeout_s: Positive = 20.0
    """Longest time for one request."""
    retries: NonNegativeInt = 3
    """Retries of a request after a failed connection, a timeout or an answer of 429 or 5xx."""
    backoff_s: Positive = 0.5
    """Pause before the first retry; it doubles each time."""

    def __post_init__(self) -> None:
        require_url("reward.remote.url", self.url)


@section("reward.reasoning_gym.")
class ReasoningGymRewardConfig:
    """Reward reasoning_gym."""

    answer: Literal["tags", "boxed", "last_number", "whole"] = "tags"
    """What of a response is its answer: the text in the last <answer> tags or the last box, its last number, or all of
    it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewardConfig:
    """A reward of all responses to a prompt together, added to the reward of each response, in training only."""

    function: str = ""
    """Custom `package.module:function` of (responses, row), which returns one reward for each response; empty: no group
    reward."""
    weight: float = 1.0
    """Factor of the group reward."""
    pairwise: bool = False
    """The function is one of (first, second, row), and returns the share in [0, 1] with which the first response is
    better. It is called for each pair of a group, in both orders, within one reward.timeout_s."""
    scores: Literal["win_rate", "bradley_terry"] = "win_rate"
    """With pairwise, the score of a response. win_rate: mean share with which it was better. bradley_terry: probability
    of being better than an average response, by strengths fitted to the comparisons."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight != 0):
            do = "give it a number other than 0, or leave reward.group.function out"
            raise ConfigError(explain(f"reward.group.weight={self.weight}", "it would add nothing", do))


@section("reward.judge.")
class JudgeConfig:
    """Reward of a judge: the model of section `judge`. It is added to the reward of each response."""

    weight: float = 0.0
    """Factor of the judge's reward; 0: no judge."""
    prompt: str = "Question:\n{prompt}\n\nAnswer:\n{response}\n\nIs the answer good? Say yes or no."
    """The question to the judge, as one user message. {prompt}: the messages of the row. {response}: the response, or
    with pairwise {first} and {second}. {truth}: the ground truth."""
    answers: dict[str, float] = field(default_factory=dict)
    """Answer of the judge -> worth. With pairwise from 0 to 1: how much better the first response is. Empty: yes is
    worth 1 and no 0; with read=text it writes a number."""
    read: Literal["expected", "text"] = "expected"
    """How an answer is read. expected: the mean worth of the answers, weighted by their relative probability as the
    start of the judge's reply; nothing is sampled. text: the judge writes greedily, and pattern reads its reply."""
    pattern: str = ""
    """With read=text: a Python regular expression with one group, whose last match is one of answers, or a number."""
    max_tokens: PositiveInt = 256
    """With read=text: longest answer."""
    on_unreadable: Literal["fail", "zero"] = "zero"
    """For an answer without a match of pattern, and a question over the judge's max_model_len. fail: the attempt at the
    group fails. zero: the worth is 0, or the lowest of answers if that is negative, and part judge.unreadable is 1;
    with pairwise the comparison is a tie."""
    pairwise: bool = False
    """The judge compares each pair of a group, in both orders: G (G - 1) questions for G responses; not in
    evaluations."""
    scores: Literal["win_rate", "bradley_terry"] = "win_rate"
    """As reward.group.scores."""

    def __post_init__(self) -> None:
        asked = f"reward.judge with read={self.read}"
        if not (math.isfinite(self.weight) and all(math.isfinite(worth) for worth in self.answers.values())):
            asked = f"reward.judge.weight={self.weight} and answers={dict(self.answers)}"
            raise ConfigError(explain(asked, "not all of them are finite numbers", "give them numbers"))
        if self.read != "text" and len(self.answers) == 1:
            found = "the judge has nothing to choose from"
            do = "name two answers or more, such as {yes: 1, no: 0}"
            raise ConfigError(explain(f"{asked} and answers={dict(self.answers)}", found, do))
        if not (all(self.answers) and all(0 <= worth <= 1 for worth in self.answers.values() if self.pairwise)):
            found = "an empty answer, or the worth of a comparison outside of 0 to 1"
            do = "name each answer, and give a comparison a worth from 0 (second is better) to 1 (first is better)"
            raise ConfigError(explain(f"{asked}, pairwise={self.pairwise} and answers={dict(self.answers)}", found, do))
        if self.read == "text":
            require_one_group("reward.judge.pattern", self.pattern)
        places = ("{first}", "{second}") if self.pairwise else ("{response}",)
        missing = [place for place in places if place not in self.prompt]
        if self.weight != 0 and missing:
            asked = f"reward.judge.prompt with pairwise={self.pairwise}".lower()
            raise ConfigError(explain(asked, f"it has no {' and no '.join(missing)}", "write these into it"))

    @property
    def worths(self) -> dict[str, float]:
        """`answers`, set or derived; empty where the judge writes a number."""
        return dict(self.answers) or ({"yes": 1.0, "no": 0.0} if self.read == "expected" else {})


@section("reward.")
class RewardConfig:
    function: str = "math"
    """A name from asyncrl.rewards, or custom `package.module:function`, which may be async."""
    parts: dict[str, float] = field(default_factory=dict)
    """Several rewards instead of function: name -> weight. The reward is their weighted sum."""
    skip_special_tokens: bool = False
    """Give rewards and environments the responses without special tokens. By default they read all that the policy
    wrote except the token that ends it, since tags such as <answer> may be special tokens."""
    timeout_s: Positive = 30.0
    """Longest time for one reward; the process is then killed and the attempt at the group fails."""
    workers: PositiveInt = 2
    """Reward processes per rollouter."""
    pattern: str = ""
    """For reward regex: a Python regular expression that must match in the response; {truth} stands for the ground
    truth."""
    tolerance: NonNegative = 1e-6
    """For reward numeric: largest relative error of a correct number."""
    code: CodeRewardConfig = field(default_factory=CodeRewardConfig)
    """Settings of reward code."""
    reasoning_gym: ReasoningGymRewardConfig = field(default_factory=ReasoningGymRewardConfig)
    """For reward reasoning_gym."""
    remote: RemoteRewardConfig = field(default_factory=RemoteRewardConfig)
    """Settings of reward remote."""
    group: GroupRewardConfig = field(default_factory=GroupRewardConfig)
    """A reward that sees a whole group."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    """A reward that another model gives."""

    def __post_init__(self) -> None:
        for name, weight in self.parts.items():
            if not math.isfinite(weight):
                raise ConfigError(explain(f"reward.parts.{name}={weight}", "no finite weight", "give it a number"))
        if self.parts and not any(self.parts.values()):
            do = "give one of them another weight"
            raise ConfigError(explain(f"reward.parts={dict(self.parts)}", "every weight is 0: nothing is rewarded", do))
        used = self.names
        for name, key, value in (
            ("remote", "reward.remote.url", self.remote.url),
            ("regex", "reward.pattern", self.pattern),
        ):
            if name in used and not value:
                raise ConfigError(explain(f"reward {name}", f"{key} is not set", f"set {key}"))
        if "code" in used and self.code.timeout_s + _END_S > self.timeout_s:
            found = f"reward.timeout_s={self.timeout_s}: a slow program would fail the attempt in place of getting 0"
            do = f"make reward.timeout_s at least {_END_S:g} s longer"
            raise ConfigError(explain(f"reward.code.timeout_s={self.code.timeout_s}", found, do))

    @property
    def asked(self) -> str:
        """The keys that choose the reward, for messages."""
        return f"reward.parts={dict(self.parts)}" if self.parts else f"reward.function={self.function}"

    @property
    def compares(self) -> bool:
        """True if pairs of responses are compared."""
        judge, group = self.judge, self.group
        return bool((judge.weight and judge.pairwise) or (group.function and group.pairwise))

    @property
    def names(self) -> tuple[str, ...]:
        """The rewards in use."""
        return tuple(self.parts) or (self.function,)
