"""One trainer rank: a process around a TrainBackend. It knows neither Ray nor the queue, only the function `fetch`."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from asyncrl.checkpoint.digests import FileDigest
from asyncrl.config.checks import require_cuda
from asyncrl.config.weights import WeightsConfig
from asyncrl.errors import DeadlineExceeded, WeightTransferError, explain, unwritable
from asyncrl.kernels.cpu_products import use_onednn
from asyncrl.trainer.backend import TrainBackend
from asyncrl.trainer.backends import build_backend, require_written_by
from asyncrl.trainer.host_copies import HostCopies
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl.types import (
    Digest,
    EncodedWeights,
    Manifest,
    RankPlan,
    SendingRank,
    TensorSpec,
    TrainMetrics,
    Trajectory,
    TrajectoryKey,
    TransferSource,
)
from asyncrl.weights.encodings.delta_encoder import DeltaEncoder
from asyncrl.weights.plan import part_manifests
from asyncrl.weights.transport import WeightSender
from asyncrl.weights.transports import build_sender
from asyncrl.weights.transports.process_group import host_store, sockets_towards

logger = logging.getLogger(__name__)

Fetch = Callable[[Sequence[TrajectoryKey]], Sequence[Trajectory]]
"""Sequences of leased groups, in that order. Raises what the queue raises, within its own deadline."""


class TrainerWorker:
    """Owns the backend, the process group and the sending end of a transport.

    All methods except `ping`, `keep`, `close_weights` and `save` must be called from one thread: torch's thread count
    and the order of collectives depend on it. `save` may run beside them, in one thread of its own. So may
    `open_weights` and `send_weights`, in another one, where snapshots are sent.

    Consumes: one plan per step; the groups that it names.
    Produces: optimizer steps; the tensors of a publish (the backend's sending ranks send their parts, the others help
    to gather).
    Waits for: its peers, at most `trainer.collective_timeout_s` per collective; `fetch`, at most 120 s.
    Unblocked by: calls of the trainer pool; its peers.
    Stops when: `stop` is called or its process is killed. When a peer dies the collective in progress raises.
    """

    def __init__(self, spec: TrainerSpec, rank: int, world_size: int, fetch: Fetch) -> None:
        self._spec, self._rank, self._world_size, self._fetch = spec, rank, world_size, fetch
        self._timeout = timedelta(seconds=spec.trainer.collective_timeout_s)
        self._store: dist.TCPStore | None = None
        self._sender: WeightSender | None = None
        self._encoder = DeltaEncoder()
        self._bucket_bytes = 0
        self._copies = HostCopies()
        self._snapshot: dict[str, torch.Tensor] | None = None
        self._streams: dict[int, torch.cuda.Stream] = {}
        """By thread."""
        self._kept: Mapping[TrajectoryKey, Trajectory] = {}
        """Sequences of the next step, as far as they were foreseen."""
        self._is_sending = threading.Lock()
        """Held while the snapshot is read."""
        self._host = "127.0.0.1"
        self._device: torch.device
        self._backend: TrainBackend

    def address(self, host: str) -> tuple[str, int]:
        """Opens the rendezvous on `host`, an address of this machine; rank 0 only. The port is bound from here on, so
        that nothing else can take it before `start`."""
        self._store = host_store(host, self._world_size, self._timeout)
        return host, self._store.port

    def start(self, master_addr: str, master_port: int, timeout_s: float, host: str = "127.0.0.1") -> None:
        """Waits at most `timeout_s` for the peers and loads the model; returns when this rank can train.

        Args:
            host: an address of this machine, from which weights are sent.

        Raises:
            ConfigError: the model cannot be read or trained.
            DeadlineExceeded: a peer did not come.
        """
        transformers_logging.disable_progress_bar()  # one bar per rank in the driver's log says nothing
        self._host = host
        self._device = resolve_device(self._spec.trainer.device, self._rank)
        torch.set_num_threads(self._spec.num_threads)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        else:
            use_onednn(num_shapes=32)  # of one micro-batch: the next one has another number of tokens
        if self._store is None:
            self._store = dist.TCPStore(master_addr, master_port, self._world_size, timeout=self._timeout)
        sockets_towards(master_addr)
        await_peers(self._store, self._rank, self._world_size, timeout_s)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo",
            store=self._store,
            rank=self._rank,
            world_size=self._world_size,
            timeout=self._timeout,
        )
        self._backend = build_backend(self._spec, rank=self._rank, world_size=self._world_size, device=self._device)
        self._leave_device()
        logger.info(
            "trainer rank %d of %d ready on %s, pid %d", self._rank, self._world_size, self._device, os.getpid()
        )

    def train_step(self, plan: RankPlan) -> TrainMetrics:
        """Fetches what this rank's plan names and takes one optimizer step; collective.

        Raises:
            RunFailed: loss or gradient is not finite; nothing was changed.
        """
        metrics = self._backend.train_step(plan, self._trajectories(plan))
        self._leave_device()
        return metrics

    def reference_kl(self, plan: RankPlan) -> dict[TrajectoryKey, float]:
        """As `TrainBackend.reference_kl`, for the sequences of this rank's plan; collective."""
        found = self._backend.reference_kl(plan, self._trajectories(plan))
        self._leave_device()
        return found

    def _leave_device(self) -> None:
        """Gives back what the allocator keeps: activations, gradients, gathered weights. Weights and, without
        offload_optimizer, the optimizer's state stay on the device."""
        if self._spec.shares_device and self._device.type == "cuda":
            torch.cuda.empty_cache()

    def keep(self, sequences: Mapping[TrajectoryKey, Trajectory]) -> None:
        """Holds sequences for the next step, in place of those before. May be called from another thread."""
        self._kept = sequences

    def _trajectories(self, plan: RankPlan) -> dict[TrajectoryKey, Trajectory]:
        """What the plan names: what is held as the plan describes it, the rest from the queue."""
        kept, due = self._kept, plan.lengths
        found = {key: kept[key] for key, lengths in due.items() if key in kept and lengths.fits(kept[key])}
        missing = [key for key in due if key not in found]
        return found | dict(zip(missing, self._fetch(missing) if missing else (), strict=True))

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        return self._backend.weight_specs()

    def sending_ranks(self) -> tuple[SendingRank, ...]:
        return self._backend.sending_ranks()

    def open_weights(self, config: WeightsConfig, num_receivers: int) -> TransferSource:
        """Opens the sending end, and closes an earlier one; sending ranks only. Returns what receivers need to join."""
        if self._spec.sends_snapshots:
            self._use_thread()
        if self._sender is not None:
            self._sender.close()
        sender = build_sender(
            config.transport,
            config.bucket_bytes,
            num_receivers,
            device=self._device.type,
            host=self._host,
            directory=config.disk_directory,
        )
        self._sender, self._bucket_bytes = sender, config.bucket_bytes
        return sender.open()

    def snapshot_weights(self) -> None:
        """Copies the current weights of a sending rank into host memory, for `encode_weights` and `send_weights`;
        collective. The memory of the copy before is used again, unless it is still being sent."""
        before, self._snapshot = self._snapshot, None
        if before is not None and self._is_sending.acquire(blocking=False):
            self._copies.give_back(before)
            self._is_sending.release()
        weights = self._backend.named_weights()
        try:
            if self._sends():
                self._snapshot = self._copies.copy(weights)
        finally:
            _exhaust(weights)

    def encode_weights(self) -> EncodedWeights | None:
        """A sending rank encodes its part of the weights to send as differences to those that it encoded before; the
        others gather with it and return None."""
        with self._weights(torch.device("cpu")) as weights:
            return self._encoder.encode(weights) if self._sends() else None

    def send_weights(self, manifest: Manifest, timeout_s: float) -> Digest | None:
        """A sending rank sends its part of the current weights and returns its digest; the others gather with it and
        return None. Where snapshots are sent, the weights are those of the last one, and nothing is gathered. Nor is it
        with encoding delta: what `encode_weights` made is sent, and the digest is of the weights that it encoded.

        Raises:
            WeightTransferError, DeadlineExceeded: on a sending rank; the ranks that do not send end normally.
        """
        if manifest.encoding == "delta":
            sent = self._send(manifest, self._encoder.differences(), timeout_s)
            return None if sent is None else self._encoder.digest
        try:
            with self._weights(self._device) as weights:
                return self._send(manifest, weights, timeout_s)
        finally:
            self._leave_device()

    def _send(self, manifest: Manifest, weights: Iterator[tuple[str, torch.Tensor]], timeout_s: float) -> Digest | None:
        senders = self._backend.sending_ranks()
        places = [place for place, sender in enumerate(senders) if sender.rank == self._rank]
        if not places:
            return None
        if self._sender is None:
            raise WeightTransferError("send_weights was called before open_weights")
        if len(senders) > 1:
            manifest = part_manifests(manifest, [s.first_tensor for s in senders], self._bucket_bytes)[places[0]]
        return self._sender.send(manifest, weights, timeout_s)

    def _sends(self) -> bool:
        return any(sender.rank == self._rank for sender in self._backend.sending_ranks())

    @contextmanager
    def _weights(self, device: torch.device) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """Those to send: of the last snapshot, on `device`, where snapshots are sent; else the current ones, which all
        ranks gather together."""
        if self._spec.sends_snapshots:
            self._use_thread()
            with self._is_sending:
                yield self._copied_weights(device)
            return
        weights = self._backend.named_weights()
        try:
            yield weights
        finally:
            _exhaust(weights)

    def _copied_weights(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in list((self._snapshot or {}).items()):
            yield name, tensor.to(device)

    def _use_thread(self) -> None:
        """Readies a thread that works beside the one that trains. On a GPU it gets a stream of its own: on the common
        one each copy would wait for the kernels of the step."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            stream = self._streams.setdefault(threading.get_ident(), torch.cuda.Stream())
            torch.cuda.set_stream(stream)
        else:
            torch.set_num_threads(1)  # of the calling thread: a step may run beside it

    def close_weights(self) -> None:
        """Closes the sending end, which ends a send in progress. May be called from another thread. Idempotent."""
        if (sender := self._sender) is not None:
            sender.close()

    def capture(self) -> None:
        self._backend.capture()

    def save(self, directory: Path) -> dict[str, FileDigest]:
        """Writes the last capture; collective, in a group of its own. May be called from another thread. Returns the
        digests of what this rank wrote, by file name.

        Raises:
            StorageError: a rank could not write, or this one cannot read what it wrote.
        """
        self._use_thread()
        written = self._backend.save(directory)
        try:
            return {name: FileDigest.of(directory / name) for name in written}
        except OSError as error:
            raise unwritable(directory, error) from error

    def load(self, directory: Path) -> None:
        """Raises ConfigError: it is a checkpoint of another backend or model, or none."""
        require_written_by(self._spec.trainer.backend, directory)
        self._backend.load(directory)
        self._leave_device()

    def ping(self) -> float:
        """CPU seconds of this process. May be called from another thread while a step runs."""
        cpu = os.times()
        return cpu.user + cpu.system

    def stop(self) -> None:
        """Frees the sending end and leaves the group. Idempotent."""
        self.close_weights()
        self._sender = None
        if dist.is_initialized():
            dist.destroy_process_group()


def _exhaust(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Gathering is collective: every rank must iterate to the end, also when copying or sending has failed."""
    for _ in weights:
        pass


def await_peers(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
    """Returns when all ranks have started. It has its own timeout: on a busy machine ranks start seconds apart, and the
    timeout of a collective is meant for ranks that run.

    Raises:
        DeadlineExceeded: some ranks have not started; the message names them.
    """
    here = [f"asyncrl/here/{peer}" for peer in range(world_size)]
    store.set(here[rank], "")
    try:
        store.wait(here, timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        missing = [str(peer) for peer, key in enumerate(here) if not store.check([key])]
        found = f"rank {', '.join(missing)} did not come within {timeout_s:g} s"
        do = "see the log of that process, or raise ray.start_timeout_s"
        raise DeadlineExceeded(explain(f"trainer rank {rank} to meet its peers", found, do)) from error


def resolve_device(asked: str, rank: int) -> torch.device:
    """`auto` takes a CUDA device where one is visible: the only one, or one per rank of this machine. Raises
    ConfigError: one is asked for, and torch sees none."""
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(asked)
    if device.type == "cuda":
        require_cuda("trainer.device", asked, is_available=torch.cuda.is_available())
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", rank % torch.cuda.device_count())
    return device
