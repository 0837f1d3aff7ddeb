"""What a worker process and its owner send. A frame is its length in 4 bytes, little-endian, and a pickle; that of an
answer has the seconds that it took, too."""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass

LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One kind of worker process.

    name: in messages and as the process to blame, e.g. "reward process".
    module: run with `python -m`; its main calls `worker_loop.serve`.
    labels: further words on the command line, for people who look at the list of processes.
    settings: handed to the builder in each process.
    asked: the recipe keys that choose it, for messages.
    answer: the type of every answer.
    advice: what to do about a call that exceeds its deadline.
    timeout_s: longest that one call may take; start_timeout_s: longest until a process is ready.
    ahead: calls that a process may be sent at once, as long as they are quick.
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
    """The first frame: `path` is `sys.path` of the owner. Answered by None or `Raised`."""

    path: tuple[str, ...]
    asked: str
    settings: object


@dataclass(frozen=True, slots=True)
class Raised:
    """`error`: the pickled exception; None when it cannot be pickled, or may not pass on (SystemExit, say)."""

    error: bytes | None
    summary: str
    trace: str


def packed(value: object) -> bytes:
    """A frame. Raises whatever pickling the value raises."""
    body = pickle.dumps(value)
    return LENGTH.pack(len(body)) + body
