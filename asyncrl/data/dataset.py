"""Reads a dataset from a file, a directory or the hub: `load_rows`, or draws one: `GeneratedRows`. Files are read in
order of their names."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.data import DataConfig
from asyncrl.config.paths import how_to_make, is_generator, is_place
from asyncrl.data.rows import PromptRow, RowReader, Schema, with_system_prompt
from asyncrl.errors import DataError, explain
from asyncrl.registry import resolve

SUFFIXES = (".jsonl", ".parquet")
READ_ROWS = 4096
"""Rows of a parquet file or a hub dataset per read."""
MOST_DRAWS = 50
"""Rows of a generator that may be refused before one is taken."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A dataset on the Hugging Face hub: `name` (with or without organisation), its configuration and split."""

    name: str
    config: str | None = None
    split: str = "train"

    def __str__(self) -> str:
        return f"{self.name}{f'/{self.config}' if self.config else ''}:{self.split}"


def load_rows(
    source: str, schema: Schema = "auto", system_prompt: str | None = None, image_directory: str | None = None
) -> list[PromptRow]:
    """All rows of `source`, in memory. As `read_rows`."""
    return list(read_rows(source, schema, system_prompt, image_directory=image_directory))


def read_rows(
    source: str,
    schema: Schema = "auto",
    system_prompt: str | None = None,
    unused: set[str] | None = None,
    image_directory: str | None = None,
) -> Iterator[PromptRow]:
    """Yields the rows of `source`: a JSONL or parquet file, a directory of files, or a hub name.

    Args:
        schema: of the rows, as `data.schema`.
        system_prompt: prepended to rows without a system message.
        unused: gets the names of the columns that no row uses.
        image_directory: as `data.image_directory`.

    Raises DataError: nothing there, no rows, or a malformed row (named by file and line).
    """
    reader = RowReader(schema, unused, image_directory)
    if is_generator(source):
        do = "write some of its rows to a file, and name that: only training rows are drawn from a generator"
        raise DataError(explain(f"the dataset {source}", "a generator, which has no end", do))
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
        if "/" not in hub.name:
            do += "; the module of a generator `module:Name` must be in the working directory or on PYTHONPATH"
        found = _named(error)
        if isinstance(error, ConnectionError):
            found = f"the hub cannot be reached, and the cache does not have it ({found})"
        raise DataError(explain(f"the dataset {hub} from the hub", found, do)) from error
    reader = reader or RowReader()
    columns = reader.needed(dataset.column_names)
    batches = dataset.select_columns(columns).with_format("arrow").iter(batch_size=READ_ROWS)
    yield from _batch_rows(batches, str(hub), reader)


class GeneratedRows:
    """The rows of a generator, `data.train` or a source of the mixture: each a pure function of its index."""

    def __init__(self, name: str, options: Mapping[str, Any], key: str, data: DataConfig) -> None:
        """`key`: decides the seeds. Raises ConfigError, DataError: the generator cannot be imported or made."""
        self.name = name
        self._options = dict(options)
        self._key = key
        self._data = data
        self._made: dict[int, Any] = {}
        self.reader = RowReader(data.schema, image_directory=data.image_directory)
        self._generator(0)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_made": {}}  # made again in each process: what users bring need not be picklable

    def row(self, index: int, is_taken: Callable[[PromptRow], bool]) -> PromptRow:
        """The first row taken of those drawn for `index`, each with its own seed.

        Raises DataError: none is taken, the generator fails, or a row is malformed.
        """
        for draw in range(MOST_DRAWS):
            origin = f"{self.name}(seed={self._seed(draw)})[{index}]"
            try:
                line = json.dumps(self._generator(draw)[index])
            except (Exception, SystemExit) as error:
                raise DataError(explain(f"the row {origin}", _named(error), "correct the generator")) from error
            row = self.reader.line(line, origin)
            if self._data.system_prompt is not None:
                row = with_system_prompt(row, self._data.system_prompt)
            if is_taken(row):
                return row
        found = f"none of {MOST_DRAWS} rows: their prompts are too long, or questions of held-out sets"
        do = "give the generator more questions, raise data.max_prompt_tokens, or hold out fewer"
        raise DataError(explain(f"a row of {self.name}, index {index}", found, do))

    def _seed(self, draw: int) -> int:
        """31 bits, which numpy takes too."""
        return int.from_bytes(hashlib.blake2b(f"{self._key} {draw}".encode(), digest_size=4).digest(), "little") >> 1

    def _generator(self, draw: int) -> Any:
        if draw not in self._made:
            found: Any = resolve("data.train", self.name, {})
            try:
                self._made[draw] = found(seed=self._seed(draw), **self._options)
            except (Exception, SystemExit) as error:
                do = "correct the generator, or its arguments in options"
                raise DataError(explain(f"{self.name} with {self._options}", _named(error), do)) from error
        return self._made[draw]


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


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
