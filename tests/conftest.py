"""How the tests share a machine: one thread per process, two files at a time, one real system at a time."""

import os

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that spin slow each other down tenfold on few cores
settings.register_profile("asyncrl", deadline=None)  # a busy machine is no failure
settings.load_profile("asyncrl")

REAL = ("tests/e2e/", "tests/chaos/", "tests/contract/test_publish_faults.py", "tests/contract/test_left_behind.py")
"""They hold processes to deadlines, and take both cores as it is."""
if "PYTEST_XDIST_WORKER" in os.environ:
    os.nice(15)  # as Ray's workers are: else the tests of one process starve the actors that the other one waits for


def pytest_collection_modifyitems(items):
    """The real systems come first: the other files fit beside them."""
    items.sort(key=lambda item: not item.nodeid.startswith(REAL))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `-n` every file goes to one process, and all real systems to the same one."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return "real" if nodeid.startswith(REAL) else nodeid.partition("::")[0]

    return ByFile(config, log)
