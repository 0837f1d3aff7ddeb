"""The corrections against their papers' formulas in float64 numpy, and what they share at the edges."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.algorithms import build_correction
from asyncrl.algorithms.loss import FittedCorrection
from asyncrl.config.algorithm import AlgorithmConfig, CorrectionConfig
from asyncrl.config.algorithm_parts import CORRECTIONS
from asyncrl.errors import ConfigError
from tests.numerics.losses import draw


def build(name, ratio, low=0.0, high=2.0):
    config = AlgorithmConfig(ratio=ratio)
    return build_correction(CorrectionConfig(name=name, low=low, high=high), config)


def run(correction, tokens):
    inputs = tokens.torch()
    if isinstance(correction, FittedCorrection):
        inputs = replace(inputs, fitted={"m2po": correction.fit([inputs], lambda values: values)})
    factor, touched = correction(inputs)
    assert not factor.requires_grad
    assert touched.dtype == torch.bool
    return factor.numpy(), touched.numpy()


def mismatch(t, ratio):
    before = t.old_logprobs if ratio == "proximal" else t.logprobs
    return before - t.behavior_logprobs


def per_sequence(t, values, reduce):
    """[n]: `reduce` over the trained tokens of each token's trajectory."""
    out = np.zeros(len(values))
    for tokens in t.trajectories():
        trained = tokens[t.mask[tokens]]
        if len(trained):
            out[tokens] = reduce(values[trained])
    return out


def paper(t, name, ratio, low, high):
    """(factor, touched) as the papers write them, token by token."""
    m = np.exp(mismatch(t, ratio))
    weight = m if ratio == "proximal" else np.ones_like(m)
    match name:
        case "truncated_is":
            factor, touched = np.minimum(m, high), m > high
        case "sequence_truncated_is":
            whole = np.exp(per_sequence(t, np.log(m), np.sum))
            factor, touched = np.minimum(whole, high), whole > high
        case "masked_is":
            factor, touched = np.where(m <= high, weight, 0), m > high
        case "icepop":
            touched = ~((low <= m) & (m <= high))
            factor = np.where(touched, 0, weight)
        case "geometric_rejection":
            mean = np.exp(per_sequence(t, np.log(m), np.mean))
            touched = ~((low <= mean) & (mean <= high))
            factor = np.where(touched, 0.0, 1.0)
        case "off_policy_mask":
            left = per_sequence(t, t.behavior_logprobs - t.logprobs, np.mean)
            touched = (t.advantages < 0) & (left > high)
            factor = np.where(touched, 0.0, 1.0)
        case "m2po":
            squares = np.where(t.mask, np.log(m) ** 2, np.inf)
            order = np.argsort(squares)[: t.mask.sum()]
            kept = order[: (np.cumsum(squares[order]) / (1 + np.arange(len(order))) <= high).sum()]
            touched = ~np.isin(np.arange(len(m)), kept)
            factor = np.where(touched, 0.0, 1.0)
    return np.where(t.mask, factor, 0), touched & t.mask


BOUNDS = {
    "truncated_is": (0.0, 1.1),
    "sequence_truncated_is": (0.0, 2.0),
    "masked_is": (0.0, 1.2),
    "icepop": (0.8, 1.3),
    "geometric_rejection": (0.9, 1.1),
    "off_policy_mask": (0.0, 0.05),
    "m2po": (0.0, 0.04),
}
CASES = [
    (name, ratio)
    for name in BOUNDS
    for ratio in ("proximal", "behavior")
    if ratio == "proximal" or name not in ("truncated_is", "sequence_truncated_is")
]


def test_every_correction_is_tested():
    assert set(BOUNDS) == set(CORRECTIONS)


@pytest.mark.parametrize(("name", "ratio"), CASES)
def test_factor_and_touched_are_the_papers(name, ratio):
    low, high = BOUNDS[name]
    hits = []
    for t in map(draw, range(3)):
        factor, touched = run(build(name, ratio, low, high), t)
        expected, expected_touched = paper(t, name, ratio, low, high)
        np.testing.assert_allclose(factor, expected, rtol=1e-12)
        np.testing.assert_array_equal(touched, expected_touched)
        hits += touched[t.mask].tolist()
    assert 0 < sum(hits) < len(hits), "there are tokens on both sides of the bounds"


