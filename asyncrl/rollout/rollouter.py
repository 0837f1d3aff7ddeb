"""The rollouter: runs environments over many groups at once. Runs as a Ray actor.

Consumes: tickets of the message queue.   Produces: one `put` or `nack` per ticket.
Waits for: admission (bounded long polls), responses of replicas, rewards (each with a deadline).
Unblocked by: a publish that frees slots; tokens streamed by replicas.
Stops when: `stop` is called, or a loop of it dies: `run` then raises and the coordinator ends the run.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import logging
import os
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from asyncrl.config.recipe import Recipe
from asyncrl.data.prompt_stream import PromptStream
from asyncrl.data.rows import PromptRow
from asyncrl.data.tokenizer import RenderedPrompts, load_tokenizer, stop_token_ids
from asyncrl.environments import Environment, Session, Task, build_environment
from asyncrl.errors import DeadlineExceeded, GenerationError
from asyncrl.rewards import RewardFunction, RewardResult, build_reward
from asyncrl.rollout.generation import Generation, GenerationClient, ReplicaChannel
from asyncrl.types import SamplingParams, Ticket, Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")

ADMIT_WAIT_S = 1.0
EVAL_CONCURRENCY = 256
MAX_REASON_CHARS = 8000


class TicketSource(Protocol):
    """The rollout side of the message queue."""

    async def admit(self, limit: int, wait_s: float) -> list[Ticket]: ...
    async def put(self, ticket: Ticket, group: TrajectoryGroup) -> None: ...
    async def nack(self, ticket: Ticket, reason: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """`train` and `held_out`: the prompts, rendered. `samples_path`: where a few trajectories per version go."""

    recipe: Recipe
    train: RenderedPrompts
    held_out: Mapping[str, RenderedPrompts]
    samples_path: Path


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """`groups`: being generated; `replicas`: that requests are sent to; `rows`: usable training prompts; `cpu_s`: of
    this process."""

    pid: int
    groups: int
    requests: int
    replicas: tuple[int, ...]
    rows: int
    dropped_rows: int
    cpu_s: float


@dataclass(frozen=True, slots=True)
class EvalResult:
    """One held-out set: share of correct responses, mean reward and length in tokens of those that came.

    A prompt whose environment or reward raised counts as not correct, and in `num_failed`.
    """

    name: str
    accuracy: float
    reward_mean: float
    response_tokens_mean: float
    num_prompts: int
    num_failed: int


class RolloutSession:
    """The session that one trajectory's environment gets."""

    def __init__(self, rollouter: Rollouter, sampling: SamplingParams, session_id: str, seed: int) -> None:
        self._rollouter = rollouter
        self._sampling = sampling
        self._session_id = session_id
        self._seed = seed
        self._calls = 0

    async def generate(self, prompt_ids: np.ndarray) -> Generation:
        seed = self._seed + self._calls  # each turn draws from a stream of its own
        self._calls += 1
        return await self._rollouter.client.generate(prompt_ids, self._sampling, session_id=self._session_id, seed=seed)

    def decode(self, token_ids: np.ndarray) -> str:
        return self._rollouter.decode(token_ids)

    async def reward(self, response: str, row: PromptRow) -> RewardResult:
        return await self._rollouter.score(response, row)


