"""Stops the run when too many of the last groups failed or were filtered. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path

from asyncrl.errors import RunFailed, explain
from asyncrl.types import EndShares

MIN_ENDED_FOR_FAILED = 32
"""Fewest ended groups for which the share of failed ones is meaningful."""


class EndWindow:
    """How many of the last `size` ended groups had one certain end."""

    def __init__(self, size: int) -> None:
        self._ends: deque[bool] = deque(maxlen=size)

    def add(self, hit: bool) -> None:
        self._ends.append(hit)

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def hits(self) -> int:
        return sum(self._ends)

    @property
    def is_full(self) -> bool:
        return len(self._ends) == self._ends.maxlen

    @property
    def share(self) -> float:
        return self.hits / len(self._ends) if self._ends else 0.0

    def to_text(self) -> str:
        """One character per end, oldest first."""
        return "".join("1" if hit else "0" for hit in self._ends)

    def load_text(self, text: Iterable[str]) -> None:
        """Restores the text of `to_text`; a smaller window keeps the newest ends."""
        self._ends.clear()
        self._ends.extend(character == "1" for character in text)


class EndBudgets:
    """Owns the windows of the last failed and the last filtered groups, and their limits."""

    def __init__(
        self, *, max_failed: float, failed_window: int, max_filtered: float, filtered_window: int, events_path: Path
    ) -> None:
        """
        Args:
            max_failed, failed_window: largest share of failed groups, checked from MIN_ENDED_FOR_FAILED groups on.
            max_filtered, filtered_window: largest share of filtered groups in a full window; 1: no limit.
            events_path: the file named in the errors.
        """
        self._max_failed, self._max_filtered = max_failed, max_filtered
        self._events_path = events_path
        self.failed = EndWindow(failed_window)
        self.filtered = EndWindow(filtered_window)

    def add(self, end: str) -> None:
        self.failed.add(end == "failed")
        self.filtered.add(end == "filtered")

    @property
    def shares(self) -> EndShares:
        return EndShares(filtered=self.filtered.share, failed=self.failed.share)

    def check(self) -> None:
        """Raises RunFailed: a share is over its limit."""
        failed, filtered = self.failed, self.filtered
        if len(failed) >= MIN_ENDED_FOR_FAILED and failed.share > self._max_failed:
            asked = f"at most {self._max_failed:.4g} of the groups may fail (rollout.max_failed_fraction)"
            found = f"{failed.hits} of the last {len(failed)} ended groups failed"
            do = f"read the tracebacks of the `failed` events in {self._events_path}"
            raise RunFailed(explain(asked, found, do))
        if self._max_filtered < 1 and filtered.is_full and filtered.share > self._max_filtered:
            asked = f"at most {self._max_filtered:.4g} of the groups may be filtered (algorithm.max_filtered_fraction)"
            found = f"{filtered.hits} of the last {len(filtered)} ended groups had equal rewards"
            do = "train on data that is neither too easy nor too hard for the policy, check the reward, or set "
            raise RunFailed(explain(asked, found, f"{do}algorithm.dynamic_sampling=false"))
