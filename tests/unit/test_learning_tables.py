"""The tables of benchmarks/learning_under_lag.py: what they compute, and that those committed are of the records."""

import math
import sys
from collections import Counter

import numpy as np
import pytest

from tests.make import ROOT, quickstart

sys.path.append(str(ROOT / "benchmarks"))

import learning_tables as tables
import learning_under_lag as benchmark

RECORDS = tables.records(benchmark.RECORDS)


def test_a_target_is_reached_where_the_curve_first_crosses_it():
    curve = [(0.0, 0.2), (2.0, None), (4.0, 0.6), (6.0, 0.5), (8.0, 1.0)]
    assert tables.reached(curve, 0.5) == pytest.approx(3.0)
    assert tables.reached(curve, 0.8) == pytest.approx(7.2)
    assert tables.reached(curve, 1.1) is None


def test_intervals_are_students():
    values = [0.9, 0.95, 0.97, 0.92, 0.99]
    mean, half = tables.interval(values)
    assert mean == pytest.approx(np.mean(values))
    assert half == pytest.approx(2.776 * np.std(values, ddof=1) / 5**0.5, rel=2e-3)
    assert math.isnan(tables.interval([0.5])[1])


def test_a_cell_does_not_hide_runs_that_never_got_there():
    assert tables.cell([1.0, 3.0, None], 1) == "2 of 3: 2.0"
    assert tables.cell([None, None]) == "0 of 2"
    assert tables.cell([]) == "-"
    assert tables.cell([0.5]) == "0.500"


def test_sampled_rewards_are_averaged_over_neighbouring_versions():
    smooth = tables.smoothed([0.0, None, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert smooth == [(pytest.approx(2.8), pytest.approx(0.4)), (pytest.approx(4.0), pytest.approx(0.6))]


def test_every_cell_of_every_part_is_a_recipe():
    cells = [cell for grid in benchmark.GRIDS.values() for cell in grid]
    assert {cell.algorithm for cell in cells} == set(benchmark.ALGORITHMS) - {"grpo_clip_kl"}
    for cell in {(c.algorithm, c.updates): c for c in cells}.values():
        recipe = quickstart(*cell.overrides())
        assert recipe.batch.num_minibatches == cell.updates
        assert recipe.algorithm.dual_clip == (3 if cell.algorithm in ("grpo_clip_dual", "opsm", "decoupled_ppo") else 0)


def record(algorithm, lag, seed, **fields):
    defaults = {"part": "steps", "lr": 5e-4, "updates": 1, "partial": False, "commit": "0" * 40, "ratio_max": 3.0}
    means = dict.fromkeys(("clip_fraction_positive", "clip_fraction_negative", "kl_behavior", "entropy"), 0.25)
    steps = {"accuracy": {"25": 0.5 + 0.1 * seed, "50": 0.9}, "sampled": [v / 50 for v in range(50)], "lag_mean": [4.0]}
    means |= {"grad_norm": 1.0, "several_versions": 0.5}
    return defaults | steps | {"means": means, "algorithm": algorithm, "lag": lag, "seed": seed} | fields


def test_every_part_has_its_table():
    fields = ({}, {"lr": 1e-3}, {"updates": 2}, {"partial": True})
    made = [record(a, 8, seed, **f) for a in ("grpo_clip", "tis") for seed in (0, 1) for f in fields]
    made += [record("uncorrected", 0, seed, lr=1e-3) for seed in (0, 1)]
    wall = {"part": "wall", "clock": "everything", "seconds": 12.0, "steps": 30, "lag_mean": 1.0}
    curve = [(0.0, 0.2), (6.0, 0.92), (12.0, 0.99)]
    made += [record("tis", lag, seed, **wall, curve=curve) for lag in (0, 1) for seed in (0, 1)]
    text = tables.report(made, tuple(benchmark.ALGORITHMS))
    for row in (
        "| grpo_clip | 0.550 ± 0.635 |",  # after 25 steps, seeds 0 and 1
        "| tis | +0.000 ± 0.000; +0.000 ± 0.000 |",
        "0.001: 0.900 ± 0.000",
        "| tis | 0.900 ± 0.000 | 0.900 ± 0.000 |",  # both rates
        "| tis | 40.0 ± 0.0 | 40.0 ± 0.0 |",  # steps to 0.8
        "## Two updates a step",
        "several versions 0.50 ± 0.00; mean lag 4.00 ± 0.00",
        "| tis | 0.250 ± 0.000 | 0.250 ± 0.000 | 0.250 ± 0.000 | 0.250 ± 0.000 | 1.000 ± 0.000 | 3.0 ± 0.0 |",
        "| tis | 5.8 ± 0.0 | 5.8 ± 0.0 |",  # seconds to 0.9
        "| seconds a step | 0.400 ± 0.000 | 0.400 ± 0.000 |",
    ):
        assert row in text, row


def test_a_run_that_was_too_short_for_a_column_is_not_one_that_failed():
    text = tables.report([record("tis", 8, 0, accuracy={"12": 0.9}, sampled=[0.5] * 12)], tuple(benchmark.ALGORITHMS))
    assert "of 1:" not in text
    assert "| tis | 0 of 1 |" in text  # it has not come to the targets
    assert text.count("| tis |") == 3  # the two targets, and what its updates saw


def test_a_run_is_kept_once_and_known_again():
    found = Counter((benchmark.Cell.of(r), r["seed"], r.get("clock")) for r in RECORDS)
    assert set(found.values()) == {1}
    assert benchmark.Cell("steps", "tis", 8) in {cell for cell, *_ in found}
    assert {r["algorithm"] for r in RECORDS} <= set(benchmark.ALGORITHMS)


def test_the_committed_tables_are_those_of_the_committed_records():
    written = benchmark.RECORDS.with_suffix(".md").read_text().splitlines()
    made = tables.report(RECORDS, tuple(benchmark.ALGORITHMS)).splitlines()
    assert written[3:] == made[3:]  # the third line names machine and versions
