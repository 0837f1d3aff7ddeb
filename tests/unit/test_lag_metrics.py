"""The metrics `lag/`: histograms of the lease, and what the loss sees of the tokens of one lag."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms.by_lag import SHAPE, means_by_lag, sums_by_lag
from asyncrl.driver.step_record import StepRecord
from asyncrl.types import GroupSummary, LeaseManifest, Lengths, TokenLag
from asyncrl.types.guard import LAG_BUCKETS, lag_bucket, lag_buckets_to
from asyncrl.types.metrics import Metric

MAX_LAG = 20


def test_every_lag_has_its_bucket():
    names = [LAG_BUCKETS[lag_bucket(lag)] for lag in range(20)]
    assert names == ["0", "1", "2", "3", "4", *["5-8"] * 4, *["9-16"] * 8, *["17+"] * 3]
    assert lag_buckets_to(0) == ("0",)
    assert lag_buckets_to(6) == ("0", "1", "2", "3", "4", "5-8")


@st.composite
def summaries(draw):
    groups = []
    for ordinal in range(draw(st.integers(1, 4))):
        lags, rewards, lengths = [], [], []
        for index in range(draw(st.integers(1, 3))):
            parts = draw(st.lists(st.tuples(st.integers(0, MAX_LAG), st.integers(0, MAX_LAG), st.integers(1, 9))))
            lags += [TokenLag(index, max(a, b), min(a, b), tokens) for a, b, tokens in parts]
            rewards.append(draw(st.integers(-3, 3)) / 2)
            lengths.append(Lengths(1, 99, sum(tokens for *_, tokens in parts)))
        groups.append(GroupSummary(ordinal, 0, tuple(lengths), tuple(rewards), tuple(lags), 1, 0))
    return tuple(groups)


@given(summaries())
def test_the_histograms_count_every_token_once(groups):
    record = StepRecord(1, max_lag=MAX_LAG)
    record.of_batch(LeaseManifest(0, groups))
    parts = [part for g in groups for part in g.lags]
    for family, lag_of in (
        (Metric.LAG_TOKENS, lambda part: part.lag),
        (Metric.LAG_GAINED_IN_FLIGHT, lambda part: part.in_flight),
        (Metric.LAG_GAINED_IN_QUEUE, lambda part: part.lag - part.in_flight),
    ):
        shares = [record.values[family.of(bucket)] for bucket in LAG_BUCKETS]
        tokens = np.repeat([lag_bucket(lag_of(p)) for p in parts], [p.tokens for p in parts]).astype(int)
        assert shares == pytest.approx(np.bincount(tokens, minlength=len(LAG_BUCKETS)) / max(1, len(tokens)))
    for bucket in LAG_BUCKETS:
        rewards = [
            reward
            for g in groups
            for index, reward in enumerate(g.rewards)
            if (own := [p.lag for p in g.lags if p.trajectory == index]) and LAG_BUCKETS[lag_bucket(max(own))] == bucket
        ]
        assert record.values.get(Metric.LAG_REWARD.of(bucket)) == (pytest.approx(np.mean(rewards)) if rewards else None)


@given(st.integers(0, 60), st.integers(0, 2**32 - 1))
def test_the_figures_of_each_lag_are_those_of_its_tokens_alone(size, seed):
    draw = np.random.default_rng(seed)
    lags, mask = draw.integers(0, 20, size), draw.random(size) < 0.7
    kl = np.where(mask, draw.normal(0, 0.6, size), 0.0)
    ratio = np.where(mask, np.exp(-kl), 0.0)
    upper, lower = (draw.random(size) < 0.2) & mask, (draw.random(size) < 0.2) & mask

    def sums(at: np.ndarray) -> torch.Tensor:
        tensors = [torch.from_numpy(np.ascontiguousarray(a[at])) for a in (lags, mask, ratio, upper, lower, kl)]
        return sums_by_lag(tensors[0].float(), tensors[1], tensors[2], tensors[3:5], tensors[5])

    half = np.arange(size) % 2 == 0
    found = means_by_lag(sums(half) + sums(~half))
    assert sums(half).shape == SHAPE
    tails = ((ratio > 2) | (ratio < 0.5)) & mask
    expected = {
        Metric.EFFECTIVE_SAMPLES: effective(ratio[mask]),
        Metric.RATIO_TAILS: tails.sum() / max(1, mask.sum()),
    }
    for place, bucket in enumerate(LAG_BUCKETS):
        at = mask & np.array([lag_bucket(lag) == place for lag in lags], bool)
        if at.any():
            expected |= {
                Metric.LAG_RATIO.of(bucket): ratio[at].mean(),
                Metric.LAG_EFFECTIVE.of(bucket): effective(ratio[at]),
                Metric.LAG_TAILS.of(bucket): tails[at].mean(),
                Metric.LAG_CLIPPED_POSITIVE.of(bucket): upper[at].mean(),
                Metric.LAG_CLIPPED_NEGATIVE.of(bucket): lower[at].mean(),
                Metric.LAG_KL.of(bucket): kl[at].mean(),
            }
    assert found == pytest.approx(expected)


def effective(ratio: np.ndarray) -> float:
    return float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())) if len(ratio) else 0.0


def test_only_a_cache_that_outlives_a_publish_can_be_stale():
    group = GroupSummary(0, 0, (Lengths(1, 8, 8),), (1.0,), (TokenLag(0, 1, 1, 8),), 2, 1, continued_tokens=6)
    for keeps, share in ((True, 0.75), (False, 0.0)):
        record = StepRecord(1, max_lag=1, keeps_cache=keeps)
        record.of_batch(LeaseManifest(0, (group,)))
        assert record.values[Metric.STALE_CACHE] == share
