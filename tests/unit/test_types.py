from dataclasses import replace

import numpy as np
import pytest

from asyncrl.types import Segment
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
