from itertools import pairwise

import pytest

from asyncrl.config.trainer import TrainerConfig
from asyncrl.trainer.step.loop import learning_rate


@pytest.mark.parametrize(
    ("options", "max_steps", "rates"),
    [
        ({"lr": 8.0, "warmup_steps": 4}, 100, [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]),
        ({"lr": 3.0, "warmup_steps": 0}, 100, [3.0]),
        ({"lr": 4.0, "warmup_steps": 4, "schedule": "linear"}, 3, [1.0, 2.0, 3.0, 4.0]),
        (
            {"lr": 8.0, "warmup_steps": 2, "schedule": "linear", "decay_steps": 6, "min_lr_fraction": 0.25},
            100,
            [4.0, 8.0, 8.0, 6.5, 5.0, 3.5, 2.0, 2.0, 2.0],
        ),
    ],
    ids=["constant", "without warm-up", "a run that ends within its warm-up", "linear"],
)
def test_the_rates_rise_to_the_peak_and_fall_evenly_to_its_share(options, max_steps, rates):
    config = TrainerConfig(**options)
    assert [learning_rate(config, step, max_steps) for step in range(len(rates))] == pytest.approx(rates, rel=1e-12)


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


def test_the_end_of_the_run_is_the_end_unless_the_recipe_says_otherwise():
    config = TrainerConfig(lr=1.0, schedule="linear", warmup_steps=0)
    assert learning_rate(config, 50, 100) == pytest.approx(0.5)
    assert learning_rate(config, 50, 100, peak=3.0) == pytest.approx(1.5)
    early = TrainerConfig(lr=1.0, schedule="linear", decay_steps=50)
    assert learning_rate(early, 50, 100) == 0


def test_steps_count_from_zero():
    with pytest.raises(ValueError, match="-1"):
        learning_rate(TrainerConfig(), -1, 100)
