"""A process group for broadcasts, beside torch.distributed's default group; a failure replaces it by a new generation.

Replicas come and go, so the trainer's own group must not contain them. The backend is therefore built directly over a
store that the sender hosts. Each generation of the group has its own keys in that store.
"""

from __future__ import annotations

import socket
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.errors import DeadlineExceeded, WeightTransferError, explain
from asyncrl.weights.transports.control_channel import Deadline

_GLOO_THREADS = 2
"""Two broadcasts are in transfer at once; each occupies a thread."""
_STORE_TIMEOUT = timedelta(seconds=300)
_LOGS = "look at the logs of the trainer and the replicas; the next publish forms a new group"


def host_store(host: str, world_size: int | None = None, timeout: timedelta = _STORE_TIMEOUT) -> dist.TCPStore:
    """A store at an ephemeral port of `host`, and at no other address of this machine, as TCPStore's own would be. It
    has no authentication: any process that reaches the address can read and write it."""
    with socket.create_server((host, 0)) as listener:
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            host,
            port,
            world_size,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.fileno(),
        )
        listener.detach()  # it is the store's now
    return store


def join_store(address: str, deadline: Deadline) -> dist.TCPStore:
    """A receiver's view of the store at `host:port`. Raises WeightTransferError: there is no server at that address."""
    host, _, port = address.rpartition(":")
    try:
        return dist.TCPStore(host, int(port), is_master=False, timeout=_left(deadline))
    except RuntimeError as error:
        do = "form a new transfer group and give receivers its source"
        raise WeightTransferError(explain(f"reach the store at {address}", _first_line(error), do)) from error


class BroadcastGroup:
    """One generation of the group: rank 0 sends, rank `receiver + 1` receives. Unusable after the first error.

    The group owns the pending work: gloo closes its connections only when the last reference to a work object is gone,
    and a traceback would keep one.
    """

    def __init__(self, store: dist.TCPStore, generation: int, rank: int, world_size: int, device: torch.device) -> None:
        self.generation = generation
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._backend: Any = None
        self._works: deque[dist.Work] = deque()

    def form(self, deadline: Deadline) -> None:
        """Returns when all ranks have come. Raises DeadlineExceeded: some did not."""
        keys = dist.PrefixStore(f"weights/{self.generation}", self._store)
        keys.set_timeout(_left(deadline))
        try:
            if self._device.type == "cuda":
                self._backend = _nccl(keys, self._rank, self._world_size, deadline)
            else:
                self._backend = _gloo(keys, self._rank, self._world_size, deadline, self._store.host)
        except RuntimeError as error:
            asked = f"form a group of {self._world_size} processes within {deadline.timeout_s:.1f} s"
            found = f"rank {self._rank} still waits for others: {_first_line(error)}"
            raise DeadlineExceeded(explain(asked, found, _LOGS)) from error

    @property
    def under_way(self) -> int:
        return len(self._works)

    def start(self, data: torch.Tensor, deadline: Deadline) -> None:
        """Begins to send (rank 0) or to fill (others) `data`, [n] uint8, the same n on all ranks."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = _left(deadline)
        options.asyncOp = True
        try:
            self._works.append(self._backend.broadcast([data], options))
        except RuntimeError as error:
            raise WeightTransferError(explain("broadcast a bucket", _first_line(error), _LOGS)) from error

    def wait(self, deadline: Deadline, what: str) -> None:
        """Returns when the oldest work is done (CUDA: ordered before the next kernel of the current stream).

        Raises:
            DeadlineExceeded: it was not done in time.
            WeightTransferError: a peer closed its connection.
        """
        try:
            self._works[0].wait(_left(deadline))
        except RuntimeError as error:
            if not deadline.remaining_s() or "timed out" in str(error).lower():
                asked = f"{what} within {deadline.timeout_s:.1f} s"
                raise DeadlineExceeded(explain(asked, _first_line(error), _LOGS)) from error
            raise WeightTransferError(explain(what, _first_line(error), _LOGS)) from error
        self._works.popleft()

    def close(self) -> None:
        """Drops the connections, which ends the waits of the peers. Pending work ends by its own deadline at the
        latest, and gloo lets go only then. Idempotent."""
        if self._backend is not None:
            self._backend.abort()
        self._works.clear()
        self._backend = None


def _gloo(keys: dist.Store, rank: int, world_size: int, deadline: Deadline, host: str) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_address_towards(host))]
    options._timeout = _left(deadline)
    options._threads = _GLOO_THREADS
    return dist.ProcessGroupGloo(keys, rank, world_size, options)


def _nccl(keys: dist.Store, rank: int, world_size: int, deadline: Deadline) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _left(deadline)
    return dist.ProcessGroupNCCL(keys, rank, world_size, options)


def _address_towards(host: str) -> str:
    """The address of this machine on its route to `host`; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]


def _left(deadline: Deadline) -> timedelta:
    """At least a millisecond: torch takes zero for its own default."""
    return timedelta(seconds=max(deadline.remaining_s(), 0.001))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
