"""Derives the lengths that a recipe leaves out from the limits of prompt and response: `with_lengths`. Pure."""

from __future__ import annotations

from dataclasses import replace

from asyncrl.config.rollout import RolloutConfig
from asyncrl.config.trainer import TrainerConfig

MICROBATCH_TOKENS = 8192
"""Default token budget of a micro-batch, unless a trajectory is longer."""
OVERLONG_SHARE = 5
"""The soft penalty begins this share of the longest response before its end, as DAPO's does (4096 of 20480)."""


def response_limit(rollout: RolloutConfig) -> int:
    """Tokens of the longest response of one trajectory: all turns, tool results and observations together. The limits
    of a custom environment are unknown here: for it this is the limit of one turn."""
    turn = rollout.sampling.max_response_tokens
    turns, shown = {
        "tool_use": (rollout.tool_use.max_turns, 0),
        "agent": (rollout.agent.max_turns, 0),
        "verifiers": (rollout.verifiers.max_turns, 0),
        "openenv": (rollout.openenv.max_turns, rollout.openenv.max_observation_tokens),
        "gymnasium": (rollout.gymnasium.max_turns, rollout.gymnasium.max_observation_tokens),
    }.get(rollout.environment, (0, 0))
    return rollout.tool_use.max_trajectory_tokens or (turn + shown) * turns if turns else turn


def with_lengths(
    rollout: RolloutConfig, trainer: TrainerConfig, max_prompt_tokens: int
) -> tuple[RolloutConfig, TrainerConfig]:
    """Both with `max_model_len` of the engine that is used and `max_tokens_per_microbatch`, as set or derived: the
    longest prompt and the longest response fit.

    Agents, custom environments and those of others write prompts of their own: the engine takes at least its default
    then, and a micro-batch whatever the engine takes.
    """
    longest = max_prompt_tokens + response_limit(rollout)
    writes_prompts = rollout.environment not in ("single_turn", "tool_use", "interleaved_tool_use")
    engine = rollout.settings
    if engine.max_model_len is None:
        length = max(longest, engine.context_tokens) if writes_prompts else longest
        rollout = replace(rollout, **{rollout.engine: replace(engine, max_model_len=length)})
    if trainer.max_tokens_per_microbatch is None:
        length = rollout.max_model_len if writes_prompts else min(longest, rollout.max_model_len)
        trainer = replace(trainer, max_tokens_per_microbatch=max(MICROBATCH_TOKENS, length))
    return rollout, trainer