@pytest.mark.parametrize(("name", "ratio"), CASES)
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("field", ["logprobs", "old_logprobs", "behavior_logprobs", "advantages"])
def test_masked_tokens_contribute_nothing_whatever_they_hold(name, ratio, junk, field):
    t = draw(3)
    dirty = getattr(t, field).copy()
    dirty[~t.mask] = junk
    correction = build(name, ratio, *BOUNDS[name])
    for clean, found in zip(run(correction, t), run(correction, t.with_(**{field: dirty})), strict=True):
        np.testing.assert_array_equal(clean, found)


@pytest.mark.parametrize(("name", "ratio"), CASES)
def test_equal_policies_are_left_alone(name, ratio):
    t = draw(4)
    t = t.with_(old_logprobs=t.behavior_logprobs, logprobs=t.behavior_logprobs)
    factor, touched = run(build(name, ratio, *BOUNDS[name]), t)
    np.testing.assert_array_equal(factor, t.mask.astype(float))
    assert not touched.any()


@pytest.mark.parametrize(("name", "ratio"), CASES)
@pytest.mark.parametrize("distance", [-200.0, 200.0, 1e4])
def test_huge_ratios_stay_finite(name, ratio, distance):
    t = draw(5)
    t = t.with_(behavior_logprobs=t.behavior_logprobs - distance)
    factor, _ = run(build(name, ratio, *BOUNDS[name]), t)
    assert np.isfinite(factor).all()
    assert factor.max() <= max(1.0, BOUNDS[name][1])


@pytest.mark.parametrize(("name", "ratio"), CASES)
def test_empty_masks_single_tokens_and_masked_sequences(name, ratio):
    correction = build(name, ratio, *BOUNDS[name])
    t = draw(6)
    factor, touched = run(correction, t.with_(mask=np.zeros_like(t.mask)))
    assert not factor.any()
    assert not touched.any()
    single = draw(7, sizes=(1, 1, 1), masked=0)
    np.testing.assert_allclose(run(correction, single)[0], paper(single, name, ratio, *BOUNDS[name])[0], rtol=1e-12)
    hidden = t.with_(mask=t.mask & (t.sequences != 2))
    rest = hidden.pick(np.flatnonzero(hidden.sequences != 2))
    np.testing.assert_array_equal(run(correction, hidden)[0][hidden.sequences != 2], run(correction, rest)[0])


@pytest.mark.parametrize("name", list(CORRECTIONS))
def test_what_the_recipe_leaves_out_has_bounds_that_keep_equal_policies(name):
    ratio = "proximal" if name in ("truncated_is", "sequence_truncated_is") else "behavior"
    t = draw(4)
    t = t.with_(old_logprobs=t.behavior_logprobs, logprobs=t.behavior_logprobs)
    _, touched = run(build(name, ratio, None, None), t)
    assert not touched.any()
    low, high = CorrectionConfig(name=name).bounds
    assert CorrectionConfig(name=name, low=low or None, high=high).bounds == (low, high)


@pytest.mark.parametrize(
    ("name", "low", "high", "message"),
    [
        ("truncated_is", 0.5, 2.0, "no lower bound"),
        ("sequence_truncated_is", 0.5, None, "no lower bound"),
        ("masked_is", 0.5, None, "no lower bound"),
        ("off_policy_mask", 0.1, 0.5, "no lower bound"),
        ("off_policy_mask", None, 0.0, "nats"),
        ("off_policy_mask", None, float("inf"), "nats"),
        ("m2po", 0.1, 0.5, "no lower bound"),
        ("m2po", None, 0.0, "squared nats"),
        ("truncated_is", None, 0.9, "low <= 1 <= high"),
        ("icepop", 1.1, 5.0, "low <= 1 <= high"),
        ("icepop", 0.5, float("inf"), "low <= 1 <= high"),
        ("icepop", float("nan"), None, "low <= 1 <= high"),
        ("geometric_rejection", 1.0, 1.0, "low <= 1 <= high"),
        ("geometric_rejection", -1.0, None, "low <= 1 <= high"),
    ],
)
def test_bounds_that_mean_nothing_are_refused(name, low, high, message):
    with pytest.raises(ConfigError, match=message):
        CorrectionConfig(name=name, low=low, high=high)


@pytest.mark.parametrize("name", ["truncated_is", "sequence_truncated_is"])
def test_weighing_over_the_behavior_policy_is_refused(name):
    with pytest.raises(ConfigError, match="count twice"):
        AlgorithmConfig(ratio="behavior", corrections=[CorrectionConfig(name=name)])
