"""W&B, offline, and TensorBoard as they are."""

import re
from pathlib import Path

import pytest

from asyncrl.observability.metrics_log import MetricsLog
from asyncrl.observability.sinks import build_sinks
from tests.make import quickstart
from tests.processes import ran
from tests.unit.test_metrics import record


@pytest.fixture
def nobody(tmp_path, monkeypatch):
    """Without a login."""
    for name in ("WANDB_API_KEY", "WANDB_SERVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))


def test_the_sinks_take_a_record_without_a_login(tmp_path, nobody):
    recipe = quickstart("observability.sinks=[wandb,tensorboard]")
    sinks = build_sinks(recipe, {}, "test", tmp_path)
    log = MetricsLog(tmp_path / "metrics.jsonl", sinks)
    log.write(record(1, **{"reward/mean": 0.5}))
    log.close()
    assert [sink.failed for sink in sinks] == [0, 0]
    assert list((tmp_path / "tensorboard").glob("events.*"))
    assert list(Path(tmp_path).glob("wandb/offline-run-*/*.wandb"))


ENDS = """
import os, signal, sys
from pathlib import Path
import psutil
from asyncrl.config.load import load_recipe
from asyncrl.driver.cluster.janitor import RUN_VARIABLE, Janitor
from asyncrl.types.metrics import REQUIRED
from asyncrl.observability.sinks import build_sinks

how, directory = sys.argv[1], Path(sys.argv[2])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
recipe = load_recipe(Path("recipes/quickstart.yaml"), ["observability.sinks=[wandb]"])
janitor = Janitor("sinks")
os.environ[RUN_VARIABLE] = "sinks"
[feed] = build_sinks(recipe, {}, "test", directory)
try:
    for step in (1, 2, 3):
        feed.write(step, dict.fromkeys(REQUIRED, 0.0) | {"step": step})
        while feed._records.unfinished_tasks and not (how == "stopped" and step == 3):
            feed._thread.join(0.01)
        services = [p for p in psutil.Process().children() if "wandb" in p.name()]
        if step == 2:
            if how == "killed":
                [p.kill() for p in services]
            if how == "stopped":
                [p.suspend() for p in services]
            if how == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
finally:
    feed.close(20.0 if how != "stopped" else 1.0)
    janitor.close()
    print("failed", feed.failed)
    print("pandas", "pandas" in sys.modules)
"""


@pytest.mark.parametrize(
    ("how", "code", "failed"),
    # W&B writes in the background: that its service is gone may be found by the next record or at the end
    [
        pytest.param("as usual", 0, "0", marks=pytest.mark.slow),
        pytest.param("SIGTERM", 143, "0", marks=pytest.mark.slow),
        ("killed", 0, "[01]"),
        pytest.param("stopped", 0, "0", marks=pytest.mark.slow),
    ],
)
def test_wandb_ends_without_a_traceback_however_its_service_does(tmp_path, nobody, how, code, failed):
    done = ran("-c", ENDS, how, tmp_path, code=code)
    assert "Traceback" not in done.stderr, done.stderr
    assert re.search(f"failed {failed}$", done.stdout, re.MULTILINE), done.stdout
    assert list(Path(tmp_path).glob("wandb/offline-run-*/*.wandb"))
    assert "pandas False" in done.stdout, "80 MB of the driver's memory, for data frames that no sink sends"
