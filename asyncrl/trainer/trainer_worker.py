"""One trainer rank: a Ray actor around a TrainBackend. It knows the queue only by the functions that fetch from it."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from asyncrl.checkpoint.digests import FileDigest
from asyncrl.config.weights import WeightsConfig
from asyncrl.errors import ConfigError, WeightTransferError, explain, writing
from asyncrl.remote.connection import HasConnections
from asyncrl.trainer.backends import build_backend, require_written_by
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl.types import (
    Digest,
    EncodedWeights,
    Lengths,
    Manifest,
    RankPlan,
    Segment,
    SendingRank,
    TensorSpec,
    TrainMetrics,
    TrainSequence,
    Trajectory,
    TrajectoryKey,
    TransferSource,
)
from asyncrl.weights.plan import part_manifests

if TYPE_CHECKING:
    import torch

    from asyncrl.trainer.backend import TrainBackend
    from asyncrl.weights.transport import WeightSender

logger = logging.getLogger(__name__)

W = TypeVar("W", bound="TrainerWorker")
P = ParamSpec("P")
T = TypeVar("T")

Fetch = Callable[[Sequence[TrajectoryKey]], Sequence[Trajectory]]
"""Sequences of leased groups, in the given order. Raises the queue's errors, within its own deadline."""
FetchAhead = Callable[[Sequence[TrajectoryKey]], Mapping[TrajectoryKey, Trajectory]]
"""Those sequences that the queue foresaw last. Raises as `Fetch`."""


def in_thread(
    name: str,
) -> Callable[[Callable[Concatenate[W, P], T]], Callable[Concatenate[W, P], Coroutine[Any, Any, T]]]:
    """Runs a blocking method in the rank's thread of this name, so the event loop stays responsive. A thread makes its
    calls one after the other."""

    def threaded(method: Callable[Concatenate[W, P], T]) -> Callable[Concatenate[W, P], Coroutine[Any, Any, T]]:
        @functools.wraps(method)
        async def call(self: W, /, *args: P.args, **kwargs: P.kwargs) -> T:
            return await self.threads[name].do(method, self, *args, **kwargs)

        return call

    return threaded


