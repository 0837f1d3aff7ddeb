"""An event out of the JSON object that a line holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from asyncrl.json_records import from_plain
from asyncrl.ranges import is_finite
from asyncrl.types.events import ENVELOPE, EVENTS, Event


def read_event(line: Mapping[str, Any]) -> Event | str:
    """The event, or what is wrong with its form."""
    kind = line.get("event")
    record = EVENTS.get(kind) if isinstance(kind, str) else None
    if record is None:
        return f"malformed: there is no event {json.dumps(kind)[:80]}"
    try:
        for time in ("time_s", "monotonic_s"):
            if type(line.get(time)) not in (int, float) or not is_finite(line[time]):
                raise ValueError(f"{time} is no time")
        return from_plain(record, {name: value for name, value in line.items() if name not in ENVELOPE})
    except ValueError as error:
        return f"malformed: {error} in {json.dumps(line)[:200]}"
