"""What a weight transfer does when a process of it dies or stops, memory or disk runs out, or bytes change on the way.

Sender and receivers are processes. Every fault ends in a named error within its deadline, leaves no file, and the next
publish succeeds.
"""

import itertools
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from asyncrl.errors import AsyncRLError, ConfigError, DeadlineExceeded, TransferEnded, WeightTransferError
from asyncrl.types import PartsSource
from asyncrl.weights import object_store
from asyncrl.weights.packing import byte_view, spec_of
from asyncrl.weights.plan import make_manifest
from asyncrl.weights.transports import build_receiver, build_sender, process_group
from asyncrl.weights.transports.control_channel import Deadline
from asyncrl.weights.transports.process_group import (
    BroadcastGroup,
    host_store,
    interface_of,
    sockets_towards,
    watchdog_spares_the_process,
)
from asyncrl.weights.transports.shared_segment import SHARED_MEMORY, attach
from asyncrl_testing.transport_rig import (
    BUCKET_BYTES,
    PROMPT_S,
    TIMEOUT_S,
    Hold,
    Outcome,
    Receive,
    Trouble,
    Worker,
    contents,
    files_in,
    poll,
)
from asyncrl_testing.transport_sender import EXIT_OF_SIGTERM, Open, Send, SenderProcess, Sent, weights_of

torch.set_num_threads(1)

# torch's TCPStore looks up the names of its peers' addresses; where nothing answers, the resolver waits 5 s by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

TRANSPORTS = ("ipc", "collective", "disk", "objects")
"""`objects`: `disk` with a URL."""
LONG = [f"{transport} delta" for transport in TRANSPORTS if transport != "ipc"]
"""`delta`: all weights until a publish has succeeded, differences to it after that, and all weights after a fault."""


@pytest.fixture(scope="module")
def receivers() -> Iterator[list[Worker]]:
    workers = [Worker(build_receiver, in_process=False) for _ in range(2)]
    yield workers
    for worker in workers:
        worker.stop()


@pytest.fixture(scope="module")
def sender() -> Iterator[SenderProcess]:
    sender = SenderProcess()
    yield sender
    sender.stop()


