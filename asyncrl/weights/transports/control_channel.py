"""Control messages of a transfer: which receivers take part, which buckets arrived, which side failed and why.

One ROUTER at the sender, one DEALER per receiver, over a unix socket (`ipc`) or TCP (the others). A publish runs

    receiver: READY -> sender: BEGIN -> sender: BUCKET* / receiver: ACK* -> sender: DONE

and either side may end it with ERROR. Every receiver numbers its attempts; messages of another publish or attempt are
dropped, so an aborted publish cannot leak into the next. Messages are fixed structs with optional text; nothing is
unpickled.

ZeroMQ's CURVE authenticates the peers. The sender's public key travels with its `TransferSource`, in calls to replicas,
and is a secret of the run: no process completes a handshake without it, whatever identity it claims, and only the
holder of the secret key can act as the sender. Control messages are encrypted; the weights are not.
"""

from __future__ import annotations

import logging
import secrets
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import zmq
from zmq.utils.monitor import recv_monitor_message

from asyncrl.errors import AsyncRLError, DeadlineExceeded, TransferEnded, WeightTransferError, explain
from asyncrl.types import Manifest

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<BqQq")
_PING_EVERY_S = 0.5
_CAUSED_ELSEWHERE: dict[int, type[AsyncRLError]] = {1: DeadlineExceeded, 2: TransferEnded}
"""Marks the ERROR of a receiver that only waited: the cause is the sender or another receiver."""
_LINGER_MS = 200
"""Longest wait of a closing socket for its last message (DONE or ERROR) to be sent."""
_HEARTBEAT_MS = 5_000
_HEARTBEAT_TIMEOUT_MS = 30_000
"""A machine that vanished without closing its connection counts as lost after this time."""


class Kind(IntEnum):
    READY = 1  # value: of the receiver (collective: generation of its process group; ipc: best medium it can read)
    BEGIN = 2  # value: in use (collective: the generation; ipc: the medium)
    BUCKET = 3  # value: index of a bucket that can be read, with all before it
    ACK = 4  # value: index of a bucket that has been read; the number of buckets when the sink has everything
    DONE = 5
    ERROR = 6  # text: the error; value: one of _CAUSED_ELSEWHERE, or 0
    PING = 7


@dataclass(frozen=True, slots=True)
class ControlMessage:
    kind: Kind
    publish_id: int
    attempt: int
    value: int = 0
    text: str = ""

    def encode(self) -> bytes:
        return _HEADER.pack(self.kind, self.publish_id, self.attempt, self.value) + self.text.encode()

    @staticmethod
    def decode(frame: bytes) -> ControlMessage:
        """Raises ValueError: not a message of this protocol."""
        if len(frame) < _HEADER.size:
            raise ValueError(f"{len(frame)} bytes, a message has at least {_HEADER.size}")
        kind, publish_id, attempt, value = _HEADER.unpack_from(frame)
        return ControlMessage(Kind(kind), publish_id, attempt, value, frame[_HEADER.size :].decode())


