"""What generation, training and publishes cost, as one record that a person can read and edit as YAML. Pure."""

from __future__ import annotations

import bisect
import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import yaml

from asyncrl.errors import ConfigError, explain
from asyncrl.json_records import from_plain
from asyncrl.ranges import NonNegative, Positive, PositiveInt, PositiveShare, Share

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthCosts:
    """Distribution of the tokens of one response: either measured quantiles, or a lognormal distribution."""

    quantiles: tuple[NonNegative, ...] = ()
    """Tokens at evenly spaced shares of the responses, from the shortest to the longest; at least two."""
    median: Positive | None = None
    """Of the lognormal distribution, in tokens."""
    sigma: NonNegative | None = None
    """Of the lognormal distribution: standard deviation of the logarithm."""
    straggler_share: Share = 0.0
    """Share of the responses that are `straggler_factor` times as long."""
    straggler_factor: Positive = 1.0

    def __post_init__(self) -> None:
        lognormal = self.median is not None and self.sigma is not None
        if (len(self.quantiles) >= 2) == lognormal or (self.median is None) != (self.sigma is None):
            raise ValueError("lengths need either two or more quantiles, or median and sigma")
        if any(a > b for a, b in pairwise(self.quantiles)):
            raise ValueError("lengths.quantiles must not fall")

    def tokens(self, share: float, straggles: float, limit: float) -> float:
        """The length at this share of the responses.

        Args:
            share: in (0, 1).
            straggles: in [0, 1); a straggler where it is below `straggler_share`.
            limit: the longest response, in tokens.
        """
        if self.median is not None and self.sigma is not None:
            tokens = self.median * math.exp(self.sigma * _NORMAL.inv_cdf(share))
        else:
            at = share * (len(self.quantiles) - 1)
            low = min(int(at), len(self.quantiles) - 2)
            tokens = self.quantiles[low] + (at - low) * (self.quantiles[low + 1] - self.quantiles[low])
        if straggles < self.straggler_share:
            tokens *= self.straggler_factor
        return max(1.0, min(tokens, limit))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCosts:
    """What a replica needs. All times are those of a replica that has its cores or GPUs for itself."""

    decode_step_s: tuple[tuple[PositiveInt, Positive], ...]
    """(requests that decode together, seconds of one decode step), with rising requests. Between two points and above
    the last one it follows the straight line; below the first it is constant."""
    prompt_tokens: NonNegative
    """Mean tokens of a prompt."""
    lengths: LengthCosts
    prefill_tokens_per_s: Positive | None = None
    """Tokens of prompts that a replica computes in a second, during which it decodes nothing. Null: no time."""
    shares_prompts: bool = True
    """A replica computes the prompt of a group once."""
    latency_s: NonNegative = 0.0
    """From the last token until it has arrived, and whatever else a response takes besides its tokens."""

    def __post_init__(self) -> None:
        requests = [n for n, _ in self.decode_step_s]
        if not requests or any(a >= b for a, b in pairwise(requests)):
            raise ValueError("generation.decode_step_s needs points with rising numbers of requests")

    def step_s(self, requests: int) -> float:
        """Seconds of a decode step with this many requests."""
        points = self.decode_step_s
        if len(points) == 1 or requests <= points[0][0]:
            return points[0][1]
        high = min(len(points) - 1, bisect.bisect_left(points, (requests, 0.0)))
        (n0, s0), (n1, s1) = points[high - 1], points[high]
        return max(1e-9, s0 + (s1 - s0) * (requests - n0) / (n1 - n0))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCosts:
    token_s: NonNegative
    """Seconds per token, prompts included, of one pass over a step, with `num_ranks` ranks."""
    step_s: NonNegative = 0.0
    """Seconds of a step whatever it trains."""
    num_ranks: PositiveInt = 1
    """Ranks for which `token_s` was measured."""
    efficiency: PositiveShare = 0.9
    """Share of the speed of each rank that is left when the number of ranks doubles."""
    num_threads: PositiveInt = 1
    """Of each rank, on a CPU: those with which all of this was measured."""
    thread_efficiency: PositiveShare = 0.65
    """Share of the speed of each thread that is left when their number doubles."""

    def seconds(self, tokens: float, ranks: int, threads: int | None = None) -> float:
        """Seconds of an optimizer step. `threads`: of each rank; None: as many as were measured."""
        ratio = ranks / self.num_ranks
        seconds = self.step_s + tokens * self.token_s / ratio * self.efficiency ** -math.log2(ratio)
        more = 1.0 if threads is None else threads / self.num_threads
        return seconds / more * self.thread_efficiency ** -math.log2(more)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishCosts:
    """A publish takes `fixed_s + bytes / bytes_per_s + replica_s * replicas`; a rolling one that for each wave."""

    bytes: NonNegative
    bytes_per_s: Positive
    """From the trainer to all replicas at once."""
    fixed_s: NonNegative = 0.0
    replica_s: NonNegative = 0.0
    """Seconds more for each replica that is reached at once."""
    running_s: NonNegative = 0.0
    """Seconds of the publish in which the replicas still generate."""

    def seconds(self, replicas: int) -> float:
        return self.fixed_s + self.bytes / self.bytes_per_s + self.replica_s * replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Costs of one model on one kind of hardware, from which any configuration of it is predicted."""

    source: str
    """Where the figures come from, for people."""
    generation: GenerationCosts
    training: TrainingCosts
    publish: PublishCosts
    reward_s: NonNegative = 0.0
    """From the last token of a group to its put: rewards and environments. Does not hold up replicas."""
    loop_s: NonNegative = 0.0
    """Seconds of a step that are neither waiting, training nor publish: plan, commit, record, checkpoint."""
    filtered_share: Share = 0.0
    """Share of the groups whose rewards are all equal. Read with algorithm.dynamic_sampling."""
    cores: Positive | None = None
    """Cores that all processes share: a busy replica wants one, a busy rank one for each thread, the rollouter one, and
    the processes beside it one, while they have work. Where they want more than there are, everything slows down alike.
    Null: each has its own."""
    rollouter_s: NonNegative = 0.0
    """CPU seconds of the rollouter for each response, one response after the other: its group waits for them."""
    beside_s: NonNegative = 0.0
    """The same of the queue, the coordinator and the rollouter's worker processes, together. Nothing waits for them;
    read with `cores`."""


def read_costs(text: str, name: str) -> CostModel:
    """The cost model in a YAML file. `name`: of the file, for messages. Raises ConfigError."""
    try:
        return from_plain(CostModel, yaml.safe_load(text))
    except (yaml.YAMLError, ValueError, TypeError) as error:
        found = " ".join(str(error).split())
        do = "correct it; docs/plan.md has every field, and asyncrl-plan --from-run RUN_DIR --write FILE writes one"
        raise ConfigError(explain(f"the cost model {name}", found, do)) from error


def write_costs(costs: CostModel) -> str:
    """The YAML that `read_costs` reads, with numbers of five digits."""
    return yaml.safe_dump(_plain(asdict(costs)), sort_keys=False, default_flow_style=None, width=110)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
