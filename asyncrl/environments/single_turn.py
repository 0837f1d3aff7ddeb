"""One prompt, one response, one reward."""

from __future__ import annotations

import time

import numpy as np

from asyncrl.environments.environment import Session, Task
from asyncrl.types import Trajectory


class SingleTurn:
    async def run(self, task: Task, session: Session) -> Trajectory:
        started_s = time.time()
        generation = await session.generate(task.prompt_ids)
        result = await session.reward(generation.token_ids, task.row)
        return Trajectory(
            prompt_ids=task.prompt_ids,
            response_ids=generation.token_ids,
            logprobs=generation.logprobs,
            loss_mask=np.ones(len(generation.token_ids), np.bool_),
            segments=generation.segments,
            reward=result.reward,
            reward_parts=result.parts,
            finish_reason=generation.finish_reason,
            started_s=started_s,
            finished_s=time.time(),
            extra=generation.extra,
        )
