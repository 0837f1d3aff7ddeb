"""How the tests share a machine: one thread per process, two files at a time, one real system at a time."""

import os

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that spin slow each other down tenfold on few cores
settings.register_profile("asyncrl", deadline=None)  # a busy machine is no failure
settings.load_profile("asyncrl")

ONE_AT_A_TIME = ("e2e", "chaos", "contract/test_publish_faults", "contract/test_left_behind")
"""They hold processes to deadlines, and take both cores as it is."""
if "PYTEST_XDIST_WORKER" in os.environ:
    os.nice(15)  # as Ray's workers are: else the tests of one process starve the actors that the other one waits for


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """The real systems form one group, which comes first; each other file is one."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        file = item.nodeid.partition("::")[0].removeprefix("tests/").removesuffix(".py")
        item.add_marker(pytest.mark.xdist_group("real" if file.startswith(ONE_AT_A_TIME) else file))
    items.sort(key=lambda item: next(item.iter_markers("xdist_group")).args[0] != "real")
