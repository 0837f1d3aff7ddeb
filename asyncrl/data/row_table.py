"""Rows in a memory-mapped file: `RowWriter` writes it, `RowTable` reads single rows.

Only rows that a process has read occupy memory, in reclaimable pages. The file is Arrow IPC; all record batches except
the last hold `BATCH_ROWS` rows.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from asyncrl.data.rows import ChatMessage, PromptRow
from asyncrl.errors import writing

_TEXTS = ("ground_truth", "data_source", "origin")
"""Fields of a row that are stored as they are."""
ENDLESS = 2**40
"""Rows of a generator, by number: more than any run asks for, and more than any table has."""
BATCH_ROWS = 1024
"""Rows per batch: few enough that reading a row touches few pages, many enough that the batch list stays short."""


class RowTable(Sequence[PromptRow]):
    """The rows of a `RowWriter`'s file, in order. Pickled as the path: processes on one machine map the same file."""

    def __init__(self, path: Path, num_rows: int) -> None:
        self.path = path
        self._num_rows = num_rows
        self._reader: Any = None
        self._unlink: weakref.finalize[..., Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RowTable, (self.path, self._num_rows)

    def __len__(self) -> int:
        return self._num_rows

    @overload
    def __getitem__(self, index: int) -> PromptRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[PromptRow]: ...
    def __getitem__(self, index: int | slice) -> PromptRow | list[PromptRow]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._num_rows))]
        if not -self._num_rows <= index < self._num_rows:
            raise IndexError(f"row {index} of {self._num_rows}")
        batch, row = divmod(index % self._num_rows, BATCH_ROWS)
        return _row(self._batch(batch).slice(row, 1).to_pylist()[0])

    def __iter__(self) -> Iterator[PromptRow]:
        for number in range(-(-self._num_rows // BATCH_ROWS)):
            yield from map(_row, self._batch(number).to_pylist())

    def keep(self, path: Path) -> None:
        """Moves the file to `path` permanently; otherwise it is deleted with this object. Raises StorageError."""
        with writing(path):
            shutil.move(self.path, path)
        if self._unlink is not None:
            self._unlink.detach()
        self.path, self._reader = path, None

    def _batch(self, number: int) -> Any:
        if self._reader is None:
            import pyarrow

            self._reader = pyarrow.ipc.open_file(pyarrow.memory_map(str(self.path)))
        return self._reader.get_batch(number)


class RowWriter:
    """Writes a `RowTable` to the temporary directory; its file is deleted with the table unless `RowTable.keep` is
    called."""

    def __init__(self) -> None:
        import pyarrow

        text = pyarrow.string()
        names = ("role", "content", "more"), ("key", "value")
        messages, extra = (pyarrow.list_(pyarrow.struct([(name, text) for name in pair])) for pair in names)
        texts = [(name, text) for name in _TEXTS]
        lists = [("messages", messages), ("extra", extra), ("structured", pyarrow.list_(text))]
        self._schema = pyarrow.schema([*lists, *texts])
        self._waiting: list[dict[str, Any]] = []
        self._num_rows = 0
        with writing("a file in the temporary directory (TMPDIR)"):
            descriptor, name = tempfile.mkstemp(prefix="asyncrl-rows-", suffix=".arrow")
        os.close(descriptor)
        self._path = Path(name)
        self._unlink = weakref.finalize(self, self._path.unlink, missing_ok=True)
        self._file = pyarrow.ipc.new_file(str(self._path), self._schema)

    def __len__(self) -> int:
        return self._num_rows

    def add(self, row: PromptRow) -> None:
        """Raises StorageError."""
        messages = [{"role": m.role, "content": m.content, "more": m.more} for m in row.messages]
        extra = [{"key": key, "value": value} for key, value in row.extra]
        lists = {"messages": messages, "extra": extra, "structured": row.structured}
        self._waiting.append(lists | {name: getattr(row, name) for name in _TEXTS})
        self._num_rows += 1
        if len(self._waiting) == BATCH_ROWS:
            self._flush()

    def table(self) -> RowTable:
        """The table of all added rows; ends the writer. Raises StorageError."""
        if self._waiting:
            self._flush()
        with writing(self._path):
            self._file.close()
        # Ownership of the file passes from the writer to the table.
        self._unlink.detach()
        table = RowTable(self._path, self._num_rows)
        table._unlink = weakref.finalize(table, self._path.unlink, missing_ok=True)
        return table

    def _flush(self) -> None:
        import pyarrow

        with writing(self._path):
            self._file.write_batch(pyarrow.RecordBatch.from_pylist(self._waiting, schema=self._schema))
        self._waiting.clear()


def _row(record: dict[str, Any]) -> PromptRow:
    return PromptRow(
        messages=tuple(ChatMessage(**message) for message in record["messages"]),
        extra=tuple((pair["key"], pair["value"]) for pair in record["extra"]),
        structured=tuple(record["structured"]),
        **{name: record[name] for name in _TEXTS},
    )


# Records of prompts: the sources of a mixture, and the rendered rows of a held-out set.


@dataclass(frozen=True, slots=True)
class SourceRows:
    """Rows `[start, stop)` of the training prompts come from the source `name`, which has `weight` in the mixture.
    Generator number k has `[(k + 1) * ENDLESS, (k + 2) * ENDLESS)`."""

    name: str
    weight: float
    start: int
    stop: int

    @property
    def is_endless(self) -> bool:
        return self.start >= ENDLESS


@dataclass(frozen=True, slots=True, eq=False)
class RenderedPrompts:
    """The rows of a held-out set with their prompts: `prompt_ids[i]`, [P] int32, is of `rows[i]`. `num_dropped` rows
    were too long. Training prompts are a `data.training_set.TrainingSet`."""

    rows: tuple[PromptRow, ...]
    prompt_ids: tuple[np.ndarray, ...]
    num_dropped: int
