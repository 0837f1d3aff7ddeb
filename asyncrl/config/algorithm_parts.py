"""The advantages, losses and corrections that a recipe can name, each with its properties.

A new part needs an implementation in `asyncrl/algorithms` and an entry here. The recipe's choices, its checks, the
planner and the training step read these entries; no other module lists names. An entry names its implementation as
`package.module:Name`, which is imported when it is built, so that reading an entry imports neither torch nor numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSpec:
    of_group: str
    """`Advantage`: computes the advantages of one group from its rewards, in the planner."""
    of_tokens: str | None = None
    """`TokenAdvantage`: computes the advantage of each token, in the trainer. None: tokens have their trajectory's."""
    is_relative: bool = True
    """Compares the trajectories of a group: a single trajectory, or equal rewards, teach nothing."""
    needs_critic: bool = False
    needs_teacher: bool = False
    """The advantage is 0: only algorithm.distillation teaches."""
    whitens: bool = False
    """With algorithm.gae.whiten it is shifted and scaled by mean and spread over the tokens of an update."""
    takes_negative: bool = True
    """Is defined for negative rewards."""
    has_group_std: bool = False
    """Divides by the standard deviation of the group, or with `sample=True` by that of a sample."""

    @property
    def scope(self) -> Literal["group", "token"]:
        """token: the trainer computes it, and subtracts a divergence in the reward from each token. group: the planner
        computes it, from the rewards alone."""
        return "group" if self.of_tokens is None else "token"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    of: str
    """Class of the `Loss`, whose `of` builds it from the algorithm's section."""
    scope: Literal["token", "trajectory"] = "token"
    """The unit that has a ratio, which clip_low and clip_high bound."""
    takes_proximal: bool = True
    """Is defined with algorithm.ratio=proximal."""
    has_dual_clip: bool = False
    """Reads algorithm.dual_clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSpec:
    of: str
    """Class of the `Correction`, whose `of` builds it from its own section and the algorithm's."""
    high: float
    """Default of the upper bound."""
    low: float = 0.0
    """Default of the lower bound. 0: it has no lower bound."""
    measure: str | None = None
    """The quantity that `high` bounds, for messages; None: a ratio, which is 1 where the policies agree."""
    usual: str = ""
    """Usual values of `high`, for messages about a `measure`."""
    scope: Literal["token", "trajectory"] = "token"
    """The unit that gets one factor."""
    weighs: bool = False
    """Weighs the kept tokens by the ratio, with algorithm.ratio=proximal."""
    drops: bool = True
    """Drops tokens or trajectories beyond its bounds."""
    is_fitted: bool = False
    """A `FittedCorrection`: it is fitted over all tokens of an update before the update begins."""


ADVANTAGES = {
    "grpo": AdvantageSpec(of_group="asyncrl.algorithms.grpo:grpo_advantages", has_group_std=True),
    "dr_grpo": AdvantageSpec(of_group="asyncrl.algorithms.group_rewards:centred"),
    "rloo": AdvantageSpec(of_group="asyncrl.algorithms.group_rewards:rloo_advantages"),
    "maxrl": AdvantageSpec(of_group="asyncrl.algorithms.maxrl:maxrl_advantages", takes_negative=False),
    "reinforce_plus_plus": AdvantageSpec(
        of_group="asyncrl.algorithms.group_rewards:checked",
        of_tokens="asyncrl.algorithms.returns:return_advantages",
        is_relative=False,
        whitens=True,
    ),
    "reinforce_plus_plus_baseline": AdvantageSpec(of_group="asyncrl.algorithms.group_rewards:centred", whitens=True),
    "teacher_only": AdvantageSpec(
        of_group="asyncrl.algorithms.group_rewards:zero_advantages", is_relative=False, needs_teacher=True
    ),
    "gae": AdvantageSpec(
        of_group="asyncrl.algorithms.group_rewards:checked",
        of_tokens="asyncrl.algorithms.gae:critic_advantages",
        is_relative=False,
        needs_critic=True,
        whitens=True,
    ),
}
LOSSES = {
    "clipped_surrogate": LossSpec(of="asyncrl.algorithms.clipped_surrogate:ClippedSurrogate", has_dual_clip=True),
    "gspo": LossSpec(of="asyncrl.algorithms.gspo:Gspo", scope="trajectory"),
    "cispo": LossSpec(of="asyncrl.algorithms.cispo:Cispo"),
    "sapo": LossSpec(of="asyncrl.algorithms.sapo:Sapo"),
    "dppo": LossSpec(of="asyncrl.algorithms.dppo:Dppo", takes_proximal=False),
}
CORRECTIONS = {
    "truncated_is": CorrectionSpec(
        of="asyncrl.algorithms.truncated_is:TruncatedIs", high=2.0, weighs=True, drops=False
    ),
    "sequence_truncated_is": CorrectionSpec(
        of="asyncrl.algorithms.truncated_is:SequenceTruncatedIs",
        high=2.0,
        scope="trajectory",
        weighs=True,
        drops=False,
    ),
    "masked_is": CorrectionSpec(of="asyncrl.algorithms.masking:MaskedIs", high=2.0, weighs=True),
    "icepop": CorrectionSpec(of="asyncrl.algorithms.masking:IcePop", low=0.5, high=5.0, weighs=True),
    "geometric_rejection": CorrectionSpec(
        of="asyncrl.algorithms.masking:GeometricRejection", low=0.99, high=1.01, scope="trajectory"
    ),
    "off_policy_mask": CorrectionSpec(
        of="asyncrl.algorithms.masking:OffPolicyMask",
        high=0.5,
        measure="a divergence in nats per token",
        usual="0.1 to 0.5",
        scope="trajectory",
    ),
    "m2po": CorrectionSpec(
        of="asyncrl.algorithms.m2po:M2po",
        high=0.04,
        measure="a second moment in squared nats",
        usual="0.04",
        is_fitted=True,
    ),
}
