"""Makes trajectories and groups: the environment (user code) makes each trajectory; scorers and the teacher add to
it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from asyncrl.config.hidden import Hidden
from asyncrl.config.recipe import Recipe, trains_branches
from asyncrl.data.rows import PromptRow
from asyncrl.data.tokenizer import PromptRenderer, load_tokenizer, stop_texts, stop_token_ids
from asyncrl.data.training_set import text_within
from asyncrl.environments import Chat, Environment, Managed, Task, build_environment, prompt_tools
from asyncrl.errors import explain
from asyncrl.remote.tasks import concurrently
from asyncrl.rewards import RewardResult
from asyncrl.rewards.reward_pool import RewardPool
from asyncrl.rewards.scorers import Scorers
from asyncrl.rollout.active_clock import ActiveClock
from asyncrl.rollout.generation import GenerationClient
from asyncrl.rollout.judge import Judge
from asyncrl.rollout.replica_time import ReplicaWatch
from asyncrl.rollout.sessions import RolloutSession, RunningGroup, SessionTools
from asyncrl.rollout.user_code import UserCode
from asyncrl.types import SamplingParams, Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SHOWN_IDS, _SHOWN_CHARS = 16, 600
CLOSE_WAIT_S = 5.0
"""Longest time that the `close` of an environment may take."""


class GroupMaker:
    """Owns the environment, the reward processes and the running user code. Does not own the generation clients."""

    def __init__(
        self,
        recipe: Recipe,
        client: GenerationClient,
        pools: Mapping[str, GenerationClient],
        watch: ReplicaWatch,
        hide: Hidden,
        *,
        shows: bool = False,
    ) -> None:
        """
        Args:
            pools: clients of the pools of other models, by section of the recipe.
            hide: for what is logged.
            shows: logs the first response.
            watch: told while a trajectory, or a reward of a group, is in progress.
        """
        self._recipe = recipe
        self._client = client
        self._pools = pools
        self._watch, self._hide = watch, hide
        self._has_shown = not shows
        self._rewards = RewardPool(recipe.reward, start_timeout_s=recipe.ray.start_timeout_s)
        self._additions: list[Callable[[Trajectory, str], Awaitable[Trajectory]]] = []
        """Scorers and teachers: (trajectory, session id of its group) -> the trajectory with additions."""
        self.sampling: SamplingParams
        self.tools: SessionTools
        self._renderer: PromptRenderer
        self._environment: Environment
        self._scorers: Scorers
        self._user_code: UserCode

    async def start(self) -> None:
        """Loads the tokenizer, starts the reward processes and the environment. Raises ConfigError."""
        recipe, rollout = self._recipe, self._recipe.rollout
        tokenizer = load_tokenizer(recipe.model)
        self.sampling = SamplingParams(
            temperature=rollout.sampling.temperature,
            top_p=rollout.sampling.top_p,
            top_k=rollout.sampling.top_k,
            max_tokens=rollout.sampling.max_response_tokens,
            stop_token_ids=stop_token_ids(tokenizer, recipe.model, rollout.stop),
            experts=recipe.trainer.router_replay == "rollout",
            kept=rollout.sampling.keep_sets,
        )
        parser, skips = rollout.tool_use.parser, recipe.reward.skip_special_tokens
        chat = Chat(tokenizer, recipe.model, parser, skip_special_tokens=skips)
        tools = await asyncio.to_thread(prompt_tools, recipe, tokenizer)  # blocks on MCP servers
        # The rewards decode with the chat's tokenizer, and `start` of the environment is user code under a deadline.
        continues = recipe.data.continue_final_message
        self._renderer = renderer = PromptRenderer(tokenizer, recipe.model, tools, parser=parser, continues=continues)
        self._environment = build_environment(recipe, chat)
        self._rewards.decode_with(chat.plain_decoder, chat.ends, renderer.template.thinking)
        await self._rewards.start()
        self._user_code = UserCode()
        if isinstance(self._environment, Managed):
            await self._of_environment("its start", self._environment.start, recipe.ray.start_timeout_s)
        self._add_scorers(chat)
        self.tools = SessionTools(
            self._client,
            chat,
            self._score,
            stop_texts(tokenizer, rollout.stop),
            partial(stop_texts, tokenizer, of_request=True),
        )

    def _add_scorers(self, chat: Chat) -> None:
        config, judging = self._recipe.reward.group, self._recipe.reward.judge
        self._scorers = Scorers(self._rewards, chat.decode)
        if config.function:
            self._scorers.add_of_groups("group", config.weight, self._scorers.by_function)
        if (client := self._pools.get("judge")) is not None:
            pool, replicas = self._recipe.pools["judge"]
            model = replace(pool.model, date=self._recipe.model.date)
            judge = Judge(judging, model, client, max_model_len=replicas.max_model_len)

            async def compare(responses: Sequence[np.ndarray], row: PromptRow) -> Sequence[RewardResult]:
                return await judge.compare([chat.decode(ids) for ids in responses], row)

            if judging.pairwise:
                self._scorers.add_of_groups("judge", judging.weight, compare)
            else:
                self._scorers.add("judge", judging.weight, judge.score)
        if (teacher := self._pools.get("teacher")) is not None:
            top_k = self._recipe.algorithm.distillation.top_k
            self._additions.append(partial(with_teacher, teacher, top_k=top_k))

    async def _score(self, response: str | np.ndarray, row: PromptRow) -> RewardResult:
        result = await self._scorers.score(response, replace(row, thinks=self._renderer.begins_thinking(row)))
        if not self._has_shown:
            self._has_shown = True
            self._show(response, row, result)
        return result

    def _show(self, response: str | np.ndarray, row: PromptRow, result: RewardResult) -> None:
        """Logs a first response as tokens and as text, and what its reward read."""
        text, prompt = self._renderer.text(row), self._renderer.prompt_ids(row).tolist()
        ids = [] if isinstance(response, str) else response.tolist()
        read = response if isinstance(response, str) else self.tools.chat.decode(response)
        told = (
            f"the first response, to {row.origin}\n"
            f"  prompt, {len(prompt)} tokens: {_few(prompt)}\n  its text: {text[-_SHOWN_CHARS:]!r}\n"
            f"  response, {len(ids)} tokens: {_few(ids)}\n  what the reward read: {read[-_SHOWN_CHARS:]!r}\n"
            f"  ground truth {row.ground_truth[:_SHOWN_CHARS]!r}, reward {result.reward:g}"
        )
        logger.info("%s", self._hide(told))

    @property
    def sandboxes(self) -> Mapping[str, int]:
        """Sandboxes of the environment, by state; empty without any."""
        return dict(getattr(self._environment, "sandboxes", {}))

    def fits(self, row: PromptRow) -> bool:
        """Whether the row's prompt is short enough. Raises DataError if a longer one is an error."""
        return text_within(row, self._renderer, self._recipe.data) is not None

    async def make(self, running: RunningGroup, row: PromptRow) -> TrajectoryGroup:
        """All trajectories of the group, made concurrently and validated; `running.done` gets each one when it is
        complete. Raises the error of the first that failed."""
        ticket, done = running.ticket, running.done
        prompt_ids = self._renderer.prompt_ids(row)

        async def one(i: int) -> Trajectory:
            trajectory = done[i]
            if trajectory is None:
                made = await self.trajectory(Task(row, prompt_ids, ticket.ordinal, i), running.sessions[i])
                trajectory = self._as_trained(made)
            for add in self._additions:
                with self._watch.working():
                    trajectory = (await add(trajectory, f"group-{ticket.ordinal}")).validate()
            done[i] = trajectory
            return trajectory

        # Each trajectory stands in `done` before the group is complete, so a checkpoint saves it whole.
        trajectories = await concurrently(one(i) for i in range(len(done)))
        with self._watch.working():
            trajectories = await self._scorers.with_group_rewards(trajectories, row)
        group = TrajectoryGroup(ticket.ordinal, ticket.attempt, tuple(trajectories))
        # Refused here, in the rollouter, since a trainer rank could only crash on it.
        longest = max(len(each.prompt_ids) + len(each.response_ids) for each in group.sequences)
        limit = self._recipe.max_tokens_per_microbatch
        if longest > limit:
            raise ValueError(f"a trajectory of {longest} tokens is over trainer.max_tokens_per_microbatch={limit}")
        return group

    async def trajectory(self, task: Task, session: RolloutSession) -> Trajectory:
        """The trajectory that the environment returns for `task`, validated. Raises what `UserCode.call` raises."""

        async def made() -> Trajectory:
            return (await self._environment.run(task, session)).normalized().validate()

        began = time.time()
        session.clock = ActiveClock(self._recipe.rollout.trajectory_timeout_s)
        with self._watch.working():
            try:
                return await self._of_environment(
                    f"trajectory {task.index} of prompt {task.ordinal} ({task.row.origin})",
                    made,
                    session.clock,
                    do="see what it waits for, or raise rollout.trajectory_timeout_s",
                )
            finally:
                session.close()
                if session.spans is not None:
                    session.spans.append(("trajectory", began, time.time(), {}))

    async def close(self) -> None:
        """Ends the reward processes, the environment and all user code."""
        await self._rewards.close()
        if isinstance(self._environment, Managed):
            try:
                await self._of_environment("its close", self._environment.close, CLOSE_WAIT_S)
            except Exception:  # task boundary: an error in a user's `close` must not stop the shutdown
                logger.warning("the environment could not be closed", exc_info=True)
        await self._user_code.close()

    def _as_trained(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory as it is trained: without loss if it was cut and `mask_truncated` is set. Raises ValueError:
        it lacks an engine array that training needs, or has branches although only one is trained."""
        needed = {"experts": self.sampling.experts, "kept_ids": self.sampling.kept}
        for sequence in trajectory.sequences:
            lacking = [name for name, is_needed in needed.items() if is_needed and name not in sequence.extra]
            if lacking and len(sequence.response_ids):
                do = "let the environment keep `extra` of its generations"
                raise ValueError(explain(f"train with {lacking[0]} of each token", "a trajectory without them", do))
        if trajectory.branches and not trains_branches(self._recipe):
            do = "set rollout.agent.train=all_branches, or let the environment return none"
            raise ValueError(explain("train with rollout.agent.train=last_branch", "a trajectory with branches", do))
        is_cut = trajectory.finish_reason == "length"
        return trajectory.untrained() if is_cut and self._recipe.algorithm.overlong.mask_truncated else trajectory

    async def _of_environment(
        self,
        asked: str,
        work: Callable[[], Awaitable[T]],
        limit: float | ActiveClock,
        do: str = "see what it waits for",
    ) -> T:
        code = f"environment {self._recipe.rollout.environment}"
        clock = limit if isinstance(limit, ActiveClock) else ActiveClock(limit)
        return await self._user_code.call(asked, code, work, clock=clock, do=do)


def _few(ids: list[int]) -> str:
    """Ids in brief: the first and the last."""
    return str(ids) if len(ids) <= 2 * _SHOWN_IDS else f"{ids[:_SHOWN_IDS]} ... {ids[-_SHOWN_IDS:]}"


async def with_teacher(
    teacher: GenerationClient, trajectory: Trajectory, session_id: str, *, top_k: int = 0
) -> Trajectory:
    """The trajectory with the teacher's log-probabilities, for on-policy distillation.

    Adds `extra["teacher_logprobs"]`, [T] float32, for all response tokens, including tokens of the environment. With
    `top_k` above 0 adds `top_ids` and `top_logprobs` of the likeliest tokens instead, [T, top_k] each. Branches get
    them too. Returns the trajectory unchanged if it already has them (restored from a checkpoint).

    Args:
        session_id: trajectories of one session go to one replica of the teacher while it can take them.

    Raises GenerationError: the teacher did not answer in time, or refused.
    """
    if trajectory.branches:
        own, *branches = [
            await with_teacher(teacher, sequence, session_id, top_k=top_k)
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
        scored = await teacher.score(tokens, len(trajectory.prompt_ids), top_k, session_id=session_id)
        found = {"teacher_logprobs": scored.logprobs, **scored.extra}
    return replace(trajectory, extra={**trajectory.extra, **found})
