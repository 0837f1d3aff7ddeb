"""Asks the teacher of on-policy distillation for the log-probabilities of the tokens that the policy has sampled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from asyncrl.rollout.generation import GenerationClient
from asyncrl.types import Trajectory


async def with_teacher(trajectory: Trajectory, teacher: GenerationClient, session_id: str) -> Trajectory:
    """The trajectory with `extra["teacher_logprobs"]`, [T] float32, of all its response tokens, those that the
    environment wrote included.

    Args:
        session_id: trajectories of one session go to one replica of the teacher while it can take them.

    Raises GenerationError: the teacher did not answer in time, or refused.
    """
    logprobs = np.zeros(0, np.float32)
    if len(trajectory.response_ids):
        tokens = np.concatenate([trajectory.prompt_ids, trajectory.response_ids])
        logprobs = await teacher.score(tokens, len(trajectory.prompt_ids), session_id=session_id)
    return replace(trajectory, extra={**trajectory.extra, "teacher_logprobs": logprobs})