class Rollouter:
    """Args:
    queue: the rollout side of the message queue.
    replicas: channel of every replica, by id.
    """

    def __init__(self, spec: RolloutSpec, queue: TicketSource, replicas: Mapping[int, ReplicaChannel]) -> None:
        self._recipe = recipe = spec.recipe
        self._prompts = spec.train
        self._held_out = spec.held_out
        self._stream = PromptStream(len(spec.train.rows), recipe.run.seed, recipe.data.shuffle)
        self._queue = queue
        self._replicas = replicas
        self._samples = _SampleFile(spec.samples_path, recipe.observability.samples_per_step)
        self._groups: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] | None = None
        self._reward_threads = _reward_threads()
        self.client: GenerationClient
        self.decode: Callable[[np.ndarray], str]
        self._reward: RewardFunction
        self._environment: Environment
        self._sampling: SamplingParams

    async def start(self) -> RolloutStats:
        """Loads the tokenizer and connects to the replicas. Raises ConfigError."""
        recipe, rollout = self._recipe, self._recipe.rollout
        tokenizer = load_tokenizer(recipe.model)
        self.decode = lambda token_ids: str(tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))
        self._sampling = SamplingParams(
            temperature=rollout.sampling.temperature,
            top_p=rollout.sampling.top_p,
            top_k=rollout.sampling.top_k,
            max_tokens=rollout.sampling.max_response_tokens,
            stop_token_ids=stop_token_ids(tokenizer, recipe.model, rollout.sampling.stop),
        )
        self._environment = build_environment(rollout.environment)
        self._reward = build_reward(rollout.reward)
        self._failure = asyncio.get_running_loop().create_future()
        self.client = GenerationClient(
            f"rollouter-{os.getpid()}",
            self._replicas,
            request_timeout_s=rollout.request_timeout_s,
            poll_interval_s=rollout.poll_interval_s,
            waits_for_replacements=True,
            max_lost=recipe.recovery.max_replica_restarts + 1,  # the pool gives up first
        )
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

    async def add_replica(self, replica_id: int, channel: ReplicaChannel) -> None:
        """Sends requests to a replica again that had been lost and was replaced."""
        self.client.add_replica(replica_id, channel)

    async def remove_replica(self, replica_id: int) -> None:
        """Sends nothing to a replica any more that has failed; its requests resume elsewhere."""
        self.client.remove_replica(replica_id, "it is replaced")

    async def evaluate(self, name: str, seed: int) -> EvalResult:
        """One response to every prompt of a held-out set, by whatever version the replicas serve now."""
        prompts = self._held_out[name]
        sampling = SamplingParams(
            temperature=self._recipe.eval.temperature,
            max_tokens=self._sampling.max_tokens,
            stop_token_ids=self._sampling.stop_token_ids,
        )
        slots = asyncio.Semaphore(EVAL_CONCURRENCY)

        async def one(index: int) -> Trajectory | Exception:
            async with slots:
                session = RolloutSession(self, sampling, "", _seed(seed, index))
                task = Task(prompts.rows[index], prompts.prompt_ids[index], index, 0)
                try:
                    return await self._environment.run(task, session)
                except Exception as e:  # noqa: BLE001 - task boundary: one prompt of an evaluation, counted as failed
                    logger.warning("evaluation of %s failed on %s: %r", name, prompts.rows[index].origin, e)
                    return e

        outcomes = await _all(one(i) for i in range(len(prompts.rows)))
        trajectories = [o for o in outcomes if isinstance(o, Trajectory)]
        if not trajectories:
            raise GenerationError(
                f"evaluation of {name}: all {len(outcomes)} prompts failed; the last: {outcomes[-1]!r}"
            )
        return EvalResult(
            name=name,
            accuracy=sum(is_correct(t) for t in trajectories) / len(outcomes),
            reward_mean=float(np.mean([t.reward for t in trajectories])),
            response_tokens_mean=float(np.mean([len(t.response_ids) for t in trajectories])),
            num_prompts=len(outcomes),
            num_failed=len(outcomes) - len(trajectories),
        )

    async def score(self, response: str, row: PromptRow) -> RewardResult:
        timeout_s = self._recipe.rollout.reward_timeout_s
        call = asyncio.get_running_loop().run_in_executor(self._reward_threads, self._reward, response, row)
        try:
            return await asyncio.wait_for(call, timeout_s)
        except TimeoutError:
            # The thread of a reward that hangs cannot be killed: it is left behind, and the others get new ones.
            self._reward_threads.shutdown(wait=False, cancel_futures=False)
            self._reward_threads = _reward_threads()
            raise DeadlineExceeded(f"the reward of {row.origin} took more than {timeout_s} s") from None

    async def stats(self) -> RolloutStats:
        cpu = os.times()
        requests = self.client.in_flight
        dropped = self._prompts.num_dropped
        return RolloutStats(
            pid=os.getpid(),
            groups=len(self._groups),
            requests=requests,
            replicas=tuple(self.client.loads),
            rows=len(self._prompts.rows),
            dropped_rows=dropped,
            cpu_s=cpu.user + cpu.system,
        )

    async def stop(self) -> None:
        if self._failure is None:
            return  # it has not started
        if not self._failure.done():
            self._failure.set_result(None)
        for task in list(self._groups):
            task.cancel()
        await asyncio.gather(*self._groups, return_exceptions=True)
        await self.client.close()
        self._reward_threads.shutdown(wait=False, cancel_futures=True)

    # -- inside --------------------------------------------------------------------------------------------------

    async def _admit(self) -> None:
        while True:
            for ticket in await self._queue.admit(self._recipe.batch.groups_per_step, ADMIT_WAIT_S):
                task = asyncio.create_task(self._group(ticket), name=f"group {ticket.ordinal}.{ticket.attempt}")
                self._groups.add(task)
                task.add_done_callback(self._group_done)

    def _group_done(self, task: asyncio.Task[None]) -> None:
        self._groups.discard(task)
        failure = self._failure
        if failure is not None and not failure.done() and not task.cancelled() and (error := task.exception()):
            failure.set_exception(error)

    async def _group(self, ticket: Ticket) -> None:
        try:
            group = await self._generate(ticket)
        except Exception as e:  # noqa: BLE001 - task boundary: whatever the environment or reward raised fails the group
            logger.warning("group %d attempt %d failed: %r", ticket.ordinal, ticket.attempt, e)
            await self._queue.nack(ticket, traceback.format_exc()[-MAX_REASON_CHARS:])
            return
        await self._queue.put(ticket, group)
        row = self._prompts.rows[self._stream.row_index(ticket.ordinal)]
        self._samples.offer(group, ticket, row, self.decode)

    async def _generate(self, ticket: Ticket) -> TrajectoryGroup:
        index = self._stream.row_index(ticket.ordinal)
        row, prompt_ids = self._prompts.rows[index], self._prompts.prompt_ids[index]

        def one(i: int) -> Coroutine[Any, Any, Trajectory]:
            seed = _seed(self._recipe.run.seed, ticket.ordinal, ticket.attempt, i)
            session: Session = RolloutSession(self, self._sampling, f"group-{ticket.ordinal}", seed)
            return self._environment.run(Task(row, prompt_ids, ticket.ordinal, i), session)

        trajectories = await _all(one(i) for i in range(self._recipe.batch.group_size))
        group = TrajectoryGroup(ticket.ordinal, ticket.attempt, tuple(t.normalized() for t in trajectories)).validate()
        longest, limit = max(map(len_of, trajectories)), self._recipe.trainer.max_tokens_per_microbatch
        if longest > limit:
            raise ValueError(f"a trajectory of {longest} tokens is over trainer.max_tokens_per_microbatch={limit}")
        return group


