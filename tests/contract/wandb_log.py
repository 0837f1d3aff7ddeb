"""Reads the transaction log that W&B's client writes: LevelDB's log format with protocol buffers in it."""

import json
import struct
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7
"""Bytes of a block, and of the header of each chunk in it."""
FILE_HEADER = 7


def history_of(path: Path) -> list[dict[str, Any]]:
    """The rows that were logged, in order. What a crash cut off at the end is left out."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append(
                {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            )
    return rows


def _records(data: bytes) -> list[bytes]:
    found, parts, at = [], [], FILE_HEADER
    while at + HEADER <= len(data):
        if (left := BLOCK - at % BLOCK) < HEADER:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        chunk = data[at + HEADER : at + HEADER + length]
        if not kind or len(chunk) < length:
            break
        parts = [chunk] if kind in (1, 2) else [*parts, chunk]  # 1 whole, 2 first, 3 middle, 4 last
        if kind in (1, 4):
            found.append(b"".join(parts))
        at += HEADER + length
    return found
