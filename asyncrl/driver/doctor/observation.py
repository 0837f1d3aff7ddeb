from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from asyncrl.errors import AsyncRLError

Status = Literal["ok", "warning", "bad"]


@dataclass(frozen=True, slots=True)
class Observation:
    """What one check has found.

    Attributes:
        area: what was looked at, in one or two words.
        status: bad: the run will not start, or fail; warning: it may, or will be slower than it could.
        remedy: what to do; empty where nothing is wrong.
    """

    area: str
    status: Status
    text: str
    remedy: str = ""


def ok(area: str, text: str) -> Observation:
    return Observation(area, "ok", text)


def warning(area: str, text: str, remedy: str) -> Observation:
    return Observation(area, "warning", text, remedy)


def bad(area: str, text: str, remedy: str) -> Observation:
    return Observation(area, "bad", text, remedy)


def guarded(area: str, check: Callable[[], Iterable[Observation] | None]) -> Iterator[Observation]:
    """The findings of a check; one that fails is a finding itself."""
    try:
        yield from check() or ()
    except AsyncRLError as error:  # in the words of `explain`
        text, _, remedy = str(error).partition("\ndo:")
        yield bad(area, text.removeprefix("asked: ").replace("\nfound:", ":"), remedy.strip())
    except Exception as error:  # noqa: BLE001 - a doctor reports, whatever a machine is like
        yield warning(area, f"could not be checked: {type(error).__name__}: {error}", "see whether it matters")
