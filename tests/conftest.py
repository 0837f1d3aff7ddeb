"""How the tests share a machine: one thread per process, some files at a time, one broken system at a time; and the
tiny model that some of them run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that spin slow each other down tenfold on few cores
os.environ.setdefault("RAY_worker_niceness", "0")  # nicer ones starve beside the tests of the other process
os.environ.pop("RAY_ADDRESS", None)  # the tests' clusters are their own
# Otherwise `ray.init` for a cluster of its own sets this to "token" for everything that the process starts later, and a
# driver with a token refuses the calls of a cluster without one.
os.environ["RAY_AUTH_MODE"] = "disabled"
settings.register_profile("asyncrl", deadline=None, derandomize=True)  # the same examples each time; no time limit
settings.register_profile("fuzz", deadline=None, print_blob=True)  # `make fuzz`: new examples each time
settings.load_profile("asyncrl")

ROOT = Path(__file__).resolve().parents[1]
ONE_BY_ONE = (
    "tests/chaos/",
    "tests/contract/test_left_behind.py",
    "tests/contract/test_publish_faults.py",
    "tests/e2e/test_quickstart.py",
    "tests/e2e/test_recovery.py",
    "tests/e2e/test_serve.py",
)
"""Real systems that are broken on purpose and held to short deadlines: never two at a time."""
LAST = "tests/e2e/"
"""The other real systems: whoever has nothing else left takes them."""
LONG_S = 20
FAST_S = 10
"""A test that takes longer on a quiet machine should be marked slow, or made faster."""


class Told:
    """What a run that is cut short must have said by then: each failure immediately, and every test that took long. At
    the end, which fast tests were not fast."""

    def __init__(self, terminal):
        self._terminal = terminal
        self._spent_s = {}
        self._not_fast = {}

    def pytest_runtest_logreport(self, report):
        spent_s = self._spent_s.get(report.nodeid, 0) + report.duration
        self._spent_s[report.nodeid] = spent_s
        if report.failed:
            self._terminal.write_line(f"\n{report.nodeid} failed in its {report.when}:\n{report.longreprtext}")
        if report.when == "teardown" and spent_s > LONG_S:
            self._terminal.write_line(f"\n{time.strftime('%X')} {spent_s:.0f} s: {report.nodeid}")
        if report.when == "teardown" and spent_s > FAST_S and ("slow", "yes") not in report.user_properties:
            self._not_fast[report.nodeid] = spent_s

    def pytest_terminal_summary(self):
        if self._not_fast:
            self._terminal.write_sep("=", f"fast tests that took over {FAST_S} s")
        for nodeid, spent_s in sorted(self._not_fast.items(), key=lambda entry: -entry[1]):
            self._terminal.write_line(f"{spent_s:.0f} s {nodeid}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    # A shell lets its jobs in the background ignore interrupts; the processes that tests interrupt would inherit it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if terminal := config.pluginmanager.get_plugin("terminalreporter"):
        config.pluginmanager.register(Told(terminal))


def pytest_collection_modifyitems(items):
    """A test bears the mark of its folder. What goes one by one takes longest and begins; the others fit beside it.
    Reports say which tests are slow."""
    for item in items:
        item.add_marker(item.nodeid.split("/")[1])
        if item.get_closest_marker("slow"):
            item.user_properties.append(("slow", "yes"))
    items.sort(key=lambda item: 0 if item.nodeid.startswith(ONE_BY_ONE) else 2 if item.nodeid.startswith(LAST) else 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `-n` every file goes to one process, and all of ONE_BY_ONE to the same one."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return "one by one" if nodeid.startswith(ONE_BY_ONE) else nodeid.partition("::")[0]

    return ByFile(config, log)


@pytest.fixture(scope="session")
def inputs():
    """`runs/tiny-qwen3` and `data/`, as `make quickstart` makes them."""
    for tool, *options in (
        ("make_tiny_model.py", "--out", "runs/tiny-qwen3"),
        ("make_arithmetic_dataset.py", "--out", "data"),
    ):
        subprocess.run([sys.executable, f"tools/{tool}", *options], cwd=ROOT, check=True, timeout=600)


@pytest.fixture(scope="module")
def one_thread():
    """Of torch: several spin on shared cores and wait for each other, and are slower than one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
