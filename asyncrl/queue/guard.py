"""The off-policy guard: adapts the limit on the lag to the measurements of the last steps. At the end: the parity gate.
Pure: no clock, no I/O.

Lag does harm if the sampling policy is far from the policy in training. How far lag 8 is depends on the learning rate,
the algorithm and the model, and changes during a run, so the guard measures the distance:

    severity = max(signal / threshold)   of 1 - effective sample size, tails of the ratio, KL, clipped tokens

A step is sick if its severity is at least 1, and healthy up to HEALTHY. Between the two, the count of healthy steps
restarts and the count of sick steps stays.

* Sick for `trip_steps`: the limit on the lag is halved, or lowered to the youngest lags that are healthy.
* Sick for `trip_steps` more at the lowest limit: the bounds of the corrections are tightened, if there are any.
* Sick for `stop_steps` more with nothing left to tighten: the run stops.
* Healthy for `relax_steps` in a row: one step back, first the corrections, then the limit by 1. That is a trial. A
  trial that makes the run sick is undone, and doubles the healthy steps required for the next trial. So over n steps at
  most about log2(n) trials fail: the limit does not oscillate.

The limit never exceeds `staleness.max_lag`. `staleness.py` enforces that bound independently.

Source: collapse under asynchrony is preceded by a drop of the effective sample size (VCPO, arXiv:2602.17616). Halving
and adding one is the rule of congestion control (Chiu and Jain 1989), with trials that back off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from asyncrl.config.recipe import Recipe
from asyncrl.config.run import GuardConfig
from asyncrl.types.guard import LAG_BUCKETS, LAST_OF_BUCKET, GuardAction, GuardState
from asyncrl.types.metrics import Metric

HEALTHY = 0.5
"""Up to this severity a step is healthy."""
MIN_SHARE = 0.02
"""Lags with a smaller share of a step's tokens are not judged separately: too few tokens."""
MAX_SEVERITY = 1000.0
_OF_ALL_LAGS = Metric.EFFECTIVE_SAMPLES, Metric.RATIO_TAILS, Metric.KL_BEHAVIOR
_OF_A_LAG = Metric.LAG_EFFECTIVE, Metric.LAG_TAILS, Metric.LAG_KL
_CLIPPED = Metric.LAG_CLIPPED_POSITIVE, Metric.LAG_CLIPPED_NEGATIVE
LEVELS = ("full", "tightened", "raised", "stopped")
"""The values of `guard/state`."""


@dataclass(frozen=True, slots=True)
class LagReading:
    """The severity of the tokens with lags up to `last_lag`, and above `last_lag` of the reading before."""

    last_lag: int
    severity: float


@dataclass(frozen=True, slots=True)
class GuardReading:
    """The measurements of one step.

    Attributes:
        severity: of all its tokens, from 0 to MAX_SEVERITY.
        worst: the signal with the highest severity, in words.
        lag_max: largest lag of a trained token.
        by_lag: in ascending order of lag, without lags of few tokens.
    """

    severity: float
    worst: str
    lag_max: int
    by_lag: tuple[LagReading, ...] = ()


@dataclass(frozen=True, slots=True)
class GuardDecision:
    """`limit`: the limit on the lag from now on. `reason`: for people."""

    action: GuardAction
    limit: int
    reason: str


