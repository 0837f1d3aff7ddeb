from itertools import pairwise

import pytest

from asyncrl.config.trainer import TrainerConfig
from asyncrl.trainer.step.loop import learning_rate


def test_linear_falls_evenly_from_the_peak_to_its_share():
    config = TrainerConfig(lr=8.0, warmup_steps=2, schedule="linear", decay_steps=6, min_lr_fraction=0.25)
    rates = [learning_rate(config, s, 100) for s in range(9)]
    assert rates == pytest.approx([4.0, 8.0, 8.0, 6.5, 5.0, 3.5, 2.0, 2.0, 2.0])


def test_cosine_is_flat_at_both_ends_and_half_way_in_the_middle():
    config = TrainerConfig(lr=1.0, warmup_steps=0, schedule="cosine", decay_steps=10)
    rates = [learning_rate(config, s, 100) for s in range(12)]
    assert (rates[0], rates[5], rates[10], rates[11]) == pytest.approx((1.0, 0.5, 0.0, 0.0))
    drops = [a - b for a, b in pairwise(rates[:11])]
    assert min(drops) > 0
    assert drops[0] < drops[4] > drops[9]


def test_constant_never_falls():
    assert learning_rate(TrainerConfig(lr=3.0, warmup_steps=5, min_lr_fraction=0.1), 10**6, 10) == 3.0


def test_the_warm_up_waits_for_the_first_step_that_trains():
    config = TrainerConfig(lr=8.0, schedule="linear", warmup_steps=2)
    rates = [learning_rate(config, step, 9, start=3) for step in range(10)]
    assert rates == pytest.approx([0, 0, 0, 4, 8, 8, 6, 4, 2, 0])


def test_a_run_that_ends_within_its_warm_up_only_rises():
    rates = [learning_rate(TrainerConfig(lr=4.0, warmup_steps=4, schedule="linear"), s, 3) for s in range(4)]
    assert rates == [1.0, 2.0, 3.0, 4.0]


def test_the_end_of_the_run_is_the_end_unless_the_recipe_says_otherwise():
    config = TrainerConfig(lr=1.0, schedule="linear", warmup_steps=0)
    assert learning_rate(config, 50, 100) == pytest.approx(0.5)
    assert learning_rate(config, 50, 100, peak=3.0) == pytest.approx(1.5)
    early = TrainerConfig(lr=1.0, schedule="linear", decay_steps=50)
    assert learning_rate(early, 50, 100) == 0


def test_warm_up_is_linear_and_ends_at_the_peak():
    config = TrainerConfig(lr=8.0, warmup_steps=4)
    assert [learning_rate(config, s, 100) for s in range(6)] == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_without_warm_up_the_first_step_has_the_peak():
    assert learning_rate(TrainerConfig(lr=3.0, warmup_steps=0), 0, 100) == 3.0


def test_steps_count_from_zero():
    with pytest.raises(ValueError, match="-1"):
        learning_rate(TrainerConfig(), -1, 100)
