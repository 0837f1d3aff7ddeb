"""A short run of the chaos harness over all roles: everything is mended, nothing is lost, nothing is left behind."""

import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import SMALL
from tools.chaos import markdown
from tools.chaos_driver import Driver
from tools.chaos_faults import ROLES, Saboteur
from tools.chaos_run import Chaos, Plan

pytestmark = pytest.mark.timeout(1500)

FAULTS = 4
QUEUE = [sys.executable, "-c", "import time\nwhile True: time.sleep(0.1)", "ray::MessageQueue"]


@pytest.mark.slow
@pytest.mark.usefixtures("inputs")
def test_a_run_survives_what_can_happen_to_it(tmp_path):
    plan = Plan(
        recipe="recipes/quickstart.yaml",
        kills=FAULTS,
        seed=3,
        steps=20,
        roles=tuple(role for role in ROLES if role != "engine"),  # the embedded engine has no process of its own
        overrides=SMALL,
        pause_s=0.5,
        deadline_s=120,
    )
    report = Chaos(plan, tmp_path).run()
    assert report.clean, markdown(report)
    assert report.audit is not None
    assert (report.audit.outcome, report.audit.unfinished) == ("finished", ())
    assert len(report.faults) == FAULTS
    assert len({fault.name for fault in report.faults}) == FAULTS, "each kind once before any comes again"
    assert "wake queue" in {fault.name for fault in report.faults}, "one that was given up, and wakes"


def test_what_is_stopped_until_it_is_lost_wakes_while_it_is_replaced(tmp_path):
    saboteur, driver = Saboteur(("queue",), tmp_path, seed=0, disk_mb=1), Driver(1, QUEUE, tmp_path / "output.txt")
    try:
        until = time.monotonic() + 60
        while not driver.of("queue"):
            assert time.monotonic() < until, "it has started"
        assert next(saboteur.faults(lambda: driver, lambda: 0)).how == "wake"
        process = psutil.Process(driver.process.pid)
        saboteur.noticed("trainer")
        saboteur.take_back()
        while process.status() != psutil.STATUS_STOPPED:  # the kernel takes a moment
            assert time.monotonic() < until
        saboteur.noticed("queue")
        assert saboteur.holds
        while saboteur.holds:
            assert time.monotonic() < until
            saboteur.take_back()
        while process.status() == psutil.STATUS_STOPPED:
            assert time.monotonic() < until
    finally:
        saboteur.close()
        driver.close()


def test_what_a_driver_leaves_behind_is_seen(tmp_path):
    """A process in a session of its own, a file and a segment: found by the harness, and gone when it closes."""
    leave = (
        "import os, pathlib, subprocess, tempfile\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "pathlib.Path(tempfile.gettempdir(), 'asyncrl-socket').touch()\n"
        "pathlib.Path(tempfile.gettempdir(), 'ray').mkdir()\n"
        "pathlib.Path(f'/dev/shm/asyncrl-weights-{child.pid}-chaostest.seg').touch()\n"
        "print(child.pid, flush=True)\n"
        "input()\n"
    )
    driver = Driver(1, [sys.executable, "-c", leave], tmp_path / "output.txt")
    try:
        assert driver.process.wait(60) == 1, "its input has ended"
        child = int((tmp_path / "output.txt").read_text().split()[0])
        assert [p.pid for p in driver.look()] == [child]
        names = sorted(Path(file).name for file in driver.leftovers())
        assert names == ["asyncrl-socket", f"asyncrl-weights-{child}-chaostest.seg"]
    finally:
        driver.close()
        for segment in Path("/dev/shm").glob("asyncrl-weights-*-chaostest.seg"):
            segment.unlink()
    assert driver.look() == []
    assert not driver.temporary.exists()


def test_a_corrupted_checkpoint_is_the_newest_one_and_a_full_disk_is_freed(tmp_path):
    driver = Driver(1, ["sleep", "600"], tmp_path / "output.txt")
    saboteur = Saboteur(("checkpoint", "disk"), tmp_path, seed=1, disk_mb=1)
    for step in (3, 6, 12):
        folder = saboteur.run_dir / "checkpoints" / f"step_{step}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}" * 100)
    try:
        seen = set()
        for fault in saboteur.faults(lambda: driver, lambda: 0):
            seen.add(fault.name)
            if fault.role == "disk":
                assert saboteur.holds
                saboteur.take_back(all_of_it=True)
            assert not saboteur.holds
            if len(seen) == 2 or saboteur.skipped:
                break
    finally:
        saboteur.close()
        driver.close()
    assert "corrupt checkpoint" in seen
    assert driver.process.returncode == -9
    assert saboteur.corrupted == "step_12"
    intact = {p.parent.name for p in (tmp_path / "run").rglob("state.json") if p.read_bytes() == b"{}" * 100}
    assert intact == {"step_3", "step_6"}
