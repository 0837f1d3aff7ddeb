"""Publishes by vLLM's own sender: both ends in step, against servers that keep vLLM's rules of a session, and a wire
without NCCL. `tests/numerics/test_version_stamping_remote.py` has the same on a real server."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from asyncrl.errors import DeadlineExceeded, WeightTransferError
from asyncrl.inference.remote.publish_calls import _Discarded
from asyncrl.weights.packing import spec_of
from asyncrl.weights.plan import make_manifest
from asyncrl.weights.transports.collective import NativeReceiver, NativeSender

BUCKET = 1 << 12
WEIGHTS = [("a", torch.arange(3000.0)), ("b", torch.ones(2, 3, dtype=torch.bfloat16)), ("c", torch.tensor(2.0))]
WORKERS = 2
INIT, START, UPDATE = "/init_weight_transfer_engine", "/start_weight_update", "/update_weights"
FINISH, SHUTDOWN = "/finish_weight_update", "/shutdown_weight_transfer_engine"
FIRST, LATER = [SHUTDOWN, INIT, START, UPDATE, FINISH], [START, UPDATE, FINISH]


class Wire:
    """In place of NCCL: `vllm`'s sender, whose rounds end at once, or at `shutdown` if it is stuck."""

    def __init__(self):
        self.joined, self.rounds = [], []
        self.stuck, self._ended, self.returned = False, threading.Event(), threading.Event()

    def join(self, host, port, world_size, buffer_bytes, weights):
        self.joined.append((host, port, world_size, buffer_bytes))
        self.source = weights
        return self

    def send_weights(self):
        if self.stuck:
            assert self._ended.wait(30)
        try:
            self.rounds.append([(name, tensor.clone()) for name, tensor in self.source])
        finally:
            self.returned.set()

    def shutdown(self):
        self._ended.set()


class Server:
    """The rules of a session in vLLM's worker."""

    def __init__(self):
        self.calls, self.bodies, self.active = [], {}, False
        self.fails, self.silent = set(), set()
        """Paths that answer 500 once, and paths that answer nothing."""

    def post(self, path, body, timeout_s):
        answer = Future()
        self.calls.append(path)
        self.bodies[path] = body
        if path in self.silent:
            return answer
        legal = self.active == (path in (UPDATE, FINISH)) or path == INIT
        if path in self.fails or not legal:
            self.fails.discard(path)
            self.active = self.active and path != UPDATE
            answer.set_exception(RuntimeError(f"{path} answers 500"))
        else:
            self.active = path in (START, UPDATE)
            answer.set_result({})
        return answer


class Rig:
    def __init__(self):
        self.wire, self.servers = Wire(), [Server(), Server()]
        self.sender = NativeSender(BUCKET, 2, device="cpu", host="127.0.0.1", join=self.wire.join)
        self.receivers = self._receivers(self.sender.open())
        self._threads = ThreadPoolExecutor(3)
        self._count = 0

    def _receivers(self, source):
        self.source = source
        return [NativeReceiver(replace(source, receiver=i), WORKERS, s.post) for i, s in enumerate(self.servers)]

    def publish(self, weights=WEIGHTS, *, timeout_s=10.0):
        """Outcomes of the sender and of both receivers; the calls of each server."""
        self._count += 1
        specs = [spec_of(name, tensor) for name, tensor in WEIGHTS]
        manifest = make_manifest(self._count, 1, specs, BUCKET, verify=False)
        for server in self.servers:
            server.calls = []
        doing = [self._threads.submit(r.receive, manifest, _Discarded(), timeout_s) for r in self.receivers]
        doing = [self._threads.submit(self.sender.send, manifest, iter(weights), timeout_s), *doing]
        return [each.exception(30) or each.result() for each in doing], [server.calls for server in self.servers]

    def close(self):
        for end in (self.sender, *self.receivers):
            end.close()
        self._threads.shutdown()


@pytest.fixture
def rig():
    with closing(Rig()) as rig:
        yield rig


