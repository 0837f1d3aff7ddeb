"""A scripted trainer, scripted replicas and the fleet of them: the two sides of a checkpoint engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from asyncrl.config.weights import WeightsConfig
from asyncrl.errors import DeadlineExceeded, TransferEnded
from asyncrl.types import (
    Digest,
    EncodedWeights,
    Manifest,
    PauseMode,
    ReplicaRow,
    ReplicaTable,
    TensorSpec,
    TransferSource,
)
from asyncrl_testing.local import NO_SOURCE

SPECS = (TensorSpec("embed.weight", (4, 4), "float32", 64), TensorSpec("norm.weight", (4,), "float32", 16))
GOOD: Digest = (1, 2)
WRONG: Digest = (1, 99)


class FakeTrainer:
    """`outcomes`: of the next sends, exceptions or digests; then always `GOOD`. `waits`: the first send goes on until
    it is interrupted. `timeouts`: of the calls that prepare a send, by name."""

    def __init__(self, outcomes: Iterable[Digest | BaseException] = (), *, waits: bool = False) -> None:
        self.waits = waits
        self.interrupted = asyncio.Event()
        self.outcomes = list(outcomes)
        self.sent: list[Manifest] = []
        self.opened: list[int] = []
        self.timeouts: list[tuple[str, float]] = []
        self.encoded: list[EncodedWeights] = []
        self.difference_bytes = 3
        """Of each tensor, in the next encodings."""

    async def encode_weights(self, timeout_s: float) -> EncodedWeights:
        """Weights that are new every time: digests (1,), (2,) and so on."""
        specs = [TensorSpec(f"{s.name}.delta", (n := self.difference_bytes,), "uint8", n) for s in SPECS]
        number = len(self.encoded)
        base = (number,) if number else None
        self.encoded.append(EncodedWeights((number + 1,), base, tuple(specs) if base else ()))
        return self.encoded[-1]

    async def weight_specs(self, timeout_s: float) -> tuple[TensorSpec, ...]:
        self.timeouts.append(("weight_specs", timeout_s))
        return SPECS

    async def open_weights(
        self, config: WeightsConfig, num_receivers: Mapping[int | None, int], timeout_s: float
    ) -> dict[int | None, TransferSource]:
        self.opened.append(sum(num_receivers.values()))
        self.timeouts.append(("open_weights", timeout_s))
        return {sender: replace(NO_SOURCE, epoch=sender or 0) for sender in num_receivers}

    async def interrupt_weights(self, timeout_s: float) -> None:
        self.interrupted.set()

    async def send_weights(self, manifest: Manifest, timeout_s: float) -> Digest | None:
        self.sent.append(manifest)
        if self.waits:
            self.waits = False
            async with asyncio.timeout(timeout_s):
                await self.interrupted.wait()
            raise TransferEnded("the sender was closed meanwhile")
        outcome = self.outcomes.pop(0) if self.outcomes else GOOD
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome if manifest.verify else None


class FakeReplica:
    """A `ReplicaControl` and its replica. `outcomes`: of the next receives; then always `GOOD`. `pause_error`,
    `commit_error`: raised by every such call."""

    def __init__(
        self,
        *outcomes: Digest | BaseException,
        pause_error: BaseException | None = None,
        commit_error: BaseException | None = None,
    ) -> None:
        self.outcomes = list(outcomes)
        self.pause_error = pause_error
        self.commit_error = commit_error
        self.calls: list[tuple[Any, ...]] = []
        self.alive = True

    @property
    def committed(self) -> list[int | None]:
        """Versions, in order."""
        return [call[2] for call in self.calls if call[0] in ("commit", "adopt")]

    async def call(self, timeout_s: float, method: Callable[..., Any], /, *args: Any) -> Any:
        return await getattr(self, method.__name__)(*args)

    async def pause(self, mode: PauseMode) -> None:
        self.calls.append(("pause", mode))
        if self.pause_error is not None:
            raise self.pause_error

    async def receive_weights(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        self.calls.append(("receive", manifest.publish_id, source.receiver))
        outcome = self.outcomes.pop(0) if self.outcomes else GOOD
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome if manifest.verify else None

    async def commit(self, publish_id: int, version: int | None, digest: Digest | None) -> None:
        if self.commit_error is not None:
            raise self.commit_error
        self.calls.append(("commit", publish_id, version, digest))

    async def adopt(
        self, publish_id: int, version: int | None, digest: Digest | None, mode: PauseMode, timeout_s: float
    ) -> float:
        if self.commit_error is not None:
            raise self.commit_error
        self.calls.append(("adopt", publish_id, version, digest, mode))
        return 0.25


class FakeFleet:
    """Replicas that `respawn(i)` replaces immediately; without it a failed replica stays away."""

    def __init__(self, *replicas: FakeReplica, respawn: Callable[[int], FakeReplica] | None = None) -> None:
        self._replicas = dict(enumerate(replicas))
        self._serving: dict[int, FakeReplica] = {}
        self._held: set[int] = set()
        self._respawn = respawn
        self.failures: list[tuple[int, str]] = []
        self.routing: list[tuple[str, list[int], int | None]] = []
        """Calls of `hold`, and of `committed` for what was held: name, replicas, version."""

    @property
    def members(self) -> dict[int, FakeReplica]:
        return dict(self._replicas)

    @property
    def newcomers(self) -> dict[int, FakeReplica]:
        return {i: r for i, r in self._replicas.items() if self._serving.get(i) is not r}

    @property
    def table(self) -> ReplicaTable:
        return ReplicaTable(
            rows={i: ReplicaRow(r, "serving" if i in self._serving else "newcomer", 0) for i, r in self.members.items()}
        )

    def fail(self, replica_id: int, control: Any, why: BaseException | str) -> None:
        if self._replicas.get(replica_id) is not control:
            return
        self.failures.append((replica_id, str(why)))
        del self._replicas[replica_id]
        if self._respawn is not None:
            self._replicas[replica_id] = self._respawn(replica_id)

    def suspend(self, replica_id: int) -> None:
        """It is up as the same process, and its weights count as undefined."""
        del self._serving[replica_id]

    async def wait_member(self, timeout_s: float) -> None:
        if not self._replicas:
            raise DeadlineExceeded("no replica is up")

    async def committed(self, controls: Mapping[int, Any], version: int | None = None) -> int:
        still_up = {i: c for i, c in controls.items() if self._replicas.get(i) is c}
        self._serving |= still_up
        if held := [i for i in controls if i in self._held]:
            self.routing.append(("committed", held, version))
            self._held.difference_update(held)
        return len(still_up)

    async def hold(self, controls: Mapping[int, Any]) -> None:
        self.routing.append(("hold", list(controls), None))
        self._held.update(controls)

    def publishing(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    async def stats(self) -> None:
        for replica_id, replica in self.members.items():
            if not replica.alive:
                self.fail(replica_id, replica, "it answers no health check")
