"""What a run whose driver was killed leaves behind is removed; the stacks of its processes can be read before."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from asyncrl.driver.cluster.janitor import RUN_VARIABLE, processes_of
from asyncrl.driver.run import Watchdog
from asyncrl.errors import Process, Stalled
from asyncrl.observability import stacks
from asyncrl.observability.failure_report import write_report
from asyncrl.weights.lock_files import SEGMENT, SHARED_MEMORY
from tests.processes import killed
from tests.waiting import is_alive, wait_until

DRIVER = """
import os, pathlib, subprocess, sys, time
from asyncrl.driver.cluster.janitor import Janitor, RUN_VARIABLE
from asyncrl.weights.lock_files import SEGMENT, SHARED_MEMORY, create_locked
os.environ[RUN_VARIABLE] = sys.argv[1]
janitor = Janitor(sys.argv[1])
(janitor.scratch / "a.sock").write_text("")
elsewhere = pathlib.Path(sys.argv[2]); elsewhere.mkdir()
janitor.remove_later(elsewhere)
fd, segment = create_locked(SHARED_MEMORY, *SEGMENT)
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(janitor.scratch, segment, child.pid, flush=True)
sys.stdin.readline()
os.close(fd)
janitor.close()
"""


def start_driver(run_id, elsewhere):
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, run_id, str(elsewhere)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    scratch, segment, child = driver.stdout.readline().split()
    return driver, Path(scratch), Path(segment), int(child)


@pytest.mark.parametrize("end", ["killed", "closed"])
def test_nothing_is_left_of_a_run_however_its_driver_ends(tmp_path, end):
    run_id = f"test-{os.getpid()}-{end}"
    driver, scratch, segment, child = start_driver(run_id, tmp_path / "named")
    with killed(driver):
        assert (scratch / "a.sock").exists()
        assert segment.exists()
        assert [p.pid for p in processes_of(run_id) if p.pid == child] == [child]
        if end == "killed":
            driver.kill()
        else:
            driver.stdin.write("\n")
            driver.stdin.flush()
        driver.wait(30)
        wait_until(lambda: not is_alive(child), "the end of its child", 15)
        for path in (scratch, segment, tmp_path / "named"):
            wait_until(lambda path=path: not path.exists(), f"{path} is removed", 15)


def test_a_segment_whose_owner_lives_is_left_alone(tmp_path):
    driver, _, segment, _ = start_driver(f"test-{os.getpid()}-a", tmp_path / "a")
    with killed(driver):
        other, _, gone_segment, _ = start_driver(f"test-{os.getpid()}-b", tmp_path / "b")
        other.kill()
        other.wait(10)
        wait_until(lambda: not gone_segment.exists(), within_s=20)
        assert segment.exists()
        assert segment.parent == SHARED_MEMORY
        assert segment.name.startswith(SEGMENT[0])


def worker(*lines):
    code = "from asyncrl.observability import stacks; stacks.install()\n" + textwrap.dedent("\n".join(lines))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    return process


def test_the_stacks_of_a_busy_a_blocked_and_a_stopped_process():
    busy = worker("def spins_for_ever():", "    print('up', flush=True)", "    while True: pass", "spins_for_ever()")
    lock = "def waits_for_a_lock():\n    print('up', flush=True)\n    threading.Lock().acquire() and l.acquire()"
    blocked = worker("import threading", "l = threading.Lock(); l.acquire()", lock, "waits_for_a_lock()")
    with killed(busy, blocked):
        assert "spins_for_ever" in stacks.read(busy.pid)
        first = stacks.read(blocked.pid)
        assert "waits_for_a_lock" in first
        assert stacks.read(blocked.pid).count("waits_for_a_lock") == first.count("waits_for_a_lock")
        blocked.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(blocked.pid).status() == psutil.STATUS_STOPPED)
        assert "is stopped" in stacks.read(blocked.pid)
        assert busy.poll() is None
    assert "cannot be read" in stacks.read(busy.pid)


def test_a_process_without_a_handler_is_not_harmed():
    other = subprocess.Popen(["sleep", "30"])
    with killed(other):
        assert stacks.read(other.pid)
        assert other.poll() is None


def test_a_report_says_what_failed_and_what_everybody_was_doing(tmp_path):
    busy = worker("def spins_for_ever():", "    print('up', flush=True)", "    while True: pass", "spins_for_ever()")
    log = tmp_path / "log.txt"
    log.write_text("first\nlast words\n")
    error = Stalled("nothing moved").of(Process("trainer rank", 1))
    with killed(busy):
        places = [
            write_report(
                tmp_path / "faults",
                error,
                waits=["lease of message queue"],
                processes=[psutil.Process(busy.pid)],
                log=log,
            )
            for _ in range(2)
        ]
    assert len(set(places)) == 2
    text = (places[0] / "report.txt").read_text()
    for part in ("Stalled: nothing moved", "trainer rank 1", "lease of message queue", str(busy.pid), "last words"):
        assert part in text
    (stack,) = (places[0] / "stacks").iterdir()
    assert "spins_for_ever" in stack.read_text()


def test_the_watchdog_barks_once_when_nothing_moves_and_not_before():
    barked: list[float] = []
    heard = threading.Event()

    def bark(quiet_s):
        barked.append(quiet_s)
        heard.set()

    dog = Watchdog(2.0, bark)
    for mark in range(25):  # longer than that together, and each far shorter
        dog.saw("step", mark)
        time.sleep(0.1)
    assert not barked
    dog.saw("step", 24)  # the same mark again is no progress
    assert heard.wait(20)
    assert barked[0] > 2.0
    dog.close()
    assert len(barked) == 1


def test_the_run_of_a_process_is_known_by_its_environment():
    child = subprocess.Popen(["sleep", "30"], env={**os.environ, RUN_VARIABLE: "test-known"})
    with killed(child):
        assert [p.pid for p in processes_of("test-known")] == [child.pid]
        assert processes_of("test-unknown") == []
