"""Asks the teacher of on-policy distillation for the log-probabilities of the tokens that the policy has sampled, and
of those that the teacher finds likeliest in their place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from asyncrl.rollout.generation import GenerationClient
from asyncrl.types import Trajectory


async def with_teacher(
    trajectory: Trajectory, teacher: GenerationClient, session_id: str, *, top_k: int = 0
) -> Trajectory:
    """The trajectory with `extra["teacher_logprobs"]`, [T] float32, of all its response tokens, those that the
    environment wrote included; with `top_k` above 0 also with `top_ids` and `top_logprobs`, [T, top_k] each. So have
    its branches. The same trajectory where it has them, as one that a checkpoint brought may.

    Args:
        session_id: trajectories of one session go to one replica of the teacher while it can take them.

    Raises GenerationError: the teacher did not answer in time, or refused.
    """
    if trajectory.branches:
        own, *branches = [
            await with_teacher(sequence, teacher, session_id, top_k=top_k)
            for sequence in (replace(trajectory, branches=()), *trajectory.branches)
        ]
        return replace(own, branches=tuple(branches))
    count, found = len(trajectory.response_ids), {"teacher_logprobs": np.zeros(0, np.float32)}
    shapes = {"teacher_logprobs": (count,)}
    if top_k:
        found |= {"top_ids": np.zeros((0, top_k), np.int32), "top_logprobs": np.zeros((0, top_k), np.float32)}
        shapes |= dict.fromkeys(("top_ids", "top_logprobs"), (count, top_k))
    if all(name in trajectory.extra and trajectory.extra[name].shape == shape for name, shape in shapes.items()):
        return trajectory
    if count:
        tokens = np.concatenate([trajectory.prompt_ids, trajectory.response_ids])
        scored = await teacher.score_top(tokens, len(trajectory.prompt_ids), top_k, session_id=session_id)
        found = {"teacher_logprobs": scored.logprobs, **scored.extra}
    return replace(trajectory, extra={**trajectory.extra, **found})
