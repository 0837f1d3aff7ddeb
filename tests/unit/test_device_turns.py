"""Turns on shared devices: engines and trainer as a model of who holds memory, over every order of events."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from asyncrl.driver.fleet.device_turns import DeviceTurns

ENGINES = st.integers(0, 2)


def generating(engines=(0, 1)):
    turns = DeviceTurns()
    for engine in engines:
        turns.loads(engine)
    turns.generate()
    return turns


def trained(turns):
    turns.rest()
    for engine in turns.awake:
        turns.slept(engine)
    turns.train()
    return turns


def test_a_killed_process_keeps_its_memory_until_it_has_exited():
    turns = generating()
    turns.rest()
    turns.slept(0)
    turns.killed(1)
    with pytest.raises(ValueError, match=r"awake \[1\]"):
        turns.train()
    turns.exited(1)
    turns.train()
    assert not turns.may_load(1), "the trainer has the devices"
    turns.wake()
    assert not turns.may_load(1), "the trainer frees memory after the publish"
    turns.generate()
    assert turns.may_load(1)
    assert not turns.may_load(0), "it is awake"
    turns.loads(1)
    with pytest.raises(ValueError, match="engine 1 cannot load now"):
        turns.loads(1)


def test_a_process_that_dies_asleep_is_replaced_after_the_wake_and_not_before_its_exit():
    turns = trained(generating())
    turns.killed(0)
    turns.wake()
    assert not turns.may_load(0)
    turns.exited(0)
    assert not turns.may_load(0), "beside a publish"
    turns.generate()
    turns.loads(0)
    assert turns.awake == {0, 1}


def test_where_all_processes_died_asleep_one_loads_so_that_the_publish_reaches_somebody():
    turns = trained(generating())
    for engine in (0, 1):
        turns.killed(engine)
        turns.exited(engine)
    turns.wake()
    turns.loads(0)
    assert not turns.may_load(1)
    turns.generate()
    turns.loads(1)


class Devices(RuleBasedStateMachine):
    """A model of the memory beside the rules: `memory` has what each process does with it. Whatever may happen to
    processes happens at any moment; the phases follow the order of a run, which failures cut short."""

    @initialize()
    def begin(self):
        self.turns = DeviceTurns()
        self.memory = dict.fromkeys(range(3), "none")
        self.computes = False
        self.has_slept = False

    @rule(engine=ENGINES)
    def a_replacement_loads_when_it_may(self, engine):
        if self.turns.may_load(engine):
            assert self.memory[engine] == "none", "two processes of one replica"
            self.turns.loads(engine)
            self.memory[engine] = "awake"
        else:
            with pytest.raises(ValueError, match="cannot load now"):
                self.turns.loads(engine)

    @rule(engine=ENGINES)
    def a_process_is_killed(self, engine):
        if self.memory[engine] in ("awake", "asleep"):
            self.turns.killed(engine)
            self.memory[engine] = f"exiting, {self.memory[engine]}"

    @rule(engine=ENGINES)
    def a_killed_process_exits(self, engine):
        if self.memory[engine].startswith("exiting"):
            self.turns.exited(engine)
            self.memory[engine] = "none"

    @rule()
    def the_trainer_asks_for_its_turn(self):
        self.computes = False  # also after a failed step, from a new training side
        self.turns.rest()

    @rule(engine=ENGINES)
    def an_engine_sleeps(self, engine):
        if self.turns.phase == "settling" and self.memory[engine] == "awake":
            self.turns.slept(engine)
            self.memory[engine] = "asleep"
        elif self.memory[engine] != "exiting, awake" or self.turns.phase != "settling":
            with pytest.raises(ValueError, match="was not asked to sleep"):
                self.turns.slept(engine)

    @rule()
    def the_trainer_begins(self):
        if self.turns.phase == "settling" and not {"awake", "exiting, awake"} & set(self.memory.values()):
            self.turns.train()
            self.computes = self.has_slept = True
        else:
            with pytest.raises(ValueError, match="cannot have the devices"):
                self.turns.train()

    @rule()
    def a_publish_begins(self):
        if self.turns.phase in ("training", "waking"):
            self.computes = False
            self.turns.wake()
            self.memory = {i: "awake" if m == "asleep" else m for i, m in self.memory.items()}
        else:
            with pytest.raises(ValueError, match="nobody is to be woken"):
                self.turns.wake()

    @rule()
    def a_publish_ends(self):
        if self.turns.phase == "waking":
            self.turns.generate()
            assert "asleep" not in self.memory.values(), "an engine generates while it sleeps"
        else:
            with pytest.raises(ValueError, match="generation follows a wake"):
                self.turns.generate()

    @invariant()
    def no_engine_holds_memory_while_the_trainer_computes(self):
        if not hasattr(self, "turns"):
            return
        holding = {i for i, memory in self.memory.items() if memory in ("awake", "exiting, awake")}
        assert not (self.computes and holding)
        assert self.turns.awake == holding
        assert self.turns.asleep == {i for i, memory in self.memory.items() if memory == "asleep"}
        assert (self.turns.phase == "training") == self.computes

    def teardown(self):
        """From every state that was reached, a run can go on: exits, one turn of each, everybody loads."""
        if not hasattr(self, "turns"):
            return
        for engine, memory in self.memory.items():
            if memory.startswith("exiting"):
                self.turns.exited(engine)
        trained(self.turns)
        self.turns.wake()
        self.turns.generate()
        for engine in range(3):
            assert self.turns.may_load(engine) == (engine not in self.turns.awake)


Devices.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestDevices = Devices.TestCase
