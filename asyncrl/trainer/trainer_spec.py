"""The settings of a trainer rank, as plain values that can be sent to any process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.model import ModelConfig
from asyncrl.config.trainer import TrainerConfig

if TYPE_CHECKING:
    from asyncrl.config.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """`temperature`: of sampling. Logits are divided by it, because log-probabilities are compared with the replicas'
    (0, greedy, is trained at 1). `seed`: the run's. `total_steps`: length of the run, at which a falling learning rate
    ends unless `trainer.decay_steps` is set. `num_threads`: of each rank, on its node's cores. `sends_snapshots`:
    weights are sent from a copy while the rank trains. `shares_device`: an engine takes the memory of the device
    between the steps. `over_kept`: probabilities are normalised over the tokens that sampling kept. `is_alone`: no
    replica computes while a rank does.
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
        )

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a rank on a CPU, read when torch is loaded. A rank sets its number of threads itself. Waiting
        threads yield the cores to other processes; if the rank is alone they spin for a few microseconds first, which
        is less than waking a thread takes."""
        spins = {"GOMP_SPINCOUNT": "1000"} if self.is_alone else {}
        return {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **spins}
