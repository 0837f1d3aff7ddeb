"""What the control channel does with messages that do not belong to the transfer."""

from contextlib import contextmanager

import pytest
import zmq

from asyncrl.errors import DeadlineExceeded, TransferEnded
from asyncrl.weights.plan import make_manifest, make_spec
from asyncrl.weights.transports.control_channel import (
    ControlMessage,
    Deadline,
    Kind,
    ReceiverChannel,
    SenderChannel,
    layout_of,
)
from asyncrl_testing.strangers import known_to

MANIFEST = make_manifest(7, 7, [make_spec("a", (64,), "float32")], 256)
ATTEMPT = 5


@pytest.fixture
def channel(tmp_path):
    channel = SenderChannel(f"ipc://{tmp_path}/socket", 1)
    yield channel
    channel.close()


@contextmanager
def raw_peer(channel, identity, key):
    """A raw socket with this identity, for which the sender's key is `key`."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.IDENTITY, identity)
    known_to(socket, key)
    socket.connect(channel.endpoint)
    yield socket
    socket.close()
    context.term()


@pytest.fixture
def peer(channel):
    """In the place of receiver 0."""
    with raw_peer(channel, b"0", channel.key) as socket:
        yield socket


def join(channel, peer):
    peer.send(ControlMessage(Kind.READY, 7, ATTEMPT, 3, layout_of(MANIFEST)).encode())
    assert channel.gather(MANIFEST, Deadline(10)) == (3,)


def test_messages_survive_their_encoding():
    message = ControlMessage(Kind.ERROR, -1, 2**64 - 1, -5, "größer\nthan")
    assert ControlMessage.decode(message.encode()) == message


@pytest.mark.parametrize(
    "frame", [b"", b"x" * 24, b"\x63" + b"\0" * 24, ControlMessage(Kind.READY, 7, 1).encode() + b"\xff"]
)
def test_foreign_messages_are_dropped(channel, peer, frame):
    peer.send(frame)
    join(channel, peer)


def test_a_receiver_with_a_number_out_of_range_is_ignored(channel, peer):
    with raw_peer(channel, b"1", channel.key) as stranger:
        stranger.send(ControlMessage(Kind.READY, 7, 1, 0, layout_of(MANIFEST)).encode())
        with pytest.raises(DeadlineExceeded, match="receiver 0 did not"):
            channel.gather(MANIFEST, Deadline(0.2))


def test_a_sender_that_does_not_have_the_key_cannot_pass_for_one(tmp_path):
    """As one that binds the port of a sender that is gone."""
    true, false = (SenderChannel(f"ipc://{tmp_path}/{name}", 1) for name in ("true", "false"))
    receiver = ReceiverChannel(false.endpoint, 0, true.key)
    with pytest.raises((DeadlineExceeded, TransferEnded), match="the sender at"):
        receiver.join(MANIFEST, Deadline(0.1))
    with pytest.raises(DeadlineExceeded, match="receiver 0 did not"):
        false.gather(MANIFEST, Deadline(0.3))
    assert true.key != false.key
    for channel in (receiver, true, false):
        channel.close()


@pytest.mark.parametrize("kind", [Kind.ACK, Kind.ERROR])
def test_what_another_attempt_said_does_not_count(channel, peer, kind):
    join(channel, peer)
    peer.send(ControlMessage(kind, 7, ATTEMPT - 1, 0, "old").encode())
    with pytest.raises(DeadlineExceeded, match="take bucket 0"):
        channel.wait_acked(0, Deadline(0.2))
    peer.send(ControlMessage(Kind.ACK, 7, ATTEMPT, 0).encode())
    channel.wait_acked(0, Deadline(10))


def test_a_receiver_that_begins_anew_in_the_middle_ends_the_transfer(channel, peer):
    join(channel, peer)
    peer.send(ControlMessage(Kind.READY, 7, ATTEMPT + 1, 0, layout_of(MANIFEST)).encode())
    with pytest.raises(TransferEnded, match="receiver 0 started over"):
        channel.wait_acked(0, Deadline(10))
    channel.abort("over")
    assert ControlMessage.decode(peer.recv()).text == "over"


def test_a_receiver_for_a_publish_that_is_over_hears_so(channel, peer):
    peer.send(ControlMessage(Kind.READY, 6, ATTEMPT, 0, "").encode())
    with pytest.raises(DeadlineExceeded, match="join publish 7"):
        channel.gather(MANIFEST, Deadline(0.3))
    answer = ControlMessage.decode(peer.recv())
    assert (answer.kind, answer.publish_id, answer.attempt) == (Kind.ERROR, 6, ATTEMPT)
    assert "publish 7" in answer.text


@pytest.mark.parametrize(("value", "kind"), [(1, DeadlineExceeded), (2, TransferEnded)])
def test_a_receiver_that_only_waited_in_vain_is_no_culprit(channel, peer, value, kind):
    join(channel, peer)
    peer.send(ControlMessage(Kind.ERROR, 7, ATTEMPT, value, f"{kind.__name__}: no bucket").encode())
    with pytest.raises(kind, match="no bucket"):
        channel.wait_acked(0, Deadline(10))
