"""A publish as JSON, for servers started by someone else: they must not unpickle."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from typing import Any

from asyncrl.json_records import from_plain
from asyncrl.types import CollectiveSource, DiskSource, IpcSource, Manifest, PartsSource, TransferSource

_KINDS: dict[str, type[TransferSource]] = {"disk": DiskSource, "collective": CollectiveSource, "ipc": IpcSource}
_PARTS = "parts"


def write_order(manifest: Manifest, source: TransferSource, timeout_s: float) -> str:
    """`timeout_s`: the remaining time of the publish."""
    return json.dumps({"manifest": asdict(manifest), "source": _plain_source(source), "timeout_s": timeout_s})


def read_order(order: str) -> tuple[Manifest, TransferSource, float]:
    """Inverse of `write_order`. Raises ValueError: malformed order."""
    held = json.loads(order)
    if not isinstance(held, dict) or held.keys() != {"manifest", "source", "timeout_s"}:
        raise ValueError(f"{order[:60]!r} is no order of a publish")
    manifest = from_plain(Manifest, held["manifest"], "manifest")
    return manifest, _source(held["source"]), from_plain(float, held["timeout_s"], "timeout_s")


def _plain_source(source: TransferSource) -> dict[str, Any]:
    held: dict[str, Any] = {field.name: getattr(source, field.name) for field in fields(source)}
    if isinstance(source, PartsSource):
        return held | {"kind": _PARTS, "parts": [_plain_source(part) for part in source.parts]}
    kind = next(kind for kind, record in _KINDS.items() if type(source) is record)
    return {name: v.hex() if isinstance(v, bytes) else v for name, v in held.items()} | {"kind": kind}


def _source(value: Any) -> TransferSource:
    if not isinstance(value, dict) or value.get("kind") not in (*_KINDS, _PARTS):
        raise ValueError("the source is of no known kind")
    held = {name: item for name, item in value.items() if name != "kind"}
    if value["kind"] == _PARTS:
        parts = held.get("parts")
        if not isinstance(parts, list) or not parts:
            raise ValueError("source.parts is empty")
        read = [_source(part) for part in parts]
        first_tensors = from_plain(tuple[int, ...], held.get("first_tensors"), "source.first_tensors")
        return replace(PartsSource.of(read, first_tensors), receiver=from_plain(int, held.get("receiver"), "receiver"))
    record = _KINDS[value["kind"]]
    if record is not IpcSource:
        return from_plain(record, held, "source")
    proof = from_plain(str, held.pop("proof", ""), "source.proof")
    return replace(from_plain(IpcSource, held, "source"), proof=bytes.fromhex(proof))
