import pytest

from asyncrl.trainer.step.loop import learning_rate


def test_warm_up_is_linear_and_ends_at_the_peak():
    assert [learning_rate(s, peak=8.0, warmup_steps=4) for s in range(6)] == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_without_warm_up_the_first_step_has_the_peak():
    assert learning_rate(0, peak=3.0, warmup_steps=0) == 3.0


def test_steps_count_from_zero():
    with pytest.raises(ValueError, match="-1"):
        learning_rate(-1, peak=1.0, warmup_steps=0)
