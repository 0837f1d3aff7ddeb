"""The rollouter: runs environments over many groups at once. Runs as a Ray actor.

Consumes: tickets of the message queue.   Produces: one `put` or `nack` per ticket that is not cancelled.
Waits for: admission (bounded long polls), responses of replicas, rewards, environments (each with a deadline).
Unblocked by: a publish that frees slots; tokens streamed by replicas.
Stops when: `stop` is called, or a loop of it dies: `run` then raises. `rollout.supervisor` replaces one that died.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import itertools
import logging
import os
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from asyncrl.config.hidden import Hidden
from asyncrl.config.recipe import Recipe
from asyncrl.data.prompt_stream import build_stream
from asyncrl.data.prompts import RenderedPrompts
from asyncrl.data.rows import PromptRow
from asyncrl.data.tokenizer import PromptRenderer, load_tokenizer, stop_token_ids
from asyncrl.data.training_set import TrainingSet
from asyncrl.environments import Chat, Environment, Managed, Task, build_environment, prompt_tools
from asyncrl.errors import LedgerError, ProcessDied
from asyncrl.remote.waits import ROLLOUTER
from asyncrl.rewards.reward_pool import RewardPool
from asyncrl.rollout.generation import GenerationClient
from asyncrl.rollout.held_out import answer_held_out
from asyncrl.rollout.sample_files import QuarantineFile, SampleFile
from asyncrl.rollout.sessions import RolloutSession, RunningGroup, SessionTools
from asyncrl.rollout.user_code import UserCode, summary
from asyncrl.types import (
    Admission,
    EvalResult,
    PartialGroup,
    PartialTrajectory,
    ReplicaState,
    ReplicaTable,
    RolloutStats,
    SamplingParams,
    Ticket,
    Trajectory,
    TrajectoryGroup,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

ADMIT_WAIT_S = 1.0
MAX_REASON_CHARS = 8000
CANCEL_WAIT_S = 30.0
"""Longest that a put which the queue has refused waits for the news that its ticket was cancelled."""
CLOSE_WAIT_S = 5.0
"""Longest that the `close` of an environment may take."""


class TicketSource(Protocol):
    """The rollout side of the message queue."""

    async def admit(self, limit: int, wait_s: float) -> Admission: ...
    async def put(self, ticket: Ticket, group: TrajectoryGroup) -> None: ...
    async def nack(self, ticket: Ticket, reason: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """`train`: None where no groups are generated. `samples_path`: where a few trajectories per version go;
    `quarantine_path`: where the prompts go whose groups end `failed`."""

    recipe: Recipe
    train: TrainingSet | None
    held_out: Mapping[str, RenderedPrompts]
    samples_path: Path
    quarantine_path: Path
    hide: Hidden = field(default_factory=Hidden)


class Rollouter:
    """Args:
    queue: the rollout side of the message queue.
    client_id: names this incarnation among all clients of the replicas.
    """

    def __init__(self, spec: RolloutSpec, queue: TicketSource, client_id: str) -> None:
        self._recipe = recipe = spec.recipe
        self._train = spec.train
        self._held_out = spec.held_out
        self._stream = None if spec.train is None else build_stream(spec.train, recipe.run.seed, recipe.data.shuffle)
        self._queue = queue
        self._replicas = ReplicaTable()
        self._client_id = client_id
        self._samples = SampleFile(spec.samples_path, recipe.observability.samples_per_step, spec.hide)
        self._quarantine = QuarantineFile(spec.quarantine_path, spec.hide)
        self._rewards = RewardPool(recipe.reward, start_timeout_s=recipe.ray.start_timeout_s)
        self._groups: dict[tuple[int, int], RunningGroup] = {}
        self._cancelled = 0
        self._failure: asyncio.Future[None] | None = None
        self._evaluations = itertools.count()
        self._lent: GenerationClient | None = None
        """Reaches the replicas that are there for the evaluation under way alone."""
        self.client: GenerationClient
        self._tools: SessionTools
        self._renderer: PromptRenderer
        self._environment: Environment
        self._user_code: UserCode
        self._sampling: SamplingParams

    async def start(self) -> RolloutStats:
        """Loads the tokenizer, starts the reward processes and connects to the replicas. Raises ConfigError."""
        recipe, rollout = self._recipe, self._recipe.rollout
        tokenizer = load_tokenizer(recipe.model)
        self._sampling = SamplingParams(
            temperature=rollout.sampling.temperature,
            top_p=rollout.sampling.top_p,
            top_k=rollout.sampling.top_k,
            max_tokens=rollout.sampling.max_response_tokens,
            stop_token_ids=stop_token_ids(tokenizer, recipe.model, rollout.sampling.stop),
        )
        chat = Chat(tokenizer, recipe.model)
        self._renderer = PromptRenderer(tokenizer, recipe.model, prompt_tools(recipe, tokenizer))
        self._environment = build_environment(recipe, chat)
        await self._rewards.start()
        self._user_code = UserCode()
        if isinstance(self._environment, Managed):
            await self._of_environment("its start", self._environment.start, recipe.ray.start_timeout_s)
        self._failure = asyncio.get_running_loop().create_future()
        self.client = self._new_client("groups", self._replicas, states=("serving", "held"), waits=True)
        self._tools = SessionTools(self.client, chat, self._rewards.score)
        # Rows, tokenizer and modules live as long as the process: full garbage collections that walk them again and
        # again took a fifth of this process's time.
        gc.collect()
        gc.freeze()
        return await self.stats()

    async def run(self) -> None:
        """Generates until `stop`. Raises what ended a loop of it."""
        failure = self._failure
        assert failure is not None, "start comes first"
        loops = [asyncio.create_task(self._admit(), name="admission"), asyncio.create_task(self.client.watch())]
        try:
            done, _ = await asyncio.wait([*loops, failure], return_when=asyncio.FIRST_COMPLETED)
            for finished in done:
                await finished
        finally:
            for loop in loops:
                loop.cancel()

    async def set_replicas(self, table: ReplicaTable) -> None:
        """Sends requests to the replicas that serve in this table; its handles are `ReplicaChannel`s. An older table
        than the last one is ignored."""
        if table.generation >= self._replicas.generation:
            self._replicas = table
            self.client.set_replicas(table)
            if self._lent is not None:
                self._lent.set_replicas(table)

    async def partials(self) -> list[PartialGroup]:
        """Every running group of which there is a token, as it is at this moment."""
        found = (running.partial() for running in self._groups.values())
        return [partial for partial in found if partial.num_tokens]

    async def evaluate(self, name: str, seed: int, timeout_s: float, leased: ReplicaTable | None = None) -> EvalResult:
        """`eval.samples` responses to every prompt of a held-out set, by whatever version the replicas serve now.

        Args:
            leased: those that answer all of it, for this alone; None: those that serve.

        Raises what `answer_held_out` raises.
        """
        config, prompts = self._recipe.eval, self._held_out[name]
        lent = (
            None
            if leased is None
            else self._new_client(f"evaluation-{next(self._evaluations):06d}", leased, states=("leased",), waits=False)
        )
        tools = self._tools if lent is None else replace(self._tools, client=lent)
        sampling = SamplingParams(
            temperature=config.temperature,
            max_tokens=self._sampling.max_tokens,
            stop_token_ids=self._sampling.stop_token_ids,
        )

        async def attempt(index: int, number: int) -> Trajectory:
            words = (seed, index, number) if number else (seed, index)
            session = RolloutSession(tools, sampling, "", _seed(*words))
            return await self._trajectory(Task(prompts.rows[index], prompts.prompt_ids[index], index, number), session)

        self._lent = lent
        try:
            return await answer_held_out(
                name,
                prompts,
                attempt,
                samples=config.samples,
                pass_at=config.pass_at,
                timeout_s=timeout_s,
                lent=lent,
            )
        finally:
            self._lent = None
            if lent is not None:
                await lent.close()

    async def stats(self) -> RolloutStats:
        cpu = os.times()
        requests = self.client.in_flight
        return RolloutStats(
            pid=os.getpid(),
            groups=len(self._groups),
            requests=requests,
            replicas=tuple(self.client.loads),
            rows=0 if self._train is None else len(self._train.rows),
            dropped_rows=0 if self._train is None else self._train.num_dropped,
            cpu_s=cpu.user + cpu.system,
            reprefilled_tokens=self.client.reprefilled_tokens,
            cancelled_groups=self._cancelled,
        )

    async def stop(self) -> None:
        if self._failure is None:
            return  # it has not started
        if not self._failure.done():
            self._failure.set_result(None)
        tasks = [running.task for running in self._groups.values() if running.task is not None]
        for running in self._groups.values():
            running.give_up()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.close()
        await self._rewards.close()
        if isinstance(self._environment, Managed):
            try:
                await self._of_environment("its close", self._environment.close, CLOSE_WAIT_S)
            except Exception:  # task boundary: what the close of a user's environment raises keeps nothing from ending
                logger.warning("the environment could not be closed", exc_info=True)
        await self._user_code.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _new_client(
        self, use: str, replicas: ReplicaTable, *, states: tuple[ReplicaState, ...], waits: bool
    ) -> GenerationClient:
        """`waits`: for replacements of its replicas."""
        rollout = self._recipe.rollout
        return GenerationClient(
            f"{self._client_id}-{os.getpid()}-{use}",
            replicas,
            request_timeout_s=rollout.request_timeout_s,
            poll_interval_s=rollout.poll_interval_s,
            states=states,
            waits_for_replacements=waits,
            max_lost=self._recipe.recovery.max_replica_restarts + 1,  # the pool gives up first
        )

    async def _admit(self) -> None:
        assert self._failure is not None, "start comes first"
        while True:
            admission = await self._queue.admit(self._recipe.batch.groups_per_step, ADMIT_WAIT_S)
            if self._failure.done():
                return  # nobody would end what it begins now
            for ticket in admission.cancelled:
                self._cancel(ticket)
            partials = {_key(partial.ticket): partial.trajectories for partial in admission.partials}
            for ticket in admission.tickets:
                self._begin(ticket, partials.get(_key(ticket), ()))

    def _begin(self, ticket: Ticket, partials: Sequence[PartialTrajectory]) -> None:
        size = self._recipe.batch.group_size
        begun = (*partials, *[PartialTrajectory()] * size)[:size]
        seeds = [_seed(self._recipe.run.seed, ticket.ordinal, ticket.attempt, i) for i in range(size)]
        running = RunningGroup(
            ticket,
            tuple(
                RolloutSession(self._tools, self._sampling, f"group-{ticket.ordinal}", seed, partial.calls)
                for seed, partial in zip(seeds, begun, strict=True)
            ),
            [partial.done for partial in begun],
        )
        self._groups[_key(ticket)] = running
        running.task = asyncio.create_task(self._group(running), name=f"group {ticket.ordinal}.{ticket.attempt}")
        running.task.add_done_callback(lambda task: self._group_done(ticket, task))

    def _cancel(self, ticket: Ticket) -> None:
        """Its group has ended: nothing of it is put, and the replicas are told to stop working on it."""
        running = self._groups.get(_key(ticket))
        if running is not None and running.task is not None:
            self._cancelled += 1
            running.give_up()

    def _group_done(self, ticket: Ticket, task: asyncio.Task[None]) -> None:
        """A group that ended without an answer to its ticket, and that nobody gave up, ends this rollouter: the queue
        takes its tickets back then."""
        running = self._groups.pop(_key(ticket))
        error = task.exception() if not task.cancelled() else None
        if task.cancelled() and not running.given_up:
            error = ProcessDied(f"{task.get_name()} was cancelled by code that does not own it").of(ROLLOUTER)
        if error is not None and self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def _group(self, running: RunningGroup) -> None:
        ticket = running.ticket
        row = self._row(ticket)
        try:
            group = await self._generate(running, row)
        except Exception as e:  # noqa: BLE001 - task boundary: whatever the environment or reward raised fails the group
            logger.warning("group %d attempt %d failed: %s", ticket.ordinal, ticket.attempt, summary(e))
            reason = traceback.format_exc()[-MAX_REASON_CHARS:]
            again = await _unless_cancelled(self._queue.nack(ticket, reason))
            if not again:
                self._quarantine.add(ticket, row, reason)
            return
        await _unless_cancelled(self._queue.put(ticket, group))
        self._samples.offer(group, ticket, row, self._tools.chat.decode)

    def _row(self, ticket: Ticket) -> PromptRow:
        assert self._train is not None, "groups are of a training set"
        assert self._stream is not None, "and in its order"
        return self._train.rows[self._stream.row_index(ticket.ordinal)]

    async def _generate(self, running: RunningGroup, row: PromptRow) -> TrajectoryGroup:
        ticket, done = running.ticket, running.done
        prompt_ids = self._renderer.prompt_ids(row)

        async def one(i: int) -> Trajectory:
            trajectory = done[i]
            if trajectory is None:
                task = Task(row, prompt_ids, ticket.ordinal, i)
                made = await self._trajectory(task, running.sessions[i])
                skipped = made.finish_reason == "length" and self._recipe.algorithm.overlong.mask_truncated
                trajectory = done[i] = made.untrained() if skipped else made
            return trajectory

        trajectories = await _all(one(i) for i in range(len(done)))
        group = TrajectoryGroup(ticket.ordinal, ticket.attempt, tuple(trajectories)).validate()
        longest, limit = max(map(len_of, trajectories)), self._recipe.max_tokens_per_microbatch
        if longest > limit:
            raise ValueError(f"a trajectory of {longest} tokens is over trainer.max_tokens_per_microbatch={limit}")
        return group

    async def _trajectory(self, task: Task, session: RolloutSession) -> Trajectory:
        """What the environment makes of `task`, checked. Raises as `UserCode.call` does."""

        async def made() -> Trajectory:
            return (await self._environment.run(task, session)).normalized().validate()

        try:
            return await self._of_environment(
                f"trajectory {task.index} of prompt {task.ordinal} ({task.row.origin})",
                made,
                self._recipe.rollout.trajectory_timeout_s,
                do="see what it waits for, or raise rollout.trajectory_timeout_s",
            )
        finally:
            session.close()

    async def _of_environment(
        self, asked: str, work: Callable[[], Awaitable[T]], timeout_s: float, do: str = "see what it waits for"
    ) -> T:
        code = f"environment {self._recipe.rollout.environment}"
        return await self._user_code.call(asked, code, work, timeout_s=timeout_s, do=do)


def _key(ticket: Ticket) -> tuple[int, int]:
    return ticket.ordinal, ticket.attempt


def len_of(trajectory: Trajectory) -> int:
    """Tokens of prompt and response."""
    return len(trajectory.prompt_ids) + len(trajectory.response_ids)


async def _all(runs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Awaits all; the first exception cancels the rest, and is raised when they have ended."""
    tasks = [asyncio.create_task(run) for run in runs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _unless_cancelled(call: Awaitable[T]) -> T:
    """Awaits a put or a nack. One that the queue refuses may be of a ticket that it has just cancelled: the next
    admission says so, and cancels the task that waits here. Raises LedgerError when it does not."""
    try:
        return await call
    except LedgerError:
        await asyncio.sleep(CANCEL_WAIT_S)
        raise


def _seed(*words: int) -> int:
    """A 63-bit seed that depends on every word and on their order."""
    digest = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
