"""What a recipe takes from the environment is in nothing that is written."""

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from asyncrl.checkpoint.run_directory import RunDirectory
from asyncrl.commands.train import main
from asyncrl.config.hidden import MIN_LENGTH, Hidden
from asyncrl.config.load import load
from asyncrl.errors import ConfigError
from asyncrl.observability.events import EventLog
from asyncrl.observability.logs import configure_driver
from asyncrl.rollout.sample_files import QuarantineFile
from asyncrl.types import Ticket
from asyncrl.types.events import RunFaulted
from tests.make import QUICKSTART, row

SECRET = 'hunter2 "quoted" größer'
ROW = row("-")


RECIPE = f"""
base: {QUICKSTART}
data: {{system_prompt: "key ${{oc.env:SECRET}} kept", eval: {{a: "${{oc.env:SECRET}}", b: plain}}}}
run: {{name: "${{data.system_prompt}}"}}
rollout: {{sampling: {{stop: ["${{oc.env:SECRET}}", x]}}}}
reward: {{pattern: "${{oc.env:ABSENT,default}}"}}
trainer: {{lr: "${{trainer.weight_decay}}", weight_decay: 0.5}}
"""


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("SECRET", SECRET)
    monkeypatch.setenv("STEPS", "7")


def test_the_recipe_has_the_value_and_what_is_written_the_interpolation(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    loaded = load(file, ["run.max_steps=${oc.env:STEPS}"])
    recipe, written = loaded.recipe, loaded.written
    assert recipe.data.system_prompt == recipe.run.name == f"key {SECRET} kept"
    assert (recipe.run.max_steps, written["run"]["max_steps"]) == (7, 7), "programs read numbers"
    assert recipe.trainer.lr == written["trainer"]["lr"] == 0.5
    assert written["data"]["system_prompt"] == "key ${oc.env:SECRET} kept"
    assert written["run"]["name"] == "${data.system_prompt}"
    assert written["data"]["eval"] | {"held_out": ""} == {"a": "${oc.env:SECRET}", "b": "plain", "held_out": ""}
    assert written["rollout"]["sampling"]["stop"] == ["${oc.env:SECRET}", "x"]
    assert written["reward"]["pattern"] == "default"
    directory = RunDirectory(tmp_path)
    directory.write_config(recipe, written, "name")
    text = directory.config.read_text()
    assert "hunter2" not in text
    again = tmp_path / "again.yaml"
    again.write_text(json.dumps(json.loads(text)["recipe"]))
    assert load(again, []).recipe == recipe, "who may read the environment gets it back"


@pytest.mark.parametrize(
    "key",
    [
        "trainer.lr=${oc.env:SECRET}",
        "mode=${oc.env:SECRET}",
        "model.path=${oc.env:SECRET}",
        "data.train=${oc.env:SECRET}",
        "reward.function=${oc.env:SECRET}",
        "reward.remote.url=${oc.env:SECRET}",
        "run.max_steps=${oc.env:SECRET}",
    ],
)
@pytest.mark.usefixtures("inputs")
def test_no_error_of_the_command_tells_it(capfd, key):
    code = main([str(QUICKSTART), "--dry-run", key])
    told = "".join(capfd.readouterr())
    assert ("asked: " in told) == (code == 2)
    assert "${oc.env:SECRET}" in told
    assert "hunter2" not in told


def test_a_variable_that_is_not_named_is_refused(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(
        f"base: {QUICKSTART}\nrun: {{name: SECRET}}\ndata: {{system_prompt: '${{oc.env:${{run.name}}}}'}}\n"
    )
    with pytest.raises(ConfigError, match="the name of the environment variable is not in it"):
        load(file, [])


def test_logs_events_and_quarantine_have_the_interpolation(tmp_path, monkeypatch):
    hide = Hidden.named(["SECRET", "NONE"], {"SECRET": SECRET})
    assert hide.names == ["SECRET"]
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    configure_driver(tmp_path / "log.txt", Console(quiet=True), hide)
    try:
        raise ValueError(f"no answer of https://host/?key={SECRET}")
    except ValueError as error:
        logging.getLogger("asyncrl.test").exception("asked with %s", SECRET)
        EventLog(tmp_path / "events.jsonl", hide).write(RunFaulted("ConfigError", str(error)))
        QuarantineFile(tmp_path / "quarantine.jsonl", hide).add(Ticket(0, 0, 0), ROW, repr(error))
    for name in ("log.txt", "events.jsonl", "quarantine.jsonl"):
        text = (tmp_path / name).read_text()
        assert "hunter2" not in text
        assert "${oc.env:SECRET}" in text
    assert "hunter2" not in repr(hide)
    [event] = (tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(event)["message"] == "no answer of https://host/?key=${oc.env:SECRET}"


@given(st.text(min_size=MIN_LENGTH), st.text(), st.text())
def test_any_value_goes_from_text_and_from_json(value, before, after):
    hide = Hidden({value: "${oc.env:X}"})
    text = before + value + after
    assert value not in hide(text).replace("${oc.env:X}", "\0")
    assert json.loads(hide(json.dumps([text]))) == [hide(text)] or value in before + after


def test_a_short_value_is_not_looked_for():
    assert Hidden({"a": "${oc.env:A}"})("an apple") == "an apple"