@dataclass(frozen=True, slots=True)
class OffPolicyGuard:
    """The rules of the guard.

    Attributes:
        floor: the lowest limit on the lag.
        can_raise: the recipe has corrections whose bounds can be tightened.
    """

    config: GuardConfig
    max_lag: int
    floor: int
    can_raise: bool

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= self.max_lag:
            raise ValueError(f"the lowest limit on the lag is {self.floor}, outside [0, max_lag {self.max_lag}]")

    @classmethod
    def of(cls, recipe: Recipe) -> OffPolicyGuard:
        """If a publish waits for running groups the mode determines the lag: only corrections and the stop remain."""
        staleness, floor = recipe.staleness, recipe.max_lag
        if recipe.mode == "fully_async":
            # A step is trained up to publish_every_steps - 1 steps after a publish: a lower limit would admit no group.
            floor = min(recipe.max_lag, max(staleness.guard_rules.min_lag, staleness.publish_every_steps - 1))
        return cls(staleness.guard_rules, recipe.max_lag, floor, bool(recipe.algorithm.corrections))

    def begin(self, saved: GuardState | None = None) -> GuardState:
        """The state at the start of a run; `saved`: its state in the checkpoint."""
        if saved is None:
            return GuardState(self.max_lag)
        return replace(
            saved,
            limit=min(self.max_lag, max(self.floor, saved.limit)),
            is_raised=saved.is_raised and self.can_raise,
        )

    def read(self, record: Mapping[str, float]) -> GuardReading:
        """The reading of a step from the metrics of the training step and `staleness/lag_max`."""
        lag_max = int(record[Metric.LAG_MAX])
        clipped = record[Metric.CLIPPED]
        severity, worst = self._severity(record, _OF_ALL_LAGS, clipped)
        # Each bucket of lags is judged separately, if it has enough tokens and its metrics were recorded.
        by_lag = []
        for bucket, last in zip(LAG_BUCKETS, (*LAST_OF_BUCKET, lag_max), strict=True):
            if record.get(Metric.LAG_TOKENS.of(bucket), 0.0) >= MIN_SHARE and Metric.LAG_KL.of(bucket) in record:
                clipped = sum(record[family.of(bucket)] for family in _CLIPPED)
                found, _ = self._severity(record, [family.of(bucket) for family in _OF_A_LAG], clipped)
                by_lag.append(LagReading(min(last, lag_max), found))
        return GuardReading(severity, worst, lag_max, tuple(by_lag))

    def step(self, state: GuardState, reading: GuardReading) -> tuple[GuardState, GuardDecision | None]:
        """The state after a step, and the action to take, if any."""
        if reading.severity >= 1:
            state = replace(state, sick_steps=state.sick_steps + 1, healthy_steps=0)
            return self._sick(state, reading)
        if reading.severity > HEALTHY:
            return replace(state, healthy_steps=0), None
        state = replace(state, sick_steps=0, healthy_steps=state.healthy_steps + 1)
        return self._healthy(state)

    def patience(self, state: GuardState) -> int:
        """Healthy steps in a row required for the next relaxation: at least enough for tokens of the current limit to
        be trained."""
        return max(self.config.relax_steps, state.limit + 2) * 2**state.failed_trials

    def level(self, state: GuardState) -> int:
        """The index in `LEVELS`, of a run that continues."""
        return 2 if state.is_raised else int(state.limit < self.max_lag)

    def _severity(self, record: Mapping[str, float], names: Sequence[str], clipped: float) -> tuple[float, str]:
        """`names`: of effective samples, tails and KL in `record`."""
        config, (effective, tails, nats) = self.config, (record[name] for name in names)
        lost, allowed = 1 - effective, 1 - config.min_effective_samples
        signals = (
            (lost / allowed, f"effective samples {1 - lost:.2f} (at least {config.min_effective_samples:g})"),
            _over("tokens in the tails of the ratio", tails, config.max_ratio_tails),
            _over("KL", nats, config.max_kl_nats, " nats"),
            _over("clipped tokens", clipped, config.max_clip_fraction),
        )
        # NaN and infinity count as the worst severity.
        bounded = [(min(s, MAX_SEVERITY) if s == s else MAX_SEVERITY, words) for s, words in signals]
        severity, words = max(bounded, key=lambda signal: signal[0])
        return max(0.0, severity), words

    def _sick(self, state: GuardState, reading: GuardReading) -> tuple[GuardState, GuardDecision | None]:
        steps = "one step" if state.sick_steps == 1 else f"{state.sick_steps} steps"
        found = f"{reading.worst}, too far off-policy in {steps}"
        calm = replace(state, sick_steps=0, is_trial=False)
        # The responses escalate: lower the limit, then tighten the corrections, then stop.
        can_tighten, can_raise = state.limit > self.floor, self.can_raise and not state.is_raised
        if state.sick_steps < (self.config.trip_steps if can_tighten or can_raise else self.config.stop_steps):
            return state, None
        failed = state.failed_trials + state.is_trial
        if can_tighten:
            limit = self._tighter(state, reading)
            return replace(calm, limit=limit, failed_trials=failed), GuardDecision("tightened", limit, found)
        if can_raise:
            return replace(calm, is_raised=True, failed_trials=failed), GuardDecision("raised", state.limit, found)
        return calm, GuardDecision("stopped", state.limit, found)

    def _tighter(self, state: GuardState, reading: GuardReading) -> int:
        """The lowered limit."""
        if state.is_trial:
            return state.limit - 1  # undoes the trial
        limit = min(state.limit, reading.lag_max) // 2
        healthy = None
        for part in reading.by_lag:
            if part.severity >= 1:
                break
            healthy = part.last_lag
        if healthy is not None:
            limit = min(limit, healthy)
        return max(self.floor, limit)

    def _healthy(self, state: GuardState) -> tuple[GuardState, GuardDecision | None]:
        if state.healthy_steps < self.patience(state):
            return state, None
        reason = f"{state.healthy_steps} healthy steps in a row"
        trial = replace(state, healthy_steps=0, is_trial=True)
        if state.is_raised:
            return replace(trial, is_raised=False), GuardDecision("eased", state.limit, reason)
        if state.limit < self.max_lag:
            limit = state.limit + 1
            return replace(trial, limit=limit), GuardDecision("relaxed", limit, reason)
        return replace(trial, is_trial=False), None


