"""Corrections that look at a whole update: M2PO's cut and the mean of batch-normalised weights, in float64 numpy."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms import build_correction, build_objective
from asyncrl.algorithms.batch_normalized import BatchNormalized
from asyncrl.algorithms.loss import FittedCorrection
from asyncrl.algorithms.m2po import M2po
from asyncrl.config.algorithm import AlgorithmConfig, CorrectionConfig
from asyncrl.config.algorithm_parts import CORRECTIONS
from asyncrl.errors import ConfigError
from tests.numerics.losses import clipped_surrogate, draw, slopes

WEIGHING = [name for name, spec in CORRECTIONS.items() if spec.weighs]


def alone(values: torch.Tensor) -> torch.Tensor:
    """`AddUp` of a single rank."""
    return values


def on_ranks(correction, microbatches_of_rank):
    """What each rank finds; all take part in every sum."""
    ranks = len(microbatches_of_rank)
    barrier, slots, found = threading.Barrier(ranks, timeout=20), [None] * ranks, [None] * ranks

    def run(rank):
        def add_up(values):
            slots[rank] = values.clone()
            barrier.wait()
            total = torch.stack(slots).sum(0)
            barrier.wait()
            return total

        found[rank] = correction.fit(microbatches_of_rank[rank], add_up)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def cuts(t, seed, ranks):
    """The trajectories of `t`, dealt to ranks and cut into micro-batches at random; no rank is without one."""
    rng = np.random.default_rng(seed)
    order, owner = rng.permutation(len(t.trajectories())), rng.integers(0, ranks, len(t.trajectories()))
    placeholder = t.pick(t.trajectories()[0][:1])
    placeholder = placeholder.with_(mask=np.zeros(1, bool)).torch()
    found = []
    for rank in range(ranks):
        own = [i for i in order if owner[i] == rank]
        parts = [p for p in np.array_split(own, rng.integers(1, 4)) if len(p)]
        found.append([t.pick(np.concatenate([t.trajectories()[i] for i in part])).torch() for part in parts])
        found[-1].append(placeholder)
    return found


def fewest_dropped(squares: np.ndarray, high: float) -> np.ndarray:
    """The paper's algorithm: drop the largest until the mean of the rest is at most `high`; equal ones together."""
    kept = np.ones(len(squares), bool)
    while kept.any() and squares[kept].sum() > high * kept.sum():
        kept &= squares < squares[kept].max()
    return kept


squares = st.lists(st.floats(0, 100, width=32), max_size=40) | st.lists(st.sampled_from([0.0, 0.01, 0.04, 1.0, 9.0]))


@settings(deadline=None, max_examples=200)
@given(values=squares, high=st.sampled_from([1e-3, 0.04, 1.0, 200.0]))
def test_the_cut_drops_the_fewest_tokens_that_suffice(values, high):
    ratios = np.sqrt(np.array(values, np.float64))
    t = draw(0, sizes=(max(1, len(values)),), masked=0)
    logprobs = t.logprobs[: len(values)] if values else t.logprobs
    t = t.with_(
        logprobs=logprobs,
        behavior_logprobs=logprobs - (ratios if values else 0),
        mask=np.array([bool(values)] * len(logprobs)),
    )
    inputs = t.torch()
    exact = (inputs.logprobs.detach() - inputs.behavior_logprobs).square().float().double().numpy()
    correction = M2po(0.0, high, "behavior")
    found = replace(inputs, fitted={"m2po": correction.fit([inputs], alone)})
    factor, touched = correction(found)
    expected = fewest_dropped(exact, high) if values else np.zeros(1, bool)
    np.testing.assert_array_equal(factor.numpy(), expected.astype(float))
    np.testing.assert_array_equal(touched.numpy(), ~expected if values else expected)


@pytest.mark.parametrize("ratio", ["behavior", "proximal"])
@pytest.mark.parametrize("high", [0.04, 1e-12, 1e6])
def test_m2po_is_the_same_for_every_packing_and_number_of_ranks(ratio, high):
    t = draw(2)
    correction = M2po(0.0, high, ratio)
    expected = float(correction.fit([t.torch()], alone))
    for seed, ranks in enumerate((1, 2, 3, 3)):
        assert [float(cut) for cut in on_ranks(correction, cuts(t, seed, ranks))] == [expected] * ranks


def normalized(name, high=1.2):
    config = AlgorithmConfig(ratio="proximal", corrections=[CorrectionConfig(name=name, high=high, normalize=True)])
    return build_correction(config.corrections[0], config)