@dataclass
class Group:
    """A sender, or several of a part each, and the receivers that have joined it."""

    transport: str
    senders: list[SenderProcess]
    receivers: list[Worker]
    directory: Path
    delta: bool = False
    publishes: int = 0
    base: int | None = None
    """What all receivers have, if they can be sent the differences to it."""
    firsts: tuple[int, ...] = (0,)
    """With which tensor the part of each sender begins."""

    @property
    def sender(self) -> SenderProcess:
        return self.senders[0]

    def open(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        transport, place = self.transport, str(self.directory)
        if transport == "objects":
            transport, place = "disk", f"file://{place}"
        command = Open(transport, len(self.receivers), place, bucket_bytes)
        sources = [sender.open(command) for sender in self.senders]
        self.source = PartsSource.of(sources, self.firsts) if sources[1:] else sources[0]
        for number, worker in enumerate(self.receivers):
            worker.join(replace(self.source, receiver=number))

    def begin(self, send: Send, troubles: dict[int, Trouble] | None = None, timeout_s: float = TIMEOUT_S) -> Send:
        """Begins to receive and to send."""
        self.publishes += 1
        send = replace(send, publish_id=self.publishes, base=self.base, is_kept=self.delta)
        self.base = None
        for number, worker in enumerate(self.receivers):
            worker.begin(Receive(send.manifest, timeout_s, (troubles or {}).get(number)))
        for number, sender in enumerate(self.senders):
            sender.begin(replace(send, part=(number, self.firsts)) if self.senders[1:] else send)
        return send

    def outcomes(self) -> list[Outcome]:
        return [worker.outcome() for worker in self.receivers]

    def publish(self, seed: int) -> None:
        """One publish that must succeed."""
        self.begin(Send(0, seed))
        sent = [sender.outcome() for sender in self.senders]
        assert [one.error for one in sent] == [None] * len(sent)
        for outcome in self.outcomes():
            assert outcome.error is None, outcome.error
            assert outcome.tensors == contents(weights_of(seed, small=False))
            assert outcome.digest == tuple(number for one in sent for number in one.digest or ())
        self.base = seed if self.delta else None

    def files(self) -> set[Path]:
        """What the senders, or those that they replaced, have put somewhere and is still there."""
        return files_in((SHARED_MEMORY, self.directory), {pid for sender in self.senders for pid in sender.pids})

    def require_dropped(self, outcomes: list[Outcome]) -> None:
        """Every receiver knew soon that the sender had ended it."""
        for outcome in outcomes:
            require_error(outcome, "TransferEnded")
            assert outcome.elapsed_s < PROMPT_S


def require_error(found: Sent | Outcome, kind: str, *words: str) -> None:
    """It ended with an error of this class that has all these words."""
    assert found.error is not None
    assert found.error[0] == kind, found.error
    assert all(word in found.error[1] for word in words), found.error


@pytest.fixture(params=[*TRANSPORTS, "ipc delta", *(pytest.param(kind, marks=pytest.mark.slow) for kind in LONG)])
def group(
    request: pytest.FixtureRequest, sender: SenderProcess, receivers: list[Worker], tmp_path: Path
) -> Iterator[Group]:
    directory = tmp_path / "weights"
    directory.mkdir()
    transport, _, delta = request.param.partition(" ")
    group = Group(transport, [sender], receivers, directory, delta == "delta")
    group.open()
    if group.delta:
        group.publish(9)
    yield group
    sender.close()
    assert group.files() == set()


@pytest.fixture
def hold(tmp_path: Path) -> Hold:
    directory = tmp_path / "hold"
    directory.mkdir()
    return Hold(directory)


def test_a_sender_that_is_killed_in_the_middle_of_a_bucket(group: Group, hold: Hold) -> None:
    group.publish(1)
    group.begin(Send(0, 2, small=not group.delta, hold_at="layer.7", hold=hold))
    hold.reached()
    group.sender.kill()
    group.require_dropped(group.outcomes())
    left = group.files()
    assert left or group.transport not in ("disk", "objects"), "a dead sender removes nothing"
    group.sender.start()
    group.open()
    if group.transport == "objects":  # other machines may use the same place: the store lets them expire
        for path in left:
            shutil.rmtree(path)
    assert not left & group.files(), "the next sender removes what it left"
    group.publish(3)


def test_a_sender_that_is_terminated(group: Group, hold: Hold) -> None:
    group.begin(Send(0, 2, hold_at="layer.7", hold=hold))
    hold.reached()
    assert group.sender.terminate() == EXIT_OF_SIGTERM
    group.require_dropped(group.outcomes())
    assert group.files() == set(), "it left nothing behind"
    group.sender.start()
    group.open()
    group.publish(3)


def test_a_receiver_that_is_killed_between_publishes(group: Group) -> None:
    group.publish(1)
    group.receivers[1].kill()
    group.publishes, group.base = group.publishes + 1, None
    send = replace(Send(0, 2, timeout_s=2.0), publish_id=group.publishes)
    group.receivers[0].begin(Receive(send.manifest, TIMEOUT_S))
    group.sender.begin(send)
    sent = group.sender.outcome()
    assert sent.error is not None
    assert "receiver 1" in sent.error[1]
    group.require_dropped([group.receivers[0].outcome()])
    group.receivers[1].start()
    group.receivers[1].join(replace(group.source, receiver=1))
    group.publish(3)


def test_the_sender_is_not_at_fault_for_a_receiver_that_is_killed_in_the_middle(group: Group, hold: Hold) -> None:
    group.begin(Send(0, 1), {1: Trouble("layer.3", hold=hold)})
    hold.reached()
    group.receivers[1].kill()
    require_error(group.sender.outcome(), "TransferEnded")
    group.require_dropped([group.receivers[0].outcome()])
    hold.release()
    group.receivers[1].start()


def test_a_receiver_that_stops_and_goes_on(group: Group, hold: Hold) -> None:
    stopped = group.receivers[1]
    group.begin(Send(0, 1, timeout_s=2.0), {1: Trouble("layer.3", hold=hold)})
    hold.reached()
    stopped.pause()
    try:
        sent = group.sender.outcome()
        require_error(sent, "DeadlineExceeded", "receiver 1")
        assert sent.elapsed_s < 2.0 + PROMPT_S
        group.require_dropped([group.receivers[0].outcome()])
        hold.release()
    finally:
        stopped.resume()
    require_error(stopped.outcome(), "TransferEnded")
    group.publish(2)


@pytest.mark.parametrize("group", TRANSPORTS, indirect=True)
def test_a_bit_that_flips_on_the_way(group: Group, hold: Hold) -> None:
    """At the sender's slot, in the file, or in the buffer of a receiver: the digest of that tensor differs, and sending
    again mends it."""
    if group.transport in ("collective", "objects"):
        group.begin(Send(0, 1, small=True), {1: Trouble("layer.7", flip_next_byte=True)})
    else:
        group.begin(Send(0, 1), {1: Trouble("layer.3", hold=hold)})
        hold.reached()
        flip_a_bit_of_layer_8(group) if group.transport == "disk" else flip_a_bit_of_layer_4(group)
        hold.release()
    sent = group.sender.outcome()
    received = group.receivers[1].outcome()
    group.receivers[0].outcome()
    assert sent.error is None
    assert sent.digest is not None
    assert received.digest is not None
    differing = [i for i, (ours, theirs) in enumerate(zip(sent.digest, received.digest, strict=True)) if ours != theirs]
    assert differing == ([4] if group.transport == "ipc" else [8])
    group.publish(1)


def flip_a_bit_of_layer_4(group: Group) -> None:
    """In the ring, once the sender has written it there: the receiver that is held reads it next but one."""
    slot = attach(group.source.path)[:BUCKET_BYTES]
    expected = byte_view(weights_of(1, small=False)[4][1])
    poll(lambda: torch.equal(slot, expected), "layer.4 to lie in the ring")
    slot[100] ^= 1


def flip_a_bit_of_layer_8(group: Group) -> None:
    """In the file of the publish."""
    (file,) = Path(group.source.directory).glob("publish-1/*.safetensors")
    content = file.read_bytes()
    position = content.index(byte_view(weights_of(1, small=False)[8][1]).numpy().tobytes())
    with file.open("r+b") as opened:
        opened.seek(position + 100)
        opened.write(bytes([content[position + 100] ^ 1]))


@pytest.mark.parametrize("group", ["disk", "disk delta"], indirect=True)
def test_a_file_that_is_cut_short_is_named(group: Group, hold: Hold) -> None:
    group.begin(Send(0, 1), {1: Trouble("layer.3", hold=hold)})
    hold.reached()
    (file,) = Path(group.source.directory).glob(f"publish-{group.publishes}/*.safetensors")
    os.truncate(file, file.stat().st_size // 2)
    hold.release()
    sent = group.sender.outcome()
    assert sent.error is not None
    assert file.name in sent.error[1]
    assert any(outcome.error is not None and file.name in outcome.error[1] for outcome in group.outcomes())
    group.publish(2)


@pytest.mark.parametrize("group", ["disk", "disk delta"], indirect=True)
def test_a_receiver_reads_no_further_when_the_sender_is_gone(group: Group, hold: Hold) -> None:
    group.begin(Send(0, 1), {1: Trouble("layer.3", hold=hold)})
    hold.reached()
    group.sender.kill()
    group.receivers[0].outcome()
    hold.release()
    outcome = group.receivers[1].outcome()
    group.require_dropped([outcome])
    assert len(outcome.tensors) == 4
    group.sender.start()
    group.open()
    group.publish(2)


@pytest.mark.parametrize("group", ["ipc"], indirect=True)
def test_shared_memory_that_is_full(group: Group) -> None:
    group.sender.close()
    group.sender.begin(Open("ipc", 2, bucket_bytes=1 << 50))
    require_error(group.sender.outcome(), "ConfigError", "lower weights.bucket_bytes")
    assert group.files() == set()
    group.open()
    group.publish(1)


@pytest.mark.parametrize("group", ["disk", "disk delta"], indirect=True)
def test_a_disk_that_is_full(group: Group) -> None:
    group.publish(1)
    group.begin(Send(0, 2, max_file_bytes=3 * BUCKET_BYTES))
    require_error(group.sender.outcome(), "WeightTransferError", "model-00001-of-00001.safetensors", "free space")
    group.require_dropped(group.outcomes())
    directory = Path(group.source.directory)
    assert [path.name for path in directory.iterdir()] == [f"publish-{group.publishes - 1}"], (
        "the last complete one stays"
    )
    group.publish(3)
    assert [path.name for path in directory.iterdir()] == [f"publish-{group.publishes}"]


@pytest.mark.parametrize("group", ["disk"], indirect=True)
def test_a_directory_that_receivers_do_not_see(group: Group, tmp_path: Path) -> None:
    elsewhere = replace(group.source, directory=str(tmp_path / "not-mounted"), receiver=1)
    group.receivers[1].join(elsewhere)
    group.begin(Send(0, 1))
    sent = group.sender.outcome()
    assert sent.error is not None
    assert "receiver 1" in sent.error[1]
    assert "weights.disk_directory" in sent.error[1]
    assert all(outcome.error is not None for outcome in group.outcomes())


class _Store(LocalFileSystem):
    """What a store does to one object, by the name of the bucket: never answers, refuses, returns half of it."""

    protocol = "troubled"
    answers = threading.Event()
    trouble: ClassVar[dict[str, str]] = {}

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("troubled://"))

    def _meets(self, path: str, what: str) -> bool:
        found = self.trouble.get(path.rpartition("/")[2]) == what
        if found and what.endswith("hangs"):
            self.answers.wait(60)
        return found

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self._meets(path, "put hangs")
        if self._meets(path, "put refused"):
            raise PermissionError("403 Forbidden")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        super().pipe_file(path, value, mode, **kwargs)

    def cat_file(self, path, start=None, end=None, **kwargs):
        self._meets(path, "get hangs")
        data = super().cat_file(path, start, end, **kwargs)
        return data[: len(data) // 2] if self._meets(path, "get cut") else data


@pytest.fixture
def store() -> Iterator[type[_Store]]:
    fsspec.register_implementation("troubled", _Store, clobber=True)
    _Store.trouble, _Store.answers = {}, threading.Event()
    yield _Store
    _Store.answers.set()


@pytest.mark.parametrize(
    ("trouble", "sent", "received"),
    [
        ("put hangs", "DeadlineExceeded.*put bucket 2", "TransferEnded"),
        ("put refused", "WeightTransferError.*put bucket 2.*403 Forbidden.*credentials", "TransferEnded"),
        ("get hangs", "DeadlineExceeded", "DeadlineExceeded|TransferEnded"),
        ("get cut", "WeightTransferError.*receiver 0.*bytes instead of", "WeightTransferError"),
    ],
)
def test_a_store_in_trouble_ends_a_transfer_in_time_and_the_next_one_succeeds(
    store: type[_Store], tmp_path: Path, trouble: str, sent: str, received: str
) -> None:
    weights = weights_of(1, small=False)
    specs = [spec_of(name, tensor) for name, tensor in weights]
    sender = build_sender("disk", BUCKET_BYTES, 1, directory=f"troubled://{tmp_path}")
    worker = Worker(build_receiver, in_process=True)
    try:
        worker.join(replace(sender.open(), receiver=0))
        store.trouble = {"2": trouble}
        manifest = make_manifest(1, 1, specs, BUCKET_BYTES, verify=True)
        assert len(manifest.buckets) > 4
        worker.begin(Receive(manifest, 3.0))
        with pytest.raises(AsyncRLError) as caught:
            sender.send(manifest, iter(weights), 2.0)
        assert re.search(f"(?s){sent}", f"{type(caught.value).__name__}: {caught.value}"), caught.value
        outcome = worker.outcome()
        assert outcome.error is not None
        assert re.fullmatch(received, outcome.error[0]), outcome.error
        store.trouble = {}
        store.answers.set()
        manifest = make_manifest(2, 2, specs, BUCKET_BYTES, verify=True)
        worker.begin(Receive(manifest, TIMEOUT_S))
        digest = sender.send(manifest, iter(weights), TIMEOUT_S)
        outcome = worker.outcome()
        assert (outcome.error, outcome.digest) == (None, digest)
        assert outcome.tensors == contents(weights)
    finally:
        store.answers.set()
        sender.close()
        worker.stop()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "nothing is left"


def test_a_store_that_does_not_answer_is_refused_before_a_run(store: type[_Store], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(object_store, "CHECK_S", 0.2)
    store.trouble = {"0": "put hangs"}
    with pytest.raises(ConfigError, match=r"(?s)weights\.disk_directory=troubled://.*no answer within 0\.2 s"):
        object_store.check_store(f"troubled://{tmp_path}")


def test_a_directory_that_cannot_be_made_is_named(sender: SenderProcess, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sender.begin(Open("disk", 1, str(tmp_path / "file")))
    require_error(sender.outcome(), "ConfigError", "weights.disk_directory")


def test_a_broadcast_to_a_receiver_that_is_stopped_ends_when_the_sender_is_closed(
    receivers: list[Worker], hold: Hold
) -> None:
    """NCCL does not notice a lost peer either: what ends the wait is that the sender looks, every few milliseconds,
    whether it is still wanted."""
    weights = [(f"layer.{i}", torch.full((1 << 20,), float(i))) for i in range(12)]  # more than a socket takes in
    manifest = make_manifest(1, 1, [spec_of(name, tensor) for name, tensor in weights], 4 << 20)
    sender = build_sender("collective", 4 << 20, 1)
    failures: list[BaseException] = []

    def send() -> None:
        try:
            sender.send(manifest, iter(weights), TIMEOUT_S)
        except AsyncRLError as error:
            failures.append(error)

    stopped = receivers[0]
    stopped.join(sender.open())
    stopped.begin(Receive(manifest, TIMEOUT_S, Trouble("layer.1", hold=hold)))
    sending = threading.Thread(target=send)
    sending.start()
    hold.reached()
    stopped.pause()
    try:
        time.sleep(0.5)  # the sender is at the broadcast that fills the socket
        sender.close()
        sending.join(TIMEOUT_S)
    finally:
        hold.release()
        stopped.resume()
    assert isinstance(failures[0], TransferEnded)
    assert "closed meanwhile" in str(failures[0]), "not at the deadline of the publish"
    assert stopped.outcome().error is not None


def test_a_group_that_does_not_form_is_given_up_when_a_receiver_is_lost() -> None:
    """Neither gloo's rendezvous nor NCCL's can be interrupted: it is left in its thread."""
    store = host_store("127.0.0.1")
    group = BroadcastGroup(store, 1, rank=0, world_size=2, device=torch.device("cpu"))
    looks = itertools.count()

    def watch() -> None:
        if next(looks) == 5:
            raise WeightTransferError("receiver 0 has died")

    with pytest.raises(WeightTransferError, match="receiver 0 has died"):
        group.form(Deadline(5.0), watch)
    with pytest.raises(DeadlineExceeded, match="form a group of 2 processes within"):
        group.form(Deadline(0.3), lambda: None)
    group.close()
    poll(lambda: all(t.name != "weights-group" for t in threading.enumerate()), "the threads that were left to end")


def test_gloo_and_nccl_use_the_interface_of_the_route_to_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    both = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
    for name in both:
        monkeypatch.setenv(name, "before")
    sockets_towards("127.0.0.1")
    assert [os.environ[name] for name in both] == ["before", "before"], "the user's own"
    for name in both:
        monkeypatch.delenv(name)
    sockets_towards("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == interface_of("127.0.0.1")
    assert "NCCL_SOCKET_IFNAME" not in os.environ, "its groups may reach further"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(process_group, "_address_towards", lambda host: "10.0.0.7")
    monkeypatch.setattr(process_group, "interface_of", lambda address: "eth1")
    sockets_towards("10.0.0.9")
    assert [os.environ.pop(name) for name in both] == ["eth1", "=eth1"]
    assert interface_of("192.0.2.1") is None


def test_a_group_for_weights_has_no_watchdog_that_could_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a group over NCCL reads when it is made; the groups of the trainer, made at other times, keep theirs."""
    wanted = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"}
    for before in (None, "3"):
        for name in wanted:
            monkeypatch.delenv(name, raising=False)
            if before is not None:
                monkeypatch.setenv(name, before)
        with watchdog_spares_the_process():
            assert {name: os.environ[name] for name in wanted} == wanted
        assert [os.environ.get(name) for name in wanted] == [before, before]


# -- publishes that two processes send, as pipeline stages do: each its part -------------------------------------------


FIRSTS = (0, 4)
"""The second sender sends layer.4 and all after it."""


@pytest.fixture(scope="module")
def senders() -> Iterator[list[SenderProcess]]:
    made = [SenderProcess() for _ in FIRSTS]
    yield made
    for sender in made:
        sender.stop()


LONG_PAIRS = [pytest.param(transport, marks=pytest.mark.slow) for transport in ("collective delta", "disk delta")]


@pytest.fixture(params=["ipc", "collective", "disk", "ipc delta", *LONG_PAIRS])
def pair(request, senders, receivers, tmp_path) -> Iterator[Group]:
    (tmp_path / "weights").mkdir()
    transport, _, delta = request.param.partition(" ")
    made = Group(transport, senders, receivers, tmp_path / "weights", delta == "delta", firsts=FIRSTS)
    made.open()
    yield made
    for sender in senders:
        sender.close()
    assert made.files() == set()


def test_parts_make_the_whole_publish_after_publish(pair: Group) -> None:
    pair.publish(1)
    pair.publish(2)
    pair.publish(3)


def test_a_sender_that_is_killed_in_its_part_ends_the_publish(pair: Group, hold: Hold) -> None:
    pair.publish(1)
    pair.begin(Send(0, 2, hold_at="layer.7", hold=hold))
    hold.reached()
    pair.senders[1].kill()
    assert pair.senders[0].outcome().error is None, "its part had arrived"
    pair.require_dropped(pair.outcomes())
    pair.senders[1].start()
    for sender in pair.senders:
        sender.close()
    pair.open()
    pair.publish(3)


@pytest.mark.parametrize(("tensor", "failed"), [("layer.1", 0), ("layer.7", 1)])
def test_a_receiver_that_refuses_a_tensor_fails_the_sender_of_its_part(pair: Group, tensor: str, failed: int) -> None:
    """The other sender is closed by whoever asked them to send: it would wait until its deadline."""
    pair.begin(Send(0, 1, timeout_s=4.0), {1: Trouble(tensor, text="of another shape")})
    outcomes = pair.outcomes()
    assert [outcome.error[0] for outcome in outcomes if outcome.error] == ["TransferEnded", "WeightTransferError"]
    sent = [sender.outcome() for sender in pair.senders]
    assert sent[failed].error is not None
    assert "of another shape" in sent[failed].error[1]
    other = sent[1 - failed].error
    assert other is None if failed == 1 else other is not None and other[0] == "DeadlineExceeded"
    pair.publish(2)
