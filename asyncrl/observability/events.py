"""Writes `events.jsonl`: one event per line, with wall and monotonic time."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from dataclasses import asdict, fields
from pathlib import Path

from asyncrl.config.hidden import Hidden
from asyncrl.errors import writing
from asyncrl.json_records import write_json
from asyncrl.types.events import Event

CHAIN_BYTES = 16
READ_BYTES = 1 << 20


def new_writer() -> str:
    """A value for `writer` that no other process has."""
    return secrets.token_hex(4)


class EventLog:
    """Appends events from any number of processes of one machine: each line is a single O_APPEND write, so lines never
    mix, and they survive the death of the writer.

    Each line ends with `writer`, `at` and `chain`: the BLAKE2b of the first `at` bytes of the file and of the line up
    to `chain`. The first `at` bytes are everything that this writer found: lines of all writers, whole or torn. So
    every line confirms all bytes before it, and no writer waits for another. If another writer's line came in between,
    `at` is before the line's own start, and the next line confirms both.
    """

    def __init__(self, path: Path, hide: Hidden | None = None, *, writer: str = "") -> None:
        """Reads the existing file. `hide`: applied to every line. `writer`: in every line, random by default. Raises
        StorageError."""
        self._path, self._hide = path, hide or Hidden()
        self._writer = writer or new_writer()
        self._before = hashlib.blake2b(digest_size=CHAIN_BYTES)
        self._at = 0
        self.chain = ""
        """Hash in the last line of this writer."""
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                os.write(self._file, b"\n")  # a crash tore the last line: begin a new one
            self._catch_up()

    def write(self, event: Event) -> None:
        """Raises StorageError if the event cannot be written."""
        with writing(self._path):
            # Other writers may have appended since: the chain must cover their lines.
            self._catch_up()
            seal = {"writer": self._writer, "at": self._at}
            now = {"time_s": time.time(), "monotonic_s": time.monotonic()}
            own = {field.name: getattr(event, field.name) for field in fields(event)}  # `asdict` copies every value
            record = {"event": event.kind, **now, **own, **seal}
            body = self._hide(write_json(record, default=asdict))[:-1].encode()
            chain = self._before.copy()
            chain.update(body)
            line = b'%b, "chain": "%b"}\n' % (body, chain.hexdigest().encode())
            if (written := os.write(self._file, line)) < len(line):
                raise OSError(f"only {written} of {len(line)} bytes were written")
        self.chain = chain.hexdigest()

    def sync(self) -> None:
        """Flushes all lines to disk, so that they survive a crash of the machine. Raises StorageError."""
        with writing(self._path):
            os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)

    def _catch_up(self) -> None:
        """Adds the bytes written since the last call to the hash."""
        while data := os.pread(self._file, READ_BYTES, self._at):
            self._before.update(data)
            self._at += len(data)
