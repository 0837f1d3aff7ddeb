"""The coordinator: decides when to train, publish, evaluate and save. Runs in the driver's asyncio loop.

It sees lengths, rewards and lags of groups, never a token. The first error of any part of the run ends it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.checkpoint.store import RunState, read_state
from asyncrl.config.recipe import Recipe
from asyncrl.driver.checkpoint_writer import CheckpointWriter
from asyncrl.driver.evaluation_schedule import Evaluations
from asyncrl.driver.interfaces import Parts
from asyncrl.driver.off_policy import GuardLoop, LiveFindings
from asyncrl.driver.publisher import Colocation, Publisher
from asyncrl.driver.step_record import ReplicaShares, StepClock, StepRecord
from asyncrl.errors import ConfigError, DeadlineExceeded, GenerationError, ProcessDied, cause, explain
from asyncrl.inference.engines import ENGINES
from asyncrl.queue.message_queue import MessageQueue
from asyncrl.queue.staleness import StalenessPolicy
from asyncrl.remote.actor_client import CALL_TIMEOUT_S
from asyncrl.remote.tasks import cancel, end
from asyncrl.remote.waits import WAITS
from asyncrl.trainer.planner import StepPlanner
from asyncrl.types import (
    Committed,
    EndShares,
    LeaseManifest,
    LedgerCounts,
    PublishReport,
    RankPlan,
    ReplicaStats,
    TrainMetrics,
    Trajectory,
)
from asyncrl.types.events import StepTrained, TrainingResumed
from asyncrl.types.metrics import Metric

logger = logging.getLogger(__name__)

COMPARED = 4
"""Responses that replicas and trainer score after a resume."""
POLL_S = 1.0
"""Longest long poll: how late a stop can be noticed."""
POLL_TIMEOUT_S = POLL_S + CALL_TIMEOUT_S
LOAD_TIMEOUT_S = 600.0
"""Longest time to read the queue's part of a checkpoint."""
RECORD_S = 5.0
"""Longest time to write the metrics of a committed step when the run ends for another reason."""
_INITIAL: dict[str, str] = {Metric.EVAL_ACCURACY: Metric.EVAL_INITIAL_ACCURACY, Metric.EVAL_FAILED: Metric.EVAL_FAILED}
"""Metric of the evaluation before training -> its name on the line of step 1."""


@dataclass(slots=True, eq=False)
class _EndedStep:
    """Input of a committed step's metrics. `stats`: of the replicas, if already known; `publishes`: ended since the
    previous step."""

    manifest: LeaseManifest
    metrics: TrainMetrics
    train_s: float
    waited_s: float
    counts: LedgerCounts
    shares: EndShares
    stats: Sequence[ReplicaStats] | None = None
    publishes: Sequence[PublishReport] = ()


