import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import GenerationError
from asyncrl.rollout.router import Router

pytestmark = pytest.mark.unit


def router(*replicas, **options):
    made = Router(**options)
    for replica in replicas:
        made.add(replica)
    return made


def test_equal_loads_are_served_in_turn():
    made = router(0, 1, 2)
    assert sorted(made.pick() for _ in range(3)) == [0, 1, 2]
    assert made.loads == {0: 1, 1: 1, 2: 1}


def test_a_session_stays_until_its_replica_is_overloaded_or_gone():
    made = router(0, 1, max_imbalance=3)
    home = made.pick("a")
    assert [made.pick("a") for _ in range(3)] == [home] * 3
    assert made.pick("a") != home, "4 requests against 0: the session moves"
    made.remove(home)
    assert made.pick("a") == 1 - home


def test_without_replicas_the_error_says_so():
    made = router(0)
    made.remove(0)
    with pytest.raises(GenerationError, match="no replica"):
        made.pick()


@given(st.lists(st.tuples(st.sampled_from(["pick", "done", "remove", "add"]), st.integers(0, 4)), max_size=200))
def test_a_pick_without_session_is_always_the_least_loaded(actions):
    made, loads = router(0), {0: 0}
    for action, replica in actions:
        if action == "add" and replica not in loads:
            made.add(replica)
            loads[replica] = 0
        elif action == "remove":
            made.remove(replica)
            loads.pop(replica, None)
        elif action == "done" and loads.get(replica, 0) > 0:
            made.done(replica)
            loads[replica] -= 1
        elif action == "pick" and loads:
            chosen = made.pick()
            assert loads[chosen] == min(loads.values())
            loads[chosen] += 1
        assert made.loads == loads


def test_old_sessions_are_forgotten():
    made = router(0, 1, max_sessions=2)
    for name in "abc":
        made.pick(name)
    assert len(made._sessions) == 2


def test_a_pick_stays_cheap_with_many_replicas():
    """Not a timed claim: only that a pick does not scan all replicas."""
    made = router(*range(1000))
    started = time.process_time()
    for _ in range(2000):
        made.done(made.pick())
    assert (time.process_time() - started) / 2000 < 1e-3
