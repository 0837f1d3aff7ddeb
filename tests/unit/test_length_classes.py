"""Classes of similar length: every sequence in one of them, padded work within the limit, and no class too many."""

from itertools import chain, combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.trainer.length_classes import MAX_WORK_RATIO, length_classes, spared_work

LENGTHS = st.lists(st.integers(1, 12) | st.integers(1, 400), min_size=1, max_size=8)
RATIOS, SPARED = st.sampled_from([1.0, 1.05, 1.25, 2.0]), st.sampled_from([0, 20, 4096])


def work(lengths, classes):
    return sum(len(c) * max(lengths[i] for i in c) ** 2 for c in classes)


def exact(lengths):
    return sum(n**2 for n in lengths)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=200), RATIOS, SPARED)
@settings(max_examples=60, deadline=None)
def test_each_sequence_is_in_one_class_and_the_work_is_bounded(lengths, max_ratio, spared):
    classes = length_classes(lengths, max_ratio=max_ratio, spared=spared)
    assert sorted(np.concatenate(classes).tolist()) == list(range(len(lengths)))
    assert work(lengths, classes) <= max_ratio * exact(lengths) + spared
    assert all((np.diff(c) > 0).all() for c in classes)
    for one, other in pairwise(classes):  # sequences of one length share a class
        assert min(lengths[i] for i in one) > max(lengths[i] for i in other)


@given(LENGTHS, RATIOS, SPARED)
def test_fewer_classes_break_the_limit_and_as_many_do_no_less_work(lengths, max_ratio, spared):
    found = length_classes(lengths, max_ratio=max_ratio, spared=spared)
    distinct = sorted(set(lengths), reverse=True)
    members = [[i for i, n in enumerate(lengths) if n == size] for size in distinct]
    for count in range(1, len(found) + 1):
        least = min(
            work(lengths, [list(chain(*members[low:high])) for low, high in pairwise([0, *cuts, len(distinct)])])
            for cuts in combinations(range(1, len(distinct)), count - 1)
        )
        if count < len(found):
            assert least > max_ratio * exact(lengths) + spared
        else:
            assert work(lengths, found) == least


def test_a_long_tail_takes_few_classes():
    draw = np.random.default_rng(0)
    lengths = np.where(draw.random(256) < 0.05, 262, draw.integers(14, 54, 256))
    classes = length_classes(lengths, spared=spared_work("cpu"))
    assert len(classes) == 3
    assert work(lengths, classes) <= MAX_WORK_RATIO * exact(lengths) + spared_work("cpu")
    assert work(lengths, [range(256)]) > 10 * exact(lengths)
    assert len(length_classes([64] * 128)) == len(length_classes([8, 9, 30], spared=spared_work("cpu"))) == 1
    assert spared_work("cuda") > spared_work("cpu")


@pytest.mark.parametrize("bad", [{"lengths": []}, {"lengths": [3, 0]}, {"lengths": [3], "max_ratio": 0.9}])
def test_bad_input_is_named(bad):
    with pytest.raises(ValueError, match="no classes for lengths"):
        length_classes(**bad)
