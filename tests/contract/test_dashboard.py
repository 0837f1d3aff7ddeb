"""`asyncrl-dashboard` with W&B's own client and libraries against a server on this machine."""

import json
import math
import os

import pytest

from asyncrl.observability.charts import CHARTS
from asyncrl.observability.workspace import NAME, view_name, workspace
from asyncrl.types.metrics import Metric, metric_of
from tests.contract.fake_wandb import ENTITY, FakeWandb
from tests.contract.wandb_log import history_of
from tests.processes import ran
from tests.unit.test_metrics import record
from tools.make_sick_run import write_run

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def server():
    fake = FakeWandb()
    yield fake
    fake.close()


def with_login(*words, server, home, code):
    """Runs Python as a user does, with a login at `server`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"HOME": str(home), "NETRC": str(home / "none"), "WANDB_CONFIG_DIR": str(home), "WANDB_SILENT": "1"}
    if server is not None:
        environment |= {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "a" * 40}
    return ran(*words, env=environment, code=code)


def dashboard(*words, server=None, home, code=0):
    return with_login("-m", "asyncrl.commands.dashboard", *words, server=server, home=home, code=code)


def test_the_workspace_is_what_the_library_itself_reads_and_shows_only_declared_metrics():
    from wandb_workspaces.workspaces import Workspace, internal

    made = workspace("me", "project")
    sent = made._to_model().spec.model_dump_json(by_alias=True, exclude_none=True)
    read = internal.WorkspaceViewspec.model_validate_json(sent)
    view = internal.View(entity="me", project="project", display_name=NAME, name="nw-x-v", id="x", spec=read)
    again = Workspace._from_model(view)

    def panels(shown, attribute):
        """Those that have such an attribute, as pairs of title and that."""
        every = [panel for section in shown.sections for panel in section.panels if getattr(panel, attribute, None)]
        return [(panel.title, getattr(panel, attribute)) for panel in every]

    assert panels(again, "title") == panels(made, "title")
    assert {chart.title for chart in CHARTS} <= {title for title, _ in panels(again, "title")}
    styles = dict(panels(again, "plot_type"))
    assert all(styles[chart.title] == {"stack": "stacked-area", "lines": "line"}[chart.kind] for chart in CHARTS)
    assert all(metric_of(key) for chart in CHARTS for key in chart.keys)


@pytest.mark.slow
def test_the_workspace_is_created_once_and_then_replaced(server, tmp_path):
    for _ in range(2):
        done = dashboard("wandb", f"{ENTITY}/project", server=server, home=tmp_path)
        assert f"{ENTITY}/project?nw=" in done.stdout
    assert list(server.views) == [view_name(ENTITY, "project")]
    assert server.views[view_name(ENTITY, "project")]["id"], "the second call names the view that it replaces"
    refused = dashboard("wandb", "nobody", home=tmp_path, code=2)
    assert "ENTITY/PROJECT" in refused.stderr


WRITES = """
import os, signal, sys
from pathlib import Path
from asyncrl.config.load import load_recipe
from asyncrl.observability.metrics_log import MetricsLog
from asyncrl.observability.sinks import build_sinks
from tests.unit.test_metrics import record

directory, first, last, how = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
recipe = load_recipe(Path("recipes/quickstart.yaml"), ["observability.sinks=[wandb]"])
log = MetricsLog(directory / "metrics.jsonl", build_sinks(recipe, {}, "run", directory))
log.truncate_after(first - 1)
for step in range(first, last + 1):
    log.write(record(step, **{"time_s": step + first / 1000, "train/loss": 0.5 * step, "lag/tokens/1": 1.0}))
if how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
log.close()
"""


def write(directory, first, last, how, *, server, home):
    code = -9 if how == "killed" else 0
    done = with_login("-c", WRITES, directory, first, last, how, server=server, home=home, code=code)
    assert "Traceback" not in done.stderr


def truth(directory):
    """What metrics.jsonl says: step -> (time, loss)."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: (line["time_s"], line["train/loss"]) for line in lines}


def there(rows):
    """The newest row of every step: step -> (time, loss)."""
    return {row["step"]: (row["time_s"], row["train/loss"]) for row in rows if "train/loss" in row}


def run_directory(path):
    path.mkdir()
    recipe = {"observability": {"sinks": ["wandb"], "wandb_project": "project"}}
    (path / "config.json").write_text(json.dumps({"name": "run", "recipe": recipe}))
    return path


@pytest.mark.slow
def test_what_a_crash_or_a_missing_network_kept_from_wandb_is_sent_later(server, tmp_path):
    path = run_directory(tmp_path / "run")
    write(path, 1, 6, "as usual", server=server, home=tmp_path)
    (run,) = server.runs.values()
    assert there(run.rows) == truth(path)
    write(path, 4, 12, "killed", server=server, home=tmp_path)  # went back to a checkpoint of step 3
    write(path, 10, 15, "as usual", server=None, home=tmp_path)  # and was resumed where there is no network
    assert there(run.rows) != truth(path)
    dashboard("sync", path, server=server, home=tmp_path)
    assert there(run.rows) == truth(path)
    assert list(server.runs) == [run.name], "it is the same run"
    again = dashboard("sync", path, server=server, home=tmp_path)
    assert "sent 0 of 15 steps" in again.stdout, again.stderr


@pytest.mark.slow
def test_an_offline_record_is_complete(tmp_path):
    path = run_directory(tmp_path / "run")
    write(path, 1, 50, "as usual", server=None, home=tmp_path)
    write(path, 31, 60, "as usual", server=None, home=tmp_path)
    logs = sorted(path.glob("wandb/offline-run-*/*.wandb"), key=lambda log: log.stat().st_mtime)
    rows = [row for log in logs for row in history_of(log)]
    assert there(rows) == truth(path)
    assert len({log.name for log in logs}) == 1, "one run"
    written = [row for row in rows if row["step"] == 60 and "train/loss" in row]
    whole = {key for key in record(60) if key in Metric.__members__.values()}
    assert whole <= written[-1].keys()


def test_sync_says_what_it_needs(tmp_path):
    for words, named in (
        (["sync", tmp_path], "config.json"),
        (["sync", run_directory(tmp_path / "run")], "nobody is logged in"),
    ):
        assert named in dashboard(*words, home=tmp_path, code=2).stderr


def test_tensorboard_is_made_anew_from_the_metrics(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = write_run(tmp_path / "run", "healthy", 10)
    config = json.loads((path / "config.json").read_text())
    config["recipe"]["observability"] = {"sinks": ["tensorboard"], "wandb_project": "p"}
    (path / "config.json").write_text(json.dumps(config))
    for _ in range(2):
        dashboard("sync", path, home=tmp_path)
    read = EventAccumulator(str(path / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    from tensorboard.util.tensor_util import make_ndarray

    found = {event.step: float(make_ndarray(event.tensor_proto)) for event in read.Tensors("train/lr")}
    assert found.keys() == set(range(1, 11))
    assert all(math.isclose(value, 1e-6, rel_tol=1e-4) for value in found.values())


@pytest.mark.slow
def test_a_record_is_taken_where_tables_are_not(server, tmp_path):
    server.tables = False
    path = run_directory(tmp_path / "run")
    write(path, 1, 25, "as usual", server=server, home=tmp_path)
    (run,) = server.runs.values()
    assert there(run.rows) == truth(path)
    assert not any("charts/tokens_by_lag" in row for row in run.rows)
    server.tables = True
    write(path, 26, 50, "as usual", server=server, home=tmp_path)
    assert there(run.rows) == truth(path)
    assert any("charts/tokens_by_lag_table" in row for row in run.rows)
