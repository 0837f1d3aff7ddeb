"""Who takes part in a publish, as the checkpoint engine sees them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from asyncrl.config.weights import WeightsConfig
from asyncrl.types import Digest, EncodedWeights, Manifest, ReplicaHandle, TensorSpec, TransferSource


class PublishingTrainer(Protocol):
    """The sending side: the trainer pool."""

    async def weight_specs(self, timeout_s: float) -> tuple[TensorSpec, ...]: ...

    async def open_weights(self, config: WeightsConfig, num_receivers: int, timeout_s: float) -> TransferSource: ...

    async def encode_weights(self, timeout_s: float) -> EncodedWeights:
        """Encodes the current weights as differences to those that were encoded before, for sends with encoding delta
        until the next call. Raises as `send_weights`."""
        ...

    async def send_weights(self, manifest: Manifest, timeout_s: float) -> Digest | None: ...

    async def interrupt_weights(self, timeout_s: float) -> None:
        """Closes the sending end, which ends a send in progress with WeightTransferError. Does not raise."""
        ...


class PublishTargets(Protocol):
    """The replicas to publish to: `inference.replica_pool.ReplicaPool`."""

    @property
    def members(self) -> Mapping[int, ReplicaHandle]:
        """The replicas that are up."""
        ...

    @property
    def newcomers(self) -> Mapping[int, ReplicaHandle]:
        """Those of them that have no committed weights yet."""
        ...

    def fail(self, replica_id: int, control: ReplicaHandle, why: BaseException | str) -> None:
        """Takes a replica out and begins to replace it."""
        ...

    async def wait_member(self, timeout_s: float) -> None:
        """Returns when at least one is up. Raises RunFailed, DeadlineExceeded."""
        ...

    async def committed(self, controls: Mapping[int, ReplicaHandle], version: int | None = None) -> int:
        """These serve committed weights from now on; returns how many of them are still up. `version`: what they serve,
        in a rolling publish."""
        ...

    async def hold(self, controls: Mapping[int, ReplicaHandle]) -> None:
        """A rolling publish reaches these next: no new request goes to them until they have committed, while there are
        others."""
        ...

    def publishing(self) -> AbstractContextManager[None]:
        """A publish is in progress: no replica is stopped on purpose in its middle."""
        ...

    async def stats(self) -> object:
        """Checks the health of all of them; those that do not answer have failed."""
        ...