class Deadline:
    """A point in time that several waits share."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._at = time.monotonic() + timeout_s

    def remaining_s(self) -> float:
        """Seconds left, 0 when it has passed."""
        return max(0.0, self._at - time.monotonic())


def layout_of(manifest: Manifest) -> str:
    """The layout that both sides must agree on before bytes move."""
    return f"{len(manifest.tensors)} tensors of {manifest.nbytes} bytes in {len(manifest.buckets)} buckets"


class SenderChannel:
    """The sender's end. All receivers are joined from `gather` until `finish` or `abort`.

    One thread at a time, except for `interrupt`.
    """

    def __init__(self, endpoint: str, num_receivers: int) -> None:
        self._num_receivers = num_receivers
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _configure(self._socket)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # sending to a dead receiver fails instead of being dropped
        self._socket.set(zmq.ROUTER_HANDOVER, 1)  # a restarted receiver takes over its number
        public, secret = zmq.curve_keypair()
        self._socket.set(zmq.CURVE_SERVER, 1)
        self._socket.set(zmq.CURVE_SECRETKEY, secret)
        self._socket.bind(endpoint)
        self.key = public.decode()
        """For receivers alone."""
        self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._ready: dict[int, ControlMessage] = {}
        self._joined: dict[int, ControlMessage] = {}
        self._acked: dict[int, int] = {}
        self._left: dict[int, str] = {}
        self._publish_id = 0
        self._interrupted = threading.Event()
        self._pinged = 0.0
        self.notes: dict[int, str] = {}
        """Remarks of the receivers in the last `gather`, by receiver."""

    def interrupt(self) -> None:
        """Ends the wait in progress, and every later one, with TransferEnded. From any thread."""
        self._interrupted.set()

    def gather(self, manifest: Manifest, deadline: Deadline) -> tuple[int, ...]:
        """Waits until every receiver has joined this publish; returns the values of their READY messages, by receiver.

        Raises DeadlineExceeded naming the absent receivers, WeightTransferError on another layout.
        """
        publish_id, layout = manifest.publish_id, layout_of(manifest)

        def absent() -> list[int]:
            ready = {r: m for r, m in self._ready.items() if m.publish_id == publish_id}
            return [r for r in range(self._num_receivers) if r not in ready]

        self._publish_id = publish_id
        self._left.clear()
        # Receivers still waiting for an older publish would wait for their whole deadline.
        self._dismiss_over(f"the sender is at publish {publish_id}", before=publish_id)
        self._wait(absent, f"join publish {publish_id}", deadline)
        self._joined = {r: self._ready.pop(r) for r in range(self._num_receivers)}
        self._acked = dict.fromkeys(self._joined, -1)
        self.notes = {}
        for receiver, message in self._joined.items():
            expected, _, note = message.text.partition("\n")
            if expected != layout:
                do = "hand the sender and every receiver the same manifest"
                raise WeightTransferError(explain(f"send {layout}", f"receiver {receiver} expects {expected}", do))
            if note:
                self.notes[receiver] = note
        return tuple(self._joined[r].value for r in range(self._num_receivers))

    def tell(self, kind: Kind, value: int = 0) -> None:
        """Sends one message to every receiver of the transfer. Raises TransferEnded: a receiver has died."""
        for receiver, joined in self._joined.items():
            self._send(receiver, joined, kind, value)

    def wait_acked(self, bucket: int, deadline: Deadline) -> None:
        """Waits until every receiver has read all buckets up to this one. Raises DeadlineExceeded naming the late
        receivers, WeightTransferError with a receiver's report."""
        self._wait(lambda: [r for r, at in self._acked.items() if at < bucket], f"take bucket {bucket}", deadline)

    def check(self, wait_s: float = 0.0) -> None:
        """Handles the messages that have arrived, waiting up to `wait_s` for the first. Raises WeightTransferError or
        DeadlineExceeded with a receiver's report."""
        self._go_on()
        if self._socket.poll(int(wait_s * 1000)):
            self._drain()

    def watch(self) -> None:
        """`check` for waits on something other than this channel; a PING every `_PING_EVERY_S` detects dead receivers.
        Raises as `check`, and TransferEnded: a receiver died, or the sender was closed."""
        self.check()
        if (now := time.monotonic()) - self._pinged > _PING_EVERY_S:
            self._pinged = now
            self.tell(Kind.PING)

    def laggards(self) -> str:
        """Names the receivers that have acknowledged the fewest buckets."""
        least = min(self._acked.values(), default=-1)
        return ", ".join(f"receiver {r}" for r, at in self._acked.items() if at == least)

    def finish(self) -> None:
        """Ends the transfer: every receiver may use the weights."""
        self.tell(Kind.DONE)
        self._joined = {}

    def abort(self, text: str) -> None:
        """Ends the transfer, and the waits of receivers that joined it, with an error. Safe at any time."""
        for receiver, message in self._joined.items():
            self._dismiss(receiver, message, text)
        self._joined = {}
        self._dismiss_over(text, before=self._publish_id + 1)

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _wait(self, missing: Callable[[], list[int]], what: str, deadline: Deadline) -> None:
        while waited_for := missing():
            self._go_on()
            if self._socket.poll(int(1000 * min(deadline.remaining_s(), _PING_EVERY_S))):
                self._drain()
                continue
            if not deadline.remaining_s():
                # A receiver that left explains itself; the others are only late.
                names = "; ".join(
                    f"receiver {r}" + (f" left: {self._left[r]}" if r in self._left else " did not") for r in waited_for
                )
                asked = f"{self._num_receivers} receiver(s) to {what} within {deadline.timeout_s:.1f} s"
                raise DeadlineExceeded(explain(asked, names, "look at the logs of these replicas"))
            self.tell(Kind.PING)

    def _go_on(self) -> None:
        if self._interrupted.is_set():
            asked, do = f"send publish {self._publish_id}", "open() it again to send weights"
            raise TransferEnded(explain(asked, "the sender was closed meanwhile", do))

    def _dismiss_over(self, text: str, *, before: int) -> None:
        """Ends the waits of receivers that came for publishes below `before`."""
        for receiver, message in list(self._ready.items()):
            if message.publish_id < before:
                del self._ready[receiver]
                self._dismiss(receiver, message, text)

    def _dismiss(self, receiver: int, joined: ControlMessage, text: str) -> None:
        try:
            self._send(receiver, joined, Kind.ERROR, text=text)
        except WeightTransferError:
            logger.warning("receiver %d is gone and did not hear: %s", receiver, text)

    def _send(self, receiver: int, joined: ControlMessage, kind: Kind, value: int = 0, text: str = "") -> None:
        message = ControlMessage(kind, joined.publish_id, joined.attempt, value, text)
        try:
            self._socket.send_multipart((b"%d" % receiver, message.encode()))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            found = "its process closed the connection"
            do = "restart the replica; it catches up at the next publish"
            raise TransferEnded(explain(f"send to receiver {receiver}", found, do)) from error

    def _drain(self) -> None:
        while True:
            try:
                identity, *rest = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                receiver, message = int(identity), ControlMessage.decode(rest[0])
            except (ValueError, IndexError) as error:
                logger.warning("dropped a foreign message on %s: %s", self.endpoint, error)
                continue
            if 0 <= receiver < self._num_receivers:
                self._handle(receiver, message)

    def _handle(self, receiver: int, message: ControlMessage) -> None:
        # ACK and ERROR count only for the attempt in progress; a READY always starts a new one.
        joined = self._joined.get(receiver)
        current = joined is not None and joined.attempt == message.attempt
        if message.kind is Kind.READY:
            self._left.pop(receiver, None)
            self._ready[receiver] = message
            self._dismiss_over(f"the sender is at publish {self._publish_id}", before=self._publish_id)
            if joined is not None:
                del self._joined[receiver]
                do = "publish again; find out why it restarted"
                found = f"receiver {receiver} started over in the middle"
                raise TransferEnded(explain(f"receiver {receiver} to stay to the end", found, do))
        elif message.kind is Kind.ACK and current:
            self._acked[receiver] = max(self._acked[receiver], message.value)
        elif message.kind is Kind.ERROR and current:
            del self._joined[receiver]
            asked = f"receiver {receiver} to take the weights"
            if message.value in _CAUSED_ELSEWHERE:
                do = f"look at the logs; behind: {self.laggards()}"
                raise _CAUSED_ELSEWHERE[message.value](explain(asked, message.text, do))
            raise WeightTransferError(explain(asked, message.text, "see the log of this replica"))
        elif message.kind is Kind.ERROR:
            # The receiver gave up before the transfer began: remember why, for the message of the deadline.
            waiting = self._ready.get(receiver)
            if waiting is not None and waiting.attempt == message.attempt:
                del self._ready[receiver]
            self._left[receiver] = message.text


