"""How long a trajectory of several turns may become."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.lengths import response_limit
from asyncrl.config.recipe import Recipe


@dataclass(frozen=True, slots=True)
class TrajectoryLimits:
    """`total_tokens`: of prompt and response together, as the replicas and the trainer take them. `response_tokens`: of
    all turns and tool results together. `turn_tokens`: of one turn of the policy."""

    total_tokens: int
    response_tokens: int
    turn_tokens: int

    def room(self, prompt_tokens: int, response_tokens: int) -> int:
        """Tokens that may still come; 0 or less: none."""
        return min(self.response_tokens, self.total_tokens - prompt_tokens) - response_tokens


def limits_of(recipe: Recipe) -> TrajectoryLimits:
    total = min(recipe.rollout.max_model_len, recipe.max_tokens_per_microbatch)
    return TrajectoryLimits(total, response_limit(recipe.rollout), recipe.rollout.sampling.max_response_tokens)
