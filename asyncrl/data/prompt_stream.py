"""The order of prompts: a pure function from an ordinal to a dataset row, so that the data cursor is one integer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.config.data import CurriculumConfig
from asyncrl.data.row_table import SourceRows
from asyncrl.types.splitmix import GOLDEN, mix_array

if TYPE_CHECKING:
    from asyncrl.data.training_set import TrainingSet

_CACHED_EPOCHS = 2  # ordinals in flight straddle at most one epoch boundary
_SHARES = 10_000
"""Longest period of a mixture: its shares are exact to one part in this number."""


def build_stream(prompts: TrainingSet, seed: int, shuffle: bool) -> PromptStream | MixedStream:
    """The stream over the training prompts of a run: one source, or a mixture; with a curriculum, if they have one."""
    if not prompts.sources:
        return PromptStream(len(prompts.rows), seed, shuffle, ease=prompts.ease, curriculum=prompts.curriculum)
    return MixedStream(
        prompts.sources,
        [
            PromptStream(
                source.stop - source.start,
                _seed_of(seed, source.name),
                shuffle and not source.is_endless,
                ease=None if prompts.ease is None else prompts.ease[source.start : source.stop],
                curriculum=prompts.curriculum,
            )
            for source in prompts.sources
        ],
    )


class PromptStream:
    """The endless stream of prompts over `num_rows` rows.

    `row_index(ordinal)` is a pure function of the arguments and the ordinal: the same in every process and after every
    resume. Each epoch visits each row once, shuffled per epoch with `shuffle`. The first `curriculum.epochs` epochs
    instead go from easy to hard, ordered by `ease` ([num_rows] float64) plus noise, uniform in +-`curriculum.jitter`,
    per epoch. Equally easy rows are shuffled.
    """

    def __init__(
        self,
        num_rows: int,
        seed: int,
        shuffle: bool = True,
        *,
        ease: np.ndarray | None = None,
        curriculum: CurriculumConfig | None = None,
    ) -> None:
        """Raises ValueError: no rows, or a negative seed."""
        if num_rows < 1 or seed < 0:
            raise ValueError(f"num_rows={num_rows} must be at least 1 and seed={seed} at least 0")
        self.num_rows = num_rows
        self.seed = seed
        self.shuffle = shuffle
        self._ease = ease
        self._ordered_epochs = curriculum.epochs if curriculum is not None and ease is not None else 0
        self._jitter = curriculum.jitter if curriculum is not None else 0.0
        self._orders: dict[int, np.ndarray] = {}

    def epoch(self, ordinal: int) -> int:
        """How often every row has been visited before `ordinal`. Raises ValueError: negative ordinal."""
        if ordinal < 0:
            raise ValueError(f"ordinal={ordinal} is negative")
        return ordinal // self.num_rows

    def row_index(self, ordinal: int) -> int:
        """The row in `[0, num_rows)` of prompt `ordinal`. O(1), except for the first call of an epoch. Raises
        ValueError: negative ordinal."""
        epoch, position = self.epoch(ordinal), ordinal % self.num_rows
        is_ordered = epoch < self._ordered_epochs
        if not self.shuffle and not is_ordered:
            return position
        if epoch not in self._orders:
            # Permutations are large; keep only the epochs in flight.
            while len(self._orders) >= _CACHED_EPOCHS:
                del self._orders[next(iter(self._orders))]
            keys = _keys(self.num_rows, self.seed, epoch)
            if is_ordered and self._ease is not None:
                self._orders[epoch] = _from_easy_to_hard(self._ease, self._jitter, keys)
            else:
                self._orders[epoch] = np.argsort(keys, kind="stable")
        return int(self._orders[epoch][position])


class MixedStream:
    """A mixture of streams: over any run of ordinals each source has its share, to within about one prompt.

    A pattern of at most `_SHARES` ordinals repeats; the k-th of a source's n ordinals lies at (k + 1/2) / n of it. The
    ordinal thus determines the source and the source's own ordinal; each source has its own epochs.
    """

    def __init__(self, sources: Sequence[SourceRows], streams: Sequence[PromptStream]) -> None:
        self._sources = tuple(sources)
        self._streams = tuple(streams)
        self._counts = _counts([source.weight for source in sources])
        # Exact fractions: with floats, equal positions of two sources would depend on rounding.
        places = sorted(
            (Fraction(2 * k + 1, 2 * count), number) for number, count in enumerate(self._counts) for k in range(count)
        )
        self._pattern = np.array([number for _, number in places])
        self._ranks = np.empty(len(places), dtype=np.int64)
        for number, count in enumerate(self._counts):
            self._ranks[self._pattern == number] = np.arange(count)

    def source(self, ordinal: int) -> tuple[int, int]:
        """(number of the source, ordinal in that source). Raises ValueError: negative ordinal."""
        if ordinal < 0:
            raise ValueError(f"ordinal={ordinal} is negative")
        period, place = divmod(ordinal, len(self._pattern))
        number = int(self._pattern[place])
        return number, period * self._counts[number] + int(self._ranks[place])

    def row_index(self, ordinal: int) -> int:
        number, own = self.source(ordinal)
        return self._sources[number].start + self._streams[number].row_index(own)


def _counts(weights: Sequence[float]) -> list[int]:
    """Ordinals per source in the shortest period that represents the weights."""
    total = sum(weights)
    counts = [max(1, round(weight / total * _SHARES)) for weight in weights]
    divisor = gcd(*counts)
    return [count // divisor for count in counts]


def _seed_of(seed: int, name: str) -> int:
    """A seed per source, so that sources of equal length have different orders."""
    text = f"{seed} {name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")


def _keys(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """[num_rows] uint64: a hash of (seed, epoch, row); the rows sorted by it are the epoch's permutation.

    An own hash, because numpy's generators may change between releases, and a resumed run must find the same order.
    """
    key = _mix(_mix(np.array([seed], np.uint64)) ^ np.array([epoch], np.uint64))
    return _mix(key + np.arange(num_rows, dtype=np.uint64))


def _from_easy_to_hard(ease: np.ndarray, jitter: float, keys: np.ndarray) -> np.ndarray:
    uniform = (_mix(keys) >> np.uint64(11)).astype(np.float64) * 2.0**-53  # exact, on every machine
    return np.lexsort((keys, -(ease + jitter * (2.0 * uniform - 1.0))))


def _mix(values: np.ndarray) -> np.ndarray:
    """A bijective hash of [n] uint64, wrapping: a step of SplitMix64."""
    return mix_array(values + np.uint64(GOLDEN))
