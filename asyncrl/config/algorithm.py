from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge

from asyncrl.config.algorithm_parts import ADVANTAGES, CORRECTIONS, LOSSES
from asyncrl.config.checks import section
from asyncrl.errors import ConfigError, explain
from asyncrl.ranges import NonNegative, NonNegativeInt, Positive, PositiveInt, Share

if TYPE_CHECKING:
    AdvantageName = LossName = CorrectionName = str
else:
    AdvantageName, LossName, CorrectionName = (Literal[tuple(known)] for known in (ADVANTAGES, LOSSES, CORRECTIONS))


@section("algorithm.gae.")
class GaeConfig:
    gamma: Share = 1.0
    """Discount per token; also of advantage reinforce_plus_plus."""
    lam: Share = 1.0
    """1 takes the whole return, 0 one step of the critic."""
    whiten: bool = True
    """Shift and scale advantages to mean 0 and spread 1 over all tokens of an update."""


@section("algorithm.critic.")
class CriticConfig:
    path: str | None = None
    """Directory or hub name of the model that the critic starts from, which must have the policy's vocabulary; its
    value head is new. None takes model.path."""
    lr: Positive = 1e-5
    """Peak learning rate of the critic, which follows the trainer's schedule."""
    warmup_steps: NonNegativeInt = 0
    """Steps at the start that train the critic only; the policy's learning rate warms up after them."""
    clip: NonNegative = 0.2
    """Values move at most this far from those before the update; 0: no limit."""
    max_grad_norm: NonNegative = 1.0
    """Gradients of the critic are scaled down to this global norm; 0 switches clipping off."""


@section("algorithm.distillation.")
class DistillationConfig:
    coefficient: NonNegative = 0.0
    """Weight of the reverse KL to the teacher (section `teacher` of the recipe); 1 is usual, 0: no distillation. With
    algorithm.advantage=teacher_only nothing but the teacher teaches."""
    top_k: NonNegativeInt = 0
    """0: the divergence is estimated from the sampled token, in its advantage. Above 0: it is computed over the
    teacher's top_k likeliest tokens and all others as one, as a term of the loss; 32 to 128 is usual."""

    def __post_init__(self) -> None:
        if self.top_k != 0 and self.coefficient <= 0:
            asked = f"algorithm.distillation.top_k={self.top_k} with algorithm.distillation.coefficient=0"
            do = "set algorithm.distillation.coefficient=1, or leave top_k out"
            raise ConfigError(explain(asked, "there is no divergence to compute", do))

    @property
    def token_arrays(self) -> tuple[str, ...]:
        """The arrays of `Trajectory.extra` that it needs."""
        return ("teacher_logprobs",) * (self.coefficient > 0) + ("top_ids", "top_logprobs") * (self.top_k > 0)


@section("algorithm.sapo.")
class SapoConfig:
    temperature_positive: Positive = 1.0
    """How fast the soft gate closes for tokens with positive advantage."""
    temperature_negative: Positive = 1.05
    """The same for negative advantage."""


