"""Publishes to one engine over a real transport, as the checkpoint engine does them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from asyncrl.inference.engine import InferenceEngine, StagingEngine
from asyncrl.inference.replica import Replica
from asyncrl.rollout.generation import GenerationClient
from asyncrl.types import Digest, Manifest, PauseMode, TransferSource
from asyncrl.weights.encodings.delta_encoder import DeltaEncoder
from asyncrl.weights.encodings.lora import is_adapter
from asyncrl.weights.packing import spec_of
from asyncrl.weights.plan import make_manifest
from asyncrl.weights.transport import WeightSender
from asyncrl.weights.transports import build_sender
from asyncrl.weights.transports.interruptible_sender import InterruptibleSender
from asyncrl_testing.engine_client import within
from asyncrl_testing.local import LocalReplicaChannel, Rows

_BUCKET_BYTES = 1 << 18
_TIMEOUT_S = 60.0

Outcome = Digest | None | BaseException


class Publisher:
    """The sending side of a test, and a replica around its engine; `replica` serves from the first publish on.

    The sender lives in a thread of its own and stays open from publish to publish, as a trainer's does. Several
    buckets make one publish, and the digests of both sides are compared.
    """

    def __init__(self, engine: InferenceEngine, transport: str = "ipc", sender: WeightSender | None = None) -> None:
        """`sender`: in place of that of `transport`, without digests."""
        self._verify = sender is None
        self.engine = engine
        self.replica = Replica(0, lambda: engine, gate_timeout_s=_TIMEOUT_S)
        self._sender = build_sender(transport, _BUCKET_BYTES, 1) if sender is None else InterruptibleSender(sender)
        self._thread = ThreadPoolExecutor(1, "test sender")
        self._encoder = DeltaEncoder()
        self._source: TransferSource | None = None
        self._publish_ids = itertools.count(1)
        self._clients = itertools.count()
        self._versions = itertools.count(1)

    def next_version(self) -> int:
        """1, 2, 3 and so on over the life of the engine."""
        return next(self._versions)

    @property
    def stages(self) -> bool:
        return isinstance(self.engine, StagingEngine)

    async def publish(self, model: Any, version: int | None, mode: PauseMode, *, staged: bool = False) -> None:
        """Serves the weights of `model`, a Hugging Face model, as `version`: pause, load, commit, resume. `staged`: the
        engine receives them first."""
        if staged:
            return await self._adopt(await self.stage(model, version), version, mode)
        await within(self.replica.pause(mode))
        manifest = self._manifest(model, version)
        sent, received = await self._both(manifest, model.named_parameters())
        for outcome in (sent, received):
            if isinstance(outcome, BaseException):
                raise outcome
        assert not isinstance(sent, BaseException)  # for the type checker
        await within(self.replica.commit(manifest.publish_id, version, sent))

    async def stage(self, model: Any, version: int | None, *, broken: bool = False) -> tuple[int, Digest | None]:
        """The number and the digest of a publish that the engine has received but does not serve yet. `broken`: the
        trainer fails halfway, and so does this call."""
        manifest = replace(self._manifest(model, version), is_staged=True)
        sent, received = await self._both(manifest, _half(model) if broken else model.named_parameters())
        if isinstance(received, BaseException):
            raise received
        assert sent == received
        return manifest.publish_id, received

    async def _adopt(self, staged: tuple[int, Digest | None], version: int | None, mode: PauseMode) -> None:
        number, digest = staged
        await within(self.replica.adopt(number, version, digest, mode, _TIMEOUT_S))

    async def publish_encoded(self, model: Any, version: int, *, delta: bool) -> None:
        """As `publish`: by differences to the weights of the last call, or by all weights, which the engine keeps."""
        encoded, weights = self._encoder.encode(model.named_parameters()), model.named_parameters()
        manifest = replace(self._manifest(model, version), is_kept=True)
        if delta:
            number, base = manifest.publish_id, encoded.base_digest
            specs, weights = encoded.tensors, self._encoder.differences()
            manifest = make_manifest(number, version, specs, _BUCKET_BYTES, encoding="delta", base_digest=base)
        await within(self.replica.pause("abort"))
        sent, received = await self._both(manifest, weights)
        for outcome in (sent, received):
            if isinstance(outcome, BaseException):
                raise outcome
        assert not isinstance(sent, BaseException)  # for the type checker
        await within(self.replica.commit(manifest.publish_id, version, self._encoder.digest if delta else sent))

    async def publish_broken(self, model: Any, version: int, mode: PauseMode) -> tuple[BaseException, BaseException]:
        """A publish whose trainer fails halfway; returns the errors of sender and replica."""
        await within(self.replica.pause(mode))
        manifest = self._manifest(model, version)
        sent, received = await self._both(manifest, _half(model))
        assert isinstance(sent, BaseException), "the sender took no notice"
        assert isinstance(received, BaseException), "the replica accepted half of the weights"
        return sent, received

    def client(self) -> GenerationClient:
        """A client of `replica`; close it."""
        channel = LocalReplicaChannel(self.replica, f"client-{(number := next(self._clients))}")
        return GenerationClient(
            f"client-{number}", Rows({0: channel}).table, request_timeout_s=120.0, poll_interval_s=0.002
        )

    async def sampled(self, count: int) -> None:
        """Waits until the engine has sampled `count` more tokens."""
        goal = self.engine.health().generated_tokens + count
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                while self.engine.health().generated_tokens < goal:  # noqa: ASYNC110 - an engine has no event for it
                    await asyncio.sleep(0.001)
        except TimeoutError:
            raise AssertionError(f"fewer than {count} more tokens: {self.engine.health()}") from None

    async def settle(self) -> None:
        """Cleans up after a failed test."""
        await within(self.engine.abort(None))
        await within(self.engine.resume())

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._sender.close)
        self._thread.shutdown()

    def _manifest(self, model: Any, version: int | None) -> Manifest:
        specs = [spec_of(name, parameter) for name, parameter in model.named_parameters()]
        encoding = "lora" if any(is_adapter(spec.name) for spec in specs) else "full"
        return make_manifest(
            next(self._publish_ids), version, specs, _BUCKET_BYTES, encoding=encoding, verify=self._verify
        )

    async def _both(self, manifest: Manifest, weights: Iterable[tuple[str, Any]]) -> tuple[Outcome, Outcome]:
        """Results or errors of sender and replica."""
        loop = asyncio.get_running_loop()
        source = self._source or await loop.run_in_executor(self._thread, self._sender.open)
        self._source = source
        sending = loop.run_in_executor(self._thread, self._sender.send, manifest, weights, _TIMEOUT_S)
        receiving = self.replica.receive_weights(manifest, source, _TIMEOUT_S)
        sent, received = await within(asyncio.gather(sending, receiving, return_exceptions=True), 2 * _TIMEOUT_S)
        return sent, received


def _half(model: Any) -> Iterable[tuple[str, Any]]:
    """The weights of a trainer that fails halfway."""
    parameters = list(model.named_parameters())
    yield from parameters[: len(parameters) // 2]
    raise ConnectionError("a rank of the trainer was lost")
