"""The conformance suite of weight transports. A test class inherits `TransportSuite` and gives it the fixture `rig`.

Receivers run in `Worker`s, one command at a time: threads for a transport that lives inside one process, spawned
processes for the others. The same workers serve a whole module, because each costs an import of torch.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.errors import AsyncRLError, DeadlineExceeded, WeightTransferError
from asyncrl.types import Manifest, TensorSpec
from asyncrl.weights.packing import spec_of
from asyncrl.weights.plan import make_manifest
from asyncrl.weights.sinks import AssemblingSink
from asyncrl.weights.transport import Digest, TransferSource, WeightReceiver, WeightSender

BUCKET_BYTES = 8192
TIMEOUT_S = 30.0
"""Of publishes that succeed."""
PROMPT_S = 8.0
"""Within this a failure that is known to one side is known to the other, although the deadline is later."""

Weights = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Trouble:
    """What the sink of one receive does before it writes tensor `tensor`: sleep, then raise if `text` is set."""

    tensor: str
    sleep_s: float = 0.0
    text: str = ""


@dataclass(frozen=True, slots=True)
class Receive:
    manifest: Manifest
    timeout_s: float
    trouble: Trouble | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a receive ended with. `tensors`: name, dtype, shape, bytes. `error`: class name and message."""

    digest: Digest | None
    tensors: tuple[tuple[str, str, tuple[int, ...], bytes], ...]
    error: tuple[str, str] | None
    elapsed_s: float


class TroubledSink:
    """An AssemblingSink that runs into its trouble."""

    def __init__(self, on_tensor: Callable[[str, torch.Tensor], None], trouble: Trouble | None) -> None:
        self._sink = AssemblingSink(on_tensor)
        self._trouble = trouble

    def write(self, spec: TensorSpec, offset: int, data: torch.Tensor) -> None:
        trouble = self._trouble
        if trouble is not None and spec.name == trouble.tensor:
            time.sleep(trouble.sleep_s)
            if trouble.text:
                raise WeightTransferError(trouble.text)
        self._sink.write(spec, offset, data)


def serve(commands: Connection, build_receiver: Callable[[TransferSource], WeightReceiver]) -> None:
    """A worker's loop: a TransferSource joins a sender, a Receive takes one publish, None ends."""
    receiver: WeightReceiver | None = None
    while (command := commands.recv()) is not None:
        if isinstance(command, TransferSource):
            if receiver is not None:
                receiver.close()
            receiver = build_receiver(command)
            commands.send(True)
        else:
            assert receiver is not None, "a worker joins a source before it receives"
            commands.send(_receive(receiver, command))
    if receiver is not None:
        receiver.close()


def _receive(receiver: WeightReceiver, command: Receive) -> Outcome:
    tensors: list[tuple[str, str, tuple[int, ...], bytes]] = []

    def keep(name: str, tensor: torch.Tensor) -> None:
        spec = spec_of(name, tensor)
        tensors.append((name, spec.dtype, spec.shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()))

    started = time.monotonic()
    digest, failure = None, None
    try:
        sink = TroubledSink(keep, command.trouble)
        digest = receiver.receive(command.manifest, sink, command.timeout_s)
    except AsyncRLError as error:
        failure = (type(error).__name__, str(error))
    return Outcome(digest, tuple(tensors), failure, time.monotonic() - started)


def _serve_process(commands: Connection, build_receiver: Callable[[TransferSource], WeightReceiver]) -> None:
    torch.set_num_threads(1)
    serve(commands, build_receiver)


class Worker:
    """One receiver and the pipe that commands it."""

    def __init__(self, build_receiver: Callable[[TransferSource], WeightReceiver], *, in_process: bool) -> None:
        """`in_process`: a thread of this process; else a spawned process, and `build_receiver` is pickled."""
        self._build = build_receiver
        self._in_process = in_process
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        if self._in_process:
            self._process = None
            self._thread = threading.Thread(target=serve, args=(theirs, self._build), daemon=True)
            self._thread.start()
        else:
            self._process = context.Process(target=_serve_process, args=(theirs, self._build), daemon=True)
            self._process.start()
            theirs.close()

    def join(self, source: TransferSource) -> None:
        self._pipe.send(source)
        self._answer(60.0)

    def begin(self, command: Receive) -> None:
        self._pipe.send(command)

    def outcome(self, timeout_s: float = TIMEOUT_S + 5) -> Outcome:
        return self._answer(timeout_s)

    def kill(self) -> None:
        assert self._process is not None, "only a process can be killed"
        self._process.kill()
        self._process.join(10)

    def stop(self) -> None:
        self._pipe.send(None)
        if self._process is None:
            self._thread.join(10)
        else:
            self._process.join(10)

    def _answer(self, timeout_s: float) -> Any:
        assert self._pipe.poll(timeout_s), f"the receiver did not answer within {timeout_s} s"
        return self._pipe.recv()


