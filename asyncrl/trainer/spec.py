"""What a trainer rank is built from; plain values, so that it can be sent to any process."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.model import ModelConfig
from asyncrl.config.trainer import TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """`temperature` is that of sampling: log-probabilities are compared with what the replicas reported, so logits are
    divided by it (0, greedy, is trained at 1). `seed` is the run's.
    """

    model: ModelConfig
    trainer: TrainerConfig
    algorithm: AlgorithmConfig
    temperature: float = 1.0
    seed: int = 0
