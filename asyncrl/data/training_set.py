"""The training prompts of a recipe: one source or a mixture; deduplicated, filtered by the curriculum, checked.

Rows are read once into a mapped file and rendered when needed, so that millions of rows take no private memory in
driver and rollouter (docs/adr/0016-prompts-are-rendered-when-they-are-asked.md).
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from asyncrl.config.data import CurriculumConfig, DataConfig, SourceConfig
from asyncrl.config.paths import is_generator
from asyncrl.data.dataset import GeneratedRows, read_rows
from asyncrl.data.row_table import ENDLESS, RowTable, RowWriter, SourceRows
from asyncrl.data.rows import PromptRow
from asyncrl.data.tokenizer import PromptRenderer, none_short, too_long
from asyncrl.errors import DataError, explain

TOKENIZED_ROWS = 64
"""Rows whose token ids enter the digest, which detects a tokenizer that splits texts differently."""


_FAR = 100_000
"""A row that no short list of rows has."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSet:
    """The training rows of a run; each renders to at most `data.max_prompt_tokens` tokens.

    Dropped rows: `num_duplicates` repeat an earlier row, `num_filtered` are outside the curriculum, `num_dropped` are
    too long. `unused`: columns that no row uses.

    `sources` tile the rows of a mixture; `ease`: [rows] float64, the curriculum's number. `digest` covers
    prompts, ground truths, `extra` (which rewards read) and their order: ordinals mean the same tasks only under the
    same digest. `data.prompt_stream` maps ordinals to rows.
    """

    rows: RowTable
    digest: str
    num_duplicates: int = 0
    num_filtered: int = 0
    num_dropped: int = 0
    unused: tuple[str, ...] = ()
    sources: tuple[SourceRows, ...] = ()
    ease: np.ndarray | None = None
    curriculum: CurriculumConfig | None = None
    generators: tuple[GeneratedRows, ...] = ()
    drawn: tuple[PromptRow, ...] = ()
    """The first rows of the generators, for checks."""

    def row(self, index: int, is_taken: Callable[[PromptRow], bool]) -> PromptRow:
        """Row `index` of `build_stream`'s order. `is_taken`: of a row that is drawn. Raises DataError, as
        `GeneratedRows.row`."""
        number, place = divmod(index, ENDLESS)
        return self.rows[place] if number == 0 else self.generators[number - 1].row(place, is_taken)


def sources_of(data: DataConfig) -> dict[str, SourceConfig]:
    """name -> source of the training rows."""
    return data.mixture or {"train": SourceConfig(path=data.train, options=data.options)}


def training_prompts(
    data: DataConfig, renderer: PromptRenderer | None, may_read: Callable[[str], bool], seed: int = 0
) -> TrainingSet | None:
    """All training prompts; None if incomplete: no `renderer`, or a source that may not be read.

    Reads every permitted source in any case, to find bad rows; of a generator, whose rows `seed` decides, the first.

    Raises:
        DataError: a row is malformed, lacks the curriculum's number or has too long a prompt; or a source has no row
            left.
        StorageError: the temporary directory has no room for the rows.
    """
    if data.mixture and data.options:
        do = "write them into the sources of the mixture"
        raise DataError(explain(f"data.options={data.options}", "data.mixture, whose sources have options", do))
    collected = _Collected(data, renderer)
    complete = renderer is not None
    sources: list[SourceRows] = []
    for name, source in sources_of(data).items():
        if not may_read(source.path):
            complete = False
            continue
        if is_generator(source.path):
            collected.draw(GeneratedRows(source.path, source.options, f"{seed} {name}", data))
            start, stop = (ENDLESS * (len(collected.generators) + more) for more in (0, 1))
        else:
            if source.options:
                do = "leave the options out, or name a generator `package.module:Name`"
                raise DataError(explain(f"options of {source.path}", "they are arguments of a generator", do))
            start = len(collected.writer)
            collected.read(source.path)
            stop = len(collected.writer)
        sources.append(SourceRows(name, source.weight, start, stop))
    whole = data.mixture or collected.generators
    return collected.training_set(tuple(sources) if whole else ()) if complete else None


