"""The checkpoint engine: makes the trainer's weights the replicas' weights, as one transaction.

Consumes: the trainer's tensors.   Produces: a committed version on every replica, or a named error.
Waits for: pause, transfer and commit of every replica, together at most `publish_timeout_s`.
A replica whose weights were not committed keeps its gate closed: a half-applied publish never serves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from asyncrl.config.recipe import Interrupt
from asyncrl.config.weights import WeightsConfig
from asyncrl.errors import WeightTransferError
from asyncrl.types import Manifest, PauseMode, TensorSpec
from asyncrl.weights.plan import plan_buckets
from asyncrl.weights.transport import Digest, TransferSource

logger = logging.getLogger(__name__)

PAUSE_MODES: dict[Interrupt, PauseMode] = {"abort_resume": "abort", "keep": "keep", "drain": "drain"}


class PublishingTrainer(Protocol):
    """The sending side: the trainer pool."""

    async def weight_specs(self) -> tuple[TensorSpec, ...]: ...

    async def open_weights(self, transport: str, bucket_bytes: int, num_receivers: int) -> TransferSource: ...

    async def send_weights(self, manifest: Manifest, timeout_s: float) -> Digest | None: ...


class PublishedReplica(Protocol):
    """The receiving side: one replica."""

    async def pause(self, mode: PauseMode, timeout_s: float) -> None: ...

    async def receive_weights(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None: ...

    async def commit(self, publish_id: int, version: int | None, digest: Digest | None, timeout_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class PublishReport:
    """Seconds of the whole publish and of its parts; `pause_s` is the time that the fleet did not generate.

    `attempts` is above 1 when a digest differed and the weights were sent again.
    """

    version: int | None
    publish_s: float
    pause_s: float
    transfer_s: float
    nbytes: int
    verified: bool
    attempts: int


class CheckpointEngine:
    """Args:
    interrupt: what a publish does to generations in flight.
    """

    def __init__(
        self,
        config: WeightsConfig,
        trainer: PublishingTrainer,
        replicas: Mapping[int, PublishedReplica],
        *,
        interrupt: Interrupt,
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._replicas = dict(replicas)
        self._pause_mode: PauseMode = PAUSE_MODES[interrupt]
        self._publishes = 0
        self._transfers = 0
        self._template: Manifest
        self._sources: dict[int, TransferSource]

    async def open(self) -> None:
        """Plans the buckets and opens the transport. Raises WeightTransferError, DeadlineExceeded, ProcessDied."""
        config = self._config
        specs = await self._trainer.weight_specs()
        self._template = Manifest(0, None, specs, plan_buckets(specs, config.bucket_bytes))
        source = await self._trainer.open_weights(config.transport, config.bucket_bytes, len(self._replicas))
        self._sources = {r: replace(source, receiver=i) for i, r in enumerate(self._replicas)}

    async def publish(self, version: int | None) -> PublishReport:
        """Every replica serves the trainer's current weights as `version` (None: their version stays).

        Raises WeightTransferError: a replica could not apply them, or its digest differed `max_retries` + 1 times.
        Raises DeadlineExceeded, ProcessDied: the message names the replica or the trainer.
        """
        started = time.monotonic()
        deadline = started + self._config.publish_timeout_s
        mode = self._pause_mode
        await self._on_all(lambda r: r.pause(mode, _left(deadline)))
        verify, transfer_s, attempts = self._verifies(), 0.0, 0
        while True:
            attempts += 1
            self._transfers += 1
            manifest = replace(self._template, publish_id=self._transfers, version=version, verify=verify)
            transfer_started = time.monotonic()
            sent, received = await self._transfer(manifest, deadline)
            transfer_s += time.monotonic() - transfer_started
            differing = [r for r, digest in received.items() if digest != sent]
            if not differing:
                break
            found = self._describe(differing, sent, received)
            logger.error("publish of version %s, attempt %d: %s", version, attempts, found)
            if attempts > self._config.max_retries:
                raise WeightTransferError(f"publish of version {version} gave up after {attempts} attempts: {found}")
        await self._on_all(lambda r: r.commit(manifest.publish_id, version, sent, _left(deadline)))
        ended = time.monotonic()
        return PublishReport(
            version=version,
            publish_s=ended - started,
            pause_s=ended - started,
            transfer_s=transfer_s,
            nbytes=manifest.nbytes,
            verified=verify,
            attempts=attempts,
        )

    def _verifies(self) -> bool:
        config, number = self._config, self._publishes
        self._publishes += 1
        return config.verify == "always" or (config.verify == "first" and number % config.verify_every == 0)

    async def _transfer(self, manifest: Manifest, deadline: float) -> tuple[Digest | None, dict[int, Digest | None]]:
        """Sends and receives at the same time; returns the sender's digest and that of each replica."""
        timeout_s = _left(deadline)
        receiving = [
            replica.receive_weights(manifest, self._sources[replica_id], timeout_s)
            for replica_id, replica in self._replicas.items()
        ]
        sent, *received = await _together([self._trainer.send_weights(manifest, timeout_s), *receiving])
        return sent, dict(zip(self._replicas, received, strict=True))

    async def _on_all(self, call: Callable[[PublishedReplica], Awaitable[None]]) -> None:
        await _together([call(replica) for replica in self._replicas.values()])

    def _describe(self, differing: list[int], sent: Digest | None, received: Mapping[int, Digest | None]) -> str:
        tensors = self._template.tensors
        parts = []
        for replica_id in differing:
            pairs = zip(tensors, sent or (), received[replica_id] or (), strict=False)
            wrong = [spec.name for spec, ours, theirs in pairs if ours != theirs]
            parts.append(f"replica {replica_id} has other bytes in {', '.join(wrong[:3]) or 'an unknown tensor'}")
        return "; ".join(parts)


def _left(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())


async def _together(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Awaits all of them to their end; then raises the most telling error, if any.

    One failing peer makes the others fail by deadline, so an error that names a cause comes before a timeout.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    errors = [r for r in results if isinstance(r, BaseException)]
    if errors:
        raise min(errors, key=lambda e: isinstance(e, TimeoutError))
    return results
