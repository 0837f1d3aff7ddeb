"""The rig of the conformance suite of weight transports: a sender here, receivers in workers.

Workers take one command at a time. They are threads for a transport that lives inside one process and processes of
their own for the others; the same workers serve a whole module.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.errors import AsyncRLError, WeightTransferError
from asyncrl.inference.torch_engine.parameter_sink import ParameterSink
from asyncrl.types import Digest, Manifest, TensorSpec, TransferSource
from asyncrl.weights.assembling_sink import AssemblingSink
from asyncrl.weights.encodings.decoder import Decoder
from asyncrl.weights.encodings.delta_encoder import DeltaEncoder
from asyncrl.weights.packing import spec_of
from asyncrl.weights.plan import make_manifest
from asyncrl.weights.transport import WeightReceiver, WeightSender, WeightSink

BUCKET_BYTES = 8192
TIMEOUT_S = 30.0
"""Of publishes that succeed."""
PROMPT_S = 8.0
"""Within this a failure that is known to one side is known to the other, although the deadline is later."""

Weights = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Hold:
    """A point at which one process waits for another. `directory` exists and is used for one hold only."""

    directory: Path

    def wait(self) -> None:
        """The held process: says that it has come, and waits to be let go."""
        (self.directory / "reached").touch()
        poll(lambda: (self.directory / "go").exists(), "a held process to be let go")

    def reached(self) -> None:
        """Returns when the other process has come."""
        poll((self.directory / "reached").exists, "a process to reach its hold")

    def release(self) -> None:
        (self.directory / "go").touch()


def poll(condition: Callable[[], bool], what: str) -> None:
    """Returns when `condition` holds; fails after `TIMEOUT_S`."""
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, f"waited {TIMEOUT_S} s for {what}"
        time.sleep(0.01)


@dataclass(frozen=True, slots=True)
class Trouble:
    """A fault of one receive's sink before tensor `tensor`: wait, then raise if `text` is set, or flip a bit of the
    byte after the tensor in its buffer."""

    tensor: str
    sleep_s: float = 0.0
    text: str = ""
    hold: Hold | None = None
    flip_next_byte: bool = False


@dataclass(frozen=True, slots=True)
class Receive:
    """`model`: specs of the parameters to write into, as an engine does; None collects whatever comes."""

    manifest: Manifest
    timeout_s: float
    trouble: Trouble | None = None
    model: tuple[TensorSpec, ...] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a receive. `tensors`: name, dtype, shape, bytes. `error`: class name and message."""

    digest: Digest | None
    tensors: tuple[tuple[str, str, tuple[int, ...], bytes], ...]
    error: tuple[str, str] | None
    elapsed_s: float


class TroubledSink:
    """An AssemblingSink that is handed bytes by `write` alone and runs into its trouble."""

    def __init__(self, on_tensor: Callable[[str, torch.Tensor], None], trouble: Trouble | None) -> None:
        self._sink = AssemblingSink(on_tensor)
        self._trouble = trouble

    def write(self, spec: TensorSpec, offset: int, data: torch.Tensor) -> None:
        trouble = self._run_into(spec)
        if trouble is not None and trouble.flip_next_byte:
            torch.empty(0, dtype=torch.uint8).set_(data.untyped_storage())[data.storage_offset() + data.numel()] ^= 1
        self._sink.write(spec, offset, data)

    def _run_into(self, spec: TensorSpec) -> Trouble | None:
        trouble = self._trouble
        if trouble is None or spec.name != trouble.tensor:
            return None
        time.sleep(trouble.sleep_s)
        if trouble.hold is not None:
            trouble.hold.wait()
        if trouble.text:
            raise WeightTransferError(trouble.text)
        return trouble


class TroubledDirectSink(TroubledSink):
    """The same as a `DirectSink`: bytes land in the memory of their tensor. It cannot flip what it does not see."""

    def destination(self, spec: TensorSpec, offset: int, nbytes: int, device: torch.device) -> torch.Tensor | None:
        return self._sink.destination(spec, offset, nbytes, device)

    def wrote(self, spec: TensorSpec, offset: int, nbytes: int) -> None:
        self._run_into(spec)
        self._sink.wrote(spec, offset, nbytes)


def serve(commands: Connection, build_receiver: Callable[[TransferSource], WeightReceiver]) -> None:
    """A worker's loop: a TransferSource joins a sender, a Receive takes one publish, None ends. As in an engine, the
    decoder outlives the receiver."""
    receiver: WeightReceiver | None = None
    decoder = Decoder("no model", None, torch.float32)
    while (command := commands.recv()) is not None:
        if isinstance(command, TransferSource):
            if receiver is not None:
                receiver.close()
            receiver = build_receiver(command)
            commands.send(True)
        else:
            assert receiver is not None, "a worker joins a source before it receives"
            commands.send(_receive(receiver, decoder, command))
    if receiver is not None:
        receiver.close()


