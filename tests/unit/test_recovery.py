"""Budgets of failures that follow from the size of a run."""

import pytest

from asyncrl.config.run import RecoveryConfig


@pytest.mark.parametrize(("asked", "num_replicas", "restarts"), [(None, 1, 3), (None, 64, 64), (2, 64, 2), (0, 8, 0)])
def test_the_budget_of_replacements_grows_with_the_replicas_unless_it_is_set(asked, num_replicas, restarts):
    assert RecoveryConfig(max_replica_restarts=asked).replica_restarts(num_replicas) == restarts


@pytest.mark.parametrize(("asked", "num_replicas", "lost"), [(None, 64, 4), (2, 64, 3), (0, 8, 1), (100, 8, 4)])
def test_one_response_does_not_spend_a_large_budget(asked, num_replicas, lost):
    assert RecoveryConfig(max_replica_restarts=asked).replicas_per_response(num_replicas) == lost
