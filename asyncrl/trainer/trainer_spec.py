"""The settings of a trainer rank, as plain values that can be sent to any process."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.model import ModelConfig
from asyncrl.config.trainer import TrainerConfig

if TYPE_CHECKING:
    from asyncrl.config.recipe import Recipe


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """`temperature`: of sampling. Logits are divided by it, because log-probabilities are compared with the replicas'
    (0, greedy, is trained at 1). `seed`: the run's. `total_steps`: length of the run, at which a falling learning rate
    ends unless `trainer.decay_steps` is set. `num_threads`: of each rank, on its node's cores. `sends_snapshots`:
    weights are sent from a copy while the rank trains. `shares_device`: an engine takes the memory of the device
    between the steps. `over_kept`: probabilities are normalised over the tokens that sampling kept. `is_alone`: no
    replica computes while a rank does. `max_model_len`: of the replicas, which decides rotary factors (`types.settle`).
    `start_timeout_s`: longest wait for the rank that reads a model. `is_native`: vLLM's own sender sends its weights.
    """

    model: ModelConfig
    trainer: TrainerConfig
    algorithm: AlgorithmConfig
    temperature: float = 1.0
    seed: int = 0
    total_steps: int = 1
    num_threads: int = 1
    sends_snapshots: bool = False
    shares_device: bool = False
    over_kept: bool = False
    is_alone: bool = False
    max_model_len: int | None = None
    start_timeout_s: float = 600.0
    is_native: bool = False

    @classmethod
    def of(cls, recipe: Recipe, *, num_threads: int = 1) -> TrainerSpec:
        return cls(
            model=recipe.model,
            trainer=recipe.trainer,
            algorithm=recipe.algorithm,
            temperature=recipe.rollout.sampling.temperature,
            seed=recipe.run.seed,
            total_steps=recipe.run.max_steps,
            num_threads=num_threads,
            sends_snapshots=recipe.sends_snapshots,
            shares_device=recipe.is_colocated,
            over_kept=recipe.rollout.sampling.keep_sets,
            is_alone=recipe.is_colocated or recipe.mode == "sync",
            max_model_len=recipe.rollout.max_model_len,
            start_timeout_s=recipe.ray.start_timeout_s,
            is_native=recipe.rollout.is_native,
        )

    def warn_of_another_length(self, then: int) -> None:
        """Logs a jump of the learning rate: it follows the length of the run, and the checkpoint's was `then`."""
        if self.trainer.schedule != "constant" and self.trainer.decay_steps is None and then != self.total_steps:
            logger.warning(
                "the learning rate jumps: it fell towards step %d, and now falls towards run.max_steps=%d; "
                "trainer.decay_steps=%d keeps its curve",
                then,
                self.total_steps,
                then,
            )

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a rank on a CPU, read when torch is loaded. A rank sets its number of threads itself. Waiting
        threads yield the cores to other processes; if the rank is alone they spin for a few microseconds first, which
        is less than waking a thread takes."""
        spins = {"GOMP_SPINCOUNT": "1000"} if self.is_alone else {}
        return {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **spins}