def _receive(receiver: WeightReceiver, decoder: Decoder, command: Receive) -> Outcome:
    tensors: list[tuple[str, str, tuple[int, ...], bytes]] = []

    def keep(name: str, tensor: torch.Tensor) -> None:
        spec = spec_of(name, tensor)
        tensors.append((name, spec.dtype, spec.shape, tensor.reshape(-1).view(torch.uint8).cpu().numpy().tobytes()))

    def receive(sink: WeightSink) -> Digest | None:
        scope = decoder.scope(command.manifest)
        return decoder.receive(receiver, command.manifest, scope, sink, command.timeout_s)

    started = time.monotonic()
    digest, failure = None, None
    try:
        if command.model is None:
            # Flipping a byte needs the transport's buffer, which a `DirectSink` never sees.
            flips = command.trouble is not None and command.trouble.flip_next_byte
            sink = (TroubledSink if flips else TroubledDirectSink)(keep, command.trouble)
            digest = receive(sink)
        else:
            parameters = {s.name: torch.zeros(s.shape, dtype=getattr(torch, s.dtype)) for s in command.model}
            sink = ParameterSink(parameters)
            digest = receive(sink)
            sink.finish()
            for name, parameter in parameters.items():
                keep(name, parameter)
    except AsyncRLError as error:
        failure = (type(error).__name__, str(error))
    return Outcome(digest, tuple(tensors), failure, time.monotonic() - started)


def _serve_process(commands: Connection, build_receiver: Callable[[TransferSource], WeightReceiver]) -> None:
    torch.set_num_threads(1)
    serve(commands, build_receiver)


def process_context() -> Any:
    """Forks processes from one that has imported torch, because tests that kill processes start many."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["asyncrl_testing.transport_rig", "asyncrl.weights.transports"])
    return context


class Worker:
    """One receiver and the pipe that commands it."""

    def __init__(self, build_receiver: Callable[[TransferSource], WeightReceiver], *, in_process: bool) -> None:
        """`in_process`: a thread of this process; else a process of its own, and `build_receiver` is pickled."""
        self._build = build_receiver
        self._in_process = in_process
        self.start()

    def start(self) -> None:
        self._busy = False
        context = process_context()
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
        if self._busy:  # a test that failed left it so
            self.outcome()
        self._pipe.send(source)
        self._answer(60.0)

    def begin(self, command: Receive) -> None:
        self._pipe.send(command)
        self._busy = True

    def outcome(self) -> Outcome:
        answer = self._answer(TIMEOUT_S + PROMPT_S)
        self._busy = False
        return answer

    def kill(self) -> None:
        assert self._process is not None, "only a process can be killed"
        self._process.kill()
        self._process.join(10)

    def pause(self) -> None:
        """Stops the process (SIGSTOP) until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        self._pipe.send(None)
        if self._process is None:
            self._thread.join(10)
        else:
            self._process.join(10)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "only a process can be stopped"
        assert self._process.pid is not None, "it has started"
        os.kill(self._process.pid, number)

    def _answer(self, timeout_s: float) -> Any:
        assert self._pipe.poll(timeout_s), f"the receiver did not answer within {timeout_s} s"
        return self._pipe.recv()


@dataclass(frozen=True, slots=True)
class Rig:
    """A transport under test. `workers`: at least 3. `places`: directories in which it puts files."""

    build_sender: Callable[[int, int], WeightSender]
    workers: Sequence[Worker]
    workers_can_die: bool
    places: tuple[Path, ...] = (Path("/dev/shm"),)

    def files(self) -> set[Path]:
        """Files that the senders of this process have put there."""
        return files_in(self.places, {os.getpid()})

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

    def encoded(self, encoder: DeltaEncoder, weights: Weights, *, delta: bool) -> tuple[Manifest, Weights]:
        """The manifest and the tensors of a publish of `weights`: the differences to those that were encoded before,
        or all weights, which receivers keep."""
        encoded = encoder.encode(weights)
        if not delta:
            return replace(self.manifest(weights), is_kept=True), weights
        self._publishes += 1
        number, base = self._publishes, encoded.base_digest
        manifest = make_manifest(number, number, encoded.tensors, BUCKET_BYTES, encoding="delta", base_digest=base)
        return manifest, list(encoder.differences())

    def publish_encoded(self, encoder: DeltaEncoder, weights: Weights, *, delta: bool) -> Manifest:
        """One publish of `encoded` that must succeed, checked bit by bit at every receiver."""
        manifest, tensors = self.encoded(encoder, weights, delta=delta)
        for worker in self.workers:
            worker.begin(Receive(manifest, TIMEOUT_S))
        sent = self.sender.send(manifest, iter(tensors), TIMEOUT_S)
        for worker in self.workers:
            outcome = worker.outcome()
            assert outcome.error is None, outcome.error
            assert outcome.tensors == contents(weights)
            assert outcome.digest == (encoder.digest if delta else sent)
        return manifest

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
            assert outcome.error[0] in ("WeightTransferError", "TransferEnded", "DeadlineExceeded")
        return outcomes


def files_in(places: Sequence[Path], pids: Collection[int]) -> set[Path]:
    """Files of these processes' weight senders that are still in the directories."""
    return {path for place in places for pid in pids for path in place.glob(f"asyncrl-weights*-{pid}-*")}


def contents(weights: Weights) -> tuple[tuple[str, str, tuple[int, ...], bytes], ...]:
    """The expected `Outcome.tensors`."""
    return tuple(
        (
            name,
            (spec := spec_of(name, t)).dtype,
            spec.shape,
            t.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes(),
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


def small_weights(seed: int = 0, num: int = 12) -> Weights:
    """`num` tensors that share one bucket, without gaps between them."""
    generator = torch.Generator().manual_seed(seed)
    return [(f"layer.{i}", torch.randn(100, generator=generator)) for i in range(num)]
