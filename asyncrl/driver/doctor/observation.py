from __future__ import annotations

from collections.abc import Callable, Iterator
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


def guarded(area: str, check: Callable[[], Iterator[Observation]]) -> Iterator[Observation]:
    """The findings of a check; one that fails is a finding itself."""
    try:
        yield from check()
    except AsyncRLError as error:
        asked, found, do = _parts(str(error))
        yield Observation(area, "bad", f"{asked}: {found}" if asked else found, do)
    except Exception as error:  # noqa: BLE001 - a doctor reports, whatever a machine is like
        yield Observation(
            area, "warning", f"could not be checked: {type(error).__name__}: {error}", "see whether it matters"
        )


def _parts(message: str) -> tuple[str, str, str]:
    """asked, found and do of an error made by `explain`; others are found."""
    fields = {"asked": "", "found": "", "do": ""}
    name = "found"
    for line in message.splitlines():
        head, colon, rest = line.partition(":")
        if colon and head in fields:
            name, line = head, rest
        fields[name] = f"{fields[name]} {line.strip()}".strip()
    return fields["asked"], fields["found"], fields["do"]
