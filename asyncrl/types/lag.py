"""Lag in buckets, for metrics: how many tokens and groups are how stale."""

from __future__ import annotations

from bisect import bisect_left

LAST_OF_BUCKET = (0, 1, 2, 3, 4, 8, 16)
"""The largest lag of each bucket, in optimizer steps; one more bucket holds what is over."""

LAG_BUCKETS = ("0", "1", "2", "3", "4", "5-8", "9-16", "17+")
"""The names of the buckets, by rising lag."""


def lag_bucket(lag: int) -> int:
    """The place of its bucket in `LAG_BUCKETS`."""
    return bisect_left(LAST_OF_BUCKET, lag)


def lag_buckets_to(max_lag: int) -> tuple[str, ...]:
    """The buckets that a lag up to `max_lag` can be in."""
    return LAG_BUCKETS[: lag_bucket(max_lag) + 1]
