"""Messages between a worker process and its owner. Frame: length (4 bytes, little-endian), then a pickle. An answer is
(seconds it took, value)."""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass

LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One kind of worker process.

    name: names the process in messages and errors, e.g. "reward process". module: run with `python -m`; its main calls
    `worker_loop.serve`. labels: further command-line words, for readers of `ps`. settings: argument of the builder in
    each process. asked: the recipe keys behind it, for messages. answer: the type of every answer. advice: for the
    message of a missed deadline. timeout_s: deadline of a call; start_timeout_s: of a process's start. ahead: largest
    number of quick calls sent to a process together.
    """

    name: str
    module: str
    labels: tuple[str, ...] = ()
    settings: object
    asked: str
    answer: type | tuple[type, ...]
    advice: str
    num_workers: int
    timeout_s: float
    start_timeout_s: float
    ahead: int = 1


@dataclass(frozen=True, slots=True)
class Start:
    """The first frame; `path` is the owner's `sys.path`. Answered by None or `Raised`."""

    path: tuple[str, ...]
    asked: str
    settings: object


@dataclass(frozen=True, slots=True)
class Raised:
    """`error`: the pickled exception; None if it cannot be pickled or must not propagate (SystemExit)."""

    error: bytes | None
    summary: str
    trace: str


def packed(value: object) -> bytes:
    """A frame. Raises any error of pickling `value`."""
    body = pickle.dumps(value)
    return LENGTH.pack(len(body)) + body
