"""What a recipe can name as loss and correction, and the objective that it composes. Imports torch."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.algorithms.batch_normalized import BatchNormalized
from asyncrl.algorithms.cispo import Cispo
from asyncrl.algorithms.clipped_surrogate import ClippedSurrogate
from asyncrl.algorithms.dppo import Dppo
from asyncrl.algorithms.geometric_rejection import GeometricRejection
from asyncrl.algorithms.gspo import Gspo
from asyncrl.algorithms.icepop import IcePop
from asyncrl.algorithms.loss import Correction, Loss
from asyncrl.algorithms.m2po import M2po
from asyncrl.algorithms.masked_is import MaskedIs
from asyncrl.algorithms.objective import Objective
from asyncrl.algorithms.off_policy_mask import OffPolicyMask
from asyncrl.algorithms.sapo import Sapo
from asyncrl.algorithms.sequence_truncated_is import SequenceTruncatedIs
from asyncrl.algorithms.truncated_is import TruncatedIs
from asyncrl.config.algorithm import AlgorithmConfig, CorrectionConfig
from asyncrl.registry import resolve

LOSSES: dict[str, Callable[[AlgorithmConfig], Loss]] = {
    "clipped_surrogate": ClippedSurrogate.of,
    "gspo": Gspo.of,
    "cispo": Cispo.of,
    "sapo": Sapo.of,
    "dppo": Dppo.of,
}
CORRECTIONS: dict[str, Callable[[CorrectionConfig, AlgorithmConfig], Correction]] = {
    "truncated_is": TruncatedIs.of,
    "sequence_truncated_is": SequenceTruncatedIs.of,
    "masked_is": MaskedIs.of,
    "icepop": IcePop.of,
    "geometric_rejection": GeometricRejection.of,
    "off_policy_mask": OffPolicyMask.of,
    "m2po": M2po.of,
}


def build_objective(config: AlgorithmConfig) -> Objective:
    """What `config` composes. Raises ConfigError: a name that is not known."""
    loss = resolve("algorithm.loss", config.loss, LOSSES)(config)
    return Objective(loss, tuple((c.name, build_correction(c, config)) for c in config.corrections), config)


def build_correction(correction: CorrectionConfig, config: AlgorithmConfig) -> Correction:
    """Raises ConfigError: a name that is not known."""
    built = resolve("algorithm.corrections", correction.name, CORRECTIONS)(correction, config)
    return BatchNormalized(correction.name, built) if correction.normalize else built
