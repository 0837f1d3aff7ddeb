"""The rollouter: generates many groups concurrently. Runs as a Ray actor, which `driver.fleet.rollouters` replaces when
it dies.

The admission loop starts one task per ticket. The task has `rollout.group_maker` make the group, and answers the
ticket.
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
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from asyncrl.config.hidden import Hidden
from asyncrl.config.model import ModelPoolConfig
from asyncrl.config.recipe import Recipe
from asyncrl.config.rollout import RolloutConfig
from asyncrl.data.prompt_stream import build_stream
from asyncrl.data.row_table import RenderedPrompts
from asyncrl.data.rows import ChatMessage, PromptRow
from asyncrl.data.training_set import TrainingSet
from asyncrl.environments import Task
from asyncrl.errors import LedgerError, ProcessDied
from asyncrl.inference.cpu_time import CpuTime
from asyncrl.queue.message_queue import MessageQueue
from asyncrl.remote.actor_client import CALL_TIMEOUT_S, ActorClient
from asyncrl.remote.garbage import PauselessCollector
from asyncrl.remote.tasks import concurrently
from asyncrl.remote.waits import ROLLOUTER
from asyncrl.rewards import check_rows
from asyncrl.rollout.generation import GenerationClient
from asyncrl.rollout.group_maker import GroupMaker
from asyncrl.rollout.held_out import answer_held_out
from asyncrl.rollout.replica_time import ReplicaWatch
from asyncrl.rollout.sample_files import QuarantineFile, RolloutFiles, SampleFile, SpanFile
from asyncrl.rollout.sessions import RolloutSession, RunningGroup
from asyncrl.rollout.user_code import summary
from asyncrl.types import (
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
SHOWN = 3
"""Responses that a result of an evaluation shows."""
MAX_REASON_CHARS = 8000
CANCEL_WAIT_S = 30.0
"""How long a refused put waits for the admission that cancels its ticket."""


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """Arguments of a rollouter. `train` None: it only evaluates held-out sets."""

    recipe: Recipe
    train: TrainingSet | None
    held_out: Mapping[str, RenderedPrompts]
    files: RolloutFiles = field(default_factory=RolloutFiles)
    hide: Hidden = field(default_factory=Hidden)


@dataclass(frozen=True, slots=True, eq=False)
class _Put:
    """A group on its way to the queue."""

    ticket: Ticket
    group: TrajectoryGroup
    done: asyncio.Future[None]


class Rollouter:
    """Generates one group per ticket. Owns the running groups, their maker and the generation clients."""

    def __init__(self, spec: RolloutSpec, queue: ActorClient[MessageQueue] | None, client_id: str) -> None:
        """
        Args:
            queue: None: the rollouter only evaluates held-out sets, and `run` is not called.
            client_id: names this incarnation among all clients of the queue and of the replicas.
        """
        self._recipe = recipe = spec.recipe
        self._train = spec.train
        self._held_out = spec.held_out
        self._asked = {row.messages for prompts in spec.held_out.values() for row in prompts.rows}
        self._stream = None if spec.train is None else build_stream(spec.train, recipe.run.seed, recipe.data.shuffle)
        self._queue = queue
        self._replicas = ReplicaTable()
        self._client_id = client_id
        samples = math.ceil(recipe.observability.samples_per_step / recipe.rollout.num_rollouters)
        self._samples = SampleFile(spec.files.samples, samples, spec.hide)
        self._spans = SpanFile(spec.files.spans, recipe.observability.trace_every_groups)
        self._quarantine = QuarantineFile(spec.files.quarantine, spec.hide)
        self._hide = spec.hide
        self._groups: dict[tuple[int, int], RunningGroup] = {}
        self._cancelled = 0
        self._cpu = CpuTime()
        self._failure: asyncio.Future[None] | None = None
        self._evaluations = itertools.count()
        self._lent: GenerationClient | None = None
        """Client of the leased replicas during an evaluation."""
        self._pools: dict[str, GenerationClient] = {}
        """Clients of the pools of other models, by section of the recipe."""
        self._watch = ReplicaWatch()
        self._waiting_puts: list[_Put] = []
        self._sender: asyncio.Task[None] | None = None
        """Sends the waiting puts."""
        self.client: GenerationClient
        self._maker: GroupMaker

    async def start(self) -> RolloutStats:
        """Builds the group maker and connects to the replicas. Raises ConfigError."""
        self.client = self._new_client("groups", self._replicas, states=("serving", "held"), waits=True)
        self._watch.follow(self.client)
        if self._train is not None:
            for key, pool in self._recipe.pools.items():
                self._pools[key] = self._new_client(key, ReplicaTable(), states=("serving",), waits=True, pool=pool)
        self._maker = GroupMaker(
            self._recipe, self.client, self._pools, self._watch, self._hide, shows=self._train is not None
        )
        await self._maker.start()
        self._failure = asyncio.get_running_loop().create_future()
        return await self.stats()

    async def run(self) -> None:
        """Generates until `stop`. Raises the error that ended one of its loops."""
        failure = self._failure
        assert failure is not None, "start comes first"
        self._watch.begin()
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
        """Sends requests to the serving replicas of this table, whose handles are `ReplicaChannel`s. Ignores a table
        older than the last one. Returns once replicas that were leased or leave have handed over their tokens.

        Args:
            own: the replicas for this rollouter's groups; None: all.
        """
        if table.generation >= self._replicas.generation:
            self._replicas = mine = table if own is None else table.only(own)
            self._watch.set_replicas(mine)
            self.client.set_replicas(mine, table)
            if self._lent is not None:
                self._lent.set_replicas(table)
            self._watch.observe()
            await self.client.handed_over()

    async def set_pool(self, key: str, table: ReplicaTable) -> None:
        """Sets the replicas of another model's pool, with `ReplicaChannel`s as handles. `key`: section of the
        recipe."""
        if key in self._pools:
            self._pools[key].set_replicas(table)
            await self._pools[key].handed_over()

    async def partials(self) -> list[PartialGroup]:
        """A copy of every running group that has at least one token."""
        found = (running.partial() for running in self._groups.values())
        return [partial for partial in found if partial.num_tokens]

    async def evaluate(
        self,
        name: str,
        seed: int,
        timeout_s: float,
        table: ReplicaTable | None = None,
        *,
        show: int = SHOWN,
        takes_part: bool = False,
    ) -> EvalResult:
        """Answers every prompt of a held-out set `eval.samples` times, with the version that the replicas serve now.

        Args:
            table: its leased replicas answer, and nothing else runs on them. Without a leased replica its serving ones
                answer, concurrently with the rollouts. None: the replicas of this rollouter's groups.
            show: prompts whose first response the result shows.
            takes_part: as `answer_held_out`.

        Raises as `answer_held_out`.
        """
        config, prompts = self._recipe.eval, self._held_out[name]
        lent, tools, of_groups = None, self._maker.tools, self._maker.sampling
        if table is not None:
            states: tuple[ReplicaState, ...] = ("leased",) if table.those("leased") else ("serving", "held")
            lent = self._new_client(f"evaluation-{next(self._evaluations):06d}", table, states=states, waits=False)
            tools = replace(tools, client=lent)
        # An evaluation has its own temperature, and no top_p or top_k.
        sampling = SamplingParams(
            temperature=config.temperature,
            max_tokens=of_groups.max_tokens,
            stop_token_ids=of_groups.stop_token_ids,
        )

        async def attempt(index: int, number: int) -> Trajectory:
            words = (seed, index, number) if number else (seed, index)
            session = RolloutSession(tools, sampling, "", _seed(*words))
            row = prompts.rows[index]
            found = await self._maker.trajectory(Task(row, prompts.prompt_ids[index], index, number), session)
            if number == 0 and index < show:
                text = tools.chat.decode(found.response_ids)
                shown[index] = (row.messages[-1].content, text, found.reward)
            return found

        shown: dict[int, tuple[str, str, float]] = {}
        # `set_replicas` passes its tables on to `_lent`, so the evaluation notices a lost replica.
        self._lent = lent
        try:
            result = await answer_held_out(
                name,
                prompts,
                attempt,
                samples=config.samples,
                pass_at=config.pass_at,
                timeout_s=timeout_s,
                lent=lent,
                takes_part=takes_part,
            )
            return replace(result, shown=tuple(shown[i] for i in sorted(shown))) if shown else result
        finally:
            self._lent = None
            if lent is not None:
                await lent.close()

    async def score(self, sequences: Sequence[Trajectory]) -> list[np.ndarray]:
        """The replicas' log-probabilities of responses, [T] float32 each, at temperature 1. Raises GenerationError."""
        asked = (
            self.client.score(np.concatenate([s.prompt_ids, s.response_ids]), len(s.prompt_ids)) for s in sequences
        )
        return [found.logprobs for found in await concurrently(asked)]

    async def stats(self) -> RolloutStats:
        return RolloutStats(
            pid=os.getpid(),
            groups=len(self._groups),
            requests=self.client.in_flight,
            replicas=tuple(self.client.loads),
            cpu_s=time.process_time(),
            workers_cpu_s=self._cpu.below_s(),
            reprefilled_tokens=self.client.reprefilled_tokens,
            cancelled_groups=self._cancelled,
            sandboxes=self._maker.sandboxes,
            replica_s={str(cause): seconds for cause, seconds in self._watch.observe().items()},
        )

    async def stop(self) -> None:
        if self._failure is None:
            return  # `start` was never called
        if not self._failure.done():
            self._failure.set_result(None)
        tasks = [running.task for running in self._groups.values() if running.task is not None]
        for running in self._groups.values():
            running.give_up()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in (self.client, *self._pools.values()):
            await client.close()
        await self._maker.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _new_client(
        self,
        use: str,
        replicas: ReplicaTable,
        *,
        states: tuple[ReplicaState, ...],
        waits: bool,
        pool: tuple[ModelPoolConfig, RolloutConfig] | None = None,
    ) -> GenerationClient:
        """`waits`: requests wait for a replacement when every replica is lost. `pool`: of another model, as in
        `Recipe.pools`; None: the policy's replicas."""
        rollout = self._recipe.rollout
        limits, settings = (rollout, rollout) if pool is None else pool
        return GenerationClient(
            f"{self._client_id}-{os.getpid()}-{use}",
            replicas,
            request_timeout_s=limits.request_timeout_s,
            poll_interval_s=rollout.poll_every_s,
            states=states,
            waits_for_replacements=waits,
            max_lost=self._recipe.recovery.replicas_per_response(settings.num_replicas),
            on_change=self._watch.observe if waits and pool is None else lambda: None,
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
        assert self._queue is not None, "without a queue it is not run"
        groups_per_step = self._recipe.batch.groups_per_step
        while True:
            admission = await self._queue.call(
                ADMIT_WAIT_S + CALL_TIMEOUT_S, MessageQueue.admit, groups_per_step, ADMIT_WAIT_S, self._client_id
            )
            if self._failure.done():
                return  # `stop` has already cancelled the groups: a new one would never end
            # Cancellations first: they free requests on the replicas for the groups that begin now.
            for ticket in admission.cancelled:
                self._cancel(ticket)
            partials = {_key(partial.ticket): partial.trajectories for partial in admission.partials}
            for ticket in admission.tickets:
                self._begin(ticket, partials.get(_key(ticket), ()))

    def _begin(self, ticket: Ticket, partials: Sequence[PartialTrajectory]) -> None:
        maker, size = self._maker, self._recipe.batch.group_size
        begun = (*partials, *[PartialTrajectory()] * size)[:size]
        seeds = [_seed(self._recipe.run.seed, ticket.ordinal, ticket.attempt, i) for i in range(size)]
        running = RunningGroup(
            ticket,
            tuple(
                RolloutSession(
                    maker.tools, maker.sampling, f"group-{ticket.ordinal}", seed, partial.calls, self._spans.of(ticket)
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
        assert self._queue is not None, "it has a ticket"
        ticket = running.ticket
        row = PromptRow((ChatMessage("user", ""),), "", "", (), "a row that the generator did not give")
        try:
            row = self._row(ticket)
            group = await self._maker.make(running, row)
        except Exception as e:  # noqa: BLE001 - task boundary: an error of the environment or reward fails the group
            logger.warning("group %d attempt %d failed: %s", ticket.ordinal, ticket.attempt, summary(e))
            reason = traceback.format_exc()[-MAX_REASON_CHARS:]
            again = await _unless_cancelled(self._queue.call(CALL_TIMEOUT_S, MessageQueue.nack, ticket, reason))
            if not again:
                self._quarantine.add(ticket, row, reason)
            return
        await _unless_cancelled(self._put(ticket, group))
        self._spans.write(ticket, [session.spans for session in running.sessions])
        await self._samples.offer(group, ticket, row, self._maker.tools.chat.decode_shown)

    async def _put(self, ticket: Ticket, group: TrajectoryGroup) -> None:
        """As `MessageQueue.put`. Puts that arrive during a call are sent together in the next call: a call costs more
        than a small group."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting_puts.append(_Put(ticket, group, done))
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_puts(), name="puts")
        await done

    async def _send_puts(self) -> None:
        """Sends until no put waits; every put gets its own outcome."""
        assert self._queue is not None, "it has groups"
        while self._waiting_puts:
            waiting, self._waiting_puts = self._waiting_puts, []
            batch = [put for put in waiting if not put.done.cancelled()]  # the others' groups were cancelled
            if not batch:
                continue
            items = [(put.ticket, put.group) for put in batch]
            try:
                outcomes = await self._queue.call(CALL_TIMEOUT_S, MessageQueue.put_many, items)
            except Exception as e:  # noqa: BLE001 - task boundary: every put of the batch raises it to its caller
                outcomes = [e] * len(batch)
            for put, outcome in zip(batch, outcomes, strict=True):
                if put.done.cancelled():
                    continue
                if outcome is None:
                    put.done.set_result(None)
                else:
                    put.done.set_exception(outcome)
        self._sender = None

    def _row(self, ticket: Ticket) -> PromptRow:
        assert self._train is not None, "groups are of a training set"
        assert self._stream is not None, "and in its order"
        return self._train.row(self._stream.row_index(ticket.ordinal), self._is_taken)

    def _is_taken(self, row: PromptRow) -> bool:
        """Whether a row that a generator drew is trained: it is short enough, and no question of a held-out set. Raises
        DataError: its reward cannot judge it."""
        check_rows(self._recipe.reward, [row])
        return row.messages not in self._asked and self._maker.fits(row)


def _key(ticket: Ticket) -> tuple[int, int]:
    return ticket.ordinal, ticket.attempt


async def _unless_cancelled(call: Awaitable[T]) -> T:
    """Awaits a put or a nack. If the queue refuses it because the ticket was just cancelled, waits until the next
    admission cancels this task. Raises LedgerError if no cancellation arrives."""
    try:
        return await call
    except LedgerError:
        await asyncio.sleep(CANCEL_WAIT_S)
        raise


def _seed(*words: int) -> int:
    """A 63-bit seed that depends on every word and on their order."""
    digest = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
