from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from asyncrl.types import Segment, Trajectory
from tests.make import trajectory


@pytest.mark.parametrize(
    "broken",
    [
        {"prompt_ids": np.zeros(0, np.int32)},
        {"logprobs": np.zeros(3, np.float32)},
        {"loss_mask": np.ones(5, np.bool_)},
        {"segments": ()},
        {"segments": (Segment(0, 3, 0, 0),)},
        {"segments": (Segment(0, 2, 0, 0), Segment(3, 4, 0, 0))},
        {"segments": (Segment(0, 4, 0, 0, "environment"),)},
        {"reward": float("nan")},
        {"extra": {"teacher_logprobs": np.zeros(3, np.float32)}},
        {"extra": {"teacher_logprobs": np.array([0, -1, -np.inf, 0], np.float32)}},
        {"extra": {"teacher_logits": np.zeros(4, np.float32)}},
        {"extra": {"top_ids": np.zeros(4, np.int32)}},
        {"extra": {"top_ids": np.zeros((3, 2), np.int32)}},
        {"extra": {"top_ids": np.full((4, 2), -1, np.int32)}},
        {"extra": {"top_logprobs": np.full((4, 2), -np.inf, np.float32)}},
    ],
)
def test_a_malformed_trajectory_is_refused(broken):
    good = trajectory().validate()
    with pytest.raises(ValueError, match=f"{next(iter(broken))}|segment"):
        replace(good, **broken).normalized().validate()


# -- arrays of others --------------------------------------------------------------------------------------------------


PLAIN = {
    "prompt_ids": np.array([5, 6], np.int32),
    "response_ids": np.array([7, 8, 9], np.int32),
    "logprobs": np.array([-0.5, -0.25, -1.0], np.float32),
    "loss_mask": np.array([True, True, False]),
    "segments": (Segment(0, 3, 1, 0),),
    "reward": 1.0,
    "reward_parts": (("exact", 1.0),),
}


class Marked(np.ndarray):
    """As memory-mapped arrays are."""


@pytest.mark.parametrize(
    "make", [list, tuple, pd.Series, torch.tensor, lambda a: a.astype(float), lambda a: a.view(Marked)],
    ids=["list", "tuple", "pandas", "torch", "float64", "subclass"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["prompt_ids", "response_ids", "logprobs", "loss_mask"])
def test_whatever_numpy_takes_for_an_array_becomes_a_plain_one(make, name):
    made = Trajectory(**PLAIN | {name: make(PLAIN[name])}).normalized().validate()
    for each, array in PLAIN.items():
        if isinstance(array, np.ndarray):
            found = getattr(made, each)
            assert type(found) is np.ndarray
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("reward", np.float32(1.0)), ("reward", 1), ("reward", True),
        ("reward_parts", [("exact", 1.0)]), ("reward_parts", (["exact", 1.0],)),
        ("reward_parts", (("exact", np.float64(1.0)),)),
        ("segments", [Segment(0, 3, 1, 0)]),
    ],
)  # fmt: skip
def test_numbers_and_sequences_become_plain_ones(name, given):
    made = Trajectory(**PLAIN | {name: given}).normalized().validate()
    assert type(made.reward) is float
    assert made.reward_parts == PLAIN["reward_parts"]
    assert type(made.reward_parts[0]) is tuple
    assert type(made.reward_parts[0][1]) is float
    assert made.segments == PLAIN["segments"]


def test_what_is_plain_already_is_not_copied():
    plain = Trajectory(**PLAIN)
    assert plain.normalized() is plain


def test_extra_and_branches_are_looked_at_too():
    with pytest.raises(ValueError, match="extra has"):
        Trajectory(**PLAIN, extra={"unknown": np.zeros(3)}).normalized()
    branch = Trajectory(**PLAIN | {"reward": 0, "reward_parts": (), "response_ids": [7, 8, 9]})
    made = Trajectory(**PLAIN, branches=(branch,)).normalized().validate()
    assert made.branches[0].response_ids.dtype == np.int32
