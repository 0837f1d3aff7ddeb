"""Reads a dataset from a file, a directory or the hub: `load_rows`. Files are read in order of their names."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.paths import how_to_make, is_place
from asyncrl.data.rows import PromptRow, RowReader, Schema, with_system_prompt
from asyncrl.errors import DataError, explain

SUFFIXES = (".jsonl", ".parquet")
READ_ROWS = 4096
"""Rows of a parquet file or a hub dataset per read."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A dataset on the Hugging Face hub: `name` (with or without organisation), its configuration and split."""

    name: str
    config: str | None = None
    split: str = "train"

    def __str__(self) -> str:
        return f"{self.name}{f'/{self.config}' if self.config else ''}:{self.split}"


def load_rows(source: str, schema: Schema = "auto", system_prompt: str | None = None) -> list[PromptRow]:
    """All rows of `source`, in memory. As `read_rows`."""
    return list(read_rows(source, schema, system_prompt))


def read_rows(
    source: str, schema: Schema = "auto", system_prompt: str | None = None, unused: set[str] | None = None
) -> Iterator[PromptRow]:
    """Yields the rows of `source`: a JSONL or parquet file, a directory of files, or a hub name.

    Args:
        schema: of the rows, as `data.schema`.
        system_prompt: prepended to rows without a system message.
        unused: gets the names of the columns that no row uses.

    Raises DataError: nothing there, no rows, or a malformed row (named by file and line).
    """
    reader = RowReader(schema, unused)
    if is_place(source):
        path = Path(source).expanduser()
        if not path.exists():
            raise _missing(source, path)
        rows = itertools.chain.from_iterable(_read_file(file, reader) for file in _files(path))
    else:
        rows = read_hub(parse_hub_name(source), reader)
    # Checked at the end: rows are streamed, so emptiness is known only then.
    is_empty = True
    for row in rows:
        is_empty = False
        yield row if system_prompt is None else with_system_prompt(row, system_prompt)
    if is_empty:
        raise DataError(explain(f"the dataset {source}", "it has no rows", "name one that has, or generate it again"))


def parse_hub_name(source: str) -> HubName:
    """Splits `name`, `org/name`, `org/name/config`, each with an optional `:split`. Raises DataError."""
    name, colon, split = source.partition(":")
    parts = name.split("/")
    if len(parts) > 3 or not all(parts) or (colon and not split):
        do = "write name, org/name or org/name/config, then optionally :split; or the path of a file"
        raise DataError(explain(f"the dataset {source}", "neither a file nor a hub name", do))
    return HubName("/".join(parts[:2]), parts[2] if len(parts) == 3 else None, split or "train")


def read_hub(hub: HubName, reader: RowReader | None = None) -> Iterator[PromptRow]:
    """Rows of a hub dataset, downloaded on first use. Raises DataError with the hub's own reason."""
    # Imported late: it takes seconds, and most runs read files.
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        dataset = datasets.load_dataset(hub.name, hub.config, split=hub.split)
    except (OSError, ValueError, DatasetsError) as error:
        do = "check the name, configuration and split; log in for a private one; or give the path of a file"
        raise DataError(explain(f"the dataset {hub} from the hub", _why(error), do)) from error
    reader = reader or RowReader()
    columns = reader.needed(dataset.column_names)
    batches = dataset.select_columns(columns).with_format("arrow").iter(batch_size=READ_ROWS)
    yield from _batch_rows(batches, str(hub), reader)


def _why(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, ConnectionError):
        return f"the hub cannot be reached, and the cache does not have it ({text})"
    return text


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES) if path.is_dir() else [path]
    for file in files:
        if not file.is_file() and not file.is_dir():
            do = "name a regular file, or a directory of them"
            raise DataError(explain(f"the dataset {file}", "a device, pipe or socket, which may never end", do))
    suffixes = sorted({file.suffix for file in files})
    if len(suffixes) != 1:
        found = f"both {' and '.join(suffixes)} files" if suffixes else "no .jsonl and no .parquet file in it"
        # The same rows are often stored in both formats: reading both would silently double them.
        raise DataError(explain(f"the directory {path}", found, "name one file, or a directory of one format"))
    return files


def _read_file(path: Path, reader: RowReader) -> Iterator[PromptRow]:
    if path.suffix == ".jsonl":
        yield from _read_jsonl(path, reader)
    elif path.suffix == ".parquet":
        yield from _read_parquet(path, reader)
    else:
        found = f"the suffix {path.suffix or '(none)'}"
        raise DataError(explain(f"the dataset {path}", found, "give a .jsonl (one object a line) or a .parquet file"))


def _read_jsonl(path: Path, reader: RowReader) -> Iterator[PromptRow]:
    try:
        with path.open(encoding="utf-8-sig") as lines:  # some editors begin a file with a byte order mark
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield reader.line(line, f"{path}:{number}")
    except UnicodeDecodeError as error:
        raise DataError(explain(f"the dataset {path}", f"not UTF-8: {error}", "save it as UTF-8")) from error
    except OSError as error:
        raise DataError(explain(f"the dataset {path}", str(error), "make it readable")) from error


def _read_parquet(path: Path, reader: RowReader) -> Iterator[PromptRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:  # else the whole file is kept
            columns = reader.needed(file.schema_arrow.names)
            yield from _batch_rows(file.iter_batches(READ_ROWS, columns=columns), str(path), reader)
    except pyarrow.ArrowInvalid as error:
        raise DataError(explain(f"the dataset {path}", f"not parquet: {error}", "write it again")) from error
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(explain(f"the dataset {path}", f"it is damaged: {error}", "write it again")) from error


def _batch_rows(batches: Iterable[Any], place: str, reader: RowReader) -> Iterator[PromptRow]:
    """The rows of Arrow's batches or tables."""
    records = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
    for number, record in enumerate(records):
        yield reader.record(record, f"{place}:row {number}")


def _missing(source: str, path: Path) -> DataError:
    # Suggest the closest name in the nearest folder that exists.
    folder = next(parent for parent in path.parents if parent.is_dir())
    names = [entry.name for entry in folder.iterdir()]
    wanted = path.relative_to(folder).parts[0]
    close = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    found = f"no such file; {folder}/ holds {close[0]}" if close else f"no such file in {folder}/"
    do = f"name {folder / close[0]} or another existing file" if close else "name an existing file"
    if command := how_to_make(source):
        do = f"make it with `{command}`, or {do}"
    return DataError(explain(f"the dataset {source}", found, do))
