"""The clock of a response or a trajectory, by a clock that the test moves."""

import pytest

from asyncrl.rollout.active_clock import ActiveClock


class Rig:
    def __init__(self, limit_s):
        self.now = 100.0
        self.clock = ActiveClock(limit_s, lambda: self.now)

    def left_after(self, seconds):
        self.now += seconds
        return self.clock.left_s


def test_time_in_a_queue_does_not_count():
    rig = Rig(60)
    assert rig.left_after(10) == 50  # an environment that prepares something
    rig.clock.wait()
    assert rig.left_after(3600) == 50
    rig.clock.sample()
    assert rig.left_after(20) == 30
    rig.clock.end(sampled=True)
    assert rig.left_after(5) == 25
    rig.clock.wait()
    assert rig.left_after(100) == 25
    rig.clock.end(sampled=False)  # interrupted in the queue
    assert rig.left_after(30) == -5


def test_of_several_requests_one_that_samples_lets_it_run():
    rig = Rig(60)
    for _ in range(2):
        rig.clock.wait()
    rig.clock.sample()
    assert rig.left_after(10) == 50
    rig.clock.end(sampled=True)
    assert rig.left_after(10) == 50


def test_a_look_is_never_too_early_and_never_much_too_late():
    rig = Rig(60)
    assert rig.clock.look_s() == 60
    rig.now += 59.9
    assert rig.clock.look_s() == 1.0, "it may stand still: no look a thousand times a second"
    assert Rig(0.3).clock.look_s() == pytest.approx(0.3)
