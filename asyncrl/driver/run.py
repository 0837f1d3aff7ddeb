"""The composition root: builds every part of a run from its recipe, wires them, restarts them and shuts them down.

    PromptStream --ordinal--> MessageQueue.admit ==ticket==> Rollouter --generate--> Router --> Replica[0..R)
                                  |  ^                          |  environment + reward            |
                                  |  |                          v                                  |
                                  |  +------- put(group) -------+                                  |
                                  | lease(step) -> ids, lengths, rewards, lags                     |
                                  v                                                                |
    Coordinator: plan (advantages, packing, shards) --> TrainerWorker[0..D) fetch(ids) -> step     |
                                  |                                                                |
                                  +-- commit(step) ; publish(version) ==> CheckpointEngine ========+

The driver's process runs the coordinator; MessageQueue, Rollouter, Replica and TrainerWorker are Ray actors, held
by handles of `driver/actors.py` for the whole run. Control carries ids, lengths, rewards and versions; tokens go from
the rollouter to the queue and from there to the trainer rank that needs them.

A coordinator lives as long as its queue and its trainer ranks. If one of these dies, the run starts new ones, and a new
coordinator resumes from the newest intact checkpoint. Replicas and rollouters are replaced under a running
coordinator. SIGINT and SIGTERM end the run after the step in progress, with a checkpoint (`Coordinator.stop`).
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import replace
from typing import Any, TypeVar

import psutil
from rich.console import Console

from asyncrl.checkpoint.store import CheckpointStore, read_state
from asyncrl.config.recipe import Recipe
from asyncrl.data.model_files import check_model, hub_facts
from asyncrl.driver.actors import Actors
from asyncrl.driver.cluster.fork_server import ForkServer
from asyncrl.driver.cluster.janitor import processes_of
from asyncrl.driver.cluster.nodes import prepare_nodes, smallest_gpu
from asyncrl.driver.cluster.placement import sends_copies
from asyncrl.driver.cluster.placement_groups import PlacementGroups, reserved
from asyncrl.driver.cluster.ray_session import Cluster, ray_cluster
from asyncrl.driver.coordinator import Coordinator
from asyncrl.driver.interfaces import Parts
from asyncrl.driver.memory_plan import GIB, gpu_bytes, with_fitting_share
from asyncrl.driver.preflight import hub_models
from asyncrl.driver.publish.checkpoint_engine import CheckpointEngine
from asyncrl.driver.run_spec import RunResult, RunSpec
from asyncrl.driver.scale_requests import ScaleDesk
from asyncrl.errors import (
    GO_ON,
    AsyncRLError,
    DeadlineExceeded,
    ProcessDied,
    RunFailed,
    Stalled,
    StorageError,
    explain,
)
from asyncrl.inference.engines import ENGINES
from asyncrl.observability.events import EventLog
from asyncrl.observability.failure_report import write_report
from asyncrl.observability.metrics_log import MetricsLog
from asyncrl.observability.progress import ProgressView
from asyncrl.observability.sinks import build_sinks
from asyncrl.remote.failure_policy import FailureAction, RestartBudget, failure_action
from asyncrl.remote.tasks import cancel
from asyncrl.remote.waits import WAITS
from asyncrl.types.events import RunEnded, RunFaulted, RunStarted, TrainingFailed, TrainingRestarted

logger = logging.getLogger(__name__)

T = TypeVar("T")

STALL_GRACE_S = 30.0
"""Longest time for a stalled run to end by itself before its processes are killed."""


def run(spec: RunSpec, console: Console, forks: ForkServer | None = None) -> RunResult:
    """Runs to the end or to a signal. Raises the first error that no restart can repair, after shutting everything
    down. `forks`: a fork server started for this run, if any."""
    sinks = build_sinks(spec.recipe, spec.written, spec.name, spec.directory.path)
    settings = spec.recipe.ray
    with (
        ray_cluster(settings.address, spec.directory.log, spec.hide.names, settings.env, forks) as cluster,
        reserved(spec.recipe) as placements,
    ):
        placed = spec.recipe.placed(
            ranks_on_gpus=placements.placement.rank_gpus > 0,
            replicas_on_gpus=placements.placement.replica_gpus > 0,
            stages=ENGINES[spec.recipe.rollout.engine].stages,
        )
        spec = replace(spec, recipe=placed)
        prepare_nodes(spec.directory.path, hub_models(spec.recipe), settings.start_timeout_s)
        spec = replace(spec, recipe=with_measured_share(spec.recipe))
        current = _Run(spec, console, cluster, placements, MetricsLog(spec.directory.metrics, sinks))
        try:
            return asyncio.run(current.run())
        finally:
            current.left.set()


def with_measured_share(recipe: Recipe) -> Recipe:
    """The recipe whose colocated engine takes what a rank leaves of GPUs that only a cluster knows, as the dry run did
    where it knew them."""
    is_known = not recipe.is_colocated or gpu_bytes(recipe) is not None
    if is_known or (memory := smallest_gpu(recipe.ray.start_timeout_s)) is None:
        return recipe
    recipe = replace(recipe, ray=replace(recipe.ray, gpu_memory_gib=memory / GIB))
    facts = check_model(recipe.model.path)
    recipe, note = with_fitting_share(recipe, facts if facts.is_local else hub_facts(recipe.model))
    logger.info("the smallest GPU has %.1f GiB: %s", memory / GIB, note)
    return recipe


class _Run:
    """One process of a run, from the start of its actors to their exit."""

    def __init__(
        self, spec: RunSpec, console: Console, cluster: Cluster, placements: PlacementGroups, metrics: MetricsLog
    ) -> None:
        self._spec, self._cluster, self._metrics, self._placements = spec, cluster, metrics, placements
        self._recipe = recipe = spec.recipe
        self._events = EventLog(spec.directory.events, spec.hide)
        live = recipe.observability.progress and console.is_terminal
        self._progress = ProgressView(console, max_steps=recipe.run.max_steps, live=live)
        self._checkpoints = CheckpointStore(spec.directory.checkpoints, recipe.checkpoint.keep)
        self._actors = Actors(spec, cluster, placements, self._events)
        self._coordinator: Coordinator | None = None
        self._ended = threading.Event()
        self.left = threading.Event()
        """Set when nothing of the run remains in this process."""
        self._loop: asyncio.AbstractEventLoop
        self._stopped: asyncio.Future[int]
        """The first signal that ends the run."""
        self._stalled: asyncio.Future[None]

    async def run(self) -> RunResult:
        self._loop = asyncio.get_running_loop()
        self._stopped, self._stalled = self._loop.create_future(), self._loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._on_signal, number)
        watchdog: Watchdog | None = None
        try:
            if not await self._unless_stopped(self._actors.start()):
                return RunResult(0, self._stopped.result())
            self._write_start()
            gc.collect()
            gc.freeze()  # start-up objects live as long as the process: collections need not visit them
            watchdog = Watchdog(self._recipe.stall_timeout_s, self._on_stall)
            step, complete = await self._unless_stalled(self._train(watchdog))
            return RunResult(step, None if complete or not self._stopped.done() else self._stopped.result())
        except Exception as error:
            named = self._as_storage_error(error)
            self._write_fault(named)
            if not isinstance(named, Stalled):  # a stall has already written its report
                await asyncio.to_thread(self._report, named)
            if named is error:
                raise
            raise named from error
        finally:
            if watchdog is not None:
                watchdog.close()
            self._progress.close()
            await self._actors.stop()
            self._metrics.close()
            self._events.close()
            self._ended.set()
            threading.Thread(target=self._leave, name="leave", daemon=True).start()

    async def _train(self, watchdog: Watchdog) -> tuple[int, bool]:
        """Trains until the end or a stop, and restarts the training side when the queue or a trainer rank is lost.

        Consumes: the ends of coordinators.
        Produces: after the loss of the queue or a trainer rank, a new training side, and a coordinator that resumes
        from the newest intact checkpoint.
        Waits for: the coordinator; starts of actors, each with its deadline.
        Unblocked by: the end of a coordinator, a signal, the watchdog.
        Stops when: the run is complete or stopped, an error cannot be repaired, or `recovery.max_restarts` is spent.

        Returns the last step, and True if it is the last step of the run. Raises errors that no restart can repair, and
        RunFailed if the training side was lost too often.
        """
        recovery = self._recipe.recovery
        budget = RestartBudget(recovery.max_restarts, recovery.window_s)
        start_from, elapsed_s = self._spec.start_from, 0.0
        while True:
            if start_from is not None:
                await asyncio.to_thread(self._checkpoints.set_aside_corrupt, start_from)
            coordinator = Coordinator(self._recipe, self._parts(watchdog), start_from, elapsed_s=elapsed_s)
            self._coordinator = coordinator
            # A signal may have come between two coordinators.
            if self._stopped.done():
                coordinator.stop()
            try:
                await coordinator.run()
            except (ProcessDied, DeadlineExceeded) as error:
                if failure_action(error.process, error, restarts_left=True) is not FailureAction.RESTART_TRAINING_SIDE:
                    raise
                if self._stopped.done():
                    self._write_loss(error, coordinator.step)
                    return self._interrupted(coordinator.step)
                lost = error
            else:
                if not coordinator.restored.is_set():  # a stop before training began
                    return self._interrupted(0 if start_from is None else read_state(start_from).global_steps)
                complete = coordinator.step >= self._recipe.run.max_steps
                self._events.write(RunEnded("finished" if complete else "interrupted", coordinator.step))
                return coordinator.step, complete
            started, elapsed_s = time.monotonic(), coordinator.elapsed_s
            if not await self._restart(lost, coordinator.step, budget):
                return self._interrupted(coordinator.step)
            watchdog.saw("restart", budget.total)
            # Before it was restored, the checkpoint that the user asked for is still the one to use.
            if coordinator.restored.is_set():
                start_from = await asyncio.to_thread(self._checkpoints.latest) or self._spec.start_from
            checkpoint = start_from.name if start_from else None
            logger.info("training goes on from %s", checkpoint or "the beginning: there is no checkpoint yet")
            self._events.write(TrainingRestarted(str(lost.process), time.monotonic() - started, checkpoint))
            watchdog.saw("verified", budget.total)

    def _interrupted(self, step: int) -> tuple[int, bool]:
        """Records a stop outside of training: the last checkpoint remains the newest."""
        self._events.write(RunEnded("interrupted", step))
        return step, False

    async def _restart(self, lost: AsyncRLError, step: int, budget: RestartBudget) -> bool:
        """Restarts the training side, as often as the budget allows; False if a signal came first."""
        while True:
            logger.error("%s has failed after step %d; the training side restarts: %s", lost.process, step, lost)
            self._write_loss(lost, step)
            if not budget.take():
                found = f"{lost.process} failed after {budget} of the training side: {lost}"
                do = f"see {self._spec.directory.faults}; raise recovery.max_restarts, or go on with resume=auto"
                raise RunFailed(explain("train on after the loss of a process", found, do)) from lost
            if isinstance(lost, DeadlineExceeded):
                await asyncio.to_thread(self._report, lost)
            try:
                return await self._unless_stopped(self._actors.restart_training_side())
            except (ProcessDied, DeadlineExceeded) as error:
                lost = error

    def _parts(self, watchdog: Watchdog) -> Parts:
        recipe, actors = self._recipe, self._actors
        assert actors.trainers is not None, "they have started"
        return Parts(
            queue=actors.queue,
            trainers=actors.trainers,
            rollouter=actors.rollouter,
            replicas=actors.replicas,
            weights=CheckpointEngine(
                recipe.weights,
                actors.trainers,
                actors.replicas,
                interrupt=recipe.interrupt,
                encoding="lora" if recipe.trainer.lora.rank else recipe.weights.encoding,
                receivers_per_replica=recipe.rollout.settings.num_workers,
                rolling=recipe.rolls_publish,
                machines=self._placements.machines if sends_copies(recipe) else None,
            ),
            checkpoints=self._checkpoints,
            metrics=self._metrics,
            events=self._events,
            progress=self._progress,
            prompts_digest=self._spec.train.digest,
            queue_writer=actors.queue_writer,
            saw=watchdog.saw,
            server=lambda: None if actors.server is None else actors.server.report,
            engines=actors.engines,
            loops={
                "number of replicas": actors.fleet_size.watch,
                "requests of asyncrl-scale": ScaleDesk(self._spec.directory.scale, actors.fleet_size).serve,
                **({"pools of other models": actors.pools.watch} if actors.pools else {}),
            },
        )

    # -- ends ----------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int) -> None:
        if not self._stopped.done():
            self._stopped.set_result(number)
        logger.warning("%s: ending with a checkpoint", signal.Signals(number).name)
        if self._coordinator is not None:
            self._coordinator.stop()

    async def _unless_stopped(self, work: Awaitable[None]) -> bool:
        """Awaits `work`; if a signal comes first, cancels it and returns False."""
        task = await _ended(work, self._stopped)
        if not task.cancelled():
            await task
        return not task.cancelled()

    async def _unless_stalled(self, work: Awaitable[T]) -> T:
        """The result of `work`; raises the watchdog's error."""
        task = await _ended(work, self._stalled)
        if task.cancelled():
            await self._stalled
        return await task

    def _as_storage_error(self, error: Exception) -> Exception:
        """Converts ENOSPC and EDQUOT to StorageError; returns other errors unchanged."""
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not full or isinstance(error, AsyncRLError):
            return error
        return StorageError(explain(f"write {error.filename or self._spec.directory.path}", str(error), GO_ON))

    def _write_start(self) -> None:
        """Writes the start event, with the limits that the audit checks: they cannot change later."""
        recipe = self._recipe
        self._events.write(
            RunStarted(
                name=self._spec.name,
                resumed=self._spec.start_from is not None,
                pid=os.getpid(),
                groups_per_step=recipe.batch.groups_per_step,
                max_lag=recipe.max_lag,
                max_steps=recipe.run.max_steps,
                replicas=recipe.rollout.num_replicas,
                verify=recipe.weights.verify,
            )
        )

    def _write_loss(self, lost: AsyncRLError, step: int) -> None:
        self._events.write(TrainingFailed(str(lost.process), str(lost), step))

    def _write_fault(self, error: Exception) -> None:
        try:
            self._events.write(RunFaulted(type(error).__name__, str(error)))
        except StorageError as full:  # must not hide the error itself
            logger.warning("%s", full)

    def _report(self, error: Exception) -> None:
        """Writes the evidence of a failure to the run directory."""
        directory = self._spec.directory
        try:
            place = write_report(
                directory.faults,
                error,
                waits=WAITS.lines(),
                processes=[psutil.Process(), *processes_of(self._cluster.run_id)],
                log=directory.log,
                outputs=self._cluster.crash_outputs,
                hide=self._spec.hide,
            )
            logger.warning("what failed and what all processes were doing: %s", place)
        except Exception as failure:  # noqa: BLE001 - a report that cannot be written must not hide the failure
            logger.warning("no report could be written: %r", failure)

    def _on_stall(self, quiet_s: float) -> None:
        """Ends the run. Called in the watchdog's thread: the event loop may be the part that hangs."""
        do = f"read the stacks below {self._spec.directory.faults}; raise recovery.stall_timeout_s if it was slow"
        error = Stalled(explain("progress of the run", f"none for {quiet_s:.0f} s", do))
        logger.error("%s", error)
        self._report(error)
        self._loop.call_soon_threadsafe(self._stall, error)
        if not self._ended.wait(STALL_GRACE_S):
            logger.critical("the run did not end by itself; the janitor ends its processes")
            os._exit(Stalled.exit_code)

    def _leave(self) -> None:
        """Ends the process if a thread hangs, for example in a dead file system: asyncio would wait forever."""
        if not self.left.wait(STALL_GRACE_S):
            logger.critical("a thread does not end; the process does")
            os._exit(Stalled.exit_code)

    def _stall(self, error: Stalled) -> None:
        if not self._stalled.done():
            self._stalled.set_exception(error)


