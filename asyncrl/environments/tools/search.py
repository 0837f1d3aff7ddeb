"""Search over a local corpus: BM25 over its words."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError, explain

K1, B = 1.2, 0.75
"""Term saturation and length normalisation; the usual values (Robertson and Zaragoza 2009)."""
MAX_RESULTS = 10


class Search:
    """Searches a corpus and owns its index.

    Args:
        corpus: JSONL file of {"title", "text"}, read by `start`.

    Raises ConfigError: no such file.
    """

    name = "search"
    description = "Searches a collection of documents and returns the best matches."
    parameters: dict[str, Any] = {  # noqa: RUF012 - a constant
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "words to look for"},
            "num_results": {"type": "integer", "description": f"1 to {MAX_RESULTS}; 3 unless given"},
        },
        "required": ["query"],
    }

    def __init__(self, corpus: str) -> None:
        self._path = Path(corpus).expanduser()
        if not self._path.is_file():
            do = 'name a JSONL file, a line {"title": ..., "text": ...} for each document'
            raise ConfigError(explain(f"rollout.tool_use.corpus={corpus}", "there is no such file", do))
        self._documents: list[tuple[str, str]] = []
        self._postings: dict[str, list[tuple[int, float]]] = {}

    def start(self) -> None:
        """Reads and indexes the corpus. Raises ConfigError naming the line."""
        counts: list[Counter[str]] = []
        with self._path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    title, text = self._document(line, number)
                    self._documents.append((title, text))
                    counts.append(Counter(_words(f"{title} {text}")))
        lengths = [sum(count.values()) for count in counts]
        mean = sum(lengths) / max(1, len(lengths)) or 1.0
        found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for index, count in enumerate(counts):
            for word, times in count.items():
                found[word].append((index, times))
        for word, places in found.items():
            rarity = math.log(1 + (len(counts) - len(places) + 0.5) / (len(places) + 0.5))
            self._postings[word] = [
                (i, rarity * n * (K1 + 1) / (n + K1 * (1 - B + B * lengths[i] / mean))) for i, n in places
            ]

    def call(self, query: str, num_results: int = 3) -> str:
        """The best documents, best first, one paragraph each."""
        scores: dict[int, float] = defaultdict(float)
        for word in set(_words(str(query))):
            for index, score in self._postings.get(word, ()):
                scores[index] += score
        best = sorted(scores, key=lambda index: (-scores[index], index))[: max(1, min(MAX_RESULTS, int(num_results)))]
        if not best:
            return "No document has any of these words."
        return "\n\n".join(f"{n}. {self._documents[i][0]}\n{self._documents[i][1]}" for n, i in enumerate(best, 1))

    def _document(self, line: str, number: int) -> tuple[str, str]:
        try:
            record = json.loads(line)
            return str(record.get("title", "")), record["text"] + ""
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            do = 'write {"title": ..., "text": ...} a line'
            raise ConfigError(explain(f"the document at {self._path}:{number}", repr(error), do)) from error


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
