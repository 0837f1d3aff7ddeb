"""The order of prompts: a pure function from an ordinal to a dataset row, so that the data cursor is one integer."""

from __future__ import annotations

import numpy as np

_CACHED_EPOCHS = 2  # ordinals in flight straddle at most one epoch boundary


class PromptStream:
    """The endless stream of prompts over `num_rows` rows.

    `row_index(ordinal)` depends on (num_rows, seed, shuffle, ordinal) alone: any process, in any order of calls, and
    after any resume gets the same answer. Each epoch visits each row once; with `shuffle` in an order of its own.
    """

    def __init__(self, num_rows: int, seed: int, shuffle: bool = True) -> None:
        """Raises ValueError: no rows, or a negative seed."""
        if num_rows < 1 or seed < 0:
            raise ValueError(f"num_rows={num_rows} must be at least 1 and seed={seed} at least 0")
        self.num_rows = num_rows
        self.seed = seed
        self.shuffle = shuffle
        self._orders: dict[int, np.ndarray] = {}

    def epoch(self, ordinal: int) -> int:
        """How often every row has been visited before `ordinal`. Raises ValueError: negative ordinal."""
        if ordinal < 0:
            raise ValueError(f"ordinal={ordinal} is negative")
        return ordinal // self.num_rows

    def row_index(self, ordinal: int) -> int:
        """The row in `[0, num_rows)` that prompt `ordinal` asks. O(1) but for the first call of an epoch."""
        epoch, position = self.epoch(ordinal), ordinal % self.num_rows
        if not self.shuffle:
            return position
        if epoch not in self._orders:
            while len(self._orders) >= _CACHED_EPOCHS:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = _permutation(self.num_rows, self.seed, epoch)
        return int(self._orders[epoch][position])


def _permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """[num_rows] int64: the rows sorted by a hash of (seed, epoch, row).

    Own hash instead of numpy's generators: their streams may change between releases, and a checkpoint must find the
    same order under any of them.
    """
    key = _mix(_mix(np.array([seed], np.uint64)) ^ np.array([epoch], np.uint64))
    return np.argsort(_mix(key + np.arange(num_rows, dtype=np.uint64)), kind="stable")


def _mix(values: np.ndarray) -> np.ndarray:
    """A bijective hash of [n] uint64, wrapping. Source: the SplitMix64 finaliser (Steele et al., OOPSLA 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
