"""The checkpoint engine: copies the trainer's weights to the replicas, as one transaction per replica.

A publish pauses the replicas, transfers the weights and commits them, all within `publish_timeout_s`; each transfer has
`transfer_timeout_s`. A paused replica that has not committed keeps its gate closed: a half-applied publish never
serves.

The engine hands a replica to the fleet if it died, did not answer, or still has wrong bytes after `max_retries`
retries. The fleet replaces it, or waits if it is only late. The publish continues with the other replicas; the lost one
joins a later publish. If the replacement gets wrong weights too, the fault is not the replica's: the run stops and
names the tensor.

*Staged*: the weights are transferred while the replicas generate. Each replica that has them then pauses, loads and
commits in one call, so a failed transfer stops no replica.

*Rolling*: the publish reaches the replicas in waves of `rolling_replicas`, newcomers in the first, since they serve no
requests. The replicas of a wave get no new requests, while the others generate. Each wave is its own transfer: the
trainer sends its weights once per wave. The version is published when all waves are done.

*Encoding delta*: the trainer encodes its weights once per publish, before any replica pauses. A transfer sends
differences if all its replicas have committed the base weights and the differences are smaller; otherwise, also after a
failed transfer, it sends all weights. Wrong weights after a transfer of differences are not a strike against the
replica, because its next transfer is full.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from asyncrl.config.recipe import Interrupt
from asyncrl.config.weights import WeightsConfig
from asyncrl.driver.cluster.placement import Machines
from asyncrl.driver.publish.verdict import all_late, any_late, blamed, is_gone, is_trainers, verdict
from asyncrl.errors import DeadlineExceeded, WeightTransferError, explain
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
"""Time that a sender has, after a receiver failed, to notice or finish before it is interrupted."""


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
    """Replicas that are paused and have not committed yet."""
    served: bool = False
    """True once a replica serves: from then on every late replica is handed to the fleet, even the last pending one."""
    retries: int = 0
    """Transfers that missed a deadline or lost a connection although every process answered."""
    encoded: EncodedWeights | None = None
    """With encoding delta, set by the first wave."""
    sent_bytes: int = 0
    """Sum over all transfers."""
    strikes: dict[int, int] = field(default_factory=dict)
    """Number of wrong transfers per replica in this publish."""

    def left(self) -> float:
        return max(0.01, self.deadline - time.monotonic())


class CheckpointEngine:
    """Runs one publish at a time. Owns the bucket plan, the connection between trainer and replicas, the digests of the
    weights that replicas have committed, and the memory of replicas that got wrong weights."""

    def __init__(  # noqa: PLR0913 the settings of one publish
        self,
        config: WeightsConfig,
        trainer: TrainerPool,
        fleet: ReplicaPool,
        *,
        interrupt: Interrupt,
        encoding: Encoding = "full",
        receivers_per_replica: int = 1,
        rolling: bool = False,
        machines: Callable[[], Machines] | None = None,
        blame_s: float = BLAME_S,
    ) -> None:
        """
        Args:
            interrupt: how a publish treats generations in flight.
            encoding: of the trainer's tensors; delta: differences where possible.
            receivers_per_replica: receiving processes of one replica (tensor-parallel workers).
            rolling: publish to `rolling_replicas` replicas at a time; overrides `config.rolling`.
            machines: where ranks and replicas are, for a transport that reaches replicas on its sender's node only: a
                rank on each node then sends all tensors.
            blame_s: see BLAME_S.
        """
        self._config = config
        self._trainer = trainer
        self._fleet = fleet
        self._pause_mode: PauseMode = PAUSE_MODES[interrupt]
        self._encoding: Encoding = encoding
        self._receivers_per_replica = receivers_per_replica
        self._rolling = rolling
        self._machines = machines
        self._blame_s = blame_s
        self._lock = asyncio.Lock()
        self._publishes = 0
        self._transfers = 0
        self._template: Manifest | None = None
        self._group: Replicas = {}
        self._sources: dict[int, TransferSource] = {}
        self._has: dict[int, tuple[ReplicaControl, Digest]] = {}
        """With encoding delta: control and digest of the committed weights, by replica."""
        self._distrusted: set[int] = set()
        """Replicas replaced because of wrong weights, until their replacement has committed correct ones."""

    async def publish(self, version: int | None, *, newcomers_only: bool = False) -> PublishReport | None:
        """Makes the replicas that are up serve the trainer's current weights as `version` (None: keep their version).

        A concurrent call waits. Returns None if `newcomers_only` is set and no newcomer is left.

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
                lacking = ", ".join(f"replica {i}" for i in pending)
                asked = f"publish version {version} within {self._config.publish_timeout_s:g} s"
                found = f"after {publish.attempts} transfer(s) {lacking} does not serve it"
                do = "see the log for the transfers that failed, or raise weights.publish_timeout_s"
                raise DeadlineExceeded(explain(asked, found, do))
            done |= await self._reach(publish, self._wave(publish, pending))
            publish.served = publish.served or bool(done)
            # Replicas that are neither done nor members were replaced or suspended: they join a later publish.
            members = self._fleet.members
            pending = {i: r for i, r in pending.items() if i not in done and members.get(i) is r}
        ended = time.monotonic()
        replicas = await self._fleet.committed(done, version if self._rolling else None)
        # A replacement is trusted again only after a publish that compared its bytes.
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
        """The replicas of the next transfer: all, or in a rolling publish at most `rolling_replicas` serving replicas
        and all newcomers.

        Order: paused replicas, then replicas connected to the sender, since the last wave of a publish is the first of
        the next.
        """
        if not self._rolling:
            return pending
        idle = self._fleet.newcomers.keys()
        serving = sorted(pending.keys() - idle, key=lambda i: (i not in publish.paused, i not in self._group, i))
        chosen = {*serving[: self._config.rolling_replicas], *idle}
        return {i: r for i, r in pending.items() if i in chosen}

    async def _reach(self, publish: _Publish, replicas: Replicas) -> Replicas:
        """Pauses these replicas, transfers and commits (staged: transfers first); returns the replicas that serve."""
        if self._encoding == "delta" and publish.encoded is None:
            publish.encoded = await self._encode(publish)
        num_members = max(1, len(self._fleet.members))
        if self._config.stage:
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
        # A wave pauses only part of the fleet: weight its pause by that part.
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
        """True if this publish carries digests: on the recipe's schedule and, unless verify is off, whenever it reaches
        a replica without weights. Always with encoding delta: an error would persist in the base."""
        config, number = self._config, self._publishes
        self._publishes += scheduled
        if self._encoding == "delta":
            return True
        if config.verify != "first":
            return config.verify == "always"
        return bool(self._fleet.newcomers) or (scheduled and number % config.verify_every == 0)

    async def _pause(self, publish: _Publish, replicas: Replicas) -> Replicas:
        """Returns the replicas that are now paused; hands dead and late ones to the fleet.

        The timeout leaves time for the rest of the publish: `min(left / 2, transfer)`; for a draining pause
        `max(left / 2, left - transfer)`.
        """
        left, transfer_s = publish.left(), self._config.transfer_timeout_s
        limit_s = max(left / 2, left - transfer_s) if self._pause_mode == "drain" else min(left / 2, transfer_s)
        outcomes = await _on_each(replicas, lambda r: r.call(limit_s, Replica.pause, self._pause_mode))
        return await self._answered(publish, replicas, outcomes)

    async def _send(self, publish: _Publish, replicas: Replicas) -> tuple[Manifest, Digest | None, Replicas]:
        """One transfer; returns its manifest, its digest, and the replicas that received it."""
        publish.attempts += 1
        await self._form_group(replicas, publish)
        planned = self._manifest(publish, replicas)
        self._transfers += 1
        manifest = replace(
            planned,
            publish_id=self._transfers,
            version=publish.version,
            verify=publish.verify,
            is_staged=bool(self._config.stage),
        )
        publish.sent_bytes += manifest.nbytes
        for replica_id in replicas:
            self._has.pop(replica_id, None)  # unknown until it commits
        started = time.monotonic()
        sent, received = await self._transfer(manifest, min(publish.left(), self._config.transfer_timeout_s))
        publish.transfer_s += time.monotonic() - started
        if isinstance(sent, BaseException):
            self._group = {}  # the failed sender's peers were closed too
        good = await self._judge(publish, sent, received, replicas, manifest)
        return manifest, None if isinstance(sent, BaseException) else sent, good

    async def _commit(
        self, publish: _Publish, replicas: Replicas, manifest: Manifest, digest: Digest | None
    ) -> Replicas:
        """Commits the received weights; returns the replicas that serve them."""
        number, limit_s = manifest.publish_id, min(publish.left(), self._config.transfer_timeout_s)
        outcomes = await _on_each(replicas, lambda r: r.call(limit_s, Replica.commit, number, publish.version, digest))
        return await self._answered(publish, replicas, outcomes)

    async def _adopt(
        self, publish: _Publish, replicas: Replicas, manifest: Manifest, digest: Digest | None
    ) -> tuple[Replicas, float]:
        """Like `_commit`, for staged weights; returns also the longest pause in seconds."""
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
        """The manifest of the next transfer, the same for all these replicas."""
        assert self._template is not None, "a group has a plan"
        encoded, full = publish.encoded, self._template
        if encoded is None:
            return full
        full, base, newcomers = replace(full, is_kept=True), encoded.base_digest, self._fleet.newcomers
        # Differences only if every replica has committed their base.
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
        self._group, self._sources = {}, {}
        senders: dict[int, int | None] = dict.fromkeys(replicas)
        if self._machines is not None and len({*(machines := await asyncio.to_thread(self._machines)).ranks}) > 1:
            senders = {r: machines.sender_of(r) for r in replicas}
        counts = Counter(senders.values())
        receivers = {sender: count * per_replica for sender, count in counts.items()}
        sources = await self._trainer.open_weights(config, receivers, publish.left())
        place: Counter[int | None] = Counter()
        for r, sender in senders.items():
            self._sources[r] = replace(sources[sender], receiver=place[sender] * per_replica)
            place[sender] += 1
        self._group = dict(replicas)

    async def _transfer(self, manifest: Manifest, timeout_s: float) -> tuple[Any, dict[int, Any]]:
        """Sends and receives concurrently; returns a digest or an exception of the sender and of each replica.

        A receiver that fails before it connects would make the sender wait until its deadline. The sender is therefore
        interrupted `blame_s` after a failure, and immediately if the fleet has suspended the failed receiver, which
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
            # A receiver failed: give the sender time to notice, then close its ends.
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
        """Returns the replicas that have the sent weights. Raises the trainer's own failure."""
        if is_trainers(sent):
            raise sent
        for replica_id, outcome in received.items():
            if is_gone(outcome):
                self._fleet.fail(replica_id, replicas[replica_id], outcome)
        # A deadline names the process that waited. A health check finds the process that does not answer.
        lost: set[int] = set()
        if any_late(sent, received):
            lost = replicas.keys() - (await self._healthy(replicas)).keys()
        assert self._template is not None, "weights were sent"
        names, retries_left = [spec.name for spec in self._template.tensors], self._config.max_retries - publish.retries
        found = verdict(sent, received, lost, names, retries_left=retries_left)
        for replica_id, why in found.wrong.items():
            self._blame(publish, replica_id, replicas[replica_id], why, manifest)
        if isinstance(sent, BaseException):
            # Peers of a broken connection blame each other: only all of their reports show who came first.
            ended = [f"replica {i}: {outcome}" for i, outcome in received.items() if found.fates[i] == "again"]
            reports = "; ".join([str(sent), *ended])
            logger.error("publish of version %s, transfer %d: %s", publish.version, publish.attempts, reports)
        if found.error is not None:
            raise found.error
        publish.retries += found.is_transient
        return {i: replicas[i] for i in replicas if i in found.ok}

    def _blame(self, publish: _Publish, replica_id: int, control: ReplicaControl, why: str, manifest: Manifest) -> None:
        """Reacts to a replica whose weights differ from the sent ones: retry, full transfer, replace, or stop."""
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
            asked = f"publish version {publish.version} to a replica that was replaced"
            raise WeightTransferError(explain(asked, found, do))
        if follows == "replace":
            self._distrusted.add(replica_id)
            self._fleet.fail(replica_id, control, WeightTransferError(found))

    async def _answered(self, publish: _Publish, replicas: Replicas, outcomes: Mapping[int, Any]) -> Replicas:
        """Returns the replicas whose call succeeded; hands the others to the fleet.

        Raises DeadlineExceeded if all are late, yet pass a health check, and none serves: the deadline is too short.
        """
        failed = {i: outcome for i, outcome in outcomes.items() if isinstance(outcome, BaseException)}
        too_short = bool(failed) and not publish.served and all_late(outcomes.values())
        if too_short and await self._healthy(replicas) == replicas:
            raise next(iter(failed.values()))
        for replica_id, outcome in failed.items():
            self._fleet.fail(replica_id, replicas[replica_id], outcome)
        return {i: r for i, r in replicas.items() if i not in failed}

    async def _healthy(self, replicas: Replicas) -> Replicas:
        """The replicas that pass a health check."""
        await self._fleet.stats()
        members = self._fleet.members
        return {i: r for i, r in replicas.items() if members.get(i) is r}


async def _on_each(replicas: Replicas, call: Any) -> dict[int, Any]:
    """Calls all replicas concurrently; returns the outcome or exception of each."""
    outcomes = await asyncio.gather(*(call(r) for r in replicas.values()), return_exceptions=True)
    return dict(zip(replicas, outcomes, strict=True))