@dataclass(frozen=True, slots=True)
class Rig:
    """A transport under test. `workers`: at least 3."""

    build_sender: Callable[[int, int], WeightSender]
    workers: Sequence[Worker]
    workers_can_die: bool

    @contextmanager
    def connected(self, num_receivers: int) -> Iterator[Transfer]:
        sender = self.build_sender(BUCKET_BYTES, num_receivers)
        source = sender.open()
        assert (source.bucket_bytes, source.num_receivers, source.receiver) == (BUCKET_BYTES, num_receivers, 0)
        for number, worker in enumerate(self.workers[:num_receivers]):
            worker.join(replace(source, receiver=number))
        try:
            yield Transfer(sender, source, self.workers[:num_receivers])
        finally:
            sender.close()


class Transfer:
    """A sender and the workers that have joined it. Publishes are numbered from 1."""

    def __init__(self, sender: WeightSender, source: TransferSource, workers: Sequence[Worker]) -> None:
        self.sender = sender
        self.source = source
        self.workers = workers
        self._publishes = 0

    def manifest(self, weights: Weights, *, verify: bool = True) -> Manifest:
        self._publishes += 1
        specs = [spec_of(name, tensor) for name, tensor in weights]
        return make_manifest(self._publishes, self._publishes, specs, BUCKET_BYTES, verify=verify)

    def publish(self, weights: Weights, *, verify: bool = True) -> tuple[Digest | None, list[Outcome]]:
        """One publish that must succeed, checked bit by bit at every receiver."""
        manifest = self.manifest(weights, verify=verify)
        for worker in self.workers:
            worker.begin(Receive(manifest, TIMEOUT_S))
        digest = self.sender.send(manifest, iter(weights), TIMEOUT_S)
        outcomes = [worker.outcome() for worker in self.workers]
        for outcome in outcomes:
            assert outcome.error is None, outcome.error
            assert outcome.tensors == contents(weights)
            assert outcome.digest == digest
        return digest, outcomes

    def publish_failing(
        self,
        manifest: Manifest,
        weights: Weights | Iterator[tuple[str, torch.Tensor]],
        expected: type[Exception],
        match: str,
        *,
        timeout_s: float = TIMEOUT_S,
        troubles: dict[int, Trouble] | None = None,
    ) -> list[Outcome]:
        """One publish that must fail at the sender with `expected`, and at every receiver with some error in time."""
        for number, worker in enumerate(self.workers):
            worker.begin(Receive(manifest, timeout_s, (troubles or {}).get(number)))
        with pytest.raises(expected, match=match):
            self.sender.send(manifest, iter(weights), timeout_s)
        outcomes = [worker.outcome() for worker in self.workers]
        for outcome in outcomes:
            assert outcome.error is not None
            assert outcome.error[0] in ("WeightTransferError", "DeadlineExceeded")
        return outcomes


