"""The costs of generation, training and publishes, as a record that people can read and edit as YAML. Pure."""

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
    """Distribution of the tokens of one response: measured quantiles, or a lognormal distribution."""

    quantiles: tuple[NonNegative, ...] = ()
    """Tokens at evenly spaced shares of the responses, from the shortest to the longest; at least two."""
    median: Positive | None = None
    """Median of the lognormal distribution, in tokens."""
    sigma: NonNegative | None = None
    """Standard deviation of the logarithm, for the lognormal distribution."""
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
            straggles: in [0, 1); below `straggler_share` the response is a straggler.
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
    """Costs of a replica. Times assume that the replica has its cores or GPUs to itself."""

    decode_step_s: tuple[tuple[PositiveInt, Positive], ...]
    """(requests that decode together, seconds of one decode step), with rising requests. Linear between points and
    above the last; constant below the first."""
    prompt_tokens: NonNegative
    """Mean tokens of a prompt."""
    lengths: LengthCosts
    prefill_tokens_per_s: Positive | None = None
    """Prompt tokens that a replica computes per second, while it decodes nothing. Null: no time."""
    shares_prompts: bool = True
    """A replica computes the prompt of a group once."""
    latency_s: NonNegative = 0.0
    """Seconds of a response besides its tokens, including the arrival of the last token."""

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
    """Seconds per token, including prompts, of one pass over a step, with `num_ranks` ranks."""
    step_s: NonNegative = 0.0
    """Fixed seconds of a step."""
    num_ranks: PositiveInt = 1
    """Ranks for which `token_s` was measured."""
    efficiency: PositiveShare = 0.9
    """Share of each rank's speed that remains when the number of ranks doubles."""
    num_threads: PositiveInt = 1
    """Threads of each rank on a CPU during the measurement."""
    thread_efficiency: PositiveShare = 0.65
    """Share of each thread's speed that remains when the number of threads doubles."""

    def seconds(self, tokens: float, ranks: int, threads: int | None = None) -> float:
        """Seconds of an optimizer step. `threads`: of each rank; None: as measured."""
        # efficiency ** log2(ratio) is the speed that remains per rank; the same for threads.
        ratio = ranks / self.num_ranks
        seconds = self.step_s + tokens * self.token_s / ratio * self.efficiency ** -math.log2(ratio)
        more = 1.0 if threads is None else threads / self.num_threads
        return seconds / more * self.thread_efficiency ** -math.log2(more)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishCosts:
    """`fixed_s + bytes / bytes_per_s + replica_s * replicas` seconds; for a rolling publish, per wave."""

    bytes: NonNegative
    bytes_per_s: Positive
    """From the trainer to all replicas together."""
    fixed_s: NonNegative = 0.0
    replica_s: NonNegative = 0.0
    """Additional seconds for each replica of a transfer."""
    running_s: NonNegative = 0.0
    """Seconds of the publish during which the replicas still generate."""

    def seconds(self, replicas: int) -> float:
        return self.fixed_s + self.bytes / self.bytes_per_s + self.replica_s * replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Costs of one model on one kind of hardware; predicts any configuration."""

    source: str
    """Origin of the figures, for people."""
    generation: GenerationCosts
    training: TrainingCosts
    publish: PublishCosts
    reward_s: NonNegative = 0.0
    """From the last token of a group to its put: rewards and environments. Does not occupy replicas."""
    loop_s: NonNegative = 0.0
    """Seconds of a step besides waiting, training and publish: plan, commit, record, checkpoint."""
    filtered_share: Share = 0.0
    """Share of the groups whose rewards are all equal. Read with algorithm.dynamic_sampling."""
    cores: Positive | None = None
    """Cores shared by all processes. While busy, a replica wants one, a rank one per thread, the rollouter one, and the
    other processes one. If they want more than there are, all slow down equally. Null: each has its own cores."""
    rollouter_s: NonNegative = 0.0
    """CPU seconds of the rollouter per response, sequentially: the group waits for them."""
    beside_s: NonNegative = 0.0
    """CPU seconds per response of the queue, the coordinator and the rollouter's workers, together. Nothing waits for
    them; read with `cores`."""


def read_costs(text: str, name: str) -> CostModel:
    """The cost model in a YAML text. `name`: of the file, for messages. Raises ConfigError."""
    try:
        return from_plain(CostModel, yaml.safe_load(text))
    except (yaml.YAMLError, ValueError, TypeError) as error:
        found = " ".join(str(error).split())
        do = "correct it; docs/plan.md has every field, and asyncrl-plan --from-run RUN_DIR --write FILE writes one"
        raise ConfigError(explain(f"the cost model {name}", found, do)) from error


def write_costs(costs: CostModel) -> str:
    """The YAML for `read_costs`; numbers have five digits."""
    return yaml.safe_dump(_plain(asdict(costs)), sort_keys=False, default_flow_style=None, width=110)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
