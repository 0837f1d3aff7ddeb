"""The rollouter: runs environments over many groups at once. Runs as a Ray actor, which `driver.rollouters` replaces
when it dies.

The admission loop starts one task per ticket; the task generates the group and answers the ticket. User code runs in
`rollout.user_code`, so that no exception of it reaches the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import math
import os
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import numpy as np

from asyncrl.config.hidden import Hidden
from asyncrl.config.recipe import Recipe
from asyncrl.data.prompt_stream import build_stream
from asyncrl.data.prompts import RenderedPrompts
from asyncrl.data.rows import PromptRow
from asyncrl.data.tokenizer import PromptRenderer, load_tokenizer, stop_texts, stop_token_ids
from asyncrl.data.training_set import TrainingSet
from asyncrl.environments import Chat, Environment, Managed, Task, build_environment, prompt_tools
from asyncrl.errors import LedgerError, ProcessDied, explain
from asyncrl.inference.cpu_time import CpuTime
from asyncrl.remote.garbage import PauselessCollector
from asyncrl.remote.waits import ROLLOUTER
from asyncrl.rewards import RewardResult
from asyncrl.rewards.group import added
from asyncrl.rewards.reward_pool import RewardPool
from asyncrl.rollout.active_clock import ActiveClock
from asyncrl.rollout.at_once import all_at_once
from asyncrl.rollout.generation import GenerationClient
from asyncrl.rollout.held_out import answer_held_out
from asyncrl.rollout.judge import Judge
from asyncrl.rollout.replica_time import ReplicaCause, ReplicaTime, ReplicaUse
from asyncrl.rollout.sample_files import QuarantineFile, RolloutFiles, SampleFile, SpanFile
from asyncrl.rollout.sessions import RolloutSession, RunningGroup, SessionTools
from asyncrl.rollout.teacher import with_teacher
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
"""How long a refused put waits for the admission that cancels its ticket."""
CLOSE_WAIT_S = 5.0
"""Longest time that the `close` of an environment may take."""


class TicketSource(Protocol):
    """The rollout side of the message queue."""

    async def admit(self, limit: int, wait_s: float) -> Admission: ...
    async def put(self, ticket: Ticket, group: TrajectoryGroup) -> None: ...
    async def nack(self, ticket: Ticket, reason: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """What a rollouter is built from. `train`: None where only held-out sets are evaluated."""

    recipe: Recipe
    train: TrainingSet | None
    held_out: Mapping[str, RenderedPrompts]
    files: RolloutFiles = field(default_factory=RolloutFiles)
    hide: Hidden = field(default_factory=Hidden)


class Rollouter:
    """Generates one group per ticket. Owns the running groups, the generation client, the reward processes and the
    environment."""

    def __init__(self, spec: RolloutSpec, queue: TicketSource, client_id: str) -> None:
        """
        Args:
            queue: the rollout side of the message queue.
            client_id: names this incarnation among all clients of the replicas.
        """
        self._recipe = recipe = spec.recipe
        self._train = spec.train
        self._held_out = spec.held_out
        self._stream = None if spec.train is None else build_stream(spec.train, recipe.run.seed, recipe.data.shuffle)
        self._queue = queue
        self._replicas = ReplicaTable()
        self._client_id = client_id
        samples = math.ceil(recipe.observability.samples_per_step / recipe.rollout.num_rollouters)
        self._samples = SampleFile(spec.files.samples, samples, spec.hide)
        self._spans = SpanFile(spec.files.spans, recipe.observability.trace_every_groups)
        self._quarantine = QuarantineFile(spec.files.quarantine, spec.hide)
        self._rewards = RewardPool(recipe.reward, start_timeout_s=recipe.ray.start_timeout_s)
        self._groups: dict[tuple[int, int], RunningGroup] = {}
        self._cancelled = 0
        self._cpu = CpuTime()
        self._failure: asyncio.Future[None] | None = None
        self._evaluations = itertools.count()
        self._lent: GenerationClient | None = None
        """Client of the leased replicas, while an evaluation has some."""
        self._pools: dict[str, GenerationClient] = {}
        """Clients of the pools of other models, by the section of the recipe."""
        self._judge: Judge | None = None
        self._time = ReplicaTime(time.monotonic())
        self._states: Counter[ReplicaState] = Counter()
        self._held: Set[int] = set()
        self._asleep: Set[int] = set()
        self._open = 0
        """Trajectories, and rewards of groups, in progress."""
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
            stop_token_ids=stop_token_ids(tokenizer, recipe.model, rollout.stop),
            experts=recipe.trainer.router_replay == "rollout",
            kept=rollout.sampling.keep_sets,
        )
        chat = Chat(tokenizer, recipe.model, rollout.tool_use.parser)
        tools = await asyncio.to_thread(prompt_tools, recipe, tokenizer)  # it may wait for MCP servers
        self._renderer = PromptRenderer(tokenizer, recipe.model, tools)
        self._environment = build_environment(recipe, chat)
        self._rewards.decode_with(chat.plain_decoder)
        await self._rewards.start()
        self._user_code = UserCode()
        if isinstance(self._environment, Managed):
            await self._of_environment("its start", self._environment.start, recipe.ray.start_timeout_s)
        self._failure = asyncio.get_running_loop().create_future()
        self.client = self._new_client("groups", self._replicas, states=("serving", "held"), waits=True)
        self._pools = {key: self._pool_client(key) for key in recipe.pools if self._train is not None}
        if (asked := self._pools.get("judge")) is not None:
            self._judge = Judge(recipe.reward.judge, recipe.judge.model, asked)
        self._observe()
        stop = stop_texts(tokenizer, rollout.stop)
        self._tools = SessionTools(self.client, chat, self._score, stop)
        return await self.stats()

    async def run(self) -> None:
        """Generates until `stop`. Raises the error that ended one of its loops."""
        failure = self._failure
        assert failure is not None, "start comes first"
        self._time = ReplicaTime(time.monotonic())  # the replicas serve now: their start is nobody's lost time
        self._observe()
        work = {"admission": self._admit(), "client": self.client.watch(), "garbage": PauselessCollector().run()}
        work |= {f"client of the {key}": client.watch() for key, client in self._pools.items()}
        loops = [asyncio.create_task(loop, name=name) for name, loop in work.items()]
        try:
            done, _ = await asyncio.wait([*loops, failure], return_when=asyncio.FIRST_COMPLETED)
            for finished in done:
                await finished
        finally:
            for loop in loops:
                loop.cancel()

    async def set_replicas(self, table: ReplicaTable, own: Collection[int] | None = None) -> None:
        """Sends requests to the replicas that serve in this table; its handles are `ReplicaChannel`s. An older table
        than the last one is ignored. Returns when those that were leased or leave have handed over their tokens.

        Args:
            own: the replicas that this rollouter's groups go to; None: all.
        """
        if table.generation >= self._replicas.generation:
            self._replicas = mine = table if own is None else table.only(own)
            self._held = mine.those("held").keys()
            self._asleep = {i for i, row in mine.those("serving").items() if row.asleep}
            self._states = Counter(row.state for row in mine.rows.values())
            self.client.set_replicas(mine, table)
            if self._lent is not None:
                self._lent.set_replicas(table)
            self._observe()
            await self.client.handed_over()

    async def set_pool(self, key: str, table: ReplicaTable) -> None:
        """The replicas of the pool of another model, with `ReplicaChannel`s as handles. `key`: its section of the
        recipe."""
        if key in self._pools:
            self._pools[key].set_replicas(table)
            await self._pools[key].handed_over()

    async def partials(self) -> list[PartialGroup]:
        """A copy of every running group that has at least one token."""
        found = (running.partial() for running in self._groups.values())
        return [partial for partial in found if partial.num_tokens]

    async def evaluate(self, name: str, seed: int, timeout_s: float, table: ReplicaTable | None = None) -> EvalResult:
        """Answers every prompt of a held-out set `eval.samples` times, with the version that the replicas serve now.

        Args:
            table: its leased replicas answer, and do nothing else; those that serve, beside the rollouts, where none is
                leased. None: the replicas of this rollouter's groups.

        Raises what `answer_held_out` raises.
        """
        config, prompts = self._recipe.eval, self._held_out[name]
        lent = (
            None
            if table is None
            else self._new_client(
                f"evaluation-{next(self._evaluations):06d}",
                table,
                states=("leased",) if table.those("leased") else ("serving", "held"),
                waits=False,
            )
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
            workers_cpu_s=self._cpu.below_s(),
            reprefilled_tokens=self.client.reprefilled_tokens,
            cancelled_groups=self._cancelled,
            replica_s={str(cause): seconds for cause, seconds in self._observe().items()},
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
        for client in (self.client, *self._pools.values()):
            await client.close()
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
        """`waits`: requests wait for a replacement when every replica is lost."""
        rollout = self._recipe.rollout
        return GenerationClient(
            f"{self._client_id}-{os.getpid()}-{use}",
            replicas,
            request_timeout_s=rollout.request_timeout_s,
            poll_interval_s=rollout.poll_every_s,
            states=states,
            waits_for_replacements=waits,
            max_lost=self._recipe.recovery.replicas_per_response(rollout.num_replicas),
            on_change=self._observe if waits else lambda: None,
        )

    def _pool_client(self, key: str) -> GenerationClient:
        pool, replicas = self._recipe.pools[key]
        return GenerationClient(
            f"{self._client_id}-{os.getpid()}-{key}",
            ReplicaTable(),
            request_timeout_s=pool.request_timeout_s,
            poll_interval_s=self._recipe.rollout.poll_every_s,
            states=("serving",),
            waits_for_replacements=True,
            max_lost=self._recipe.recovery.replicas_per_response(replicas.num_replicas),
        )

    async def _admit(self) -> None:
        """The admission loop.

        Consumes: tickets of the message queue.
        Produces: one group task per ticket; cancellations of the groups that the queue has ended.
        Waits for: a free slot or a requeued group (long polls of 1 s).
        Unblocked by: a publish that frees slots, a group that ends untrained, a nack.
        Stops when: `stop` is called, or a call of the queue fails, which ends the rollouter.
        """
        assert self._failure is not None, "start comes first"
        while True:
            admission = await self._queue.admit(self._recipe.batch.groups_per_step, ADMIT_WAIT_S)
            if self._failure.done():
                return  # `stop` has already cancelled the groups: a new one would never end
            # Cancellations first: they free requests on the replicas for the groups that begin now.
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
                RolloutSession(
                    self._tools, self._sampling, f"group-{ticket.ordinal}", seed, partial.calls, self._spans.of(ticket)
                )
                for seed, partial in zip(seeds, begun, strict=True)
            ),
            [partial.done for partial in begun],
        )
        self._groups[_key(ticket)] = running
        running.task = asyncio.create_task(self._group(running), name=f"group {ticket.ordinal}.{ticket.attempt}")
        running.task.add_done_callback(lambda task: self._group_done(ticket, task))

    def _cancel(self, ticket: Ticket) -> None:
        """Stops the generation of a group that the queue has ended: it is not put, and its requests are aborted."""
        running = self._groups.get(_key(ticket))
        if running is not None and running.task is not None:
            self._cancelled += 1
            running.give_up()

    def _group_done(self, ticket: Ticket, task: asyncio.Task[None]) -> None:
        """Ends this rollouter when a group task ended without answering its ticket and was not cancelled on purpose:
        the queue then requeues all groups of this rollouter."""
        running = self._groups.pop(_key(ticket))
        error = task.exception() if not task.cancelled() else None
        if task.cancelled() and not running.given_up:
            error = ProcessDied(f"{task.get_name()} was cancelled by code that does not own it").of(ROLLOUTER)
        if error is not None and self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def _group(self, running: RunningGroup) -> None:
        """The task of one ticket.

        Consumes: the ticket.
        Produces: one put, or one nack with the traceback.
        Waits for: the trajectories of the group; each response, turn and reward has a deadline.
        Unblocked by: tokens that the replicas stream, rewards.
        Stops when: the ticket is answered; `stop` and `_cancel` cancel the task.
        """
        ticket = running.ticket
        row = self._row(ticket)
        try:
            group = await self._generate(running, row)
        except Exception as e:  # noqa: BLE001 - task boundary: an error of the environment or reward fails the group
            logger.warning("group %d attempt %d failed: %s", ticket.ordinal, ticket.attempt, summary(e))
            reason = traceback.format_exc()[-MAX_REASON_CHARS:]
            again = await _unless_cancelled(self._queue.nack(ticket, reason))
            if not again:
                self._quarantine.add(ticket, row, reason)
            return
        await _unless_cancelled(self._queue.put(ticket, group))
        self._spans.write(ticket, [session.spans for session in running.sessions])
        await self._samples.offer(group, ticket, row, self._tools.chat.decode)

    def _row(self, ticket: Ticket) -> PromptRow:
        assert self._train is not None, "groups are of a training set"
        assert self._stream is not None, "and in its order"
        return self._train.rows[self._stream.row_index(ticket.ordinal)]

    async def _generate(self, running: RunningGroup, row: PromptRow) -> TrajectoryGroup:
        """All trajectories of the group at once, each validated. Raises what the first failed one raises."""
        ticket, done = running.ticket, running.done
        prompt_ids = self._renderer.prompt_ids(row)

        async def one(i: int) -> Trajectory:
            trajectory = done[i]
            if trajectory is None:
                task = Task(row, prompt_ids, ticket.ordinal, i)
                made = await self._trajectory(task, running.sessions[i])
                self._require_recorded(made)
                skipped = made.finish_reason == "length" and self._recipe.algorithm.overlong.mask_truncated
                trajectory = made.untrained() if skipped else made
            if (teacher := self._pools.get("teacher")) is not None:
                top_k = self._recipe.algorithm.distillation.top_k
                with self._working():
                    taught = await with_teacher(trajectory, teacher, f"group-{ticket.ordinal}", top_k=top_k)
                    trajectory = taught.validate()
            done[i] = trajectory
            return trajectory

        trajectories = await all_at_once(one(i) for i in range(len(done)))
        with self._working():
            trajectories = await self._with_group_rewards(trajectories, row)
        group = TrajectoryGroup(ticket.ordinal, ticket.attempt, tuple(trajectories))
        longest, limit = max(map(len_of, group.sequences)), self._recipe.max_tokens_per_microbatch
        if longest > limit:
            raise ValueError(f"a trajectory of {longest} tokens is over trainer.max_tokens_per_microbatch={limit}")
        return group

    def _require_recorded(self, trajectory: Trajectory) -> None:
        """Raises ValueError: an array that the engine records is to be trained with, and it has none; or it has
        branches, and only one is to be trained."""
        needed = {"experts": self._sampling.experts, "kept_ids": self._sampling.kept}
        for sequence in trajectory.sequences:
            lacking = [name for name, is_needed in needed.items() if is_needed and name not in sequence.extra]
            if lacking and len(sequence.response_ids):
                do = "let the environment keep `extra` of its generations"
                raise ValueError(explain(f"train with {lacking[0]} of each token", "a trajectory without them", do))
        if trajectory.branches and self._recipe.rollout.agent.train == "last_branch":
            do = "set rollout.agent.train=all_branches, or let the environment return none"
            raise ValueError(explain("train with rollout.agent.train=last_branch", "a trajectory with branches", do))

    async def _score(self, response: str | np.ndarray, row: PromptRow) -> RewardResult:
        """The reward of one response, with what the judge adds. Raises what either raises."""
        config = self._recipe.reward.judge
        if self._judge is None or config.pairwise:
            return await self._rewards.score(self._readable(response), row)
        if not isinstance(response, str):
            response = self._tools.chat.decode(response)
        result = await self._rewards.score(response, row)
        verdict = await self._judge.score(response, row)
        return RewardResult(*added(result.reward, result.parts, "judge", config.weight, verdict))

    def _readable(self, response: str | np.ndarray) -> str | np.ndarray:
        """Of token ids their text, where the reward processes cannot decode them."""
        return response if isinstance(response, str) or self._rewards.decodes else self._tools.chat.decode(response)

    async def _with_group_rewards(self, trajectories: Sequence[Trajectory], row: PromptRow) -> list[Trajectory]:
        """The trajectories of one group, with what rewards that see all of it add. Raises what these raise."""
        config, found = self._recipe.reward, list(trajectories)
        if not config.group.function and (self._judge is None or not config.judge.pairwise):
            return found
        given: list[tuple[str, float, Sequence[RewardResult]]] = []
        if config.group.function:
            ids = [self._readable(trajectory.policy_ids) for trajectory in trajectories]
            given.append(("group", config.group.weight, await self._rewards.score_group(ids, row)))
        if self._judge is not None and config.judge.pairwise:
            responses = [self._tools.chat.decode(trajectory.policy_ids) for trajectory in trajectories]
            given.append(("judge", config.judge.weight, await self._judge.compare(responses, row)))
        for name, weight, results in given:
            for i, result in enumerate(results):
                reward, parts = added(found[i].reward, found[i].reward_parts, name, weight, result)
                found[i] = replace(found[i], reward=reward, reward_parts=parts).validate()
        return found

    async def _trajectory(self, task: Task, session: RolloutSession) -> Trajectory:
        """The trajectory that the environment returns for `task`, validated. Raises what `UserCode.call` raises."""

        async def made() -> Trajectory:
            return (await self._environment.run(task, session)).normalized().validate()

        began = time.time()
        session.clock = ActiveClock(self._recipe.rollout.trajectory_timeout_s)
        with self._working():
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

    @contextmanager
    def _working(self) -> Iterator[None]:
        """A trajectory or a group is in progress: replicas without a request wait for it."""
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            if len(self.client.busy) < self._states["serving"] + self._states["held"]:  # else none waits for anything
                self._observe()

    def _observe(self) -> Mapping[ReplicaCause, float]:
        """Books the time of the replicas up to now; returns their seconds by cause."""
        client, counted, held, asleep = self.client, self._states, self._held, self._asleep
        held_busy = len(client.busy & held)
        use = ReplicaUse(
            serving=counted["serving"] - len(asleep),
            busy=len(client.busy) - held_busy - len(client.busy & asleep),
            held=counted["held"],
            held_busy=held_busy,
            leased=counted["leased"],
            asleep=len(asleep),
            absent=counted["starting"] + counted["newcomer"] + counted["suspended"] + counted["dead"],
            working=max(0, self._open - client.in_flight),
        )
        return self._time.observe(time.monotonic(), use)

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


def _key(ticket: Ticket) -> tuple[int, int]:
    return ticket.ordinal, ticket.attempt


def len_of(trajectory: Trajectory) -> int:
    """Tokens of prompt and response."""
    return len(trajectory.prompt_ids) + len(trajectory.response_ids)


async def _unless_cancelled(call: Awaitable[T]) -> T:
    """Awaits a put or a nack. The queue may refuse it because it has just cancelled the ticket: the next admission
    then has the cancellation, which cancels the task that waits here. Raises LedgerError when none comes."""
    try:
        return await call
    except LedgerError:
        await asyncio.sleep(CANCEL_WAIT_S)
        raise


def _seed(*words: int) -> int:
    """A 63-bit seed that depends on every word and on their order."""
    digest = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
