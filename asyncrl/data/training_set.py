"""The training prompts of a recipe: one source or a mixture, filtered by the curriculum, rendered."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from asyncrl.config.data import CurriculumConfig, DataConfig
from asyncrl.data.dataset import load_rows
from asyncrl.data.prompt_stream import SourceRows
from asyncrl.data.rows import PromptRow
from asyncrl.data.tokenizer import PromptRenderer, RenderedPrompts, render_rows
from asyncrl.errors import DataError, explain


def sources_of(data: DataConfig) -> dict[str, tuple[str, float]]:
    """name -> (path or hub name, weight) of everything that is trained on."""
    if data.mixture:
        return {name: (source.path, source.weight) for name, source in data.mixture.items()}
    return {"train": (data.train, 1.0)}


def training_prompts(
    data: DataConfig, renderer: PromptRenderer | None, may_read: Callable[[str], bool]
) -> RenderedPrompts | None:
    """All training prompts; None when some cannot be had yet: no `renderer`, or a source that may not be read.

    Every source that may be read is, so that a bad row is found.

    Raises DataError: a row cannot be read, has no number of the curriculum or too long a prompt; or a source has none
    left.
    """
    parts: list[tuple[str, float, RenderedPrompts, np.ndarray]] = []
    complete = renderer is not None
    num_filtered = 0
    for name, (path, weight) in sources_of(data).items():
        if not may_read(path):
            complete = False
            continue
        rows = load_rows(path, data.schema, data.system_prompt)
        if data.curriculum.key:
            kept = within_curriculum(rows, data.curriculum, path)
            num_filtered += len(rows) - len(kept)
            rows = kept
        if renderer is None:
            continue
        rendered = render_rows(rows, renderer, data.max_prompt_tokens, data.on_long_prompt)
        ease = np.array([ease_of(row, data.curriculum.key) for row in rendered.rows]) if data.curriculum.key else None
        parts.append((name, weight, rendered, np.empty(0) if ease is None else ease))
    if not complete:
        return None
    return _joined(data, parts, num_filtered)


def within_curriculum(rows: Sequence[PromptRow], curriculum: CurriculumConfig, path: str) -> list[PromptRow]:
    """Those between `min` and `max`. Raises DataError: a row without the number, or none left."""
    kept = [row for row in rows if curriculum.min <= ease_of(row, curriculum.key) <= curriculum.max]
    if not kept:
        found = f"no row has {curriculum.key} between {curriculum.min:g} and {curriculum.max:g}"
        raise DataError(explain(f"the curriculum of {path}", found, "widen data.curriculum.min and max"))
    return kept


def ease_of(row: PromptRow, key: str) -> float:
    """The number under `key` of the row's extra_info. Raises DataError naming the row."""
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


def _joined(
    data: DataConfig, parts: Sequence[tuple[str, float, RenderedPrompts, np.ndarray]], num_filtered: int
) -> RenderedPrompts:
    sources: list[SourceRows] = []
    start = 0
    for name, weight, rendered, _ in parts:
        sources.append(SourceRows(name, weight, start, start + len(rendered.rows)))
        start = sources[-1].stop
    joined = RenderedPrompts(
        tuple(row for _, _, rendered, _ in parts for row in rendered.rows),
        tuple(ids for _, _, rendered, _ in parts for ids in rendered.prompt_ids),
        sum(rendered.num_dropped for _, _, rendered, _ in parts),
    )
    return replace(
        joined,
        num_filtered=num_filtered,
        sources=tuple(sources) if data.mixture else (),
        ease=np.concatenate([ease for *_, ease in parts]) if data.curriculum.key else None,
        curriculum=data.curriculum if data.curriculum.key else None,
    )
