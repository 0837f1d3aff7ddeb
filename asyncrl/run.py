"""The composition root: builds every part of a run from its recipe, wires them and shuts them down.

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
by handles of this module for the whole run. Control carries ids, lengths, rewards and versions; tokens go from the
rollouter to the queue and from there to the trainer rank that needs them.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from asyncrl.checkpoint.run_directory import RunDirectory
from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.config.load import engine_environment, environment_defaults
from asyncrl.config.recipe import Recipe
from asyncrl.coordinator import Coordinator, Parts
from asyncrl.data.tokenizer import RenderedPrompts
from asyncrl.errors import AsyncRLError
from asyncrl.inference.channel import ReplicaControl, gpu_share, replica_gpus, require_gpus, spawn_replica
from asyncrl.inference.pool import PoolSettings, ReplicaPool
from asyncrl.observability.events import EventLog
from asyncrl.observability.logs import LOG_PATH_VARIABLE
from asyncrl.observability.metrics import MetricsLog
from asyncrl.observability.progress import ProgressView
from asyncrl.observability.sinks import build_sinks
from asyncrl.queue.channel import QueueControl
from asyncrl.queue.message_queue import MessageQueue, QueueSpec
from asyncrl.rollout.channels import QueueChannel, ReplicaActorChannel, RolloutControl
from asyncrl.rollout.rollouter import Rollouter, RolloutSpec
from asyncrl.trainer.pool import TrainerPool
from asyncrl.trainer.spec import TrainerSpec
from asyncrl.weights.checkpoint_engine import CheckpointEngine

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 3.0
"""Longest that one part may take to stop before its process is killed."""
ENGINE_STOP_TIMEOUT_S = {"torch": STOP_TIMEOUT_S, "vllm": 8.0}
"""The same for a replica: vLLM's processes get 5 s to end by themselves."""


@dataclass(frozen=True, slots=True)
class Job:
    """A run that has been checked. `start_from`: the checkpoint to go on from, if any."""

    recipe: Recipe
    name: str
    directory: RunDirectory
    start_from: Path | None
    train: RenderedPrompts
    held_out: Mapping[str, RenderedPrompts]


@dataclass(frozen=True, slots=True)
class RunResult:
    """`signal`: the number of the signal that ended the run early, None when it reached `run.max_steps`."""

    step: int
    signal: int | None


def run(job: Job, console: Console) -> RunResult:
    """Runs to the end or to a signal. Raises the first error of any part, after everything was shut down."""
    _start_ray(job.recipe, job.directory)
    try:
        return asyncio.run(_run(job, console))
    finally:
        ray.shutdown()


async def _run(job: Job, console: Console) -> RunResult:
    recipe, directory = job.recipe, job.directory
    signals: list[int] = []
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    on_stop: list[Any] = []

    def on_signal(number: int) -> None:
        signals.append(number)
        stopped.set()
        logger.warning("%s: ending with a checkpoint", signal.Signals(number).name)
        for call in on_stop:
            call()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    metrics = MetricsLog(directory.metrics, build_sinks(recipe, job.name, directory.path))
    events = EventLog(directory.events)
    actors = _Actors(job, events)
    live = recipe.observability.progress and console.is_terminal
    progress = ProgressView(console, max_steps=recipe.run.max_steps, live=live)
    try:
        if not await _until(stopped, actors.start()):
            return RunResult(0, signals[0])
        events.write("start", name=job.name, resumed=job.start_from is not None)
        gc.collect()
        gc.freeze()  # what start-up left behind is not worth walking in every full collection
        coordinator = Coordinator(recipe, actors.parts(metrics, events, progress), job.start_from)
        on_stop.append(coordinator.stop)
        if stopped.is_set():
            coordinator.stop()
        await coordinator.run()
        outcome = "interrupted" if signals and coordinator.step < recipe.run.max_steps else "finished"
        events.write("end", outcome=outcome, step=coordinator.step)
        return RunResult(coordinator.step, signals[0] if outcome == "interrupted" else None)
    except Exception as e:
        events.write("fault", error=type(e).__name__, message=str(e))
        raise
    finally:
        progress.close()
        await actors.stop()
        metrics.close()
        events.close()


async def _until(stopped: asyncio.Event, work: Any) -> bool:
    """Awaits `work`; False when `stopped` was set first, `work` is cancelled then."""
    task, stop = asyncio.create_task(work), asyncio.create_task(stopped.wait())
    await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return False
    await task
    return True


def _start_ray(recipe: Recipe, directory: RunDirectory) -> None:
    ray.init(
        address=recipe.ray.address,
        include_dashboard=None if recipe.ray.address else False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={
            "env_vars": {**environment_defaults(), LOG_PATH_VARIABLE: str(directory.log)},
            "worker_process_setup_hook": "asyncrl.observability.logs.configure_worker",
        },
    )


def _channel(replica_id: int, control: ReplicaControl) -> ReplicaActorChannel:
    return ReplicaActorChannel(replica_id, control.handle, "rollouter")