async def _ended(work: Awaitable[T], other: asyncio.Future[Any]) -> asyncio.Future[T]:
    """The task of `work`, which has ended, or was cancelled since `other` came first."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task, other], return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            await cancel(task)
    return task


# Detects a run without progress, even if the event loop hangs: it runs in its own thread.


SLEPT_S = 5.0
"""A pause longer than requested by this much means that the whole process was stopped: that is not a stall."""


class Watchdog:
    """Owns the watching thread and the time of the last progress."""

    def __init__(self, timeout_s: float, on_stall: Callable[[float], None]) -> None:
        """`on_stall`: called once, in the watchdog's thread, with the seconds since the last progress."""
        self._timeout_s = timeout_s
        self._on_stall = on_stall
        self._marks: dict[str, Hashable] = {}
        self._last = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def saw(self, name: str, mark: Hashable) -> None:
        """Counts as progress if `mark` differs from the last one under this name."""
        if self._marks.get(name, self) != mark:
            self._marks[name] = mark
            self._last = time.monotonic()

    def close(self) -> None:
        """Ends the thread. Idempotent; may be called from `on_stall`."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def _watch(self) -> None:
        """Calls `on_stall` if there was no progress for `timeout_s`.

        Consumes: marks of progress.
        Produces: one call of `on_stall`, which writes the stacks of all processes and ends the run.
        Waits for: time only.
        Unblocked by: nothing; it depends on no other thread.
        Stops when: `close` is called, or `on_stall` has returned.
        """
        pause_s = min(1.0, self._timeout_s / 4)
        while True:
            asked = time.monotonic()
            if self._closed.wait(pause_s):
                return
            if time.monotonic() - asked > pause_s + SLEPT_S:
                self._last = time.monotonic()  # the whole process was stopped, or the machine slept
            quiet_s = time.monotonic() - self._last
            if quiet_s > self._timeout_s:
                self._on_stall(quiet_s)
                return