class _SampleFile:
    """Writes the first trajectories of each admission version, decoded, one JSON object a line."""

    def __init__(self, path: Path, per_version: int) -> None:
        self._path = path
        self._per_version = per_version
        self._version, self._written = -1, 0

    def offer(
        self, group: TrajectoryGroup, ticket: Ticket, row: PromptRow, decode: Callable[[np.ndarray], str]
    ) -> None:
        if ticket.version > self._version:
            self._version, self._written = ticket.version, 0
        if ticket.version < self._version:
            return
        trajectories = group.trajectories[: max(0, self._per_version - self._written)]
        self._written += len(trajectories)
        for trajectory in trajectories:
            record = {
                "time_s": time.time(),
                "ordinal": group.ordinal,
                "attempt": group.attempt,
                "prompt": row.messages[-1].content,
                "response": decode(trajectory.response_ids),
                "ground_truth": row.ground_truth,
                "reward": trajectory.reward,
                "finish_reason": trajectory.finish_reason,
                "segments": [[s.start, s.stop, s.version, s.replica_id] for s in trajectory.segments],
            }
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")


def is_correct(trajectory: Trajectory) -> bool:
    """The reward's own part `correct` where it reports one, else a positive reward."""
    return dict(trajectory.reward_parts).get("correct", trajectory.reward) > 0


def len_of(trajectory: Trajectory) -> int:
    """Tokens of prompt and response."""
    return len(trajectory.prompt_ids) + len(trajectory.response_ids)


async def _all(runs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Awaits all; the first exception cancels the rest and is raised itself."""
    tasks = [asyncio.create_task(run) for run in runs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _reward_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=4, thread_name_prefix="reward")


def _seed(*words: int) -> int:
    """A 63-bit seed that depends on every word and on their order."""
    digest = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
