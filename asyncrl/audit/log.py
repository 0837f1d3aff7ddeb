"""Reads `events.jsonl` from its bytes and checks the running hash in its lines.

The hash shows that the file is unchanged. The replay checks whether its content is correct.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any, BinaryIO

from asyncrl.audit.audit_report import Finding
from asyncrl.audit.replay import EVENTS, Audit
from asyncrl.json_records import json_object

_BEGINNING = b'{"event": '
_SEAL = re.compile(rb', "writer": "(\w+)", "at": (\d{1,18})(, "chain": "([0-9a-f]{32})"\}\n)\Z')
_KEPT_EVERY = 1 << 16
"""Distance in bytes of the kept hash states, for lines that another writer's line overtook."""


def read_log(file: BinaryIO, audit: Audit) -> list[Finding]:
    """Feeds every line to `audit`; returns a finding for each line that the hashes do not confirm."""
    chain = _Chain(file)
    number = 0
    while raw := file.readline():
        number += 1
        event, start = parsed(raw) if raw.endswith(b"\n") else None, 0
        if event is None:
            audit.torn(number)
            # Another process may have appended its next line directly after the torn one.
            start = max(0, raw.rfind(_BEGINNING))
            event = parsed(raw[start:]) if start and raw.endswith(b"\n") else None
        if event is not None:
            chain.check(number, raw, start)
            audit.feed(number, event)
        chain.passed(raw)
    return chain.findings


def parsed(raw: bytes) -> Mapping[str, Any] | None:
    """The JSON object in these bytes; None if they are anything else."""
    return json_object(raw.decode(errors="replace"))


class _Chain:
    """The hash of the file up to the present line. Checks end at the first mismatch: no later line would match."""

    def __init__(self, file: BinaryIO) -> None:
        self.findings: list[Finding] = []
        self._file = file
        self._end = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._ends: dict[bytes, int] = {}
        """End of each writer's last line: the hash of its next line covers at least that."""
        self._kept_at, self._kept = [0], [self._hash.copy()]

    def check(self, number: int, raw: bytes, start: int) -> None:
        """Checks the event in `raw` from `start` on, which is line `number` of the file or its end."""
        if self.findings:
            return
        seal = _SEAL.search(raw)
        if seal is None:
            self._find(number, "no running hash: this line was not written by a run, or was changed")
            return
        writer, at = seal[1], int(seal[2])
        if not self._ends.get(writer, 0) <= at <= self._end + start:
            self._find(number, f"{at} bytes were before this line when it was written, now {self._end + start}")
            return
        self._ends[writer] = self._end + len(raw)
        expected = self._upto(at, raw)
        expected.update(raw[start : seal.start(3)])
        if expected.hexdigest() != seal[4].decode():
            self._find(number, "the running hash differs: this line, or one before it, is not what was written")

    def passed(self, raw: bytes) -> None:
        self._hash.update(raw)
        self._end += len(raw)
        if self._end - self._kept_at[-1] >= _KEPT_EVERY:
            self._kept_at.append(self._end)
            self._kept.append(self._hash.copy())

    def _upto(self, at: int, raw: bytes) -> hashlib.blake2b:
        """The hash of the first `at` bytes; `raw` begins at the present end of the hash."""
        if at >= self._end:
            state = self._hash.copy()
            state.update(raw[: at - self._end])
            return state
        # The line's hash covers fewer bytes than precede it: continue from the nearest kept state.
        kept = bisect_right(self._kept_at, at) - 1
        state, here = self._kept[kept].copy(), self._file.tell()
        self._file.seek(self._kept_at[kept])
        state.update(self._file.read(at - self._kept_at[kept]))
        self._file.seek(here)
        return state

    def _find(self, number: int, text: str) -> None:
        self.findings.append(Finding(EVENTS, number, f"{text} (no hash after this one is looked at)"))
