"""The device of a trainer rank and its place in the group of ranks."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from asyncrl.config.checks import has_nvidia_gpu, require_cuda
from asyncrl.errors import DeadlineExceeded, explain
from asyncrl.kernels.cpu_products import use_onednn
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl.weights.transports.process_group import host_store, sockets_towards


class RankDevice:
    """Owns the process group of a rank, and a CUDA stream for each thread that works while another one trains."""

    device: torch.device

    def __init__(self, spec: TrainerSpec, rank: int) -> None:
        self._spec, self._rank, self._world_size = spec, rank, spec.trainer.num_ranks
        self._timeout = timedelta(seconds=spec.trainer.collective_timeout_s)
        self._store: dist.TCPStore | None = None
        self._streams: dict[int, torch.cuda.Stream] = {}
        """By thread identifier."""

    def open_rendezvous(self, host: str) -> int:
        """Returns the port on `host`, an address of this machine, where the ranks meet; rank 0 only. The port is bound
        from here on, so nothing else can take it before `join`."""
        self._store = host_store(host, self._world_size, self._timeout)
        return self._store.port

    def join(self, host: str, port: int, timeout_s: float) -> None:
        """Prepares the calling thread, in which the rank trains, and returns when all ranks have met.

        Raises:
            ConfigError: torch does not see the device.
            DeadlineExceeded: a peer did not come within `timeout_s`.
        """
        self.device = resolve_device(self._spec.trainer.device, self._rank)
        torch.set_num_threads(self._spec.num_threads)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            use_onednn(num_shapes=32)  # of one micro-batch: the next one has another number of tokens
        if self._store is None:
            self._store = dist.TCPStore(host, port, self._world_size, timeout=self._timeout)
        sockets_towards(host)
        # Wait for slow starters first, so that the collective timeout applies to running ranks only.
        await_peers(self._store, self._rank, self._world_size, timeout_s)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
            store=self._store,
            rank=self._rank,
            world_size=self._world_size,
            timeout=self._timeout,
        )

    def leave(self) -> None:
        """Leaves the group. Idempotent."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def give_back(self) -> None:
        """Frees the allocator's cache: activations, gradients, gathered weights. Weights and, without
        offload_optimizer, the optimizer's state stay on the device. No-op unless an engine shares the device."""
        if self._spec.shares_device and self.device.type == "cuda":
            torch.cuda.empty_cache()

    def use_thread(self) -> None:
        """Prepares the calling thread for work while another one trains. On a GPU it gets its own stream: on the
        default stream each copy would wait for the kernels of the step."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            stream = self._streams.setdefault(threading.get_ident(), torch.cuda.Stream())
            torch.cuda.set_stream(stream)
        else:
            torch.set_num_threads(1)


def await_peers(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
    """Returns when all ranks have started. It has its own timeout: on a busy machine ranks start seconds apart, and the
    collective timeout is meant for running ranks.

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
    """`auto` takes a CUDA device if one is visible: the only one, or one per rank of this machine. Raises ConfigError:
    CUDA is requested, and torch sees no device."""
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() or has_nvidia_gpu() else "cpu"
    device = torch.device(asked)
    if device.type == "cuda":
        require_cuda("trainer.device", asked, is_available=torch.cuda.is_available())
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", rank % torch.cuda.device_count())
    return device