@section("algorithm.dppo.")
class DppoConfig:
    divergence: Literal["tv", "kl"] = "tv"
    """Divergence between the policy and the one that sampled, over two outcomes: the sampled token, or any other. tv:
    difference of the probabilities. kl: Kullback-Leibler, nats."""
    low: NonNegative | None = None
    """A token of negative advantage whose probability has fallen is not trained beyond this divergence. None: 0.15 for
    tv, 0.05 for kl."""
    high: NonNegative | None = None
    """The same for positive advantage and a probability that has risen. None: as for low."""
    max_ratio: Annotated[float, Ge(1)] = 20.0
    """The weight of a token is at most this."""

    @property
    def bounds(self) -> tuple[float, float]:
        """(low, high), set or the paper's values."""
        usual = 0.15 if self.divergence == "tv" else 0.05
        return (usual if self.low is None else self.low), (usual if self.high is None else self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionConfig:
    name: CorrectionName = "truncated_is"
    """truncated_is, sequence_truncated_is: weight min(ratio, high) per token or trajectory. masked_is: tokens with a
    ratio over high are dropped; icepop: those outside [low, high]; with ratio=proximal both weigh the rest by it.
    geometric_rejection: trajectories whose geometric mean ratio lies outside [low, high]. off_policy_mask: trajectories
    of negative advantage are dropped when their mean log-ratio exceeds high nats per token. m2po: drops the tokens with
    the largest squared log-ratios, until the mean of the rest is at most high."""
    low: float | None = None
    """Lower bound of the ratio; only icepop (None: 0.5) and geometric_rejection (0.99) have one."""
    high: float | None = None
    """Upper bound. None: 5 for icepop, 1.01 for geometric_rejection, 0.5 nats for off_policy_mask, 0.04 squared nats
    for m2po, else 2."""
    normalize: bool = False
    """For corrections that weigh by the ratio, with ratio=proximal: weights are divided by their mean over the update
    (with sequence_truncated_is over its trajectories). Costs a forward pass before the update."""

    def __post_init__(self) -> None:
        spec, (low, high) = CORRECTIONS[self.name], self.bounds
        asked = f"algorithm.corrections: {self.name} with low={low:g} and high={high:g}"
        if low != 0 and spec.low <= 0:
            raise ConfigError(explain(asked, "it has no lower bound", "leave low out"))
        if self.normalize and not spec.weighs:
            found = "it only drops tokens: there are no weights to normalise"
            do = f"leave normalize out, or use one of {_those(CORRECTIONS, 'weighs')}"
            raise ConfigError(explain(f"{asked} and normalize=true", found, do))
        if spec.measure is not None:
            if not (math.isfinite(high) and high > 0):
                do = f"set high above 0 ({spec.usual} is usual)"
                raise ConfigError(explain(asked, f"high is {spec.measure}", do))
            return
        if not (0 <= low <= 1 <= high < math.inf and low < high):
            found = "the ratio is 1 where the policies agree: such bounds would touch what is right"
            raise ConfigError(explain(asked, found, "set low and high so that low <= 1 <= high"))

    @property
    def bounds(self) -> tuple[float, float]:
        """(low, high), set or the usual values."""
        spec = CORRECTIONS[self.name]
        return (spec.low if self.low is None else self.low), (spec.high if self.high is None else self.high)

    def closer(self, share: float) -> CorrectionConfig:
        """The correction with the distance of its bounds from the neutral point (ratio 1, divergence 0) times
        `share`."""
        low, high = self.bounds
        if CORRECTIONS[self.name].measure is not None:
            return replace(self, high=high * share)
        return replace(self, low=1 - (1 - low) * share if low > 0 else None, high=1 + (high - 1) * share)

    @property
    def is_fitted(self) -> bool:
        """True if the correction is fitted over the whole update before it begins."""
        return self.normalize or CORRECTIONS[self.name].is_fitted


@section("algorithm.kl.")
class KlConfig:
    coefficient: NonNegative = 0.0
    """Weight of the divergence from the reference model; 0 loads no reference."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence from one sample per token. With place=loss, k1 needs importance_weighted: without it
    the gradient is 0 on average."""
    place: Literal["loss", "reward"] = "loss"
    """loss: a term of the loss, with gradient. reward: taken from the reward before advantages."""
    importance_weighted: bool = False
    """With place=loss: multiply the estimate by the ratio of the policy to the sampling policy, so that its gradient is
    the divergence's also for lagging tokens (DeepSeek-V3.2)."""
    path: str | None = None
    """Directory or hub name of the reference model, which must have the policy's vocabulary; None takes model.path."""

    def __post_init__(self) -> None:
        if self.coefficient <= 0 and self.path is not None:
            found = "no reference model is loaded"
            do = "set algorithm.kl.coefficient above 0, or leave the path out"
            raise ConfigError(explain(f"algorithm.kl.path={self.path} with algorithm.kl.coefficient=0", found, do))
        if self.coefficient != 0 and self.place != "reward" and self.estimator == "k1" and not self.importance_weighted:
            found = "its gradient is 0 on average: it holds the policy to nothing"
            do = (
                "set algorithm.kl.estimator to k2 or k3, algorithm.kl.place=reward, or "
                "algorithm.kl.importance_weighted=true"
            )
            raise ConfigError(explain("algorithm.kl.estimator=k1 with algorithm.kl.place=loss", found, do))
        if self.importance_weighted and (self.coefficient <= 0 or self.place != "loss"):
            asked = (
                f"algorithm.kl.importance_weighted=true with algorithm.kl.coefficient={self.coefficient:g} and "
                f"algorithm.kl.place={self.place}"
            )
            do = "set algorithm.kl.coefficient above 0 and algorithm.kl.place=loss, or importance_weighted=false"
            raise ConfigError(explain(asked, "there is no divergence in the loss that could be weighted", do))
        if self.importance_weighted and self.estimator == "k2":
            asked = "algorithm.kl.importance_weighted=true with algorithm.kl.estimator=k2"
            found = "its mean is not the divergence: weighted, its gradient is that of something else"
            raise ConfigError(explain(asked, found, "set algorithm.kl.estimator=k3 (or k1)"))


@section("algorithm.overlong.")
class OverlongConfig:
    mask_truncated: bool = False
    """Trajectories that were cut off at their token limit count in the group's rewards but are not trained."""
    buffer_tokens: NonNegativeInt | None = 0
    """Soft penalty: it rises from 0 to `penalty` over the last buffer_tokens tokens before the longest response that a
    trajectory may have (turns and tool results together; a custom environment: rollout.sampling.max_response_tokens);
    0 switches it off, None takes a fifth of that longest response, as DAPO does."""
    penalty: NonNegative = 0.5
    """Reward that a response of full length loses. DAPO takes half the difference between the rewards of a right and a
    wrong response: 0.5 where these are 1 and 0, 1 where they are 1 and -1."""


@section("algorithm.")
class AlgorithmConfig:
    preset: str | None = None
    """Name of a file in configs/algorithms (dapo, grpo, dr_grpo, gspo, cispo, ppo, ...); keys that the recipe sets
    override it."""
    advantage: AdvantageName = "grpo"
    """grpo: reward minus the group's mean over its spread. dr_grpo: without the spread. rloo: minus the mean of the
    others. maxrl: over the group's mean. reinforce_plus_plus: discounted return, whitened over the batch;
    _baseline: minus the group's mean first. gae: with a critic. teacher_only: 0, for distillation alone."""
    group_std: Literal["population", "sample"] = "population"
    """The standard deviation by which advantage grpo divides. population: divides the squared deviations by G. sample:
    by G - 1, as TRL, verl and others do; every advantage is sqrt((G - 1) / G) times as large."""
    loss: LossName = "clipped_surrogate"
    """clipped_surrogate: PPO's, per token. gspo: the same per trajectory. cispo: clipped weights, every token keeps a
    gradient. sapo: a soft gate instead of a bound. dppo: bounds the divergence instead of the ratio."""
    clip_low: Share = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: NonNegative = 0.28
    """The ratio is clipped above at 1 + clip_high. Loss gspo needs values around 1e-4 for both bounds, and is refused
    with the two defaults."""
    dual_clip: float = 0.0
    """clipped_surrogate: with negative advantage a token's loss is at most this times the advantage; 0: no bound."""
    sapo: SapoConfig = field(default_factory=SapoConfig)
    """Settings of loss sapo."""
    dppo: DppoConfig = field(default_factory=DppoConfig)
    """Settings of loss dppo."""
    ratio: Literal["behavior", "proximal"] = "behavior"
    """Denominator of the ratio in the loss. behavior: the probability that the replica reported. proximal: that of the
    trainer's policy before the update (decoupled PPO); corrections then weigh proximal against behavior."""
    proximal: Literal["recompute", "log_linear"] = "recompute"
    """With ratio=proximal, how the proximal policy is computed. recompute: a forward pass before the update.
    log_linear: interpolated between behavior and policy by the token's lag, without a pass."""
    corrections: list[CorrectionConfig] = field(default_factory=list)
    """Corrections for lag and for the mismatch of engine and trainer; applied in order."""
    aggregation: Literal["token_mean", "sequence_mean", "fixed"] = "token_mean"
    """token_mean: every trained token of the update has the same weight. sequence_mean: every trajectory has the same
    weight. fixed: the sum over tokens is divided by the number of trajectories of the update times fixed_tokens."""
    fixed_tokens: PositiveInt | None = None
    """The divisor of aggregation fixed; None takes the longest response that a trajectory may have (as for
    overlong.buffer_tokens)."""
    kl: KlConfig = field(default_factory=KlConfig)
    """Divergence from a reference model."""
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    """On-policy distillation from a teacher."""
    entropy_coefficient: NonNegative = 0.0
    """Weight of the entropy bonus."""
    router_aux_coefficient: NonNegative = 0.0
    """Mixtures of experts: weight of the load-balancing loss over all tokens of an update. 0: no such loss, whatever
    router_aux_loss_coef of the model's config says (Qwen3-30B-A3B: 0.001). Costs a forward pass."""
    gae: GaeConfig = field(default_factory=GaeConfig)
    """Settings of advantages gae and reinforce_plus_plus."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The value model of advantage gae."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    """Treatment of responses that are too long."""
    dynamic_sampling: bool = False
    """Groups with equal rewards end `filtered`; the next prompt takes their slot."""
    max_filtered_fraction: Share = 0.99
    """With dynamic_sampling: largest share of `filtered` groups among the last filtered_window ended groups. Above it
    the run stops: its data has nothing left to learn. 1 never stops it."""
    filtered_window: PositiveInt = 256
    """Number of last ended groups over which the fraction is computed."""

    def __post_init__(self) -> None:
        advantage = ADVANTAGES[self.advantage]
        if self.group_std != "population" and not advantage.has_group_std:
            asked = f"algorithm.group_std={self.group_std} with algorithm.advantage={self.advantage}"
            do = "set algorithm.advantage=grpo, or leave algorithm.group_std out"
            raise ConfigError(explain(asked, f"only advantage {_those(ADVANTAGES, 'has_group_std')} divides by it", do))
        if self.dual_clip != 0 and self.dual_clip <= 1:
            found = "a bound of 1 or less would cut the loss at ratio 1"
            do = "set algorithm.dual_clip above 1 (3 is usual), or 0 for none"
            raise ConfigError(explain(f"algorithm.dual_clip={self.dual_clip}", found, do))
        if self.fixed_tokens is not None and self.aggregation != "fixed":
            asked = f"algorithm.fixed_tokens={self.fixed_tokens} with algorithm.aggregation={self.aggregation}"
            do = "set algorithm.aggregation=fixed, or leave algorithm.fixed_tokens out"
            raise ConfigError(explain(asked, "only aggregation fixed reads it", do))
        # a preset may have named the place: its coefficient can still be set to 0
        if self.kl.coefficient <= 0 and self.kl.place != "loss" and self.preset is None:
            found = "nothing is taken from the reward"
            do = "set algorithm.kl.coefficient above 0, or leave the place out"
            raise ConfigError(explain("algorithm.kl.place=reward with algorithm.kl.coefficient=0", found, do))
        if self.dual_clip != 0 and not LOSSES[self.loss].has_dual_clip:
            asked = f"algorithm.dual_clip={self.dual_clip} with algorithm.loss={self.loss}"
            do = "set algorithm.dual_clip=0"
            raise ConfigError(explain(asked, f"only {_those(LOSSES, 'has_dual_clip')} has that bound", do))
        negative = self.overlong.buffer_tokens != 0 or (self.kl.coefficient > 0 and self.kl.place == "reward")
        if not advantage.takes_negative and negative:
            found = f"rewards may become negative, and {self.advantage} has no meaning for those"
            do = "set algorithm.overlong.buffer_tokens=0 and algorithm.kl.place=loss"
            raise ConfigError(explain(f"algorithm.advantage={self.advantage} with a penalty in the reward", found, do))
        if self.dynamic_sampling and self.distillation.coefficient:
            asked = "algorithm.dynamic_sampling=true with algorithm.distillation.coefficient above 0"
            found = "groups of equal rewards would be filtered, and the teacher has something to say about them too"
            raise ConfigError(explain(asked, found, "set algorithm.dynamic_sampling=false"))
        if advantage.needs_teacher and self.distillation.coefficient <= 0:
            asked = f"algorithm.advantage={self.advantage} with algorithm.distillation.coefficient=0"
            do = "set algorithm.distillation.coefficient=1 and teacher.path, or another advantage"
            raise ConfigError(explain(asked, "nothing would be learned", do))
        self._check_ratio()

    def _check_ratio(self) -> None:
        """Checks that the settings define the importance ratio exactly once."""
        if self.proximal != "recompute" and self.ratio != "proximal":
            asked = f"algorithm.proximal={self.proximal} with algorithm.ratio={self.ratio}"
            raise ConfigError(explain(asked, "there is no proximal policy", "set algorithm.ratio=proximal"))
        if not LOSSES[self.loss].takes_proximal and self.ratio != "behavior":
            found = "its trust region is around the policy that sampled: around another it does not bound the mismatch"
            do = "set algorithm.ratio=behavior, or algorithm.loss=clipped_surrogate"
            raise ConfigError(explain(f"algorithm.loss={self.loss} with algorithm.ratio=proximal", found, do))
        names = [c.name for c in self.corrections]
        normalized = [c.name for c in self.corrections if c.normalize]
        if normalized and self.ratio != "proximal":
            asked = f"normalize=true of algorithm.corrections={normalized} with algorithm.ratio=behavior"
            do = "set algorithm.ratio=proximal, or leave normalize out"
            raise ConfigError(explain(asked, "corrections weigh nothing there", do))
        fitted = [c.name for c in self.corrections if c.is_fitted]
        if fitted and self.proximal != "recompute":
            asked = f"algorithm.corrections={fitted} over the whole update with algorithm.proximal=log_linear"
            found = "they need the forward pass before the update that log_linear is to save"
            do = "set algorithm.proximal=recompute, or leave them (or their normalize) out"
            raise ConfigError(explain(asked, found, do))
        # With ratio=proximal one correction may weigh by the ratio; with ratio=behavior none, the ratio is in the loss.
        weighers = [name for name in names if CORRECTIONS[name].weighs]
        if self.ratio != "behavior" and len(weighers) > 1:
            found = "each of them weighs by the ratio: it would count twice"
            do = "name one of them"
            raise ConfigError(explain(f"algorithm.corrections={weighers} with algorithm.ratio=proximal", found, do))
        weighing = [name for name in weighers if not CORRECTIONS[name].drops]
        if self.ratio != "proximal" and weighing:
            found = "the ratio to the behaviour policy corrects for the mismatch already: it would count twice"
            do = "set algorithm.ratio=proximal, or use corrections that drop tokens (masked_is, icepop, ...)"
            raise ConfigError(explain(f"algorithm.corrections={weighing} with algorithm.ratio=behavior", found, do))
        if len(set(names)) < len(names):
            found = "a correction stands there twice"
            raise ConfigError(explain(f"algorithm.corrections={names}", found, "name each once"))

    def closer(self, share: float) -> AlgorithmConfig:
        """The algorithm with closer bounds of its corrections; see `CorrectionConfig.closer`."""
        return replace(self, corrections=[correction.closer(share) for correction in self.corrections])

    @property
    def needs_critic(self) -> bool:
        return ADVANTAGES[self.advantage].needs_critic

    @property
    def needs_reference(self) -> bool:
        return self.kl.coefficient > 0

    @property
    def learns_by_advantage(self) -> bool:
        """True if a trajectory whose advantage is 0 has gradient 0: no other term is minimised, and no advantage is
        computed or shifted in the trainer."""
        spec = ADVANTAGES[self.advantage]
        is_shifted = spec.scope == "token" or spec.needs_teacher or (spec.whitens and self.gae.whiten)
        by_loss = self.kl.coefficient > 0 and self.kl.place == "loss"
        others = self.distillation.coefficient or self.entropy_coefficient or self.router_aux_coefficient
        return not (is_shifted or by_loss or others)


def _those(known: Mapping[str, object], what: str) -> str:
    """The names of the parts whose property `what` is true."""
    return ", ".join(name for name, spec in known.items() if getattr(spec, what))