@pytest.mark.parametrize("name", WEIGHING)
def test_normalised_weights_have_mean_1(name):
    t = draw(3)
    correction, plain = (
        normalized(name),
        build_correction(CorrectionConfig(name=name, high=1.2), AlgorithmConfig(ratio="proximal")),
    )
    inputs = t.torch()
    mean = correction.fit([inputs], alone)
    weights, touched = correction(replace(inputs, fitted={name: mean}))
    raw, raw_touched = (x.numpy() for x in plain(inputs))
    if name == "sequence_truncated_is":  # one weight for each trajectory with a trained token
        ones = [raw[tokens][t.mask[tokens]][0] for tokens in t.trajectories() if t.mask[tokens].any()]
        expected = np.mean(ones)
    else:
        expected = raw[t.mask].mean()
        assert weights.numpy()[t.mask].mean() == pytest.approx(1, rel=1e-6)
    assert 0.3 < expected < 1.2
    assert abs(expected - 1) > 1e-3
    assert float(mean) == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(weights.numpy(), raw / expected, rtol=1e-6)
    np.testing.assert_array_equal(touched.numpy(), raw_touched)


@pytest.mark.parametrize("name", WEIGHING)
def test_the_mean_is_the_same_for_every_packing_and_number_of_ranks(name):
    t = draw(4)
    correction = normalized(name)
    expected = float(correction.fit([t.torch()], alone))
    for seed, ranks in enumerate((1, 2, 3)):
        for found in on_ranks(correction, cuts(t, seed, ranks)):
            assert float(found) == pytest.approx(expected, rel=1e-6)


def test_weights_that_are_all_0_stay_0():
    t = draw(5, masked=0)
    t = t.with_(old_logprobs=t.behavior_logprobs + 5)
    correction, inputs = normalized("masked_is"), t.torch()
    mean = correction.fit([inputs], alone)
    assert float(mean) == 1
    assert not correction(replace(inputs, fitted={"masked_is": mean}))[0].any()


def test_the_objective_with_both_is_its_formula():
    t = draw(6)
    config = AlgorithmConfig(
        clip_low=0.2,
        clip_high=0.28,
        ratio="proximal",
        corrections=[
            CorrectionConfig(name="truncated_is", high=1.5, normalize=True),
            CorrectionConfig(name="m2po", high=0.1),
        ],
    )
    objective = build_objective(config)
    assert isinstance(objective.corrections[0][1], BatchNormalized)
    inputs = t.torch()
    fitted = {n: c.fit([inputs], alone) for n, c in objective.corrections if isinstance(c, FittedCorrection)}
    assert set(fitted) == {"truncated_is", "m2po"}
    total, seen = objective(replace(inputs, fitted=fitted))
    total.backward()
    m = t.old_logprobs - t.behavior_logprobs
    weight = np.minimum(np.exp(m), 1.5)
    weight /= weight[t.mask].mean()
    kept = np.zeros(len(m), bool)
    kept[t.mask] = fewest_dropped(m[t.mask] ** 2, 0.1)
    assert 0 < kept.sum() < t.mask.sum()

    def paper(logprobs):
        return (t.weights * weight * kept * clipped_surrogate(t, logprobs))[t.mask].sum()

    assert total.item() == pytest.approx(paper(t.logprobs), rel=1e-6)
    np.testing.assert_allclose(inputs.logprobs.grad.numpy(), slopes(paper, t.logprobs), atol=1e-6)
    assert dict(seen.sums)["train/touched_fraction/m2po"] == (t.mask & ~kept).sum()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"corrections": [CorrectionConfig(name="masked_is", normalize=True)]}, "weigh nothing there"),
        (
            {
                "ratio": "proximal",
                "proximal": "log_linear",
                "corrections": [CorrectionConfig(name="truncated_is", normalize=True)],
            },
            "log_linear is to save",
        ),
        ({"ratio": "proximal", "proximal": "log_linear", "corrections": [CorrectionConfig(name="m2po")]}, "to save"),
    ],
)
def test_combinations_that_cannot_be_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        AlgorithmConfig(**config)


@pytest.mark.parametrize("name", sorted(set(CORRECTIONS) - set(WEIGHING)))
def test_only_weights_are_normalised(name):
    with pytest.raises(ConfigError, match="no weights to normalise"):
        CorrectionConfig(name=name, normalize=True)
