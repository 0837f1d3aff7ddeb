"""Decides when the run is evaluated, and by which replicas.

All replicas answer the evaluations before the first step and after the last one; training waits for both. With
`eval.leased_replicas` the evaluations in between run concurrently with training, on leased replicas that keep their
version. Their result goes into the metrics of the first step that ends after them.

An evaluation that fails, or takes longer than `eval.timeout_s` for a held-out set, is counted as failed and does not
end the run. An evaluation on leased replicas is first retried on another lease.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from asyncrl.config.recipe import Recipe
from asyncrl.driver.interfaces import Parts
from asyncrl.driver.publisher import Publisher
from asyncrl.errors import AsyncRLError, DeadlineExceeded, GenerationError
from asyncrl.remote.tasks import cancel
from asyncrl.types import EvalResult, ReplicaTable
from asyncrl.types.events import EvaluationFailed, EvaluationSkipped, EvaluationStarted, SetEvaluated
from asyncrl.types.metrics import Metric

if TYPE_CHECKING:
    from asyncrl.inference.replica_actor import ReplicaControl

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""Pause between two looks for newcomers while training waits for an evaluation."""


@dataclass(slots=True, eq=False)
class _Beside:
    """An evaluation concurrent with training. `version` was published when `step` ended. `tries` includes this one."""

    step: int
    version: int
    tries: int
    work: asyncio.Task[list[EvalResult]]
    started: float = field(default_factory=time.monotonic)