class _Collected:
    """The rows accepted so far, and the counts of rejected ones."""

    def __init__(self, data: DataConfig, renderer: PromptRenderer | None) -> None:
        self._data = data
        self._renderer = renderer
        self.writer = RowWriter()
        self._digest = hashlib.blake2b(b"" if renderer is None else renderer.identity(), digest_size=16)
        self._ease: list[float] = []
        self._duplicates = self._filtered = self._dropped = 0
        self._unused: set[str] = set()
        self.generators: list[GeneratedRows] = []
        self._drawn: list[PromptRow] = []

    def draw(self, generator: GeneratedRows) -> None:
        """Adds a generator, and checks its first rows. Raises DataError."""
        if self._data.curriculum.key:
            do = "leave it out, or write rows of the generator to a file"
            raise DataError(explain(f"data.curriculum.key={self._data.curriculum.key}", generator.name, do))
        self.generators.append(generator)
        renderer, start = self._renderer, len(self._drawn)
        for index in range(TOKENIZED_ROWS):
            row = generator.row(index, lambda row: renderer is None or self._fits(row, renderer))
            self._drawn.append(row)
        # A row must be the same whenever it is asked for, and there must always be another one.
        again, last = copy.copy(generator), TOKENIZED_ROWS - 1
        same = again.row(last, lambda row: renderer is None or text_within(row, renderer, self._data) is not None)
        if same != self._drawn[start + last]:
            do = "make a row from the seed and the index alone"
            asked = f"row {last} of {generator.name} a second time"
            raise DataError(explain(asked, "it is another one: a retry or a resume would train it", do))
        again.row(_FAR, lambda row: True)
        self._unused |= generator.reader.unused

    def read(self, path: str) -> None:
        """Adds the rows of one source. Raises DataError, StorageError."""
        data, key = self._data, self._data.curriculum.key
        in_range = dropped = taken = 0
        for row in self._distinct(read_rows(path, data.schema, data.system_prompt, self._unused, data.image_directory)):
            ease = ease_of(row, key) if key else 0.0
            if key and not data.curriculum.min <= ease <= data.curriculum.max:
                self._filtered += 1
                continue
            in_range += 1
            if self._renderer is None:
                continue
            if self._fits(row, self._renderer, tokenizes=len(self.writer) < TOKENIZED_ROWS):
                self.writer.add(row)
                self._ease.append(ease)
                taken += 1
            else:
                dropped += 1
        # Both checks are per source: an empty source would silently change the mixture.
        if not in_range:
            found = f"no row has {key} between {data.curriculum.min:g} and {data.curriculum.max:g}"
            raise DataError(explain(f"the curriculum of {path}", found, "widen data.curriculum.min and max"))
        if dropped and not taken:
            raise none_short(dropped, data.max_prompt_tokens)
        self._dropped += dropped

    def training_set(self, sources: tuple[SourceRows, ...]) -> TrainingSet:
        key = self._data.curriculum.key
        ease = np.array(self._ease) if key else None
        if sources:
            self._digest.update(repr(sources).encode())
        if ease is not None:
            self._digest.update(ease.tobytes() + repr(self._data.curriculum).encode())
        return TrainingSet(
            self.writer.table(),
            self._digest.hexdigest(),
            num_duplicates=self._duplicates,
            num_filtered=self._filtered,
            num_dropped=self._dropped,
            unused=tuple(sorted(self._unused)),
            sources=sources,
            ease=ease,
            curriculum=self._data.curriculum if key else None,
            generators=tuple(self.generators),
            drawn=tuple(self._drawn),
        )

    def _distinct(self, rows: Iterator[PromptRow]) -> Iterator[PromptRow]:
        """Drops duplicates within one source; across sources they count for the weights of the mixture."""
        seen: set[int] = set()
        for row in rows:
            if self._data.drop_duplicates:
                before = len(seen)
                seen.add(likeness(row))
                if len(seen) == before:
                    self._duplicates += 1
                    continue
            yield row

    def _fits(self, row: PromptRow, renderer: PromptRenderer, *, tokenizes: bool = True) -> bool:
        """Adds a row to the digest; False if it is too long. Raises DataError if that is an error."""
        text = text_within(row, renderer, self._data)
        if text is None:
            return False
        # The digest covers all that a prompt or reward depends on, in order; see `TrainingSet.digest`.
        extra = json.dumps(sorted(row.extra), default=repr)
        self._digest.update("\0".join((text, row.ground_truth, extra, "")).encode())
        if tokenizes:
            self._digest.update(renderer.prompt_ids(row).tobytes())
        return True


def text_within(row: PromptRow, renderer: PromptRenderer, data: DataConfig) -> str | None:
    """The text of the row's prompt; None if it is too long. Raises DataError if that is an error."""
    text, limit = renderer.text(row), data.max_prompt_tokens
    if (tokens := renderer.tokens_over(row, text, limit)) is None:
        return text
    if data.on_long_prompt == "drop":
        return None
    raise too_long(row, tokens, limit)


def likeness(row: PromptRow) -> int:
    """A 64-bit hash of messages, ground truth, source and `extra` without `index` (a row number); equal for duplicates.
    Two million rows collide with probability 1e-7."""
    extra = tuple(pair for pair in row.extra if pair[0] != "index")
    return hash((row.messages, row.ground_truth, row.data_source, extra))


def ease_of(row: PromptRow, key: str) -> float:
    """The number `key` in the row's extra_info. Raises DataError naming the row."""
    extra = dict(row.extra)
    asked = f"data.curriculum.key={key} of the row at {row.origin}"
    if key not in extra:
        found = f"its extra_info has {', '.join(sorted(extra)) or 'nothing'}"
        raise DataError(explain(asked, found, f"write a number {key} into every row, as `asyncrl-eval --rows` does"))
    try:
        value = float(json.loads(extra[key]))
    except (ValueError, TypeError):
        value = math.nan
    if not math.isfinite(value):
        raise DataError(explain(asked, f"{extra[key][:60]!r}, no finite number", "write a number there"))
    return value