class TrainerWorker(HasConnections):
    """Owns the backend, the process group and the sending end of a transport. The driver makes calls from this class
    and never imports torch, so methods import the modules that need torch.

    Training uses one thread, since torch's thread count and the order of collectives depend on it. Checkpoints are
    written in another thread while it trains, and so are snapshots sent.

    Consumes: one plan per step; the groups that it names.
    Produces: optimizer steps; the tensors of a publish (sending ranks send their parts, the others help to gather).
    Waits for: its peers, at most `trainer.collective_timeout_s` per collective; `fetch`, at most 120 s.
    Unblocked by: calls of the trainer pool; its peers.
    Stops when: `stop` is called or its process is killed. When a peer dies the collective in progress raises.
    """

    _backend: TrainBackend

    def __init__(
        self, spec: TrainerSpec, rank: int, fetch: Fetch, fetch_ahead: FetchAhead, node: Callable[[], str]
    ) -> None:
        """`node`: returns an address of this machine, for the rendezvous and for sending weights."""
        from asyncrl.trainer.host_copies import HostCopies
        from asyncrl.trainer.rank_device import RankDevice
        from asyncrl.weights.encodings.delta_encoder import DeltaEncoder
        from asyncrl.weights.transports.blocking import BlockingCalls

        os.environ["RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"] = "0"  # `fetch` blocks a thread, not the event loop
        self._spec, self._rank, self._node = spec, rank, node
        self._fetch, self._fetch_ahead = fetch, fetch_ahead
        self._device = RankDevice(spec, rank)
        self._sender: WeightSender | None = None
        self._sends_all = False
        """Each rank with a sending end sends all tensors."""
        self._encoder = DeltaEncoder()
        self._bucket_bytes = 0
        self._copies = HostCopies()
        self._snapshot: dict[str, torch.Tensor] | None = None
        self._kept: Mapping[TrajectoryKey, Trajectory] = {}
        """Foreseen sequences of the next step."""
        self._is_sending = threading.Lock()
        """Held while the snapshot is read."""
        self.threads = {name: BlockingCalls(name) for name in ("train", "fetch ahead", "save", "end a send")}
        """For `in_thread`."""
        self.threads["send"] = BlockingCalls("send") if spec.sends_snapshots else self.threads["train"]

    @in_thread("train")
    def open_rendezvous(self) -> tuple[str, int]:
        """Opens the rendezvous of the ranks; rank 0 only. Returns its host and port."""
        host = self._node()
        return host, self._device.open_rendezvous(host)

    @in_thread("train")
    def start(self, host: str, port: int, timeout_s: float) -> None:
        """Waits at most `timeout_s` for the peers and loads the model; returns when this rank can train.

        Raises:
            ConfigError: the model cannot be read or trained, or mixes the sequences of a packed row.
            DeadlineExceeded: a peer did not come.
        """
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()  # one bar per rank in the driver's log says nothing
        self._device.join(host, port, timeout_s)
        size, device = self._spec.trainer.num_ranks, self._device.device
        self._backend = build_backend(self._spec, rank=self._rank, world_size=size, device=device)
        require_isolation(self._backend, self._spec)
        self._device.give_back()
        logger.info("trainer rank %d of %d ready on %s, pid %d", self._rank, size, device, os.getpid())

    @in_thread("train")
    def train_step(self, plan: RankPlan) -> TrainMetrics:
        """Fetches the sequences of this rank's plan and takes one optimizer step; collective.

        Raises:
            RunFailed: loss or gradient is not finite; nothing was changed.
        """
        metrics = self._backend.train_step(plan, self._trajectories(plan))
        self._device.give_back()
        return metrics

    @in_thread("train")
    def reference_kl(self, plan: RankPlan) -> dict[TrajectoryKey, float]:
        """As `TrainBackend.reference_kl`, for the sequences of this rank's plan; collective."""
        found = self._backend.reference_kl(plan, self._trajectories(plan))
        self._device.give_back()
        return found

    @in_thread("fetch ahead")
    def fetch_ahead(self, plan: RankPlan) -> None:
        """Replaces the held sequences by the foreseen sequences of this plan, which is of the next step."""
        self._kept = self._fetch_ahead(plan.keys)

    def _trajectories(self, plan: RankPlan) -> dict[TrajectoryKey, Trajectory]:
        """The sequences of the plan: held ones if they match the plan, the rest from the queue."""
        kept, due = self._kept, plan.lengths
        found = {key: kept[key] for key, lengths in due.items() if key in kept and lengths.fits(kept[key])}
        missing = [key for key in due if key not in found]
        return found | dict(zip(missing, self._fetch(missing) if missing else (), strict=True))

    @in_thread("train")
    def weight_specs(self) -> tuple[TensorSpec, ...]:
        return self._backend.weight_specs()

    @in_thread("train")
    def sending_ranks(self) -> tuple[SendingRank, ...]:
        return self._backend.sending_ranks()

    @in_thread("send")
    def open_weights(self, config: WeightsConfig, num_receivers: int, *, copies: bool = False) -> TransferSource | None:
        """Opens the sending end and closes an earlier one; sending ranks only. Returns the information that receivers
        need; None for no receivers. `copies`: each rank with receivers sends all tensors."""
        from asyncrl.weights.transports import build_sender

        if self._spec.sends_snapshots:
            self._device.use_thread()
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        self._sends_all = copies
        if not num_receivers:
            return None
        sender = build_sender(
            "native" if self._spec.is_native else config.transport,
            config.bucket_bytes,
            num_receivers,
            device=self._device.device.type,
            host=self._node(),
            directory=config.disk_directory,
        )
        self._sender, self._bucket_bytes = sender, config.bucket_bytes
        return sender.open()

    @in_thread("train")
    def logprobs(self, sequences: Sequence[Trajectory]) -> list[np.ndarray]:
        """[T] float32 for each, at temperature 1; collective, all ranks with the same sequences."""
        found = [self._backend.logprobs(_plan(s), {(0, 0): s})[0, 0].numpy() for s in sequences]
        self._device.give_back()
        return found

    @in_thread("train")
    def snapshot_weights(self) -> None:
        """Copies the current weights of a sending rank into host memory, for `encode_weights` and `send_weights`;
        collective. Reuses the memory of the previous copy unless it is still being sent."""
        before, self._snapshot = self._snapshot, None
        # A snapshot that is being sent keeps its memory; the new copy then takes new memory.
        if before is not None and self._is_sending.acquire(blocking=False):
            self._copies.give_back(before)
            self._is_sending.release()
        weights = self._backend.named_weights()
        try:
            if self._sends():
                self._snapshot = self._copies.copy(weights)
        finally:
            _exhaust(weights)

    @in_thread("send")
    def encode_weights(self) -> EncodedWeights | None:
        """A sending rank encodes its weights as differences to the last ones it encoded; the others gather and return
        None."""
        with self._weights("cpu") as weights:
            return self._encoder.encode(weights) if self._sends() else None

    @in_thread("send")
    def send_weights(self, manifest: Manifest, timeout_s: float) -> Digest | None:
        """A sending rank sends its part of the current weights and returns its digest; the others gather and return
        None. Nothing is gathered in two cases: with snapshots the last snapshot is sent, and with encoding delta the
        result of `encode_weights` is sent, whose weights the digest is of.

        Raises:
            WeightTransferError, DeadlineExceeded: on a sending rank; the other ranks end normally.
        """
        # The differences are complete already; sending them gathers nothing.
        if manifest.encoding == "delta":
            sent = self._send(manifest, self._encoder.differences(), timeout_s)
            return None if sent is None else self._encoder.digest
        try:
            with self._weights(self._device.device) as weights:
                return self._send(manifest, weights, timeout_s)
        finally:
            self._device.give_back()

    def _send(self, manifest: Manifest, weights: Iterator[tuple[str, torch.Tensor]], timeout_s: float) -> Digest | None:
        if not self._sends():
            return None
        if self._sender is None:
            raise WeightTransferError("send_weights was called before open_weights")
        senders = self._backend.sending_ranks()
        if len(senders) > 1:
            place = next(place for place, sender in enumerate(senders) if sender.rank == self._rank)
            manifest = part_manifests(manifest, [s.first_tensor for s in senders], self._bucket_bytes)[place]
        return self._sender.send(manifest, weights, timeout_s)

    def _sends(self) -> bool:
        if self._sends_all:
            return self._sender is not None
        return any(sender.rank == self._rank for sender in self._backend.sending_ranks())

    @contextmanager
    def _weights(self, device: torch.device | str) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """The weights to send: the last snapshot, on `device`, if snapshots are sent; else the current weights, which
        all ranks gather together."""
        if self._spec.sends_snapshots:
            self._device.use_thread()
            with self._is_sending:
                yield ((name, tensor.to(device)) for name, tensor in list((self._snapshot or {}).items()))
            return
        weights = self._backend.named_weights()
        try:
            yield weights
        finally:
            _exhaust(weights)

    @in_thread("end a send")
    def close_weights(self) -> None:
        """Closes the sending end, which ends a send in progress. Idempotent."""
        if (sender := self._sender) is not None:
            sender.close()

    @in_thread("train")
    def capture(self) -> None:
        self._backend.capture()

    @in_thread("save")
    def save(self, directory: Path) -> dict[str, FileDigest]:
        """Writes the last capture; collective, in its own group. Returns file name -> digest of this rank's files.

        Raises:
            StorageError: a rank could not write, or this one cannot read what it wrote.
        """
        self._device.use_thread()
        written = self._backend.save(directory)
        with writing(directory):
            return {name: FileDigest.of(directory / name) for name in written}

    @in_thread("train")
    def load(self, directory: Path) -> None:
        """Raises ConfigError: there is no checkpoint, or it is of another backend or model."""
        require_written_by(self._spec.trainer.backend, directory)
        self._backend.load(directory)
        self._device.give_back()

    async def ping(self) -> float:
        """CPU seconds of this process."""
        return time.process_time()

    @in_thread("train")
    def stop(self) -> None:
        """Frees the sending end and leaves the group. Idempotent."""
        if self._sender is not None:
            self._sender.close()
        self._sender = None
        self._device.leave()