class Evaluations:
    """Owns the evaluation that runs during training, if any, and its leases."""

    def __init__(self, recipe: Recipe, parts: Parts, *, stop: asyncio.Event, publisher: Publisher) -> None:
        """`stop`: set when the run is to end."""
        self._config, self._seed, self._sets = recipe.eval, recipe.run.seed, tuple(recipe.data.eval)
        self._max_steps = recipe.run.max_steps
        self._before: dict[str, tuple[tuple[str, str, float], ...]] = {}
        """Set -> the first responses of its first evaluation."""
        self._parts = parts
        self._stop = stop
        self._publisher = publisher
        self._beside: _Beside | None = None
        self._due: int | None = None
        """Number of earlier tries of an evaluation that is due and has no replica yet; None: none is due."""

    async def before_training(self) -> dict[str, float]:
        """The metrics of the evaluation before step 1; empty if none is configured, or a stop came."""
        return await self._by_all(0) if self._config.every_steps else {}

    async def after_step(self, step: int, *, last: bool) -> dict[str, float]:
        """The metrics known at the end of this step; empty if there are none."""
        if not self._config.every_steps or self._stop.is_set():
            return {}
        if last:
            self._due = None
            if self._beside is not None:
                await self._unless_stopped(self._beside.work, step)
            found = self._take(last=True)
            return found if self._stop.is_set() else found | await self._by_all(step)
        found = self._take()
        if step % self._config.every_steps == 0:
            if not self._config.leased_replicas:
                return await self._by_all(step)
            if self._beside is None:
                self._due = 0
            else:
                logger.warning("no evaluation after step %d: that of step %d goes on", step, self._beside.step)
                self._parts.events.write(EvaluationSkipped(step, running=self._beside.step))
        if self._due is not None and self._beside is None:
            await self._begin(step)
        return found

    def acts_after(self, step: int) -> bool:
        """True if `after_step` has something to do that the next step must wait for."""
        config = self._config
        is_due = config.every_steps > 0 and step % config.every_steps == 0
        return is_due or self._beside is not None or self._due is not None

    async def close(self) -> None:
        """Cancels the evaluation in progress. Its replicas are fenced or stopped together with the others."""
        if self._beside is not None:
            await cancel(self._beside.work)
            self._beside = None

    # -- by all replicas -----------------------------------------------------------------------------------------

    async def _by_all(self, step: int) -> dict[str, float]:
        """Evaluates every held-out set while training waits. Nothing is published during it, so one version answers all
        prompts. A set that fails or takes too long counts as failed. Empty if a stop came first."""
        await self._publisher.settle()
        started, results = time.monotonic(), list[EvalResult]()
        for name in self._sets:
            work = asyncio.create_task(self._parts.rollouter.evaluate(name, self._seed, self._config.timeout_s))
            try:
                if not await self._unless_stopped(work, step):
                    return {}
                results.append(await work)
            except (DeadlineExceeded, GenerationError) as error:
                if not work.done() or work.exception() is not error:
                    raise  # the error of a publish to newcomers
                self._failed(error, step, self._publisher.version, tries=1)
            finally:
                work.cancel()
            self._parts.saw("evaluation of a set", (step, name))
        found = self._tell(results, step, self._publisher.version, started) if results else {}
        return found if len(results) == len(self._sets) else found | {Metric.EVAL_FAILED: 1}

    async def _unless_stopped(self, work: asyncio.Task[Any], step: int) -> bool:
        """True when `work` is done, False if a stop came first. Publishes to newcomers while it waits; a new version
        only if no replica could answer otherwise."""
        stop, replicas = asyncio.create_task(self._stop.wait()), self._parts.replicas
        try:
            while not work.done():
                await asyncio.wait([work, stop], timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                if stop.done() and not work.done():
                    return False
                if replicas.newcomers and (self._publisher.version == step or not replicas.serving):
                    await self._publisher.catch_up(step)
        finally:
            stop.cancel()
        return True

    # -- during training -----------------------------------------------------------------------------------------

    async def _begin(self, step: int) -> None:
        """Leases replicas and begins the evaluation; it stays due if no replica is free."""
        assert self._due is not None, "it is due"
        await self._publisher.settle()
        leases = await self._parts.replicas.lease(self._config.leased_replicas)
        if not leases:
            logger.warning("the evaluation after step %d waits for a replica that can be spared", step)
            return
        tries, self._due, version = self._due + 1, None, self._publisher.version
        self._parts.events.write(EvaluationStarted(step, version, replicas=tuple(sorted(leases))))
        work = asyncio.create_task(self._by_leased(leases, version), name=f"evaluation of version {version}")
        self._beside = _Beside(step, version, tries, work)

    async def _by_leased(self, leases: Mapping[int, ReplicaControl], version: int) -> list[EvalResult]:
        """Evaluates every held-out set on these replicas, then ends the lease."""
        results = []
        try:
            for name in self._sets:
                left = self._still_leased(leases)
                if not left.rows:
                    raise GenerationError(f"evaluation of {name}: the last of its replicas was lost")
                result = await self._parts.rollouter.evaluate(name, self._seed, self._config.timeout_s, left)
                if any(v != version for v in result.versions):
                    raise GenerationError(f"evaluation of {name}: version {version} was pinned, not {result.versions}")
                results.append(result)
        finally:
            # A cancelled evaluation leaves its replicas to `fence` or `stop`.
            if not (task := asyncio.current_task()) or not task.cancelling():
                await self._parts.replicas.end_lease(leases)
        return results

    def _still_leased(self, leases: Mapping[int, ReplicaControl]) -> ReplicaTable:
        table = self._parts.replicas.table
        return replace(table, rows={i: r for i, r in table.those("leased").items() if leases.get(i) is r.handle})

    def _take(self, *, last: bool = False) -> dict[str, float]:
        """The metrics of an evaluation that has ended since the last call. An evaluation that failed for the first time
        is due again, except after the last step."""
        beside = self._beside
        if beside is None or not beside.work.done():
            return {}
        self._beside = None
        try:
            results = beside.work.result()
        except AsyncRLError as error:
            self._failed(error, beside.step, beside.version, beside.tries)
            if beside.tries == 1 and not last:
                self._due = 1
                return {}
            return {Metric.EVAL_FAILED: 1}
        return self._tell(results, beside.step, beside.version, beside.started)

    def _failed(self, error: AsyncRLError, step: int, version: int, tries: int) -> None:
        logger.warning("the evaluation of version %d has failed: %s", version, error)
        self._parts.events.write(EvaluationFailed(step, version, tries, str(error)))

    def _tell(self, results: list[EvalResult], step: int, version: int, started: float) -> dict[str, float]:
        parts = self._parts
        for r in results:
            answered = _versions(r, version)
            if len(answered) > 1:
                logger.warning("%s was answered by versions %s: replicas were lost in the middle", r.name, answered)
            parts.events.write(
                SetEvaluated(
                    step=step,
                    version=max(answered),
                    name=r.name,
                    accuracy=r.accuracy,
                    interval=r.interval,
                    pass_at={str(k): value for k, value in r.pass_at},
                    samples=r.samples,
                    prompts=r.num_prompts,
                    questions=r.num_questions,
                    failed=r.num_failed,
                )
            )
            logger.info(
                "evaluation of version %d: %s accuracy %.3f [%.3f, %.3f] (%d)",
                *(max(answered), r.name, r.accuracy, *r.interval, r.num_prompts),
            )
            before = dict(zip(self._before.setdefault(r.name, r.shown), r.shown, strict=False))
            for (_, was, paid), (prompt, now, pays) in before.items() if step >= self._max_steps else ():
                logger.info("%r\n  before: %r, reward %g\n  now:    %r, reward %g", prompt, was, paid, now, pays)
        values = {name: value for r in results for name, value in r.metrics().items()}
        if len(results) == len(self._sets):  # a mean over some sets is not comparable with other lines
            values[Metric.EVAL_ACCURACY] = sum(r.accuracy for r in results) / len(results)
            parts.progress.evaluated(values[Metric.EVAL_ACCURACY])
        values |= {
            Metric.EVAL_VERSION: max(v for r in results for v in _versions(r, version)),
            Metric.EVAL_RESPONSE_TOKENS: sum(r.response_tokens_mean for r in results) / len(results),
            Metric.EVAL_TIME: time.monotonic() - started,
        }
        parts.saw("evaluation", (step, version))
        return values


def _versions(result: EvalResult, published: int) -> tuple[int, ...]:
    """The versions that sampled the tokens of a result; `published` for a result without tokens."""
    return result.versions or (published,)