class ReceiverChannel:
    """A receiver's end."""

    def __init__(self, endpoint: str, receiver: int, key: str) -> None:
        """`key`: of the sender at `endpoint`."""
        self._name = f"receiver {receiver}"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _configure(self._socket)
        self._socket.set(zmq.IDENTITY, b"%d" % receiver)
        public, secret = zmq.curve_keypair()
        self._socket.set(zmq.CURVE_PUBLICKEY, public)
        self._socket.set(zmq.CURVE_SECRETKEY, secret)
        self._socket.set(zmq.CURVE_SERVERKEY, key.encode())
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._lost = False
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(endpoint)
        self._endpoint = endpoint
        self._attempt = secrets.randbits(63)
        self._publish_id = 0

    def join(self, manifest: Manifest, deadline: Deadline, value: int = 0, note: str = "") -> int:
        """Begins a new attempt to take part in this publish; returns the value of BEGIN. Raises as `next`.

        Args:
            value: of READY.
            note: a remark to the sender.
        """
        self._attempt = (self._attempt + 1) % (1 << 64)
        self._publish_id = manifest.publish_id
        self._send(Kind.READY, value, f"{layout_of(manifest)}\n{note}" if note else layout_of(manifest))
        return self.expect(Kind.BEGIN, None, deadline, f"begin publish {manifest.publish_id}").value

    def next(self, deadline: Deadline, what: str) -> ControlMessage:
        """The next message of this attempt; PINGs are skipped.

        Raises:
            TransferEnded: the sender ended the publish or died.
            DeadlineExceeded: nothing came in time.
        """
        while (message := self._take(what)) is None:
            self._wait(deadline, what)
        return message

    def check(self, what: str) -> None:
        """Checks, without waiting, that the transfer continues. Raises TransferEnded: it does not."""
        message = self._take(what)
        if message is not None:
            raise self._unexpected(message, "nothing", what)
        self._watch(what)

    def poll(self, wait_s: float, what: str) -> ControlMessage | None:
        """The next message of this attempt, never a PING; None after `wait_s`. Raises as `next`."""
        if (message := self._take(what)) is None:
            self._watch(what)
            self._poller.poll(int(1000 * wait_s))
            message = self._take(what)
        return message

    def expect(self, kind: Kind, value: int | None, deadline: Deadline, what: str) -> ControlMessage:
        """The next message, which must be of this kind and, unless None, of this value. Raises as `next`."""
        message = self.next(deadline, what)
        self.require(message, kind, value, what)
        return message

    def require(self, message: ControlMessage, kind: Kind, value: int | None, what: str) -> None:
        """Raises WeightTransferError: another kind, or another value than `value` (None allows any)."""
        if message.kind is not kind or value not in (None, message.value):
            raise self._unexpected(message, f"{kind.name} {value}", what)

    def ack(self, bucket: int) -> None:
        self._send(Kind.ACK, bucket)

    def fail(self, error: BaseException) -> None:
        """Leaves the publish and tells the sender why."""
        value = next((i for i, kind in _CAUSED_ELSEWHERE.items() if isinstance(error, kind)), 0)
        self._send(Kind.ERROR, value, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()

    def _send(self, kind: Kind, value: int = 0, text: str = "") -> None:
        self._socket.send(ControlMessage(kind, self._publish_id, self._attempt, value, text).encode())

    def _take(self, what: str) -> ControlMessage | None:
        """A message of this attempt that has already arrived, never a PING; None without one. Raises as `next`."""
        while True:
            try:
                message = ControlMessage.decode(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return None
            if message.publish_id != self._publish_id or message.attempt != self._attempt or message.kind is Kind.PING:
                continue
            if message.kind is Kind.ERROR:
                do = "the trainer sends this publish again or drops it; see its log"
                raise TransferEnded(explain(f"{self._name} to {what}", f"the sender ended it: {message.text}", do))
            return message

    def _wait(self, deadline: Deadline, what: str) -> None:
        """Returns when there may be something to read."""
        while not self._socket.poll(0):
            self._watch(what)
            if not (remaining := deadline.remaining_s()):
                asked = f"{self._name} to {what} within {deadline.timeout_s:.1f} s"
                found = f"nothing from the sender at {self._endpoint}"
                raise DeadlineExceeded(explain(asked, found, "look at the log of the trainer"))
            self._poller.poll(int(1000 * remaining))

    def _watch(self, what: str) -> None:
        """Raises TransferEnded: the connection is lost."""
        while self._monitor.poll(0):
            self._lost = recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED
        if self._lost:
            do = "join the group that the trainer forms next"
            raise TransferEnded(explain(f"{self._name} to {what}", f"the sender at {self._endpoint} is gone", do))

    def _unexpected(self, message: ControlMessage, expected: str, what: str) -> WeightTransferError:
        found = f"{message.kind.name} {message.value}, not {expected}"
        return WeightTransferError(explain(f"{self._name} to {what}", found, "publish again and report this defect"))


def _configure(socket: zmq.Socket) -> None:
    socket.set(zmq.LINGER, _LINGER_MS)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.IPV6, 0)
    socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
