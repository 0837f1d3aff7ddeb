"""Types of numbers that declare their range, for records that are read back from files."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, slots=True)
class Range:
    """The finite numbers in [low, high]."""

    low: float
    high: float = sys.float_info.max

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


Whole = Annotated[int, Range(0, 2**63 - 1)]
Share = Annotated[float, Range(0, 1)]
Seconds = Annotated[float, Range(0)]
