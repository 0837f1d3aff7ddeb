"""The kinds of events, and what each of their fields may be."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.audit.audit_report import COUNTS

Check = Callable[[Any], bool]


def malformed(event: Mapping[str, Any]) -> str | None:
    """What is wrong with the form of an event; None: nothing."""
    kind = event.get("event")
    fields = FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        return f"malformed: there is no event {json.dumps(kind)[:80]}"
    wrong = [name for name, check in fields.items() if name not in event or not check(event[name])]
    return f"malformed: {', '.join(wrong)} of {json.dumps(event)[:200]}" if wrong else None


def is_whole(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _finite(value: object) -> bool:
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))


def _positive(value: Any) -> bool:
    return _finite(value) and value >= 0


def _share(value: Any) -> bool:
    return _finite(value) and 0 <= value <= 1


def _text(value: object) -> bool:
    return isinstance(value, str)


def _flag(value: object) -> bool:
    return isinstance(value, bool)


def _text_or_none(value: object) -> bool:
    return value is None or isinstance(value, str)


def _wholes(value: object) -> bool:
    return isinstance(value, list) and all(map(is_whole, value))


def are_counts(value: object) -> bool:
    return isinstance(value, dict) and value.keys() == set(COUNTS) and all(map(is_whole, value.values()))


def _interval(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_finite, value)) and value[0] <= value[1]


def _shares(value: object) -> bool:
    return isinstance(value, dict) and all(map(_share, value.values()))


def _one_of(*values: str) -> Check:
    return lambda value: value in values


_REPLICA: dict[str, Check] = {"replica": is_whole}
_STATE: dict[str, Check] = {"snapshot": _text, "step": is_whole, "counts": are_counts}

_EACH: dict[str, Check] = {"time_s": _finite, "monotonic_s": _finite}
_OWN: dict[str, dict[str, Check]] = {
    "start": {
        "name": _text,
        "resumed": _flag,
        "pid": is_whole,
        "groups_per_step": is_whole,
        "max_lag": is_whole,
        "max_steps": is_whole,
        "replicas": is_whole,
        "verify": _one_of("off", "first", "always"),
    },
    "resume": {"step": is_whole, "checkpoint": _text_or_none},
    "snapshot": _STATE,
    "restored": _STATE,
    "step": {"step": is_whole, "ordinals": _wholes, "lag_max": is_whole},
    "group": {
        "transition": _one_of(
            "admitted", "reissued", "ready", "leased", "returned", "trained", "filtered", "expired", "failed"
        ),
        **dict.fromkeys(("ordinal", "attempt", "step", "version", "oldest_version"), is_whole),
        "detail": _text,
    },
    "publish": {
        **dict.fromkeys(("version", "bytes", "attempts", "replicas"), is_whole),
        **dict.fromkeys(("publish_s", "pause_s", "transfer_s"), _positive),
        "verified": _flag,
    },
    "replica_failed": {**_REPLICA, "error": _text, "restarts": is_whole},
    "replica_started": _REPLICA,
    "replica_serving": _REPLICA,
    "replica_suspended": {**_REPLICA, "error": _text},
    "replica_rejoined": _REPLICA,
    "replica_leased": _REPLICA,
    "replica_returned": _REPLICA,
    "rollouter_failed": {"error": _text, "restarts": is_whole},
    "rollouter_restarted": {"seconds": _positive, "groups": is_whole},
    "training_failed": {"process": _text, "error": _text, "step": is_whole},
    "training_restarted": {"process": _text, "seconds": _positive, "checkpoint": _text_or_none},
    "checkpoint": {"step": is_whole, "path": _text, "save_s": _positive, "capture_s": _positive},
    "checkpoint_failed": {"step": is_whole, "error": _text},
    "evaluation": {
        **dict.fromkeys(("step", "version", "samples", "prompts", "questions", "failed"), is_whole),
        "name": _text,
        "accuracy": _share,
        "interval": _interval,
        "pass_at": _shares,
    },
    "evaluation_started": {"step": is_whole, "version": is_whole, "replicas": _wholes},
    "evaluation_failed": {"step": is_whole, "version": is_whole, "tries": is_whole, "error": _text},
    "evaluation_skipped": {"step": is_whole, "running": is_whole},
    "fault": {"error": _text, "message": _text},
    "end": {"outcome": _one_of("finished", "interrupted"), "step": is_whole},
}
FIELDS = {kind: {**fields, **_EACH} for kind, fields in _OWN.items()}
"""Kind -> its fields, without those that make its hash."""