class _Actors:
    """The actors of a run and the channels to them."""

    def __init__(self, job: Job, events: EventLog) -> None:
        self._recipe = recipe = job.recipe
        self._directory = directory = job.directory
        self._prompts_digest = job.train.digest()
        queue_spec = QueueSpec(
            groups_per_step=recipe.batch.groups_per_step,
            max_lag=recipe.max_lag,
            max_groups=recipe.run.max_steps * recipe.batch.groups_per_step,
            max_attempts=recipe.rollout.max_attempts,
            max_failed_fraction=recipe.rollout.max_failed_fraction,
            dynamic_sampling=recipe.algorithm.dynamic_sampling,
            events_path=directory.events,
        )
        on_driver = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "max_concurrency": 1000}
        self.queue = QueueControl(
            ray.remote(MessageQueue).options(**options, scheduling_strategy=on_driver).remote(queue_spec)
        )
        gpus = replica_gpus(recipe.rollout, recipe.trainer.num_ranks + recipe.rollout.num_replicas)
        require_gpus(gpus, recipe.rollout.num_replicas, others=recipe.trainer.num_ranks * self._rank_gpus())
        self.replicas = ReplicaPool(
            functools.partial(
                spawn_replica,
                recipe.rollout,
                recipe.model,
                num_gpus=gpus,
                environment=engine_environment(recipe.rollout.engine),
            ),
            recipe.rollout.num_replicas,
            PoolSettings(
                max_restarts=recipe.recovery.max_replica_restarts,
                start_timeout_s=recipe.ray.start_timeout_s,
                health_interval_s=recipe.ray.health_interval_s,
                health_timeout_s=recipe.ray.health_timeout_s,
            ),
            announce=self._announce,
            retire=self._retire,
            on_event=events.write,
        )
        channels = {i: _channel(i, control) for i, control in self.replicas.controls.items()}
        spec = RolloutSpec(recipe, job.train, job.held_out, directory.samples)
        self.rollouter = RolloutControl(
            ray.remote(Rollouter)
            .options(**options, scheduling_strategy=on_driver)
            .remote(spec, QueueChannel(self.queue.handle), channels)
        )
        self._trainers: TrainerPool | None = None

    async def start(self) -> None:
        """Starts all of them at once. Raises what any of them raises."""
        recipe, timeout_s = self._recipe, self._recipe.ray.start_timeout_s
        spec = TrainerSpec(
            model=recipe.model,
            trainer=recipe.trainer,
            algorithm=recipe.algorithm,
            temperature=recipe.rollout.sampling.temperature,
            seed=recipe.run.seed,
        )
        gpus = self._rank_gpus()
        try:
            async with asyncio.TaskGroup() as group:
                trainers = group.create_task(
                    TrainerPool.start(spec, self.queue.handle, num_gpus_per_rank=gpus, timeout_s=timeout_s)
                )
                group.create_task(self.rollouter.start(timeout_s))
                group.create_task(self.replicas.start())
        except ExceptionGroup as errors:
            # One error is told: a named one before others, one with a cause before a timeout.
            raise min(
                errors.exceptions, key=lambda e: (not isinstance(e, AsyncRLError), isinstance(e, TimeoutError))
            ) from None
        self._trainers = trainers.result()

    def parts(self, metrics: MetricsLog, events: EventLog, progress: ProgressView) -> Parts:
        assert self._trainers is not None
        recipe = self._recipe
        return Parts(
            queue=self.queue,
            trainers=self._trainers,
            rollouter=self.rollouter,
            replicas=self.replicas,
            weights=CheckpointEngine(
                recipe.weights,
                self._trainers,
                self.replicas,
                interrupt=recipe.interrupt,
                receivers_per_replica=recipe.rollout.workers_per_replica,
            ),
            checkpoints=CheckpointStore(self._directory.checkpoints, recipe.checkpoint.keep),
            metrics=metrics,
            events=events,
            progress=progress,
            prompts_digest=self._prompts_digest,
        )

    async def stop(self) -> None:
        """Asks every part to stop and kills what does not in time."""
        stops = [self.replicas.stop(ENGINE_STOP_TIMEOUT_S[self._recipe.rollout.engine])]
        if self._trainers is not None:
            stops.append(self._trainers.stop())
        # The rollouter first: a group that loses its replica now would be counted as failed.
        first = await asyncio.gather(self.rollouter.stop(STOP_TIMEOUT_S), return_exceptions=True)
        for failure in (*first, *await asyncio.gather(*stops, return_exceptions=True)):
            if isinstance(failure, AsyncRLError):
                logger.info("while stopping: %s", failure)
            elif isinstance(failure, BaseException):
                logger.warning("while stopping: %r", failure)
        for handle in (self.rollouter.handle, self.queue.handle):
            ray.kill(handle)

    async def _retire(self, replica_id: int) -> None:
        await self.rollouter.remove_replica(replica_id)

    async def _announce(self, replica_id: int, control: ReplicaControl) -> None:
        await self.rollouter.add_replica(replica_id, _channel(replica_id, control))

    def _rank_gpus(self) -> float:
        """GPUs of one trainer rank: a whole one beside vLLM, which takes whole ones itself."""
        recipe = self._recipe
        beside = recipe.rollout.num_replicas if recipe.rollout.engine == "torch" else 0
        return gpu_share(recipe.trainer.device, recipe.trainer.num_ranks + beside)