def _exhaust(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Gathering is collective: every rank must iterate to the end, also when copying or sending has failed."""
    for _ in weights:
        pass


# The isolation probe: a sequence has the same log-probabilities alone and packed behind another one.

_SHORT, _LONG = 16, 256
_BOUNDS_NATS = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest difference of a token that is rounding, by compute dtype."""


def require_isolation(backend: TrainBackend, spec: TrainerSpec) -> None:
    """Packs a short sequence behind a long one and compares it with itself alone; collective, two short forward passes.
    Replayed routers are left out: the replicas' choices are not known yet.

    Raises ConfigError: another sequence of the row changes it, in a model whose layers look beyond a sequence; or the
    log-probabilities are not finite.
    """
    if spec.trainer.router_replay == "rollout":
        return
    rng = np.random.default_rng(0)
    long, short = _sequence(rng, _LONG), _sequence(rng, _SHORT)
    both = backend.logprobs(_plan(long, short), {(0, 0): long, (0, 1): short})[0, 1]
    alone = backend.logprobs(_plan(short), {(0, 0): short})[0, 0]
    if not bool(alone.isfinite().all()):
        found = "log-probabilities that are not finite: its weights hold NaN or infinity, or its activations overflow"
        do = "save the weights again; float16 overflows where bfloat16 does not"
        raise ConfigError(explain(f"train model.path={spec.model.path}", found, do))
    apart = float((both - alone).abs().max())
    bound = _BOUNDS_NATS[getattr(spec.trainer, spec.trainer.backend).param_dtype]
    if not apart <= bound:
        asked = f"sequences of {spec.model.path} that are packed in one row and do not see each other"
        found = f"alone and behind {_LONG} other tokens, a log-probability differs by {apart:.3g} nats"
        raise ConfigError(explain(asked, found, "train another model: layers of this one mix the sequences of a row"))


def _sequence(rng: np.random.Generator, length: int) -> Trajectory:
    count = _SHORT - 1
    return Trajectory(
        prompt_ids=rng.integers(0, 32, length - count).astype(np.int32),
        response_ids=rng.integers(0, 32, count).astype(np.int32),
        logprobs=np.zeros(count, np.float32),
        loss_mask=np.ones(count, np.bool_),
        segments=(Segment(0, count, 0, 0),),
        reward=0.0,
    )


def _plan(*sequences: Trajectory) -> RankPlan:
    lengths = [Lengths(len(s.prompt_ids), len(s.response_ids), s.num_trained_tokens) for s in sequences]
    microbatch = tuple(TrainSequence(0, i, 0.0, each, i) for i, each in enumerate(lengths))
    return RankPlan(step=0, updates=((microbatch,),))
