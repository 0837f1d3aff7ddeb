import numpy as np
import pytest

from asyncrl.queue.group_files import ARRAYS, load_groups, save_groups
from tests.make import group


@pytest.mark.parametrize("count", [0, 1, 3])
def test_groups_survive_a_round_trip(tmp_path, count):
    groups = [group(i, attempt=i % 2, versions=(i, i + 1)) for i in range(count)]
    save_groups(tmp_path, groups)
    loaded = load_groups(tmp_path)
    assert [(g.ordinal, g.attempt) for g in loaded] == [(g.ordinal, g.attempt) for g in groups]
    for before, after in zip(groups, loaded, strict=True):
        for a, b in zip(before.trajectories, after.trajectories, strict=True):
            assert (a.segments, a.reward, a.finish_reason) == (b.segments, b.reward, b.finish_reason)
            for name in ARRAYS:
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
                assert getattr(a, name).dtype == getattr(b, name).dtype