def contents(weights: Weights) -> tuple[tuple[str, str, tuple[int, ...], bytes], ...]:
    """What `Outcome.tensors` must be."""
    return tuple(
        (
            name,
            (spec := spec_of(name, t)).dtype,
            spec.shape,
            t.contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, t in weights
    )


def many_weights(seed: int = 0) -> Weights:
    """Every kind of tensor that must survive: dtypes, scalars, empties, several buckets long, not contiguous."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return [
        ("empty.first", torch.empty(0)),
        ("float32", rand(33, 7)),
        ("bfloat16", rand(128, 3).bfloat16()),
        ("scalar", rand(1)[0]),
        ("float16", rand(5).half()),
        ("large", rand(3 * BUCKET_BYTES // 4 + 5)),
        ("int64", torch.randint(-(2**62), 2**62, (9, 2), generator=generator)),
        ("uint8", torch.randint(0, 256, (17,), generator=generator, dtype=torch.uint8)),
        ("bool", rand(13) > 0),
        ("empty.middle", torch.empty(3, 0, 2, dtype=torch.bfloat16)),
        ("transposed", rand(40, 11).t()),
        ("strided", rand(50, 4)[::2, 1:3]),
        ("odd_offset", torch.randint(0, 256, (4001,), generator=generator, dtype=torch.uint8)[1:]),
        ("exactly_a_bucket", rand(BUCKET_BYTES // 4)),
        ("large.bfloat16", rand(5 * BUCKET_BYTES // 2 + 3).bfloat16()),
        ("empty.last", torch.empty(0, 4, dtype=torch.int64)),
    ]


def plain_weights(seed: int = 0, num: int = 12) -> Weights:
    """`num` tensors of one bucket each: more than there are slots."""
    generator = torch.Generator().manual_seed(seed)
    return [(f"layer.{i}", torch.randn(BUCKET_BYTES // 4, generator=generator)) for i in range(num)]


class TransportSuite:
    """Every transport passes these. Needs a fixture `rig` that returns a `Rig`."""

    @pytest.mark.parametrize("num_receivers", [1, 2, 3])
    def test_every_kind_of_tensor_arrives(self, rig: Rig, num_receivers: int) -> None:
        with rig.connected(num_receivers) as transfer:
            digest, _ = transfer.publish(many_weights())
        assert digest is not None
        assert len(digest) == len(many_weights())

    def test_publishes_in_a_row_carry_the_new_values(self, rig: Rig) -> None:
        with rig.connected(2) as transfer:
            digests = [transfer.publish(many_weights(seed))[0] for seed in (1, 2, 3, 1)]
        assert digests[0] == digests[3] != digests[1]

    def test_weights_of_another_shape_use_the_same_ring(self, rig: Rig) -> None:
        with rig.connected(1) as transfer:
            transfer.publish(plain_weights(1))
            transfer.publish(many_weights(2))
            transfer.publish(plain_weights(3, num=1))

    def test_without_verify_there_is_no_digest(self, rig: Rig) -> None:
        with rig.connected(1) as transfer:
            digest, _ = transfer.publish(many_weights(), verify=False)
        assert digest is None

    def test_nothing_to_send(self, rig: Rig) -> None:
        with rig.connected(2) as transfer:
            assert transfer.publish([])[0] == ()
            assert transfer.publish([("a", torch.empty(0)), ("b", torch.empty(0, 3))])[0] == (0, 0)

    @pytest.mark.parametrize(
        ("fault", "match"),
        [
            ("missing_last", r"layer\.11.*\n.*ended before it"),
            ("missing_middle", r"layer\.5.*\n.*layer\.6"),
            ("extra", r"12 tensors\n.*one more: layer\.extra"),
            ("shape", r"layer\.5, float32 \(2048,\)\n.*\(32, 64\)"),
            ("dtype", r"layer\.5, float32.*\n.*float64"),
            ("empty", r"layer\.0.*\n.*ended before it"),
        ],
    )
    def test_weights_that_differ_from_the_manifest(self, rig: Rig, fault: str, match: str) -> None:
        good = plain_weights()
        bad = {
            "missing_last": good[:-1],
            "missing_middle": good[:5] + good[6:],
            "extra": [*good, ("layer.extra", torch.zeros(1))],
            "shape": [*good[:5], ("layer.5", torch.zeros(32, 64)), *good[6:]],
            "dtype": [*good[:5], ("layer.5", torch.zeros(2048, dtype=torch.float64)), *good[6:]],
            "empty": [],
        }[fault]
        with rig.connected(2) as transfer:
            outcomes = transfer.publish_failing(transfer.manifest(good), bad, WeightTransferError, match)
            assert all(o.elapsed_s < PROMPT_S for o in outcomes)
            transfer.publish(plain_weights(1))

    def test_an_error_of_the_weights_themselves_passes_unchanged(self, rig: Rig) -> None:
        def gather() -> Iterator[tuple[str, torch.Tensor]]:
            yield from plain_weights()[:4]
            raise ZeroDivisionError("gather failed")

        with rig.connected(2) as transfer:
            manifest = transfer.manifest(plain_weights())
            outcomes = transfer.publish_failing(manifest, gather(), ZeroDivisionError, "gather failed")
            assert all(o.error is not None and "gather failed" in o.error[1] for o in outcomes)
            assert all(o.elapsed_s < PROMPT_S for o in outcomes)
            transfer.publish(plain_weights(1))

    @pytest.mark.parametrize("tensor", ["layer.0", "layer.6", "layer.11"])
    def test_a_failing_sink_is_named_at_the_sender(self, rig: Rig, tensor: str) -> None:
        with rig.connected(2) as transfer:
            outcomes = transfer.publish_failing(
                transfer.manifest(plain_weights()),
                plain_weights(),
                WeightTransferError,
                "(?s)receiver 1.*the engine refuses it",
                troubles={1: Trouble(tensor, text="the engine refuses it")},
            )
            assert outcomes[1].error == ("WeightTransferError", "the engine refuses it")
            assert outcomes[0].elapsed_s < PROMPT_S
            transfer.publish(plain_weights(1))

    def test_a_sink_that_fails_on_an_empty_tensor_at_the_end(self, rig: Rig) -> None:
        weights = many_weights()
        with rig.connected(1) as transfer:
            transfer.publish_failing(
                transfer.manifest(weights),
                weights,
                WeightTransferError,
                "(?s)receiver 0.*no such tensor",
                troubles={0: Trouble("empty.last", text="no such tensor")},
            )

    def test_a_receiver_that_never_comes(self, rig: Rig) -> None:
        with rig.connected(2) as transfer:
            manifest = transfer.manifest(plain_weights())
            transfer.workers[0].begin(Receive(manifest, TIMEOUT_S))
            started = time.monotonic()
            with pytest.raises(DeadlineExceeded, match="receiver 1"):
                transfer.sender.send(manifest, plain_weights(), 0.5)
            assert 0.4 < time.monotonic() - started < 0.5 + PROMPT_S
            waiting = transfer.workers[0].outcome()
            assert waiting.error is not None
            assert waiting.elapsed_s < PROMPT_S
            transfer.publish(plain_weights(1))

    def test_a_sender_that_never_comes(self, rig: Rig) -> None:
        with rig.connected(1) as transfer:
            manifest = transfer.manifest(plain_weights())
            transfer.workers[0].begin(Receive(manifest, 0.5))
            outcome = transfer.workers[0].outcome()
            assert outcome.error is not None
            assert outcome.error[0] == "DeadlineExceeded"
            assert 0.4 < outcome.elapsed_s < 0.5 + PROMPT_S
            # What is left of that attempt must not pass for an answer to the same publish sent now. Which error it is
            # depends on whether the sender sees the attempt's end together with its beginning.
            with pytest.raises((DeadlineExceeded, WeightTransferError), match="receiver 0"):
                transfer.sender.send(manifest, plain_weights(), 0.3)
            transfer.workers[0].begin(Receive(manifest, TIMEOUT_S))
            transfer.sender.send(manifest, plain_weights(), TIMEOUT_S)
            assert transfer.workers[0].outcome().tensors == contents(plain_weights())

    def test_a_receiver_too_slow_for_the_deadline(self, rig: Rig) -> None:
        with rig.connected(2) as transfer:
            started = time.monotonic()
            transfer.publish_failing(
                transfer.manifest(plain_weights()),
                plain_weights(),
                DeadlineExceeded,
                "(?s)receiver 1",
                timeout_s=0.8,
                troubles={1: Trouble("layer.3", sleep_s=1.6)},
            )
            assert time.monotonic() - started < 1.6 + PROMPT_S
            transfer.publish(plain_weights(1))

    def test_a_slow_receiver_reads_no_later_bucket(self, rig: Rig) -> None:
        weights = plain_weights(4)
        with rig.connected(2) as transfer:
            manifest = transfer.manifest(weights)
            transfer.workers[0].begin(Receive(manifest, TIMEOUT_S))
            transfer.workers[1].begin(Receive(manifest, TIMEOUT_S, Trouble("layer.2", sleep_s=0.4)))
            digest = transfer.sender.send(manifest, weights, TIMEOUT_S)
            for worker in transfer.workers:
                outcome = worker.outcome()
                assert outcome.tensors == contents(weights)
                assert outcome.digest == digest

    def test_another_manifest_at_a_receiver(self, rig: Rig) -> None:
        with rig.connected(2) as transfer:
            manifest = transfer.manifest(plain_weights())
            other = replace(manifest, tensors=manifest.tensors[:3], buckets=manifest.buckets[:3])
            transfer.workers[0].begin(Receive(manifest, TIMEOUT_S))
            transfer.workers[1].begin(Receive(other, TIMEOUT_S))
            with pytest.raises(WeightTransferError, match="receiver 1 expects 3 tensors"):
                transfer.sender.send(manifest, plain_weights(), TIMEOUT_S)
            assert all(w.outcome().error is not None for w in transfer.workers)
            transfer.publish(plain_weights(1))

    def test_buckets_larger_than_the_transports(self, rig: Rig) -> None:
        weights = [("large", torch.zeros(BUCKET_BYTES))]
        with rig.connected(1) as transfer:
            manifest = make_manifest(9, 9, [spec_of(*w) for w in weights], 2 * BUCKET_BYTES)
            with pytest.raises(WeightTransferError, match="bucket_bytes"):
                transfer.sender.send(manifest, weights, TIMEOUT_S)

    def test_a_receiver_that_comes_back(self, rig: Rig) -> None:
        with rig.connected(2) as transfer:
            transfer.publish(plain_weights(1))
            transfer.workers[1].join(replace(transfer.source, receiver=1))
            transfer.publish(plain_weights(2))

    def test_a_receiver_that_is_killed(self, rig: Rig) -> None:
        if not rig.workers_can_die:
            pytest.skip("the receivers of this transport are threads")
        with rig.connected(2) as transfer:
            transfer.publish(plain_weights(1))
            manifest = transfer.manifest(plain_weights())
            transfer.workers[0].begin(Receive(manifest, TIMEOUT_S))
            transfer.workers[1].begin(Receive(manifest, TIMEOUT_S, Trouble("layer.3", sleep_s=60)))
            killer = threading.Timer(0.5, transfer.workers[1].kill)
            killer.start()
            started = time.monotonic()
            with pytest.raises(WeightTransferError, match="receiver 1"):
                transfer.sender.send(manifest, plain_weights(), TIMEOUT_S)
            assert time.monotonic() - started < 0.5 + PROMPT_S
            survivor = transfer.workers[0].outcome()
            assert survivor.error is not None
            assert survivor.elapsed_s < 0.5 + PROMPT_S
            killer.join()
            transfer.workers[1].start()
            transfer.workers[1].join(replace(transfer.source, receiver=1))
            transfer.publish(plain_weights(2))

    def test_a_sender_that_closes_ends_the_waits(self, rig: Rig) -> None:
        with rig.connected(1) as transfer:
            transfer.publish(plain_weights(1))
            transfer.workers[0].begin(Receive(transfer.manifest(plain_weights()), TIMEOUT_S))
            time.sleep(0.2)  # either order must pass; this one is the harder
            transfer.sender.close()
            outcome = transfer.workers[0].outcome()
            assert outcome.error is not None
            assert outcome.elapsed_s < PROMPT_S
            transfer.sender.close()
            with pytest.raises(WeightTransferError, match="closed"):
                transfer.sender.send(transfer.manifest(plain_weights()), plain_weights(), TIMEOUT_S)

    def test_a_sender_opens_anew(self, rig: Rig) -> None:
        with rig.connected(1) as transfer:
            transfer.publish(plain_weights(1))
            source = transfer.sender.open()
            assert source.epoch != transfer.source.epoch
            transfer.workers[0].join(source)
            transfer.publish(plain_weights(2))

    def test_close_leaves_no_file(self, rig: Rig) -> None:
        before = set(Path("/dev/shm").iterdir())
        with rig.connected(1) as transfer:
            transfer.publish(plain_weights(1))
            transfer.publish_failing(transfer.manifest(plain_weights()), [], WeightTransferError, "ended")
        assert {p for p in set(Path("/dev/shm").iterdir()) - before if "asyncrl" in p.name} == set()
