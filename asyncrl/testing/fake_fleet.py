"""A scripted trainer, scripted replicas and the fleet of them: the two sides of a checkpoint engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from asyncrl.config.weights import WeightsConfig
from asyncrl.errors import DeadlineExceeded
from asyncrl.testing.local import NO_SOURCE
from asyncrl.types import Manifest, PauseMode, TensorSpec
from asyncrl.weights.transport import Digest, TransferSource

SPECS = (TensorSpec("embed.weight", (4, 4), "float32", 64), TensorSpec("norm.weight", (4,), "float32", 16))
GOOD: Digest = (1, 2)
WRONG: Digest = (1, 99)


class FakeTrainer:
    """`outcomes`: what the next sends end with, an exception or a digest; then always `GOOD`."""

    def __init__(self, outcomes: Iterable[Digest | BaseException] = ()) -> None:
        self.outcomes = list(outcomes)
        self.sent: list[Manifest] = []
        self.opened: list[int] = []

    async def weight_specs(self) -> tuple[TensorSpec, ...]:
        return SPECS

    async def open_weights(self, config: WeightsConfig, num_receivers: int) -> TransferSource:
        self.opened.append(num_receivers)
        return NO_SOURCE

    async def send_weights(self, manifest: Manifest, timeout_s: float) -> Digest | None:
        self.sent.append(manifest)
        outcome = self.outcomes.pop(0) if self.outcomes else GOOD
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome if manifest.verify else None


class FakeReplica:
    """`outcomes`: what the next receives end with, by turn; then always `GOOD`. `pause_error`, `commit_error`: raised
    by every such call."""

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
        return [call[2] for call in self.calls if call[0] == "commit"]

    async def pause(self, mode: PauseMode, timeout_s: float) -> None:
        self.calls.append(("pause", mode))
        if self.pause_error is not None:
            raise self.pause_error

    async def receive_weights(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        self.calls.append(("receive", manifest.publish_id, source.receiver))
        outcome = self.outcomes.pop(0) if self.outcomes else GOOD
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome if manifest.verify else None

    async def commit(self, publish_id: int, version: int | None, digest: Digest | None, timeout_s: float) -> None:
        if self.commit_error is not None:
            raise self.commit_error
        self.calls.append(("commit", publish_id, version, digest))


class FakeFleet:
    """Replicas that are replaced at once, `respawn(i)` making the replacement; without it a failed one stays away."""

    def __init__(self, *replicas: FakeReplica, respawn: Callable[[int], FakeReplica] | None = None) -> None:
        self._replicas = dict(enumerate(replicas))
        self._serving: set[int] = set()
        self._respawn = respawn
        self.failures: list[tuple[int, str]] = []

    @property
    def members(self) -> dict[int, FakeReplica]:
        return dict(self._replicas)

    @property
    def newcomers(self) -> dict[int, FakeReplica]:
        return {i: r for i, r in self._replicas.items() if i not in self._serving}

    def fail(self, replica_id: int, control: Any, why: BaseException | str) -> None:
        if self._replicas.get(replica_id) is not control:
            return
        self.failures.append((replica_id, str(why)))
        self._serving.discard(replica_id)
        del self._replicas[replica_id]
        if self._respawn is not None:
            self._replicas[replica_id] = self._respawn(replica_id)

    async def wait_member(self, timeout_s: float) -> None:
        if not self._replicas:
            raise DeadlineExceeded("no replica is up")

    async def committed(self, replica_ids: Iterable[int]) -> None:
        self._serving |= set(replica_ids)

    async def stats(self) -> None:
        for replica_id, replica in self.members.items():
            if not replica.alive:
                self.fail(replica_id, replica, "it answers no health check")