def _over(name: str, value: float, allowed: float, unit: str = "") -> tuple[float, str]:
    return value / allowed, f"{name} {value:.2f}{unit} (at most {allowed:g})"


# The parity gate: whether replicas and trainer compute the same policy. The tokens of lag 0 were sampled with the
# weights that are trained, so over them both give the same log-probabilities up to rounding; docs/staleness.md has
# bounds and measurements. Updates of a step after its first measure a policy that has changed.


@dataclass(frozen=True, slots=True)
class Parity:
    """Bounds for the tokens of lag 0: of their divergence, and of the share of ratios outside [1/2, 2]."""

    nats: float
    tails: float

    @classmethod
    def of(cls, recipe: Recipe) -> Parity | None:
        """None: no parity is to be expected, as top_p and top_k change the sampled distribution alone."""
        rollout, trainer = recipe.rollout, recipe.trainer
        sampling = rollout.sampling
        if (sampling.top_p < 1 or sampling.top_k > 0) and not sampling.keep_sets:
            return None
        arguments = {**rollout.vllm.engine_args, **rollout.sglang.server_args}
        if rollout.vllm.quantization or any("quant" in name or "kv_cache" in name for name in arguments):
            return QUANTISED
        computed = {recipe.model.inference_dtype, getattr(trainer, trainer.backend).param_dtype}
        is_exact = computed == {"float32"} and recipe.batch.num_minibatches == recipe.batch.num_epochs == 1
        if is_exact:
            return cls(0.001, 0.001)
        return QUANTISED if rollout.engine == "remote" else cls(0.05, 0.05)  # how a server loads is its own affair

    def misfit(self, record: Mapping[str, float]) -> str | None:
        """What is out of bounds in a step's metrics; None: nothing, or no trained token has lag 0."""
        nats, tails = (record.get(family.of("0")) for family in (Metric.LAG_KL, Metric.LAG_TAILS))
        if nats is None or tails is None or (abs(nats) <= self.nats and tails <= self.tails):
            return None
        return (
            f"over the tokens of lag 0 their log-probabilities differ by {nats:.3g} nats a token (at most "
            f"{self.nats:g}), and {tails:.2%} of the ratios are outside [1/2, 2] (at most {self.tails:.1%})"
        )


QUANTISED = Parity(0.3, 0.2)
