"""Processes that a run does not know, at the addresses on which it listens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import psutil
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from asyncrl.types import Manifest, TransferSource
from asyncrl.weights.transports.control_channel import ControlMessage, Kind, layout_of
from asyncrl_testing.transport_rig import (
    TIMEOUT_S,
    Hold,
    Receive,
    Rig,
    Trouble,
    contents,
    plain_weights,
)

_REFUSED = (
    zmq.EVENT_DISCONNECTED,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)


def known_to(socket: zmq.Socket, key: str) -> None:
    """Lets `socket` speak CURVE with the sender that has this public key."""
    public, secret = zmq.curve_keypair()
    socket.set(zmq.CURVE_PUBLICKEY, public)
    socket.set(zmq.CURVE_SECRETKEY, secret)
    socket.set(zmq.CURVE_SERVERKEY, key.encode())


@contextmanager
def stranger(source: TransferSource, manifest: Manifest, *, speaks_curve: bool) -> Iterator[None]:
    """Connects to the control channel of `source` with the identity of receiver 0, says everything that it could say,
    and has been refused inside.

    Args:
        speaks_curve: with a key of its own making, instead of none.
    """
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.IDENTITY, b"0")
    if speaks_curve:
        known_to(socket, zmq.curve_keypair()[0].decode())
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | sum(_REFUSED))
    try:
        socket.connect(source.endpoint)
        for kind in (Kind.READY, Kind.ACK, Kind.ERROR):
            message = ControlMessage(kind, manifest.publish_id, 1, 1 << 20, layout_of(manifest)).encode()
            with suppress(zmq.Again):  # it was refused before it had said everything
                socket.send(message, zmq.NOBLOCK)
        # Wait for the handshake's result: silence would prove nothing.
        assert monitor.poll(int(1000 * TIMEOUT_S)), "neither let in nor refused"
        event = recv_monitor_message(monitor)["event"]
        assert event in _REFUSED, f"a stranger was let in: {event}"
        yield
    finally:
        socket.disable_monitor()
        monitor.close()
        socket.close()
        context.term()


def listeners(processes: Iterable[psutil.Process]) -> set[tuple[int, str, int]]:
    """Process id, address and port of every TCP socket on which these processes listen."""
    return {
        (process.pid, found.laddr.ip.removeprefix("::ffff:"), found.laddr.port)
        for process in processes
        for found in process.net_connections("tcp")
        if found.status == psutil.CONN_LISTEN
    }


class StrangerSuite:
    """Tests of every transport with a control channel. Needs a fixture `rig` that returns a `Rig`."""

    @pytest.mark.parametrize("speaks_curve", [False, True])
    def test_a_stranger_in_the_middle_of_a_publish_changes_nothing(
        self, rig: Rig, tmp_path_factory: pytest.TempPathFactory, speaks_curve: bool
    ) -> None:
        hold = Hold(tmp_path_factory.mktemp("hold"))
        with rig.connected(2) as transfer, ThreadPoolExecutor(1) as thread:
            transfer.publish(plain_weights(1))
            weights = plain_weights(2)
            manifest = transfer.manifest(weights)
            transfer.workers[0].begin(Receive(manifest, TIMEOUT_S))
            transfer.workers[1].begin(Receive(manifest, TIMEOUT_S, Trouble("layer.3", hold=hold)))
            sent = thread.submit(transfer.sender.send, manifest, iter(weights), TIMEOUT_S)
            hold.reached()
            with stranger(transfer.source, manifest, speaks_curve=speaks_curve):
                hold.release()
                assert sent.result() is not None
                for worker in transfer.workers:
                    outcome = worker.outcome()
                    assert (outcome.error, outcome.tensors) == (None, contents(weights))

    def test_it_listens_on_the_address_of_its_host_alone(self, rig: Rig) -> None:
        own = psutil.Process()
        before = listeners([own, *own.children(recursive=True)])
        with rig.connected(2) as transfer:
            transfer.publish(plain_weights(1))
            found = listeners([own, *own.children(recursive=True)]) - before
            assert {address for _, address, _ in found} <= {"127.0.0.1"}
