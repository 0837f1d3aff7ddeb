"""A process group for broadcasts, separate from torch.distributed's default group; replaced after a failure.

Replicas come and go, so the trainer's own group must not contain them. The backend is therefore built directly over a
store that the sender hosts. Each generation of the group has its own keys in that store.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

import psutil
import torch
import torch.distributed as dist

from asyncrl.errors import DeadlineExceeded, WeightTransferError, explain
from asyncrl.weights.object_store import in_thread
from asyncrl.weights.transports.blocking import wait_for
from asyncrl.weights.transports.control_channel import Deadline

logger = logging.getLogger(__name__)

Watch = Callable[[], None]
"""Called every few milliseconds during a wait; ends the wait by raising, e.g. an error that the other side reports."""

_GLOO_THREADS = 2
"""Two broadcasts are in transfer concurrently; each occupies a thread."""
_STORE_TIMEOUT = timedelta(seconds=300)
_LOOK = timedelta(milliseconds=20)
"""Longest time between two calls of `watch` over gloo."""
_POLL_S = 0.0005
"""The same over NCCL, whose own wait polls only every 10 ms."""
_ABORT_S = 1.0
"""Longest wait for a group to end; then its thread is abandoned."""
_WITHOUT_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"}
_LOGS = "look at the logs of the trainer and the replicas; the next publish forms a new group"


def host_store(host: str, world_size: int | None = None, timeout: timedelta = _STORE_TIMEOUT) -> dist.TCPStore:
    """A store on an ephemeral port of `host` only; TCPStore by itself would listen on all addresses. It has no
    authentication: any process that reaches the address can read and write it."""
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
        listener.detach()  # the store owns the socket
    return store


def join_store(address: str, deadline: Deadline) -> dist.TCPStore:
    """A receiver's view of the store at `host:port`. Raises WeightTransferError: there is no server at that address."""
    host, _, port = address.rpartition(":")
    try:
        return dist.TCPStore(host, int(port), is_master=False, timeout=_left(deadline))
    except RuntimeError as error:
        do = "form a new transfer group and give receivers its source"
        raise WeightTransferError(explain(f"reach the store at {address}", _first_line(error), do)) from error


class BroadcastFailed(WeightTransferError):
    """A peer closed its connection, or the group itself failed; the peer knows the cause."""


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

    def form(self, deadline: Deadline, watch: Watch) -> None:
        """Returns once all ranks have joined and can broadcast.

        Neither gloo's rendezvous nor NCCL's communicator setup can be interrupted, and NCCL's has no deadline. They run
        in a thread that is abandoned if they do not end in time.

        Raises DeadlineExceeded: some ranks did not join. Also raises the errors of `watch`.
        """
        device = self._device
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())  # the choice of this thread
        joining = in_thread(lambda: self._connect(device, deadline), "weights-group")
        try:
            self._backend = wait_for(joining, deadline, f"form a group of {self._world_size} processes", watch)
        except BaseException:
            joining.add_done_callback(_abort_late)
            raise

    def _connect(self, device: torch.device, deadline: Deadline) -> Any:
        keys = dist.PrefixStore(f"weights/{self.generation}", self._store)
        keys.set_timeout(_left(deadline))
        try:
            if device.type == "cuda":
                sockets_towards(self._store.host)
                return _nccl(keys, self._rank, self._world_size, deadline, device)
            return _gloo(keys, self._rank, self._world_size, deadline, self._store.host)
        except RuntimeError as error:
            asked = f"form a group of {self._world_size} processes within {deadline.timeout_s:.1f} s"
            found = f"rank {self._rank} still waits for others: {_first_line(error)}"
            raise DeadlineExceeded(explain(asked, found, _LOGS)) from error

    @property
    def under_way(self) -> int:
        return len(self._works)

    def start(self, data: torch.Tensor, deadline: Deadline) -> None:
        """Begins to send (rank 0) or to fill (others) `data`, [n] uint8, the same n on all ranks."""
        try:
            self._works.append(self._backend.broadcast([data], _options(deadline)))
        except RuntimeError as error:
            raise BroadcastFailed(explain("broadcast a bucket", _first_line(error), _LOGS)) from error

    def wait(self, deadline: Deadline, what: str, watch: Watch) -> None:
        """Returns when the oldest work is done (CUDA: ordered before the next kernel of the current stream).

        Polls and never waits in NCCL: NCCL does not notice a dead peer, and when its own wait times out it aborts the
        communicator, upon which torch kills the process.

        Raises:
            DeadlineExceeded: the work was not done in time.
            BroadcastFailed: a peer closed its connection.
            Also the errors of `watch`.
        """
        while not self._is_done(what, deadline):
            watch()
            if not deadline.remaining_s():
                asked = f"{what} within {deadline.timeout_s:.1f} s"
                raise DeadlineExceeded(explain(asked, "the broadcast is still in progress", _LOGS))
            if self._device.type == "cuda":
                time.sleep(_POLL_S)
            else:
                with suppress(RuntimeError):  # not done yet, or failed: the next poll tells
                    self._works[0].wait(min(_LOOK, _left(deadline)))
        self._works.popleft()

    def _is_done(self, what: str, deadline: Deadline) -> bool:
        if not self._works[0].is_completed():
            return False
        try:
            self._works[0].wait(timedelta(seconds=1))  # returns immediately: orders the stream or raises
        except RuntimeError as error:
            if not deadline.remaining_s() or "timed out" in str(error).lower():
                asked = f"{what} within {deadline.timeout_s:.1f} s"
                raise DeadlineExceeded(explain(asked, _first_line(error), _LOGS)) from error
            raise BroadcastFailed(explain(what, _first_line(error), _LOGS)) from error
        return True

    def close(self) -> None:
        """Drops the connections, which ends the peers' waits. Gloo disconnects only once pending work has ended, at its
        deadline at the latest. Idempotent."""
        held = [*self._works]
        self._works.clear()
        if self._backend is not None:
            held.append(self._backend)
            self._backend = None
            _let_go(held)


