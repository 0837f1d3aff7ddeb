"""What continuous integration chooses, and what it makes of how its commands end."""

import signal
import subprocess
import sys

import pytest

from tools import ci_tests
from tools.ci_tests import Outcome, choose, lane_of, run_within, seconds_in, speed_of, thirds, touched_units, units_of

A, B, C, D = (f"tests/e2e/test_{name}.py" for name in "abcd")
SECONDS = {A: 100.0, B: 90.0, C: 20.0, D: 10.0, "sglang": 60.0, "environments": 30.0}
UNITS = list(SECONDS)


def test_parts_are_files_with_slow_tests_and_lanes():
    slow = "@pytest.mark." + "slow\ndef test_it(): ...\n"
    files = {A: slow, B: "", "tests/e2e/conftest.py": slow, "tests/contract/test_sglang_engine.py": slow}
    assert units_of(files) == [A, "environments", "sglang"]


@pytest.mark.parametrize(
    ("path", "lane"),
    [
        ("asyncrl/inference/sglang/engine.py", "sglang"),
        ("requirements/cpu-sglang.lock", "sglang"),
        ("tests/contract/test_openenv.py", "environments"),
        ("asyncrl/environments/verifiers_environment.py", "environments"),
        ("asyncrl/inference/replica.py", None),
    ],
)
def test_a_file_that_one_lane_alone_tests_touches_it(path, lane):
    assert lane_of(path) == lane
    assert touched_units(UNITS, [path], {path: 0, A: 3}) == ({A: 3} | ({lane: 0} if lane else {}))


def test_three_days_run_everything_and_take_about_the_same_time():
    part = thirds(UNITS, SECONDS)
    assert part == {A: 0, B: 1, "sglang": 2, "environments": 2, C: 1, D: 2}
    days = [choose(UNITS, {}, day, SECONDS, 1.0, 10_000).run for day in (7, 8, 9)]
    assert sorted(unit for run in days for unit in run) == sorted(UNITS)


def test_a_new_file_moves_no_other_one_and_neither_does_one_that_is_gone():
    new = "tests/e2e/test_new.py"
    with_it = thirds([*UNITS, new], SECONDS)
    assert with_it.pop(new) in range(3)
    assert with_it == thirds(UNITS, SECONDS)
    assert thirds([C, D], SECONDS).items() <= with_it.items()


@pytest.mark.parametrize(
    ("touched", "speed", "left_s", "run"),
    [
        ({}, 1.0, 100, [C, B]),  # day 1: B and C, 110 s over two workers
        ({}, 1.0, 54, [B]),
        ({D: 4, A: 2}, 1.0, 200, [A, D, B, C]),  # the change first, by distance
        ({D: 4, A: 2, C: 9}, 1.0, 200, [C, A, D, B]),  # of it today's third first
        ({D: 4, A: 2}, 4.0, 100, [D, C]),  # A takes 200 s here; what fits goes on
        ({"sglang": 0, A: 2}, 1.0, 110, [A, "sglang"]),  # a lane has one process
        ({"sglang": 0}, 1.0, 20, ["sglang"]),  # and is cut short then
        ({"sglang": 0}, 1.0, 19, [C]),
        ({A: 1}, 1.0, 0, []),
    ],
)
def test_what_is_run_in_the_time_that_there_is(touched, speed, left_s, run):
    choice = choose(UNITS, touched, 1, SECONDS, speed, left_s)
    assert sorted(choice.run) == sorted(run)
    assert choice.run[: len(touched)] == run[: len(touched)]
    assert sorted([*choice.run, *choice.left_out]) == sorted(UNITS), "what is not run is said"


def test_what_there_was_no_time_for_is_another_part_the_next_time():
    run = [choose(UNITS, {}, day, SECONDS, 1.0, 50).run for day in (1, 4, 7)]
    assert run == [[B], [C], [B]]


def test_why_a_part_was_left_out():
    left_out = choose(UNITS, {A: 1}, 1, SECONDS, 1.0, 0).left_out
    assert left_out[A] == "the change touches it; no time"
    assert left_out[B] == "of today's third; no time"
    assert left_out["sglang"] == "of day 2 in 3"


