"""Messages between the asyncio side and the decode thread. `ticket` identifies a command that gets an answer."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.inference.engine import PauseMode
from asyncrl.types import GenerationRequest, TokenChunk


@dataclass(frozen=True, slots=True, eq=False)
class Submit:
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """`request_ids` None: all. `ticket` None: no answer is needed."""

    request_ids: tuple[str, ...] | None
    ticket: int | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    mode: PauseMode
    ticket: int


@dataclass(frozen=True, slots=True)
class Resume:
    ticket: int


@dataclass(frozen=True, slots=True)
class Commit:
    version: int | None
    ticket: int


@dataclass(frozen=True, slots=True)
class Sleep:
    level: int
    ticket: int


@dataclass(frozen=True, slots=True)
class Wake:
    """`parts`: as `SleepingEngine.wake_up` names them."""

    parts: frozenset[str]
    ticket: int


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Command = Submit | Abort | Pause | Resume | Commit | Sleep | Wake | Stop


@dataclass(frozen=True, slots=True, eq=False)
class LoopReport:
    """Results since the last report: chunks in sampling order, then the tickets of finished commands."""

    chunks: tuple[TokenChunk, ...] = ()
    tickets: tuple[int, ...] = ()