class Coordinator:
    """Runs the training loop and the tasks that guard it. Owns `global_steps`, the publisher and the checkpoint
    writer; lives until the run ends or its training side is lost."""

    def __init__(self, recipe: Recipe, parts: Parts, start_from: Path | None, *, elapsed_s: float = 0.0) -> None:
        """
        Args:
            start_from: checkpoint to resume from; None starts at step 0.
            elapsed_s: seconds of this process's run so far; a larger value in the checkpoint wins.
        """
        self._recipe = recipe
        self._parts = parts
        self._start_from = start_from
        self.step = 0
        """`global_steps`: optimizer steps completed."""
        self._clock = StepClock(elapsed_s)
        self._writer = CheckpointWriter(recipe.checkpoint, parts)
        self._planner = StepPlanner(recipe)
        self._next_step = NextStep(parts, self._planner)
        self._staleness = StalenessPolicy(recipe.batch.groups_per_step, recipe.max_lag)
        self._guard = GuardLoop(recipe, parts.queue, parts.events)
        self._saves, self._saved_at = (-1, False), time.monotonic()
        """(step, whether a checkpoint follows it), and when the last one was begun."""
        self._findings = LiveFindings({"rollout.engine": recipe.rollout.engine})
        self._stop = asyncio.Event()
        self.restored = asyncio.Event()
        """Set once the start state (checkpoint or step 0) has been restored and training has begun."""
        self._finishing = False
        """The last step is done; the remaining publish and checkpoint have their own deadlines."""
        self._shares = ReplicaShares(lambda: len(parts.replicas.table.rows))
        self._colocation = Colocation(parts, self._clock)
        self._publisher = Publisher(recipe, parts, clock=self._clock, shares=self._shares, colocation=self._colocation)
        self._evaluations = Evaluations(recipe, parts, stop=self._stop, publisher=self._publisher)
        self._health: dict[str, float] = {}
        """Metrics of the last health check."""
        self._initial: dict[str, float] = {}
        """Metrics of the evaluation before training, until a line of metrics has them."""
        self._ahead: LeaseManifest | None = None
        """Lease of the next step if it came with the commit; that step is then in progress."""
        self._recording: asyncio.Task[None] | None = None
        """Assembles the metrics of the last step while the next one trains."""

    @property
    def elapsed_s(self) -> float:
        return self._clock.elapsed_s

    def stop(self) -> None:
        """Ends the run after the step in progress, with a checkpoint. Idempotent."""
        self._stop.set()

    async def run(self) -> None:
        """Trains until the end or a stop, and leaves a checkpoint of the last complete step. A stop before training
        began changes nothing.

        Raises the first error of any part. Raises DeadlineExceeded if the step in progress does not end within
        `run.shutdown_timeout_s` of a stop; the last periodic checkpoint then stands.
        """
        training = asyncio.create_task(self._train(), name="training")
        guards = [
            asyncio.create_task(self._rollout(), name="rollouter"),
            asyncio.create_task(self._watch_health(), name="health"),
            asyncio.create_task(self._parts.replicas.watch(), name="replicas"),
            asyncio.create_task(_outcome(self._writer.failed), name="checkpoints"),
        ]
        guards += [asyncio.create_task(loop(), name=name) for name, loop in self._parts.loops.items()]
        stop = asyncio.create_task(self._stop.wait())
        try:
            # Phase 1: until training ends, a guard fails, or a stop comes.
            await asyncio.wait([training, stop, *guards], return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set() and not self.restored.is_set() and not _errors(training, *guards):
                return  # nothing was trained: the start state remains the newest
            # Phase 2: a stop gives the step in progress `shutdown_timeout_s`; the final saves have their own deadlines.
            if self._stop.is_set() and not training.done():
                await _first_of(self._recipe.run.shutdown_timeout_s, training, *guards)
                if self._finishing:
                    await _first_of(None, training, *guards)
            # Phase 3: find the cause. The other errors are often its consequences.
            if failed := _errors(*guards, training):
                first = cause(failed.values())
                for name, error in failed.items():
                    if error is not first:
                        logger.error("also: %s: %s", name, error)
                raise first
            if not training.done() and not self._stop.is_set():
                raise ProcessDied("the rollouter stopped by itself; see the log of the run")
            if not training.done():
                found = f"the step did not end within {self._recipe.run.shutdown_timeout_s:g} s"
                do = "resume=auto goes on from the last checkpoint; raise run.shutdown_timeout_s to wait longer"
                raise DeadlineExceeded(explain(f"stop after step {self.step + 1}", found, do))
        finally:
            await cancel(training, stop, *guards)
            await self._next_step.close()
            await end(self._recording, patience_s=RECORD_S)
            await self._evaluations.close()
            await self._publisher.close()
            await self._writer.close()

    # -- the loop ------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        """The training loop.

        Consumes: one lease per step.
        Produces: optimizer steps, commits, publishes, evaluations, checkpoints, one line of metrics per step.
        Waits for: the lease (long polls of 1 s), the engines' sleep before a step (placement=colocated), the trainer
        ranks, the replicas, the evaluation; each wait has a deadline.
        Unblocked by: puts of the rollouter that complete a lease.
        Stops when: `run.max_steps` steps are trained, or `stop` was called; `run` cancels it when another task fails.
        The off-policy guard's stop raises RunFailed after the last checkpoint.
        """
        parts = self._parts
        await self._resume(self._start_from)
        # The checkpoint is the truth now: later steps of the same directory are cut off or set aside.
        parts.metrics.truncate_after(self.step)
        parts.checkpoints.set_aside_after(self.step)
        sequences = await self._stored()
        ours = await parts.trainers.logprobs(sequences) if sequences else []  # its turn, if devices are shared
        await self._publisher.publish(self.step)
        self._publisher.take()  # it belongs to no step
        if sequences:
            await self._compare(sequences, ours)
        self.restored.set()
        self._initial = await self._evaluations.before_training() if self.step == 0 else {}
        started = await parts.replicas.stats()
        self._clock.mark(started)
        self._colocation.take_metrics(started)  # the start belongs to no step
        self._clock.time.take()
        while self._ahead is not None or self._goes_on:
            if not await self._one_step():
                break
            if self._saves_after(self.step):
                await self._publisher.settle()
                with self._clock.time.during(Metric.TRAINER_CHECKPOINT):
                    await self._writer.save(self._state())
                self._saved_at = time.monotonic()
        self._finishing = True  # the step is complete: the rest has its own deadlines
        await self._publisher.settle()
        await self._writer.last(self._state())
        if self._guard.stopped is not None:
            raise self._guard.stopped

    async def _stored(self) -> list[Trajectory]:
        """Responses on which replicas and trainer are compared after a resume, since no token of lag 0 may ever come
        (mode one_step_off). None where engines cannot score: the first tokens of lag 0 decide."""
        if self.step == 0 or not ENGINES[self._recipe.rollout.engine].scores:
            return []
        return await self._parts.queue.call(CALL_TIMEOUT_S, MessageQueue.some_ready, COMPARED)

    async def _compare(self, sequences: Sequence[Trajectory], ours: Sequence[np.ndarray]) -> None:
        """Compares the trainer's log-probabilities with the replicas', which have the same version now."""
        try:
            theirs = await self._parts.rollouter.score(sequences, self._recipe.rollout.request_timeout_s)
        except (GenerationError, ProcessDied, DeadlineExceeded) as error:  # others watch over replicas and rollouters
            logger.warning("replicas and trainer were not compared after the resume: %s", error)
            return
        masks = [sequence.loss_mask for sequence in sequences]
        self._guard.compare(
            self.step,
            [found[mask] for found, mask in zip(theirs, masks, strict=True)],
            [found[mask] for found, mask in zip(ours, masks, strict=True)],
        )

    @property
    def _goes_on(self) -> bool:
        return self.step < self._recipe.run.max_steps and not (self._stop.is_set() or self._guard.stopped)

    def _saves_after(self, step: int) -> bool:
        """Decided once for a step, since the next lease depends on it too."""
        if self._saves[0] != step:
            config, since_s = self._recipe.checkpoint, time.monotonic() - self._saved_at
            by_steps = config.every_steps > 0 and step % config.every_steps == 0
            self._saves = step, by_steps or 0 < 60 * config.every_minutes <= since_s
        return self._saves[1]

    async def _one_step(self) -> bool:
        """Leases, trains, commits and publishes one step; False if a stop came before its groups were ready.

        With a publish that overlaps training, the gap between two steps is short: the reply to the commit carries the
        next lease, the trainer copies its weights during the commit, and metrics are assembled while the next step
        trains.
        """
        recipe, parts = self._recipe, self._parts
        done = self.step + 1  # `global_steps` after this step: also the number of the next one
        manifest, self._ahead, waited_s = self._ahead, None, 0.0
        # Phase 1: lease.
        self._clock.start()
        if manifest is None:
            with self._clock.time.during(Metric.TRAINER_GROUPS):
                manifest = await self._lease()
            if manifest is None:
                return False
            waited_s = self._clock.lap()
            self._clock.time.move(manifest.overdue_wait_s, Metric.TRAINER_GROUPS, Metric.TRAINER_OVERDUE)
        await self._colocation.to_trainer(self.step)
        self._clock.start()  # the engines' time to fall asleep is not part of the optimizer step
        # Phase 2: train. The groups are leased until the commit: a crash in between trains them again from the
        # checkpoint.
        bounds = self._guard.correction_bounds
        plans = self._next_step.plans(manifest, bounds)
        if self._planner.needs_kl:
            with self._clock.time.during(Metric.TRAINER_TRAINING):
                reference_kl = await parts.trainers.reference_kl(plans)
            plans = self._planner.plan(manifest, reference_kl, correction_bounds=bounds)
        last = done >= recipe.run.max_steps
        if recipe.max_lag > 0 and not last:
            self._next_step.begin(done, bounds)
        with self._clock.time.during(Metric.TRAINER_TRAINING):
            metrics = await parts.trainers.train_step(plans)
        train_s = self._clock.lap()
        # Phase 3: settle the previous step: its publish and metrics must end before this commit.
        await self._next_step.end()
        await self._publisher.settle()
        await self._recorded()
        parts.events.write(
            StepTrained(
                step=done,
                ordinals=tuple(group.ordinal for group in manifest.groups),
                lag_max=max(group.lag_max for group in manifest.groups),
            )
        )
        # Phase 4: commit. The weights of an overlapping publish are copied before the next step changes them.
        publishes = not self._stop.is_set() and recipe.publishes_after(done)
        is_beside = publishes and recipe.overlaps_publish and not last
        committed, stats = await self._commit(copies=is_beside, leases_next=self._leases_ahead())
        self._ahead = committed.lease
        self.step = done
        parts.saw("step", self.step)
        ended = _EndedStep(manifest, metrics, train_s, waited_s, committed.counts, committed.shares, stats)
        # Phase 5: publish, during training or before the next step.
        if is_beside:
            self._publisher.begin(self.step)
        elif publishes:
            if recipe.empties_queue:
                with self._clock.time.during(Metric.TRAINER_GROUPS):
                    ended.waited_s += await self._drain()
                ended.stats = await parts.replicas.stats()
            if not self._stop.is_set() and self._publisher.version != self.step:  # a catch-up may have published it
                ended.counts, ended.stats = await self._publisher.publish(self.step, ended.stats)
        # Phase 6: metrics. If the next step is leased already, it trains while they are written.
        ended.publishes = self._publisher.take()
        if self._ahead is None:
            await self._record(ended)
        else:
            self._recording = asyncio.create_task(self._record(ended), name=f"metrics of step {self.step}")
        return True

    def _leases_ahead(self) -> bool:
        """True if the next step follows the commit immediately: no evaluation, save or guard acts in between."""
        recipe, step = self._recipe, self.step + 1
        waits = self._saves_after(step) or self._evaluations.acts_after(step) or self._guard.state is not None
        return recipe.overlaps_publish and step < recipe.run.max_steps and not (waits or self._stop.is_set())

    async def _commit(self, *, copies: bool, leases_next: bool) -> tuple[Committed, list[ReplicaStats] | None]:
        """Commits the trained step. `copies`: the trainer concurrently copies its weights. Returns the statistics of
        the replicas only if training waits for publishes; otherwise it would wait for the slowest replica."""
        parts = self._parts
        committing = parts.queue.call(CALL_TIMEOUT_S, MessageQueue.commit, self.step, leases_next=leases_next)
        if not self._recipe.overlaps_publish:
            return await asyncio.gather(committing, parts.replicas.stats())
        if not copies:
            return await committing, None
        with self._clock.time.during(Metric.TRAINER_PUBLISH):
            committed, _ = await asyncio.gather(committing, parts.trainers.snapshot_weights())
        return committed, None

    async def _record(self, ended: _EndedStep) -> None:
        """Writes the step's line of metrics, after the guard and the evaluations have seen it. During training neither
        has anything to do."""
        recipe, parts, step = self._recipe, self._parts, self.step
        record = StepRecord(step, max_lag=recipe.max_lag, keeps_cache=recipe.interrupt == "keep")
        record.of_batch(ended.manifest)
        record.of_training(ended.metrics, ended.train_s)
        record.of_publish(*ended.publishes)
        # The guard may lower the limit on the lag; the queue's counts are then those after the change.
        guarded, limited = await self._guard.after_step(step, record.values)
        slots = self._staleness.limited(self._guard.limit).admissible(
            step=step, version=self._publisher.version, active=0
        )
        record.of_queue(limited or ended.counts, ended.shares, slots)
        with self._clock.time.during(Metric.TRAINER_EVALUATION):
            evaluated = await self._evaluations.after_step(step, last=step >= recipe.run.max_steps)
        stats = ended.stats
        # An evaluation takes time and tokens: statistics from before it are outdated.
        if stats is None or evaluated:
            stats = await parts.replicas.stats()
        initial, self._initial = self._initial, {}
        record.values |= guarded | evaluated | {_INITIAL[name]: initial[name] for name in _INITIAL.keys() & initial}
        record.values |= self._colocation.take_metrics(stats)
        record.of_time(self._clock, stats, ended.waited_s)
        record.of_server(parts.server(), self._clock)
        record.of_processes(stats, self._health)
        record.of_waits(WAITS.take())
        parts.metrics.write(record.values)
        self._findings.stepped(record.values)
        parts.progress.stepped(record.values)

    async def _recorded(self) -> None:
        """Returns once the previous step's metrics are written. Raises the error of writing them."""
        if (recording := self._recording) is not None:
            try:
                await recording
            finally:
                if recording.done():
                    self._recording = None

    async def _lease(self) -> LeaseManifest | None:
        deadline = time.monotonic() + self._recipe.staleness.overdue_timeout_s
        while not self._stop.is_set():
            answer = await self._parts.queue.call(POLL_TIMEOUT_S, MessageQueue.lease, self.step, POLL_S)
            if isinstance(answer, LeaseManifest):
                return answer
            self._parts.saw("queue", answer.counts)
            # Newcomers without weights generate nothing: publish to them while the lease waits.
            self._publisher.check()
            if self._parts.replicas.newcomers:
                await self._publisher.catch_up(self.step)
            if time.monotonic() > deadline:
                what = f"{answer.missing} groups short" if answer.missing else f"{answer.overdue} overdue groups"
                found = f"after {self._recipe.staleness.overdue_timeout_s:g} s still {what}; {answer.counts}"
                do = "see events.jsonl for what the running groups wait for, or raise staleness.overdue_timeout_s"
                raise DeadlineExceeded(explain(f"the groups of step {self.step + 1}", found, do))
        return None

    async def _drain(self) -> float:
        """Waits until no group is being generated, or for a stop; returns the seconds it took.

        When no replica serves any more, running groups can finish only under the next weights: the drain publishes
        them and ends.
        """
        started, queue = time.monotonic(), self._parts.queue
        while not self._stop.is_set() and not await queue.call(POLL_TIMEOUT_S, MessageQueue.wait_idle, POLL_S):
            if self._parts.replicas.newcomers and not self._parts.replicas.serving:
                await self._publisher.catch_up(self.step)
                break
            if time.monotonic() - started > self._recipe.staleness.overdue_timeout_s:
                counts = await queue.call(CALL_TIMEOUT_S, MessageQueue.counts)
                found = f"groups were still running after {self._recipe.staleness.overdue_timeout_s:g} s: {counts}"
                do = "raise staleness.overdue_timeout_s or shorten rollout.request_timeout_s"
                raise DeadlineExceeded(explain(f"drain before the publish of version {self.step}", found, do))
        return time.monotonic() - started

    # -- checkpoint ----------------------------------------------------------------------------------------------

    def _state(self) -> RunState:
        return RunState.of(
            self._recipe,
            self._parts.prompts_digest,
            global_steps=self.step,
            elapsed_s=self._clock.elapsed_s,
            guard=self._guard.state,
        )

    async def _resume(self, checkpoint: Path | None) -> None:
        """Restores the state of the checkpoint; without one the run starts at step 0."""
        parts = self._parts
        if checkpoint is None:
            parts.events.write(TrainingResumed(step=0, checkpoint=None, queue=parts.queue_writer))
            return
        state = read_state(checkpoint)
        parts.events.write(TrainingResumed(state.global_steps, checkpoint.name, parts.queue_writer))
        await parts.trainers.load(checkpoint / "trainer")
        counts = await parts.queue.call(LOAD_TIMEOUT_S, MessageQueue.load, checkpoint / "queue")
        if counts.trained != state.global_steps * state.groups_per_step:
            found = f"its ledger has {counts.trained} trained groups, {state.groups_per_step} a step"
            do = "name another checkpoint, or resume=auto for the newest intact one"
            raise ConfigError(explain(f"resume from step {state.global_steps} of {checkpoint}", found, do))
        await self._guard.resume(state.guard, state.global_steps)
        self.step = self._writer.last_step = state.global_steps
        self._clock.resume(state.elapsed_s)
        logger.info("resumed from %s: step %d, %s", checkpoint, self.step, counts)
        # A smaller `run.max_steps` than before leaves groups that no step will train.
        most = self._recipe.run.max_steps
        held = counts.trained + counts.active - most * self._recipe.batch.groups_per_step
        if held > 0:
            logger.warning(
                "%d groups are more than run.max_steps=%d trains: its last checkpoint keeps them", held, most
            )

    # -- guards --------------------------------------------------------------------------------------------------

    async def _rollout(self) -> None:
        """Runs the rollouter once the queue is restored and the replicas serve the weights of the checkpoint. Their
        earlier weights may belong to steps that were undone."""
        await self.restored.wait()
        await self._parts.rollouter.run()

    async def _watch_health(self) -> None:
        """Checks the health of the queue, the trainer ranks and the rollouter. The pool watches the replicas itself.

        Consumes: nothing.
        Produces: ProcessDied or DeadlineExceeded with the name of the process that failed.
        Waits for: the answer of each process, at most `ray.health_timeout_s`, every `ray.health_interval_s`.
        Unblocked by: the answers.
        Stops when: the training loop ends, or a check fails.
        """
        parts, timeout_s = self._parts, self._recipe.ray.health_timeout_s
        while True:
            await asyncio.sleep(self._recipe.ray.health_interval_s)
            queue_s, trainers_s, rollout = await asyncio.gather(
                parts.queue.call(timeout_s, MessageQueue.ping),
                parts.trainers.ping(timeout_s),
                parts.rollouter.stats(timeout_s),
            )
            parts.saw("rollout", (rollout.groups, rollout.requests, rollout.reprefilled_tokens))
            self._health = {
                Metric.CPU_QUEUE: queue_s,
                Metric.CPU_TRAINERS: trainers_s,
                Metric.CPU_ROLLOUTER: rollout.cpu_s,
                Metric.CPU_WORKERS: rollout.workers_cpu_s,
                Metric.REPREFILLED: rollout.reprefilled_tokens,
                **self._shares.since_last(rollout),
                **{Metric.SANDBOXES.of(state): count for state, count in rollout.sandboxes.items()},
            }


async def _first_of(timeout_s: float | None, *tasks: asyncio.Task[Any]) -> None:
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def _errors(*tasks: asyncio.Task[Any]) -> dict[str, BaseException]:
    """The errors of those that have failed, by name."""
    ended = (task for task in tasks if task.done() and not task.cancelled())
    return {task.get_name(): error for task in ended if (error := task.exception()) is not None}


async def _outcome(future: asyncio.Future[None]) -> None:
    await asyncio.shield(future)


class NextStep:
    """Prepares the next step while the present one trains: its plan, and its groups in the memory of the trainer ranks.

    Only the lease decides what a step trains. If it differs from the prepared groups, the plan is recomputed and the
    ranks fetch the missing groups. Owns the plan, and the task that makes it."""

    def __init__(self, parts: Parts, planner: StepPlanner) -> None:
        self._parts, self._planner = parts, planner
        self._task: asyncio.Task[None] | None = None
        self._foreseen: tuple[LeaseManifest, float, tuple[RankPlan, ...]] | None = None

    def begin(self, step: int, correction_bounds: float) -> None:
        """Begins the preparation while the previous step trains, after `end`.

        Args:
            step: `global_steps` when the foreseen step starts.
            correction_bounds: see `RankPlan`.
        """
        assert self._task is None, "one step is foreseen at a time"
        self._task = asyncio.create_task(self._prepare(step, correction_bounds), name=f"preparing step {step + 1}")

    async def end(self) -> None:
        """Ends the wait for groups that are not ready. Raises the error of the preparation: the queue or a rank is
        gone."""
        if (task := self._task) is not None:
            task.cancel()
            await asyncio.wait([task])
            self._task = None
            if not task.cancelled():
                await task

    async def close(self) -> None:
        await end(self._task)

    def plans(self, manifest: LeaseManifest, correction_bounds: float) -> tuple[RankPlan, ...]:
        """The plans of the leased step: the prepared ones if they match, else of `StepPlanner.plan`."""
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is not None:
            before, bounds, plans = foreseen
            if (before.step, before.groups, bounds) == (manifest.step, manifest.groups, correction_bounds):
                return plans
        return self._planner.plan(manifest, correction_bounds=correction_bounds)

    async def _prepare(self, step: int, correction_bounds: float) -> None:
        """Consumes: the groups that `step` would lease now.
        Produces: its plan; its groups in the memory of the ranks that would train them.
        Waits for: the groups, in long polls; the ranks, each for the queue.
        Unblocked by: puts of the rollouter.
        Stops when: the preparation is done, or the present step has been trained.
        """
        while not (groups := await self._parts.queue.call(POLL_TIMEOUT_S, MessageQueue.foresee, step, POLL_S)):
            pass
        manifest = LeaseManifest(step, groups)
        plans = self._planner.plan(manifest, correction_bounds=correction_bounds)
        self._foreseen = manifest, correction_bounds, plans
        await self._parts.trainers.fetch_ahead(plans)
