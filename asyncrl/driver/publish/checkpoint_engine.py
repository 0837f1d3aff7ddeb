"""The checkpoint engine: makes the trainer's weights the replicas' weights, as one transaction per replica.

A publish pauses the replicas, transfers the weights and commits them, all within `publish_timeout_s`; each transfer has
`transfer_timeout_s`. A replica that was paused and has not committed keeps its gate closed: a half-applied publish
never serves.

The engine hands a replica to the fleet when it died, did not answer, or still has wrong bytes after `max_retries`
retries. The fleet replaces it, or waits for it when it is only late. The publish continues with the other replicas, and
the lost one joins a later publish. When the replacement of a replica gets wrong weights too, the fault is not the
replica's: the run stops with the tensor's name.

A publish that is staged transfers the weights while the replicas generate. Then each replica that has them pauses,
loads and commits in one call: what went wrong on the way has stopped nobody.

A rolling publish reaches the replicas in waves of `rolling_replicas`. Newcomers serve no requests, so they are in the
first wave. The replicas of a wave get no new requests, while the others generate. Each wave is a transfer of its own:
the trainer sends its weights once per wave. The version is published when all waves are done.

With encoding delta the trainer encodes its weights once per publish, before any replica pauses. A transfer sends the
differences if every replica of it has committed the weights that they apply to, and all weights otherwise: also after a
transfer that failed, and where the differences are not smaller. Wrong weights after a transfer of differences are no
strike against the replica, because the next transfer to it is full.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from asyncrl.config.recipe import Interrupt
from asyncrl.config.weights import WeightsConfig
from asyncrl.driver.publish.verdict import all_late, any_late, blamed, is_gone, is_trainers, verdict
from asyncrl.errors import (
    DeadlineExceeded,
    WeightTransferError,
    explain,
)
from asyncrl.inference.replica import GRACE_S, Replica
from asyncrl.types import (
    Digest,
    EncodedWeights,
    Encoding,
    Manifest,
    PauseMode,
    PublishReport,
    TransferSource,
)
from asyncrl.weights.plan import make_manifest

if TYPE_CHECKING:  # publishes are tested without Ray
    from asyncrl.driver.fleet.replica_pool import ReplicaPool
    from asyncrl.driver.fleet.trainer_pool import TrainerPool
    from asyncrl.inference.replica_actor import ReplicaControl

    Replicas = dict[int, ReplicaControl]

logger = logging.getLogger(__name__)

PAUSE_MODES: dict[Interrupt, PauseMode] = {"abort_resume": "abort", "keep": "keep", "drain": "drain"}


BLAME_S = 5.0
"""Time that a sender has, after a receiver has failed, to notice the failure or to finish before it is interrupted."""


@dataclass(slots=True)
class _Publish:
    """One publish in progress."""

    version: int | None
    verify: bool
    deadline: float
    attempts: int = 0
    transfer_s: float = 0.0
    pause_s: float = 0.0
    paused: Replicas = field(default_factory=dict)
    """The replicas that are paused and have not committed yet."""
    served: bool = False
    """True once some replica serves: from then on every late replica is handed to the fleet, even the last pending
    one."""
    late: int = 0
    """Transfers that missed their deadline although every process answered."""
    encoded: EncodedWeights | None = None
    """With encoding delta, from the first wave on."""
    sent_bytes: int = 0
    """Of all transfers."""
    strikes: dict[int, int] = field(default_factory=dict)
    """Number of wrong transfers per replica in this publish."""

    def left(self) -> float:
        return max(0.01, self.deadline - time.monotonic())


class CheckpointEngine:
    """Runs one publish at a time. Owns the bucket plan, the connection between the trainer and the replicas, the
    knowledge of the weights that each replica has committed, and the memory of replicas that got wrong weights."""

    def __init__(
        self,
        config: WeightsConfig,
        trainer: TrainerPool,
        fleet: ReplicaPool,
        *,
        interrupt: Interrupt,
        encoding: Encoding = "full",
        receivers_per_replica: int = 1,
        rolling: bool = False,
        blame_s: float = BLAME_S,
    ) -> None:
        """
        Args:
            interrupt: how a publish treats generations in flight.
            encoding: what the trainer's tensors are; delta: what it sends where it can.
            receivers_per_replica: processes of one replica that each receive the weights (tensor-parallel workers).
            rolling: publish to `rolling_replicas` of the config at a time, whatever the config's `rolling` says.
            blame_s: see BLAME_S.
        """
        self._config = config
        self._trainer = trainer
        self._fleet = fleet
        self._pause_mode: PauseMode = PAUSE_MODES[interrupt]
        self._encoding: Encoding = encoding
        self._receivers_per_replica = receivers_per_replica
        self._rolling = rolling
        self._staged = bool(config.stage)
        self._blame_s = blame_s
        self._lock = asyncio.Lock()
        self._publishes = 0
        self._transfers = 0
        self._template: Manifest | None = None
        self._group: Replicas = {}
        self._sources: dict[int, TransferSource] = {}
        self._has: dict[int, tuple[ReplicaControl, Digest]] = {}
        """With encoding delta: the digest of the weights that each replica has committed."""
        self._distrusted: set[int] = set()
        """Replicas that were replaced because of wrong weights, until their replacement has committed correct ones."""

    async def publish(self, version: int | None, *, newcomers_only: bool = False) -> PublishReport | None:
        """Makes the replicas that are up serve the trainer's current weights as `version` (None: their version stays).

        A second call waits for the first one. Returns None when `newcomers_only` is set and no newcomer is left.

        Raises:
            WeightTransferError: the trainer's weights cannot be sent, or a replica and its replacement got them wrong.
            DeadlineExceeded: no replica has the weights in time; the message names the wait.
            ProcessDied: the trainer died. RunFailed: no replica is left.
        """
        async with self._lock:
            with self._fleet.publishing():
                return await self._publish(version, newcomers_only)

    async def _publish(self, version: int | None, newcomers_only: bool) -> PublishReport | None:
        started = time.monotonic()
        done: Replicas = {}
        pending: Replicas = dict(self._fleet.newcomers if newcomers_only else self._fleet.members)
        verify = self._is_verified(scheduled=not newcomers_only)
        publish = _Publish(version, verify, started + self._config.publish_timeout_s)
        publish.served = len(pending) < len(self._fleet.members)
        while pending or not done:
            # All replicas of this publish are lost: a version must be served, so wait for a replacement.
            if not pending:
                if newcomers_only:
                    return None
                waiting = time.monotonic()
                await self._fleet.wait_member(publish.left())
                publish.pause_s += time.monotonic() - waiting
                pending = dict(self._fleet.members)
                publish.verify = publish.verify or self._is_verified(scheduled=False)
            if time.monotonic() > publish.deadline:
                raise DeadlineExceeded(
                    explain(
                        f"publish version {version} within {self._config.publish_timeout_s:g} s",
                        f"after {publish.attempts} transfer(s) {_names(pending)} does not serve it",
                        "see the log for the transfers that failed, or raise weights.publish_timeout_s",
                    )
                )
            done |= await self._reach(publish, self._wave(publish, pending))
            publish.served = publish.served or bool(done)
            # What is neither done nor a member any more was replaced or suspended: it joins a later publish.
            members = self._fleet.members
            pending = {i: r for i, r in pending.items() if i not in done and members.get(i) is r}
        ended = time.monotonic()
        replicas = await self._fleet.committed(done, version if self._rolling else None)
        # A replacement is trusted again only after a publish that has compared its bytes.
        if publish.verify or self._config.verify == "off":
            self._distrusted -= done.keys()
        assert self._template is not None, "the first attempt has planned the buckets"
        return PublishReport(
            version=version,
            publish_s=ended - started,
            pause_s=publish.pause_s,
            transfer_s=publish.transfer_s,
            nbytes=self._template.nbytes,
            sent_bytes=publish.sent_bytes // publish.attempts,
            verified=publish.verify,
            attempts=publish.attempts,
            replicas=replicas,
        )

    def _wave(self, publish: _Publish, pending: Replicas) -> Replicas:
        """The replicas that the next transfer reaches: all, or in a rolling publish at most `rolling_replicas` serving
        ones and all newcomers.

        Paused replicas come first, then those that the sender is already connected to: the last wave of one publish is
        the first of the next.
        """
        if not self._rolling:
            return pending
        idle = self._fleet.newcomers.keys()
        serving = sorted(pending.keys() - idle, key=lambda i: (i not in publish.paused, i not in self._group, i))
        chosen = {*serving[: self._config.rolling_replicas], *idle}
        return {i: r for i, r in pending.items() if i in chosen}

    async def _reach(self, publish: _Publish, replicas: Replicas) -> Replicas:
        """Pauses these replicas, sends to them and commits, or sends first; returns those that serve the version."""
        if self._encoding == "delta" and publish.encoded is None:
            publish.encoded = await self._encode(publish)
        num_members = max(1, len(self._fleet.members))
        if self._staged:
            manifest, digest, good = await self._send(publish, replicas)
            done, paused_s = await self._adopt(publish, good, manifest, digest)
            num_paused = len(good)
        else:
            if self._rolling:
                await self._fleet.hold(replicas)
            paused = await self._pause(publish, replicas)
            if not paused:
                return {}
            publish.paused |= paused
            began = time.monotonic()
            manifest, digest, good = await self._send(publish, paused)
            done = await self._commit(publish, good, manifest, digest)
            num_paused, paused_s = len(paused), time.monotonic() - began
            publish.paused = {i: r for i, r in publish.paused.items() if i not in done}
        # A wave pauses only a part of the fleet, and counts as that part.
        publish.pause_s += paused_s * min(1.0, num_paused / num_members)
        if publish.encoded is not None:
            self._has |= {i: (r, publish.encoded.digest) for i, r in done.items()}
        if self._rolling and done:
            await self._fleet.committed(done, publish.version)
        return done

    async def _encode(self, publish: _Publish) -> EncodedWeights:
        try:
            return await self._trainer.encode_weights(publish.left())
        except DeadlineExceeded as error:
            asked, found = f"encode the differences of version {publish.version}", str(error).replace("\n", "; ")
            do = "set weights.encoding=full, or raise weights.publish_timeout_s; float32 takes ten times as long"
            late = DeadlineExceeded(explain(asked, found, do))
            raise (late if error.process is None else late.of(error.process)) from error

    def _is_verified(self, *, scheduled: bool) -> bool:
        """True when this publish carries digests: on the schedule of the recipe and, unless verify is off, whenever it
        reaches a replica that has no weights yet. Always with encoding delta: an error would stay in the base."""
        config, number = self._config, self._publishes
        self._publishes += scheduled
        if self._encoding == "delta":
            return True
        if config.verify != "first":
            return config.verify == "always"
        return bool(self._fleet.newcomers) or (scheduled and number % config.verify_every == 0)

    async def _pause(self, publish: _Publish, replicas: Replicas) -> Replicas:
        """Returns the replicas that are paused now; hands those that died or are late to the fleet.

        The timeout leaves time for the others: a pause may take as long as a transfer. A pause that drains may take all
        the time except that of one transfer.
        """
        left, transfer_s = publish.left(), self._config.transfer_timeout_s
        limit_s = max(left / 2, left - transfer_s) if self._pause_mode == "drain" else min(left / 2, transfer_s)
        outcomes = await _on_each(replicas, lambda r: r.call(limit_s, Replica.pause, self._pause_mode))
        return await self._answered(publish, replicas, outcomes)

    async def _send(self, publish: _Publish, replicas: Replicas) -> tuple[Manifest, Digest | None, Replicas]:
        """One transfer; returns what it sent, its digest, and the replicas that received it."""
        publish.attempts += 1
        await self._form_group(replicas, publish)
        planned = self._manifest(publish, replicas)
        self._transfers += 1
        manifest = replace(
            planned,
            publish_id=self._transfers,
            version=publish.version,
            verify=publish.verify,
            is_staged=self._staged,
        )
        publish.sent_bytes += manifest.nbytes
        for replica_id in replicas:
            self._has.pop(replica_id, None)  # until it has committed
        started = time.monotonic()
        sent, received = await self._transfer(manifest, min(publish.left(), self._config.transfer_timeout_s))
        publish.transfer_s += time.monotonic() - started
        if isinstance(sent, BaseException):
            self._group = {}  # one of several senders failed, and the others were closed
        good = await self._judge(publish, sent, received, replicas, manifest)
        return manifest, None if isinstance(sent, BaseException) else sent, good

    async def _commit(
        self, publish: _Publish, replicas: Replicas, manifest: Manifest, digest: Digest | None
    ) -> Replicas:
        """Returns those of these replicas, which have received what was sent, that serve it."""
        number, limit_s = manifest.publish_id, min(publish.left(), self._config.transfer_timeout_s)
        outcomes = await _on_each(replicas, lambda r: r.call(limit_s, Replica.commit, number, publish.version, digest))
        return await self._answered(publish, replicas, outcomes)

    async def _adopt(
        self, publish: _Publish, replicas: Replicas, manifest: Manifest, digest: Digest | None
    ) -> tuple[Replicas, float]:
        """As `_commit`, of weights that were staged; returns also the seconds for which the slowest one stood still."""
        if self._rolling and replicas:
            await self._fleet.hold(replicas)
        left_s = publish.left()
        limit_s = left_s if self._pause_mode == "drain" else min(left_s, self._config.transfer_timeout_s)
        number, version, mode = manifest.publish_id, publish.version, self._pause_mode
        outcomes = await _on_each(
            replicas, lambda r: r.call(limit_s + GRACE_S, Replica.adopt, number, version, digest, mode, limit_s)
        )
        wrong = {i: str(o) for i, o in outcomes.items() if isinstance(o, WeightTransferError)}
        for replica_id, why in wrong.items():
            self._blame(publish, replica_id, replicas[replica_id], why, manifest)
        others = {i: r for i, r in replicas.items() if i not in wrong}
        done = await self._answered(publish, others, {i: outcomes[i] for i in others})
        return done, max((outcomes[i] for i in done), default=0.0)

    def _manifest(self, publish: _Publish, replicas: Replicas) -> Manifest:
        """Of the next transfer to these replicas, all of which get the same."""
        assert self._template is not None, "a group has a plan"
        encoded, full = publish.encoded, self._template
        if encoded is None:
            return full
        full, base, newcomers = replace(full, is_kept=True), encoded.base_digest, self._fleet.newcomers
        for replica_id, control in replicas.items():
            holder, digest = self._has.get(replica_id, (None, None))
            if base is None or replica_id in newcomers or holder is not control or digest != base:
                return full
        limit = self._config.bucket_bytes
        delta = make_manifest(0, None, encoded.tensors, limit, encoding="delta", base_digest=base)
        return delta if delta.nbytes < full.nbytes else full

    async def _form_group(self, replicas: Replicas, publish: _Publish) -> None:
        """Opens the sending end for exactly these replicas, unless it is open for them already."""
        if self._group == replicas:
            return
        config, per_replica = self._config, self._receivers_per_replica
        if self._template is None:
            specs = await self._trainer.weight_specs(publish.left())
            encoding: Encoding = "full" if self._encoding == "delta" else self._encoding
            self._template = make_manifest(0, None, specs, config.bucket_bytes, encoding=encoding)
        self._group = {}
        source = await self._trainer.open_weights(config, len(replicas) * per_replica, publish.left())
        self._sources = {r: replace(source, receiver=i * per_replica) for i, r in enumerate(replicas)}
        self._group = dict(replicas)

    async def _transfer(self, manifest: Manifest, timeout_s: float) -> tuple[Any, dict[int, Any]]:
        """Sends and receives at the same time; returns a digest or an exception of the sender and of each replica.

        A receiver that fails before it has connected would make the sender wait until its deadline. The sender is
        therefore interrupted `blame_s` after a failure, and at once when the fleet has suspended the receiver, which
        then sends nothing.
        """
        sources, group = self._sources, self._group
        receiving = {
            asyncio.ensure_future(
                r.call(timeout_s + GRACE_S, Replica.receive_weights, manifest, sources[i], timeout_s)
            ): i
            for i, r in group.items()
        }
        sending = asyncio.ensure_future(self._trainer.send_weights(manifest, timeout_s))
        try:
            await asyncio.wait((sending, *receiving), return_when=asyncio.FIRST_EXCEPTION)
            failed = {i: t.exception() for t, i in receiving.items() if t.done() and t.exception()}
            if not sending.done() and failed:
                members = self._fleet.members
                mute = any(
                    isinstance(e, DeadlineExceeded) and members.get(i) is not group[i] for i, e in failed.items()
                )
                await asyncio.wait((sending,), timeout=0 if mute else self._blame_s)
                if not sending.done():
                    self._group = {}
                    await self._trainer.interrupt_weights(self._blame_s)
            sent, *received = await asyncio.gather(sending, *receiving, return_exceptions=True)
        finally:
            for task in (sending, *receiving):
                task.cancel()
        return sent, dict(zip(receiving.values(), received, strict=True))

    async def _judge(
        self, publish: _Publish, sent: Any, received: Mapping[int, Any], replicas: Replicas, manifest: Manifest
    ) -> Replicas:
        """Returns the replicas that have the weights that were sent. Raises the trainer's own failure."""
        if is_trainers(sent):
            raise sent
        for replica_id, outcome in received.items():
            if is_gone(outcome):
                self._fleet.fail(replica_id, replicas[replica_id], outcome)
        lost: set[int] = set()
        if any_late(sent, received):
            lost = replicas.keys() - (await self._healthy(replicas)).keys()
        assert self._template is not None, "weights were sent"
        names, late_left = [spec.name for spec in self._template.tensors], self._config.max_retries - publish.late
        found = verdict(sent, received, lost, names, late_left=late_left)
        for replica_id, why in found.wrong.items():
            self._blame(publish, replica_id, replicas[replica_id], why, manifest)
        if isinstance(sent, BaseException):
            logger.error("publish of version %s, transfer %d: %s", publish.version, publish.attempts, sent)
        if found.error is not None:
            raise found.error
        publish.late += found.is_late
        return {i: replicas[i] for i in replicas if i in found.ok}

    def _blame(self, publish: _Publish, replica_id: int, control: ReplicaControl, why: str, manifest: Manifest) -> None:
        """This replica has other weights than were sent."""
        strikes = publish.strikes.get(replica_id, 0) + 1
        follows = blamed(
            is_delta=manifest.encoding == "delta",
            strikes=strikes,
            max_retries=self._config.max_retries,
            is_replacement=replica_id in self._distrusted,
        )
        if follows == "full":
            logger.warning("publish of version %s, all weights to replica %d: %s", publish.version, replica_id, why)
            return
        publish.strikes[replica_id] = strikes
        found = f"replica {replica_id}, transfer {strikes} of this publish: {why}"
        logger.error("publish of version %s: %s", publish.version, found)
        if follows == "stop":
            do = "the trainer and the engine disagree about this tensor, or the memory of this machine is faulty"
            raise WeightTransferError(
                explain(f"publish version {publish.version} to a replica that was replaced", found, do)
            )
        if follows == "replace":
            self._distrusted.add(replica_id)
            self._fleet.fail(replica_id, control, WeightTransferError(found))

    async def _answered(self, publish: _Publish, replicas: Replicas, outcomes: Mapping[int, Any]) -> Replicas:
        """Returns the replicas whose outcome of a call is not an error; hands the others to the fleet.

        Raises DeadlineExceeded when all of them are late, yet pass a health check, and none serves: the deadline is too
        short.
        """
        failed = {i: outcome for i, outcome in outcomes.items() if isinstance(outcome, BaseException)}
        too_short = bool(failed) and not publish.served and all_late(outcomes.values())
        if too_short and await self._healthy(replicas) == replicas:
            raise next(iter(failed.values()))
        for replica_id, outcome in failed.items():
            self._fleet.fail(replica_id, replicas[replica_id], outcome)
        return {i: r for i, r in replicas.items() if i not in failed}

    async def _healthy(self, replicas: Replicas) -> Replicas:
        """Those of these replicas that pass a health check."""
        await self._fleet.stats()
        members = self._fleet.members
        return {i: r for i, r in replicas.items() if members.get(i) is r}


def _names(replicas: Iterable[int]) -> str:
    return ", ".join(f"replica {i}" for i in replicas)


async def _on_each(replicas: Replicas, call: Any) -> dict[int, Any]:
    """The outcome or the exception of one call to every replica, all at once."""
    outcomes = await asyncio.gather(*(call(r) for r in replicas.values()), return_exceptions=True)
    return dict(zip(replicas, outcomes, strict=True))
