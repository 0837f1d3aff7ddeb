"""A weight sender in a process of its own, for tests in which it is killed."""

from __future__ import annotations

import resource
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from asyncrl.errors import AsyncRLError
from asyncrl.types import Digest, EncodedWeights, Manifest, TransferSource
from asyncrl.weights.encodings.delta import weight_of
from asyncrl.weights.encodings.delta_encoder import DeltaEncoder
from asyncrl.weights.packing import spec_of
from asyncrl.weights.plan import make_manifest, part_manifests
from asyncrl.weights.transports import build_sender
from asyncrl.weights.transports.interruptible_sender import InterruptibleSender
from asyncrl_testing.transport_rig import (
    BUCKET_BYTES,
    PROMPT_S,
    TIMEOUT_S,
    Hold,
    Weights,
    plain_weights,
    process_context,
    small_weights,
)

EXIT_OF_SIGTERM = 143


@dataclass(frozen=True, slots=True)
class Open:
    """Builds and opens a sender, replacing an earlier one."""

    transport: str
    num_receivers: int
    directory: str = ""
    bucket_bytes: int = BUCKET_BYTES


@dataclass(frozen=True, slots=True)
class Send:
    """Sends `weights_of(seed, small=small)`, with a hold before the tensor `hold_at`. `max_file_bytes`: limit on a file
    that the process writes during the send. `base`: sends the differences to the weights of this seed; None sends all
    weights, and receivers keep them if `is_kept`."""

    publish_id: int
    seed: int
    small: bool = False
    timeout_s: float = TIMEOUT_S
    hold_at: str = ""
    hold: Hold | None = None
    max_file_bytes: int | None = None
    part: tuple[int, tuple[int, ...]] | None = None
    """The part to send, of the parts that begin with these tensors; None sends all."""
    base: int | None = None
    is_kept: bool = False

    @property
    def manifest(self) -> Manifest:
        number, (_, encoded) = self.publish_id, self.encoded()
        if encoded is not None:
            base = encoded.base_digest
            return make_manifest(number, number, encoded.tensors, BUCKET_BYTES, encoding="delta", base_digest=base)
        specs = [spec_of(*w) for w in weights_of(self.seed, small=self.small)]
        return replace(make_manifest(number, number, specs, BUCKET_BYTES), is_kept=self.is_kept)

    def encoded(self) -> tuple[DeltaEncoder, EncodedWeights] | tuple[None, None]:
        """Of a publish of differences."""
        if self.base is None:
            return None, None
        encoder = DeltaEncoder()
        encoder.encode(weights_of(self.base, small=self.small))
        return encoder, encoder.encode(weights_of(self.seed, small=self.small))


@dataclass(frozen=True, slots=True)
class Sent:
    """The outcome of a command. `error`: class name and message. `source`: of Open; `digest`: of Send."""

    error: tuple[str, str] | None = None
    source: TransferSource | None = None
    digest: Digest | None = None
    elapsed_s: float = 0.0


def weights_of(seed: int, *, small: bool) -> Weights:
    return small_weights(seed) if small else plain_weights(seed)


class SenderProcess:
    """A process that obeys Open, Send and None (close), one at a time. On SIGTERM it closes its sender and exits."""

    def __init__(self) -> None:
        self.pids: set[int] = set()
        """Of this process and of its predecessors."""
        self.start()

    def start(self) -> None:
        """Replaces a process that died."""
        self._busy = False
        context = process_context()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None, "it has started"
        self.pids.add(self._process.pid)

    def open(self, command: Open) -> TransferSource:
        """Raises AssertionError: it did not open."""
        self.begin(command)
        answer = self.outcome()
        assert answer.source is not None, answer.error
        return answer.source

    def begin(self, command: Open | Send | None) -> None:
        if self._busy:  # a test that failed left it so
            self.outcome()
        self._pipe.send(command)
        self._busy = True

    def outcome(self) -> Sent:
        assert self._pipe.poll(TIMEOUT_S + PROMPT_S), "the sender did not answer"
        self._busy = False
        return self._pipe.recv()

    def close(self) -> None:
        """Closes the sender."""
        self.begin(None)
        self.outcome()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10)

    def terminate(self) -> int | None:
        """Sends SIGTERM; returns the exit code."""
        self._process.terminate()
        self._process.join(10)
        return self._process.exitcode

    def stop(self) -> None:
        """Ends the process, if it lives."""
        self._pipe.close()
        self._process.join(10)


def _serve(commands: Connection) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_OF_SIGTERM))
    sender: InterruptibleSender | None = None
    try:
        while True:
            command: Any = commands.recv()
            started = time.monotonic()
            try:
                if isinstance(command, Open):
                    sender = build_sender(
                        command.transport, command.bucket_bytes, command.num_receivers, directory=command.directory
                    )
                    commands.send(Sent(source=sender.open()))
                elif isinstance(command, Send):
                    assert sender is not None, "a sender opens before it sends"
                    digest = _send(sender, command)
                    commands.send(Sent(digest=digest, elapsed_s=time.monotonic() - started))
                else:
                    if sender is not None:
                        sender.close()
                    commands.send(Sent())
            except AsyncRLError as error:
                commands.send(Sent(error=(type(error).__name__, str(error)), elapsed_s=time.monotonic() - started))
    except EOFError:
        pass  # the test has ended
    finally:
        if sender is not None:
            sender.close()


def _send(sender: InterruptibleSender, command: Send) -> Digest | None:
    manifest, (encoder, _) = command.manifest, command.encoded()
    chosen = weights_of(command.seed, small=command.small) if encoder is None else list(encoder.differences())
    digest = None if encoder is None else encoder.digest
    if command.part is not None:
        number, firsts = command.part
        manifest = part_manifests(manifest, firsts, BUCKET_BYTES)[number]
        chosen = chosen[firsts[number] :][: len(manifest.tensors)]
        digest = digest and digest[firsts[number] :][: len(manifest.tensors)]

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in chosen:
            if weight_of(name) == command.hold_at and command.hold is not None:
                command.hold.wait()
            yield name, tensor

    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = resource.RLIM_INFINITY if command.max_file_bytes is None else command.max_file_bytes
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        sent = sender.send(manifest, weights(), command.timeout_s)
        return sent if digest is None else digest
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
