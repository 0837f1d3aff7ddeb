"""Sessions: the calls that environments make, their recording for checkpoints, and its replay after a resume."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from asyncrl.data.chat import Chat
from asyncrl.data.rows import PromptRow
from asyncrl.data.stop_strings import StopTexts
from asyncrl.errors import GenerationError
from asyncrl.rewards import RewardResult
from asyncrl.rollout.active_clock import ActiveClock
from asyncrl.rollout.draft import Draft, Span
from asyncrl.rollout.generation import GenerationClient
from asyncrl.types import Generation, PartialGroup, PartialTrajectory, SamplingParams, Ticket, Trajectory

REFUSED_S = 1.0
"""Delay before a closed session refuses a call, so that an environment that retries forever does not block others."""


@dataclass(frozen=True, slots=True, eq=False)
class SessionTools:
    """The shared state of a rollouter's sessions. `score(response, row)` is awaited outside of any lock. `stop`: texts
    that end a response, in addition to the stop tokens of its sampling parameters; `find_stop` makes them of those of a
    request too."""

    client: GenerationClient
    chat: Chat
    score: Callable[[str | np.ndarray, PromptRow], Awaitable[RewardResult]]
    stop: StopTexts | None = None
    find_stop: Callable[[Sequence[str]], StopTexts | None] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _OpenCall:
    prompt_ids: np.ndarray
    draft: Draft


class RolloutSession:
    """The session of one trajectory's environment.

    Args:
        recorded: calls of this trajectory before the checkpoint. For a prompt that one of them had, the environment
            gets its tokens; an unfinished response continues after its recorded tokens. A response whose prompt does
            not come again is not used.
        spans: gets the spans of requests and rewards; None: not recorded.
    """

    def __init__(
        self,
        tools: SessionTools,
        sampling: SamplingParams,
        session_id: str,
        seed: int,
        recorded: Sequence[Generation] = (),
        spans: list[Span] | None = None,
    ) -> None:
        self._tools = tools
        self._sampling = sampling
        self._session_id = session_id
        self._seed = seed
        self._replay = list(recorded)
        self._calls: list[Generation | _OpenCall] = []
        self._closed = False
        self.spans = spans
        self.clock: ActiveClock | None = None
        """Clock of the attempt in progress; stopped while a response waits for a place at a replica."""

    @property
    def chat(self) -> Chat:
        return self._tools.chat

    def close(self) -> None:
        """Ends the session with its attempt: later calls of the environment raise."""
        self._closed = True

    async def generate(
        self,
        prompt_ids: np.ndarray,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        hear: Callable[[np.ndarray], None] | None = None,
    ) -> Generation:
        """Raises GenerationError, also for an attempt that has ended."""
        await self._require_open()
        number = len(self._calls)
        prompt_ids = np.array(prompt_ids, np.int32)  # a copy: the environment may change its own array
        # Replay: a finished call of the record is returned as it is.
        limit = min(max_tokens or self._sampling.max_tokens, self._sampling.max_tokens)
        prior = self._recorded(prompt_ids, limit)
        if prior is not None and prior.finish_reason != "abort":
            self._calls.append(prior)
            return prior
        # The open call is on record before the first token, so a checkpoint during the request keeps its tokens.
        of_recipe = self._tools.stop
        added = [*(() if of_recipe is None else of_recipe.texts), *stop] if stop else []
        texts = self._tools.find_stop(added) if added and self._tools.find_stop else of_recipe
        draft = Draft(prior, self.spans, None if texts is None else texts.follow(prompt_ids[-8:].tolist()))
        self._calls.append(_OpenCall(prompt_ids, draft))
        sampling = self._sampling
        if limit < sampling.max_tokens:
            sampling = replace(sampling, max_tokens=limit)
        self._calls[number] = made = await self._tools.client.generate(
            prompt_ids,
            sampling,
            session_id=self._session_id,
            seed=self._seed + number,  # each call draws from a stream of its own
            draft=draft,
            clock=self.clock,
            on_chunk=None if hear is None else lambda _chunk, _replica: hear(draft.token_ids),
        )
        return made

    def decode(self, token_ids: np.ndarray) -> str:
        return self._tools.chat.decode(token_ids)

    async def reward(self, response: str | np.ndarray, row: PromptRow) -> RewardResult:
        """Raises GenerationError: the attempt has ended; what `RewardPool.score` raises."""
        await self._require_open()
        began = time.time()
        try:
            return await self._tools.score(response, row)
        finally:
            if self.spans is not None:
                self.spans.append(("reward", began, time.time(), {}))

    @property
    def calls(self) -> tuple[Generation, ...]:
        """Every call with its tokens so far, then the recorded calls that did not come again yet."""
        made = (c.draft.generation(c.prompt_ids) if isinstance(c, _OpenCall) else c for c in self._calls)
        return (*made, *self._replay)

    async def _require_open(self) -> None:
        if self._closed:
            await asyncio.sleep(REFUSED_S)
            raise GenerationError("this attempt has ended: it failed, was too slow, or was given up")

    def _recorded(self, prompt_ids: np.ndarray, limit: int) -> Generation | None:
        """Takes the first recorded call with this prompt and limit, if possible one that had ended: an agent's
        concurrent requests come in any order."""
        same = [
            (call.finish_reason == "abort", i)
            for i, call in enumerate(self._replay)
            if np.array_equal(call.prompt_ids, prompt_ids)
            and (len(call.token_ids) == limit if call.finish_reason == "length" else len(call.token_ids) <= limit)
        ]
        return self._replay.pop(min(same)[1]) if same else None


@dataclass(slots=True, eq=False)
class RunningGroup:
    """A group in progress. `done[i]`: trajectory i once complete; until then `sessions[i]` has its tokens so far.
    `task` generates the group. `given_up`: the queue has ended the group, or the rollouter stops."""

    ticket: Ticket
    sessions: tuple[RolloutSession, ...]
    done: list[Trajectory | None]
    task: asyncio.Task[None] | None = None
    given_up: bool = False

    def give_up(self) -> None:
        self.given_up = True
        if self.task is not None:
            self.task.cancel()

    def partial(self) -> PartialGroup:
        """The state of the group now. Shares the arrays of complete trajectories."""
        return PartialGroup(
            self.ticket,
            tuple(
                PartialTrajectory(done=done) if done is not None else PartialTrajectory(session.calls)
                for done, session in zip(self.done, self.sessions, strict=True)
            ),
        )