def test_in_this_repository_an_engine_touches_what_runs_it_and_not_everything():
    files = ci_tests.texts_of(ci_tests.tracked_files())
    distances = ci_tests.ImportGraph(files).distances(["asyncrl/inference/vllm/engine.py"])
    assert {"tests/contract/test_vllm_engine.py", "tests/e2e/test_quickstart_vllm.py"} <= distances.keys()
    assert len([path for path in distances if ci_tests.is_test(path)]) < 0.9 * len([*filter(ci_tests.is_test, files)])


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.e2e.test_a" name="test_one" time="2.0"/>
<testcase classname="tests.e2e.test_a.TestGroup" name="test_two" time="3.0"/>
<testcase classname="tests.e2e.test_a" name="test_long" time="40.0">
  <properties><property name="slow" value="yes"/></properties></testcase>
<testcase classname="tests.e2e.test_gone" name="test_one" time="9.0"/>
</testsuite></testsuites>"""


def test_seconds_are_read_from_a_report():
    assert seconds_in(JUNIT, [A, B]) == {"fast": {A: 5.0}, "slow": {A: 40.0}}
    recorded = ci_tests.recorded_seconds([JUNIT], [A, B])
    assert recorded == {"fast": {A: 5.0}, "slow": {A: 40.0, **ci_tests.LANE_SECONDS}}


def test_the_speed_of_this_machine_is_that_of_the_files_that_both_have():
    assert speed_of({A: 10.0, B: 5.0, C: 99.0}, {A: 4.0, B: 2.0, D: 99.0}) == 2.5
    assert speed_of({}, {A: 4.0}) == 1.0


@pytest.mark.parametrize(
    ("script", "seconds", "said"),
    [
        ("print('==== 3 passed, 1 skipped in 2.00s ====')", 60, "passed; 3 passed, 1 skipped"),
        ("print('tests/a.py::test_x[1] failed in its call:'); exit(1)", 60, "FAILED; it said no summary"),
        ("exit(2)", 60, "FAILED; it said no summary"),
        ("print('no tests ran in 0.50s'); exit(5)", 60, "passed; no tests ran"),  # pytest has selected nothing
        (
            "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt:\n"
            " print('a::b failed in its call:'); print('=== 1 failed, 2 passed in 61.20s (0:01:01) ===')\nexit(2)",
            1.5,
            "cut short, which is not passed; 1 failed, 2 passed",
        ),
    ],
    ids=["passed", "a test failed", "it failed", "nothing selected", "interrupted"],
)
def test_how_a_command_ended(script, seconds, said):
    outcome = run_within("it", [sys.executable, "-u", "-c", script], seconds)
    assert str(outcome) == f"it: {said}"
    assert outcome.failed == ("FAILED" in said)


def test_a_failure_before_the_interrupt_counts():
    outcome = Outcome("it")
    outcome.hear("tests/a.py::test_x failed in its setup:")
    outcome.cut = True
    outcome.hear("tests/a.py::test_y failed in its call:")
    assert (outcome.failed, outcome.failures) == (True, ["tests/a.py::test_x"])


def test_a_command_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(ci_tests, "GRACE_S", 0.5)
    script = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    outcome = run_within("it", [sys.executable, "-c", script], 1.5)
    assert (outcome.status, outcome.cut, outcome.failed) == (-9, True, False)


def test_a_command_can_be_interrupted_where_this_process_runs_in_the_background_and_ignores_interrupts():
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        outcome = run_within("it", [sys.executable, "-c", "import time; time.sleep(60)"], 1.5)
    finally:
        signal.signal(signal.SIGINT, former)
    assert (outcome.status, outcome.cut) == (-signal.SIGINT, True)


@pytest.mark.parametrize(("days", "changed"), [(3, ["b"]), (0, ["a", "b"])])
def test_on_main_the_change_is_that_of_a_day(tmp_path, monkeypatch, days, changed):
    monkeypatch.setattr(ci_tests, "ROOT", tmp_path)
    monkeypatch.delenv("CI_BASE", raising=False)
    for number, (name, day) in enumerate([("first", 0), ("a", 1), ("b", 1 + days)]):
        (tmp_path / name).write_text(str(number))
        stamp = f"2026-01-{1 + day:02}T12:00:00Z"
        git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org"]
        environment = {
            "GIT_COMMITTER_DATE": stamp,
            "GIT_AUTHOR_DATE": stamp,
            "HOME": str(tmp_path),
            "PATH": "/usr/bin:/bin",
        }
        for command in (["init", "-q"], ["add", "."], ["commit", "-qm", name]):
            subprocess.run([*git, *command], cwd=tmp_path, env=environment, check=True)
    assert ci_tests.change()[1] == changed
    monkeypatch.setenv("CI_BASE", "HEAD~2")
    assert ci_tests.change()[1] == ["a", "b"]
