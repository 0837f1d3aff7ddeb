"""What a run on a cluster of its own opens to others: nothing beyond this machine, and nothing without its token."""

import os
import re
import signal
import stat
from pathlib import Path

import psutil
import pytest

from asyncrl_testing.strangers import listeners
from tests.e2e.conftest import SMALL
from tests.processes import ran

pytestmark = pytest.mark.slow

JOIN = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False); print(ray.cluster_resources())"


def test_a_run_listens_on_this_machine_alone_and_asks_for_its_token(start, tmp_path):
    run = start(*SMALL, "weights.transport=collective", "trainer.num_ranks=2", "run.max_steps=1000", joined=False)
    run.wait_for_step(2)
    driver = psutil.Process(run.process.pid)
    everybody = [driver, *driver.children(recursive=True)]
    processes = [p for p in everybody if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    named = {p.pid: " ".join(p.cmdline()) for p in processes}
    found = {(named[pid], address) for pid, address, _ in listeners(processes)}
    assert {address for _, address in found} == {"127.0.0.1"}, found
    for who in ("gcs/gcs_server", "raylet/raylet ", "ray::TrainerWorker", "-m asyncrl.commands.train"):
        assert any(who in name for name, _ in found), f"{who} listens too: {found}"
    for script in ("autoscaler/_private/monitor.py", "_private/log_monitor.py", "dashboard/dashboard.py"):
        assert not any(script in name for name in named.values()), f"{script} serves nobody here"

    [gcs] = {m[1] for line in named.values() if (m := re.search(r"--gcs-address=(\S+)", line))}
    [scratch] = {Path(m[1]) for line in named.values() if (m := re.search(r"(/\S*/asyncrl-\w{8})/ray/session", line))}
    token = scratch / "token"
    assert (stat.S_IMODE(scratch.stat().st_mode), stat.S_IMODE(token.stat().st_mode)) == (0o700, 0o600)
    assert "127.0.0.1" in gcs
    assert join(gcs, tmp_path) != 0, "a stranger, without the token"
    assert join(gcs, tmp_path, RAY_AUTH_MODE="disabled") != 0
    assert join(gcs, tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64) != 0
    assert join(gcs, tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token)) == 0
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143
    assert not scratch.exists()


def join(address: str, home: Path, **variables: str) -> int:
    """Exit code of a process that joins this cluster, of somebody with no token file of their own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    environment |= {"HOME": str(home), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # else Ray asks another address
    return ran("-c", JOIN, address, env=environment | variables, code=None).returncode
