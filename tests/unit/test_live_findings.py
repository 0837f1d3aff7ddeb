"""What a run says of its learning while it learns, and what the plan says of it before."""

import logging

import pytest

from asyncrl.driver.off_policy import LEAST, LiveFindings
from asyncrl.types.metrics import Metric

HEALTHY = {
    Metric.REWARD_MEAN: 0.3,
    Metric.RATIO_MEAN: 1.0,
    Metric.CLIPPED: 0.01,
    Metric.KL_BEHAVIOR: 0.001,
    Metric.EFFECTIVE_SAMPLES: 0.98,
    Metric.ENTROPY: 0.5,
    Metric.TRUNCATED: 0.0,
    Metric.LOSS: 0.1,
    Metric.GRAD_NORM: 1.0,
}


def told(caplog, *changes, steps=12):
    """The warnings of `steps` steps, each with the last changes."""
    seen = LiveFindings({})
    with caplog.at_level(logging.WARNING):
        for step in range(steps):
            change = changes[min(step, len(changes) - 1)] if changes else {}
            seen.stepped(HEALTHY | {Metric.STEP: step, Metric.REWARD_MEAN: 0.3 + 0.01 * step} | change)
    return [record.getMessage() for record in caplog.records]


def test_a_healthy_run_says_nothing(caplog):
    assert told(caplog) == []


@pytest.mark.parametrize(
    ("change", "found", "key"),
    [
        ({Metric.EFFECTIVE_SAMPLES: 0.08}, "Collapsed importance ratio", "trainer.lr"),
        ({Metric.TRUNCATED: 1.0}, "Many responses are cut off", "max_response_tokens"),
        ({Metric.REWARD_MEAN: 0.0}, "The reward does not change", "reward.function"),
        ({Metric.REWARD_PART.of("agent_trained_share"): 0.2}, "Sampled tokens are left out", "all_branches"),
        ({Metric.REWARD_ZERO_SIGNAL: 0.9}, "Most groups carry no signal", "middling difficulty"),
        ({Metric.RATIO_MEAN: 9.0}, "Collapsed importance ratio", "staleness.max_lag"),
    ],
)
def test_a_run_that_goes_wrong_says_it_once_with_the_key(caplog, change, found, key):
    (message,) = told(caplog, change)
    assert message.startswith(found)
    assert key in message


def test_an_entropy_that_is_gone_is_told(caplog):
    falls = [{Metric.ENTROPY: 0.5 * 0.5**step} for step in range(12)]
    assert [message.partition(".")[0] for message in told(caplog, *falls)] == ["The entropy is gone"]


def test_the_first_steps_are_not_judged(caplog):
    assert told(caplog, {Metric.EFFECTIVE_SAMPLES: 0.01}, steps=LEAST - 1) == []
