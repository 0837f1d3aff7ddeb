from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from asyncrl.config.checks import require

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Layout:
    """Which of `num_ranks` trainer ranks train the same micro-batches: those with the same data-parallel index, that is
    the tensor-, context- and pipeline-parallel parts of one copy of the model.

    Ranks are in Megatron's order: tensor-parallel ones beside each other, then context, data and pipeline.
    """

    num_ranks: int
    tensor: int = 1
    context: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        copy = self.tensor * self.context * self.pipeline
        require(
            min(self.tensor, self.context, self.pipeline) >= 1 and self.num_ranks % copy == 0,
            asked=f"trainer.num_ranks={self.num_ranks}",
            found=f"a copy of the model takes {copy} ranks: tensor {self.tensor} x context {self.context} x pipeline "
            f"{self.pipeline}",
            do=f"set trainer.num_ranks to a multiple of {copy}",
        )

    @property
    def num_plans(self) -> int:
        """Data-parallel size: the number of plans per step."""
        return self.num_ranks // (self.tensor * self.context * self.pipeline)

    def plan_of(self, rank: int) -> int:
        """The rank's data-parallel index."""
        return rank // (self.tensor * self.context) % self.num_plans

    def by_rank(self, plans: Sequence[T]) -> list[T]:
        """The plan of each rank. Raises ValueError: the number of plans is not `num_plans`."""
        if len(plans) != self.num_plans:
            raise ValueError(f"{len(plans)} plans for {self.num_plans} data-parallel indices of trainer ranks")
        return [plans[self.plan_of(rank)] for rank in range(self.num_ranks)]