def _gloo(keys: dist.Store, rank: int, world_size: int, deadline: Deadline, host: str) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_address_towards(host))]
    options._timeout = _left(deadline)
    options._threads = _GLOO_THREADS
    return dist.ProcessGroupGloo(keys, rank, world_size, options)


def _nccl(keys: dist.Store, rank: int, world_size: int, deadline: Deadline, device: torch.device) -> Any:
    """A group with a ready communicator: NCCL creates it in the first broadcast, which waits for all ranks."""
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _left(deadline)
    with watchdog_spares_the_process():
        backend = dist.ProcessGroupNCCL(keys, rank, world_size, options)
    try:
        work = backend.broadcast([torch.zeros(1, dtype=torch.uint8, device=device)], _options(deadline))
        while not work.is_completed():
            if not deadline.remaining_s():
                raise RuntimeError("the first broadcast is still in progress")
            time.sleep(_POLL_S)
        work.wait(timedelta(seconds=1))
    except BaseException:
        _let_go([backend])
        raise
    return backend


@contextmanager
def watchdog_spares_the_process() -> Iterator[None]:
    """NCCL groups created inside get no watchdog. By default the watchdog kills the process when a communicator fails
    or is aborted: one lost replica would end the sender and all receivers. With error handling disabled it still
    reports late broadcasts to the process's other groups, whose monitor kills the process minutes later. NCCL reads
    these settings from the environment only; the trainer's groups keep the defaults. `wait` checks all work instead."""
    before = {name: os.environ[name] for name in _WITHOUT_WATCHDOG if name in os.environ}
    os.environ.update(_WITHOUT_WATCHDOG)
    try:
        yield
    finally:
        for name in _WITHOUT_WATCHDOG.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _let_go(held: list[Any]) -> None:
    """Aborts the backend (the last of `held`) and drops all of `held`, which must be the last references. Runs in a
    thread, because a stopped peer can block both: gloo on pending work, NCCL on a kernel."""
    ending = in_thread(lambda: _end(held), "weights-abort")
    if not futures.wait((ending,), _ABORT_S).done:
        logger.warning("a group for weights did not end within %g s; it is left to its thread", _ABORT_S)
    elif (error := ending.exception()) is not None:
        logger.warning("a group for weights could not be aborted: %s", error)


def _end(held: list[Any]) -> None:
    try:
        held[-1].abort()
    finally:
        held.clear()


def _abort_late(joining: futures.Future[Any]) -> None:
    """Aborts a group that forms after this side has given up."""
    if joining.exception() is None:
        _let_go([joining.result()])


def _options(deadline: Deadline) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    options.timeout = _left(deadline)
    options.asyncOp = True
    return options


def sockets_towards(master: str) -> None:
    """Makes later groups of this process use the interface that routes to `master`, unless GLOO_SOCKET_IFNAME or
    NCCL_SOCKET_IFNAME is set. By default gloo resolves the host's name, often to an unreachable address (`127.0.1.1
    name` in /etc/hosts), and NCCL takes the first interface that is up. NCCL keeps its choice for all groups of a
    process, so a loopback route leaves it unset."""
    address = _address_towards(master)
    name = interface_of(address)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        if not ip_address(address).is_loopback:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # exact name, not a prefix


def interface_of(address: str) -> str | None:
    """The network interface of this machine with this IPv4 address, or None."""
    for name, places in psutil.net_if_addrs().items():
        if any(place.address == address for place in places):
            return name
    return None


def _address_towards(host: str) -> str:
    """The address of this machine on its route to `host`; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]


def _left(deadline: Deadline) -> timedelta:
    """At least a millisecond: torch reads zero as its own default."""
    return timedelta(seconds=max(deadline.remaining_s(), 0.001))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
