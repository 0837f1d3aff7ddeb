"""When the ends of the last groups stop a run."""

import random
from collections import deque
from pathlib import Path

import pytest

from asyncrl.errors import RunFailed
from asyncrl.queue.budgets import EndBudgets, EndWindow


def budgets(**changes):
    limits = {"max_failed": 0.25, "failed_window": 64, "max_filtered": 0.9, "filtered_window": 20} | changes
    return EndBudgets(**limits, events_path=Path("run/events.jsonl"))


def add(limits, end, count):
    for _ in range(count):
        limits.add(end)


@pytest.mark.parametrize("size", [1, 7])
def test_a_window_looks_at_the_last_ends_only(size):
    window, last, draw = EndWindow(size), deque(maxlen=size), random.Random(size)
    assert window.share == 0
    for _ in range(50):
        hit = draw.random() < 0.4
        window.add(hit)
        last.append(hit)
        assert (window.hits, len(window), window.share) == (sum(last), len(last), sum(last) / len(last))
        copy = EndWindow(size)
        copy.load_text(window.to_text())
        assert (copy.hits, copy.to_text()) == (window.hits, window.to_text())


def test_failed_groups_count_from_32_ends_on_and_within_their_window():
    limits = budgets()
    add(limits, "failed", 31)
    limits.check()
    limits.add("failed")
    with pytest.raises(RunFailed, match=r"32 of the last 32 ended groups failed(.|\n)*run/events\.jsonl"):
        limits.check()
    add(limits, "trained", 48)
    assert limits.shares.failed == 16 / 64
    limits.check()
    limits.add("expired")
    limits.add("failed")
    limits.check()


def test_filtered_groups_count_when_their_window_is_full():
    limits = budgets()
    add(limits, "filtered", 19)
    limits.check()
    limits.add("filtered")
    with pytest.raises(
        RunFailed, match=r"20 of the last 20 ended groups had equal rewards(.|\n)*dynamic_sampling=false"
    ):
        limits.check()
    add(limits, "trained", 2)
    assert limits.shares.filtered == 0.9
    limits.check()


def test_a_fraction_of_one_stops_nothing():
    limits = budgets(max_filtered=1.0)
    add(limits, "filtered", 100)
    limits.check()
