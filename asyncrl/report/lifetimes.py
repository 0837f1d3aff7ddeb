"""Lifetimes of prompt groups from the events of a run. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.types.events import GroupChanged

_ENDS = ("trained", "filtered", "expired", "failed")


@dataclass(slots=True)
class Lifetime:
    """One attempt at a prompt group. Times are seconds since the epoch; None if the state was not reached.

    Attributes:
        lag: of the group's oldest token when it was trained, in optimizer steps.
        end: trained, filtered, expired, failed or requeued; empty while in progress.
    """

    ordinal: int
    attempt: int
    admitted: float | None = None
    ready: float | None = None
    leased: float | None = None
    ended: float | None = None
    end: str = ""
    lag: int | None = None
    step: int | None = None
    """The optimizer step that trained it."""


def lifetimes(events: Iterable[Mapping[str, Any]]) -> list[Lifetime]:
    """The lifetimes of a run, in order of their begin."""
    found: dict[tuple[int, int], Lifetime] = {}
    made: list[Lifetime] = []
    for event in events:
        if event.get("event") != GroupChanged.kind:
            continue
        key, transition, now = (event["ordinal"], event["attempt"]), event["transition"], event["time_s"]
        if transition == "requeued":  # `attempt` is already the next one
            before = found.get((key[0], key[1] - 1))
            if before is not None and not before.end:
                before.ended, before.end = now, "requeued"
            continue
        if transition in ("admitted", "reissued") or key not in found:
            found[key] = Lifetime(*key)
            made.append(found[key])
        life = found[key]
        if transition in ("admitted", "reissued"):
            life.admitted = now
        elif transition == "ready":
            life.ready = now
        elif transition == "leased":
            life.leased = now
        elif transition == "released":
            life.leased = None
        elif transition in _ENDS:
            life.ended, life.end = now, transition
            if transition == "trained":
                life.lag = event["trainer_version"] - event["oldest_version"]
                life.step = event["trainer_version"] + 1
    return made
