"""pass@k and the intervals against brute force, and what single responses add up to."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rollout.evaluation import Answer, mean_interval, pass_at_k, summarise, wilson_interval


@given(st.integers(1, 2000), st.data())
def test_pass_at_k_grows_with_k_from_the_mean_to_one(number, data):
    correct = data.draw(st.integers(0, number))
    k = data.draw(st.integers(1, number))
    assert pass_at_k(number, correct, 1) == pytest.approx(correct / number)
    assert pass_at_k(number, correct, number) == (correct > 0)
    assert pass_at_k(number, correct, k) >= pass_at_k(number, correct, max(1, k - 1)) - 1e-12
    exact = 1 - math.comb(number - correct, k) / math.comb(number, k)
    assert pass_at_k(number, correct, k) == pytest.approx(exact, abs=1e-9)


@pytest.mark.parametrize(("number", "correct", "k"), [(4, 2, 0), (4, 2, 5), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_what_cannot_be(number, correct, k):
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at_k(number, correct, k)


@pytest.mark.parametrize(("rate", "number"), [(0.0, 10), (0.3, 10), (1.0, 40), (0.5, 1)])
def test_wilson_bounds_are_the_rates_that_the_score_test_just_accepts(rate, number):
    for bound in wilson_interval(rate, number):
        distance = abs(rate - bound) / math.sqrt(max(bound * (1 - bound), 1e-300) / number)
        assert bound == rate or distance == pytest.approx(1.959964, rel=1e-5)
    low, high = wilson_interval(rate, number)
    assert 0 <= low <= rate <= high <= 1
    assert low < high


@pytest.mark.parametrize("samples", [1, 4])
def test_the_interval_holds_the_truth_as_often_as_it_says(samples):
    """Prompts differ, responses to one prompt are alike: an interval over all responses would be far too narrow."""
    rng, hits, runs = np.random.default_rng(1), 0, 2000
    for _ in range(runs):
        difficulty = rng.beta(0.5, 0.5, 100)
        low, high = mean_interval([int(c) for c in rng.binomial(samples, difficulty)], samples)
        hits += low <= 0.5 <= high
    assert 0.925 <= hits / runs <= 0.97


def test_the_interval_of_prompts_that_do_equally_well_is_no_point():
    assert mean_interval([4] * 10, 4) == wilson_interval(1.0, 10)
    assert mean_interval([2] * 10, 4) == wilson_interval(0.5, 10)
    assert mean_interval([3], 4) == wilson_interval(0.75, 1)


def test_the_clustered_interval_is_that_of_the_prompt_means():
    counts = [0, 4, 2, 3, 1, 4]
    rates = np.array(counts) / 4
    half = 1.959964 * rates.std(ddof=1) / math.sqrt(6)
    assert mean_interval(counts, 4) == pytest.approx((rates.mean() - half, rates.mean() + half), rel=1e-6)


@pytest.mark.parametrize("copies", [1, 4])
def test_the_interval_holds_the_truth_when_the_set_repeats_its_questions(copies):
    """Questions that are repeated unequally often, as copies and as samples; counted as independent they would hold it
    in two runs of three."""
    rng, hits, runs = np.random.default_rng(2), 0, 2000
    for _ in range(runs):
        difficulty = rng.beta(0.5, 0.5, 60)
        questions = np.repeat(np.arange(60), rng.integers(1, 2 * copies, 60, endpoint=True))
        counts = rng.binomial(2, difficulty[questions])
        low, high = mean_interval([int(c) for c in counts], 2, questions.tolist())
        hits += low <= 0.5 <= high
    assert 0.925 <= hits / runs <= 0.97


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 5), st.randoms(use_true_random=False))
def test_copies_of_every_prompt_make_an_interval_no_narrower(counts, copies, random):
    """The same answers again say nothing new. One response to each is Wilson's interval, which is another formula."""
    prompts = [(question, count) for question, count in enumerate(counts)] * copies
    random.shuffle(prompts)
    found = mean_interval([c for _, c in prompts], 3, [q for q, _ in prompts])
    assert found == pytest.approx(mean_interval(counts, 3), abs=1e-12)


def test_the_cluster_robust_error_of_unequal_questions_by_hand():
    """Three questions with 1 of 2, 4 of 4 and 0 of 2 right: m = 5/8, residuals -1/4, 3/2, -5/4."""
    half = 1.959964 * math.sqrt(3 / 2 * (0.25**2 + 1.5**2 + 1.25**2)) / 8
    found = mean_interval([1, 2, 0, 2], 2, ["a", "b", "c", "b"])
    assert found == pytest.approx((max(0, 0.625 - half), min(1, 0.625 + half)), rel=1e-6)


def _answer(correct, version=3, tokens=10):
    return Answer(correct, 1.0 if correct else -1.0, tokens, frozenset({version}))


def test_a_result_counts_what_failed_as_not_right_but_not_in_the_means_of_what_came():
    answers = [[_answer(True), _answer(False, tokens=30)], [_answer(True, version=4), None]]
    result = summarise("held_out", answers, (1, 2))
    assert (result.accuracy, result.samples, result.num_prompts, result.num_failed) == (0.5, 2, 2, 1)
    assert result.pass_at == ((1, 0.5), (2, 1.0))
    assert result.reward_mean == pytest.approx(1 / 3)
    assert result.response_tokens_mean == pytest.approx(50 / 3)
    assert (result.pass_rates, result.versions, result.num_questions) == ((0.5, 0.5), (3, 4), 2)
    same = summarise("held_out", answers, (1, 2), ["a", "a"])
    assert (same.num_questions, same.interval) == (1, wilson_interval(0.5, 1))
    assert result.metrics() == {
        "eval/accuracy/held_out": 0.5,
        "eval/mean@2/held_out": 0.5,
        "eval/pass@1/held_out": 0.5,
        "eval/pass@2/held_out": 1.0,
    }


def test_one_response_to_each_prompt_has_no_mean_at_k():
    assert summarise("gsm8k", [[_answer(True)], [_answer(False)]]).metrics() == {"eval/accuracy/gsm8k": 0.5}
