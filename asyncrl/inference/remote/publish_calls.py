"""Publishes to a server started by someone else."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from asyncrl.errors import ConfigError, explain
from asyncrl.inference.remote.orders import write_order
from asyncrl.inference.remote.server_client import Call, ServerClient
from asyncrl.inference.shared.publish_calls import PublishCalls, agree
from asyncrl.types import Digest, DiskSource, Manifest, TransferSource
from asyncrl.weights.transport import HeldReceiver, WeightReceiver

_GRACE_S = 5.0
"""Extra time beyond the workers' deadline, so that their error arrives first."""


class ExtensionPublishCalls(PublishCalls):
    """The server's workers receive the publish by asyncrl's `ServeExtension`."""

    def __init__(self, client: ServerClient, num_engines: int = 1) -> None:
        super().__init__(f"the server {client.url}")
        self._client = client
        self._num_engines = num_engines

    async def _update(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Sequence[Sequence[Any]]:
        if source != self._joined:
            await asyncio.to_thread(require_reachable, source, self._client.url)
        order = write_order(manifest, source, timeout_s)
        outcomes = await self._client.call_workers("asyncrl_publish", [order], timeout_s + _GRACE_S)
        # vLLM returns the outcomes of the first engine only; the others compare their digest with it.
        if self._num_engines > 1 and not any(outcome[0] for outcome in outcomes):
            digest = agree(outcomes)
            await self._client.call_workers("asyncrl_confirm", [digest and list(digest)], _GRACE_S)
        return outcomes


class ReplicaReceives(PublishCalls):
    """The server's workers run nothing of asyncrl: the replica is the receiver of the transfer."""

    def __init__(self, client: ServerClient) -> None:
        super().__init__(f"the server {client.url}")
        self._client = client
        self._thread = ThreadPoolExecutor(1, "weight-receiver")  # sockets stay in one thread
        self._receiver = HeldReceiver(self._receiver_of)
        self._closed = False

    def close(self) -> None:
        """Idempotent."""
        super().close()
        if not self._closed:
            self._closed = True
            self._thread.submit(self._receiver.close)
            self._thread.shutdown(wait=False)

    async def _update(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Sequence[Sequence[Any]]:
        loop = self._loop = asyncio.get_running_loop()
        return [["", "", await loop.run_in_executor(self._thread, self._read, manifest, source, timeout_s)]]

    def _receiver_of(self, source: Any) -> WeightReceiver:
        raise NotImplementedError

    def _read(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        return self._receiver.of(source).receive(manifest, _Discarded(), timeout_s)


class ReloadPublishCalls(ReplicaReceives):
    """The server's own loader reads the files of transport `disk`. The replica reads all files too, computes their
    digest, then tells the server the directory."""

    def __init__(self, client: ServerClient, reload: Callable[[str], Call]) -> None:
        """`reload`: builds the call that loads the directory of a publish."""
        super().__init__(client)
        self._reload = reload

    async def _update(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Sequence[Sequence[Any]]:
        if not isinstance(source, DiskSource):
            do = "set weights.transport=disk, or rollout.remote.weights=extension"
            raise ConfigError(explain("rollout.remote.weights=reload", f"a {type(source).__name__}", do))
        deadline = time.monotonic() + timeout_s
        outcomes = await super()._update(manifest, source, timeout_s)
        path = Path(source.directory) / f"publish-{manifest.publish_id}"
        await self._client.send(self._reload(str(path)), max(0.0, deadline - time.monotonic()) + _GRACE_S)
        return outcomes

    def _receiver_of(self, source: Any) -> WeightReceiver:
        from asyncrl.weights.transports.disk import DiskReceiver

        return DiskReceiver(source)


class NativePublishCalls(ReplicaReceives):
    """vLLM's own sender, in the trainer, broadcasts to the server's workers. The replica makes the server's part of the
    calls, in step with the sender: its key, its deadline and its labels stay here."""

    def __init__(self, client: ServerClient, num_workers: int) -> None:
        """`num_workers`: of the server."""
        super().__init__(client)
        self._num_workers = num_workers

    def _receiver_of(self, source: Any) -> WeightReceiver:
        from asyncrl.weights.transports.collective import NativeReceiver

        def post(path: str, body: Any, timeout_s: float) -> Future[Any]:
            call = self._client.send(Call(path, body), timeout_s + _GRACE_S)
            return asyncio.run_coroutine_threadsafe(call, self._loop)

        require_reachable(source, self._client.url)
        return NativeReceiver(source, self._num_workers, post)


class _Discarded:
    """A `WeightSink` for weights that are only digested."""

    def write(self, spec: Any, offset: int, data: Any) -> None:
        pass


def require_reachable(source: TransferSource, url: str) -> None:
    """Raises ConfigError: the trainer listens on the loopback address, as in a run that started Ray itself, and the
    server is on another machine."""
    trainer, host = urlsplit(source.endpoint).hostname or "", urlsplit(url).hostname or ""
    if not trainer.startswith("127."):
        return
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return  # the call to the server will explain it better
    if not found & own:
        asked = f"{url} to receive weights from {source.endpoint}"
        do = "start Ray on this machine and set ray.address: the run then uses an address that others reach"
        raise ConfigError(explain(asked, "the trainer's address reaches this machine only", do))