def test_each_server_gets_its_place_and_the_tensors(rig):
    outcomes, calls = rig.publish()
    assert outcomes == [None, None, None], "nobody claims a digest"
    assert calls == [FIRST, FIRST]
    (sent,) = rig.wire.rounds
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in zip(sent, WEIGHTS, strict=True))
    ((host, port, world_size, buffer_bytes),) = rig.wire.joined
    assert (host, world_size, buffer_bytes) == ("127.0.0.1", 1 + 2 * WORKERS, BUCKET)
    for number, server in enumerate(rig.servers):
        assert server.bodies[INIT]["init_info"] == {
            "master_address": host,
            "master_port": port,
            "rank_offset": 1 + number * WORKERS,
            "world_size": world_size,
            "packed": True,
            "packed_num_buffers": 2,
            "packed_buffer_size_bytes": BUCKET,
        }
        assert server.bodies[UPDATE]["update_info"] == {
            "names": ("a", "b", "c"),
            "dtype_names": ("float32", "bfloat16", "float32"),
            "shapes": ((3000,), (2, 3), ()),
        }
    assert rig.publish() == ([None] * 3, [LATER, LATER]), "the group stays from publish to publish"
    assert len(rig.wire.joined) == 1


@pytest.mark.parametrize("path", [INIT, START, UPDATE, FINISH])
def test_a_server_that_refuses_a_call_fails_the_publish_and_the_next_one_begins_anew(rig, path):
    rig.servers[1].fails = {path}
    outcomes, _ = rig.publish()
    assert isinstance(outcomes[0], WeightTransferError)
    assert f"{path} answers 500" in str(outcomes[2])
    assert path in (UPDATE, FINISH) or not rig.wire.rounds, "nothing is sent before every server is ready"
    assert isinstance(outcomes[1], WeightTransferError), "the other one does not serve these weights either"
    outcomes, calls = rig.publish()
    assert outcomes == [None] * 3
    assert all(each[-4:] == FIRST[1:] for each in calls)
    assert not any(server.active for server in rig.servers)


def test_an_update_that_never_ended_is_ended_before_the_next_one(rig):
    """A replica that was lost in the middle of a publish leaves its server in it."""
    rig.servers[0].active = True
    assert rig.publish() == ([None] * 3, [[SHUTDOWN, FINISH, *FIRST], FIRST])


def test_a_trainer_that_fails_halfway_ends_the_publish_everywhere(rig):
    def half():
        yield WEIGHTS[0]
        raise ConnectionError("a rank of the trainer was lost")

    for server in rig.servers:
        server.silent = {UPDATE}  # it waits in the broadcast
    outcomes, _ = rig.publish(half())
    assert isinstance(outcomes[0], ConnectionError), "the driver tells it from what receivers cause"
    assert all("a rank of the trainer was lost" in str(outcome) for outcome in outcomes[1:])
    for server in rig.servers:
        server.silent = set()
    assert rig.publish()[0] == [None] * 3


@pytest.mark.parametrize("path", [INIT, UPDATE])
def test_a_silent_server_costs_the_publish_its_deadline_and_no_more(rig, path):
    rig.servers[1].silent = {path}
    rig.wire.stuck = path == UPDATE
    outcomes, _ = rig.publish(timeout_s=1.0)
    assert isinstance(outcomes[0], DeadlineExceeded)
    assert isinstance(outcomes[2], WeightTransferError | DeadlineExceeded)
    assert path == INIT or rig.wire.returned.wait(10)
    assert not rig.wire.rounds, "nothing reads the weights after the end of a publish"


def test_a_new_group_never_takes_members_of_an_older_one(rig):
    rig.publish()
    rig.receivers[0].close()
    rig.receivers[0] = NativeReceiver(replace(rig.source, receiver=0), WORKERS, rig.servers[0].post)
    assert rig.publish() == ([None] * 3, [FIRST, FIRST])
    assert len(rig.wire.joined) == 2
