"""Sorts the sequences of a packed row into classes of similar length; attention pads each class to its longest. Pure.

The work of attention grows with the square of the padded length. A few classes keep it near the exact work, at the
price of one attention call per class.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_WORK_RATIO = 1.25
"""Largest work of padded attention, as a multiple of the exact work, apart from `spared_work`."""
_SPARED = {"cpu": 1 << 12, "cuda": 1 << 18}


def spared_work(device: str) -> int:
    """Pairs of positions that cost less than one more attention call on a kind of device (an estimate). This much
    padding is always allowed, so that short sequences are not divided without a gain."""
    return _SPARED.get(device, _SPARED["cuda"])


def length_classes(
    lengths: Sequence[int] | np.ndarray, *, max_ratio: float = MAX_WORK_RATIO, spared: int = 0
) -> tuple[np.ndarray, ...]:
    """The classes, longest sequences first; each sequence is in one class.

    There are as few classes as the limit allows, cut for the least padded work. Limit, over all sequences:

        sum of (longest of the class) ** 2  <=  max_ratio * sum of length ** 2 + spared

    Sequences of one length share a class.

    Args:
        lengths: [S] tokens of each sequence, at least 1.
        max_ratio: at least 1, which allows no padding beyond `spared`.
        spared: pairs of positions.

    Returns:
        [sequences] int64 for each class: indices into `lengths`, rising.

    Raises:
        ValueError: no lengths, one below 1, or a ratio below 1.
    """
    sizes = np.asarray(lengths, np.int64)
    if sizes.ndim != 1 or not sizes.size or sizes.min() < 1 or max_ratio < 1 or spared < 0:
        raise ValueError(f"no classes for lengths {sizes.tolist()}, max_ratio={max_ratio}, spared={spared}")
    order = np.argsort(-sizes, kind="stable")
    distinct, counts = np.unique(sizes, return_counts=True)
    distinct, ends = distinct[::-1], np.append(0, counts[::-1].cumsum())
    limit = max_ratio * float((sizes.astype(np.float64) ** 2).sum()) + spared
    classes = np.split(order, ends[_cuts(distinct.astype(np.float64), ends, limit)])
    return tuple(np.sort(members) for members in classes)


def _cuts(distinct: np.ndarray, ends: np.ndarray, limit: float) -> list[int]:
    """Indices into `distinct` at which a new class begins.

    Dynamic programming over the number of classes: `least[j]` is the smallest work of the sequences with the first j
    distinct lengths. D distinct lengths take D ** 2 steps per number of classes, and a row of N tokens has at most
    sqrt(2 N) distinct lengths.

    Args:
        distinct: [D] float64, falling. ends: [D + 1] int64, how many sequences have one of the first j lengths.
    """
    least = distinct[0] ** 2 * ends.astype(np.float64)
    least[0] = np.inf  # a class is never empty
    if least[-1] <= limit:
        return []
    places = np.arange(len(ends))
    # work[i, j]: one class with the distinct lengths i .. j - 1
    work = np.where(places[:-1, None] < places, (ends - ends[:-1, None]) * distinct[:, None] ** 2, np.inf)
    begins: list[np.ndarray] = []
    # Allow one more class per round until the limit holds.
    while least[-1] > limit and len(begins) + 1 < len(distinct):
        found = least[:-1, None] + work
        begins.append(found.argmin(0))
        least = found.min(0)
    # Follow the best choices back from the last class.
    cuts, at = [], len(distinct)
    for begin in reversed(begins):
        at = int(begin[at])
        cuts.append(at)
    return cuts[::-1]
