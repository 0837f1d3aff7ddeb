"""A config.json decides neither which code runs nor which machines are asked, unless somebody says that it may."""

import json
from dataclasses import asdict

import huggingface_hub
import pytest

from asyncrl.checkpoint.digests import seal
from asyncrl.checkpoint.locate import FoundCheckpoint
from asyncrl.checkpoint.store import RunState, render_state
from asyncrl.checkpoint.trust import reaches_out
from asyncrl.commands.evaluate import _of_run, load_evaluation, parse
from asyncrl.commands.evaluate import main as evaluate
from asyncrl.commands.export import main as export
from asyncrl.commands.export import model_of
from asyncrl.config.model import ModelConfig
from asyncrl.errors import ConfigError
from tests.make import quickstart

REACHES = {
    "model.trust_remote_code": True,
    "model.path": "org/model",
    "reward.function": "evil:reward",
    "reward.parts": {"evil.module:reward": 1.0},
    "reward.group.function": "evil:group",
    "rollout.environment": "evil:Environment",
    "rollout.tool_use.tools": ["calculator", "evil:Tool"],
    "rollout.agent.function": "evil:agent",
    "rollout.agent.command": ["evil"],
    "rollout.gymnasium.id": "evil:Env-v0",
    "rollout.gymnasium.factory": "evil:make",
    "rollout.tool_use.mcp": {"evil": {"command": ["evil"]}, "other": {"url": "http://elsewhere/"}},
    "rollout.openenv.url": "http://elsewhere/",
    "rollout.verifiers.env": {"taskset": {"id": "evil"}},
    "ray.address": "elsewhere:6379",
    "reward.remote.url": "http://elsewhere/",
    "data.system_prompt": "${oc.env:SECRET}",
    "base": "../other.yaml",
    "reward.code.allow_basic_sandbox": True,
    "ray.env": {"PYTHONPATH": "lib"},
    "rollout.vllm.engine_args": {"structured_outputs_config": {"reasoning_parser_plugin": "lib/p.py"}},
    "rollout.sglang.server_args": {"hooks": ["evil:hook"]},
    "rollout.remote.urls": ["http://elsewhere/"],
    "rollout.remote.api_key_env": "SECRET",
    "weights.disk_directory": "http://elsewhere/",
    "model.chat_template": "lib/template.jinja",
    "rollout.agent.host": "0.0.0.0",
    "rollout.serve.host": "0.0.0.0",
    "rollout.gymnasium.kwargs": {"xml_file": "lib/x.xml"},
    "rollout.tool_use.corpus": "lib/corpus.jsonl",
    "teacher.vllm.engine_args": {"logits_processors": ["evil:L"]},
    "judge.trust_remote_code": True,
}


@pytest.fixture
def run(tmp_path):
    """A run directory with a checkpoint in it, and its plain recipe."""
    (tmp_path / "model").mkdir()
    checkpoint = tmp_path / "run/checkpoints/step_3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(render_state(RunState(3, 1.0, 1, 2, 1, 0, True, "digest")))
    seal(checkpoint)
    recipe = asdict(quickstart(f"model.path={tmp_path / 'model'}"))
    return tmp_path / "run", recipe


def written(run, recipe, key=None, value=None):
    if key is not None:
        *sections, last = key.split(".")
        place = recipe
        for name in sections:
            place = place[name]
        place[last] = value
    (run / "config.json").write_text(json.dumps({"recipe": recipe}))


def test_a_plain_recipe_reaches_for_nothing(run):
    assert reaches_out(run[1]) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("reward.function", "rewards.py"),
        ("reward.function", "lib/rewards"),
        ("reward.parts", {"math": 1.0, "lib/more": 0.5}),
        ("rollout.tool_use.tools", ["calculator", "tools.py"]),
        ("rollout.environment", "a.b"),
        ("reward.judge.prompt", "${oc.env:SECRET}"),
        ("rollout.sampling.stop", ["a", "${oc.env:SECRET}"]),
        ("reward.parts", {"${oc.env:SECRET}": 1.0}),
        ("some.thing", 1),
        ("reward", "math"),
    ],
)
def test_what_is_no_name_of_our_own_needs_the_users_word(run, key, value):
    recipe = {**run[1], key: value} if "." not in key or key == "some.thing" else run[1]
    if recipe is run[1]:
        written(*run, key, value)
    assert key in reaches_out(recipe)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("reward.function", "numeric"),
        ("reward.parts", {"math": 1.0, "overlong": 0.5}),
        ("rollout.gymnasium.id", "ALE/Pong-v5"),
        ("rollout.sampling.temperature", 0.3),
        ("rollout.engine", "vllm"),
        ("rollout.vllm.quantization", "fp8"),
        ("data.system_prompt", "Think: step by step, then see http://elsewhere/."),
        ("trainer.lora.target_modules", ["q_proj"]),
        ("teacher.vllm.enforce_eager", True),
        ("staleness.max_lag", 4),
    ],
)
def test_what_only_says_how_to_render_sample_and_judge_is_taken(run, key, value):
    written(*run, key, value)
    assert reaches_out(run[1]) == {}


@pytest.mark.parametrize("key", REACHES)
def test_an_evaluation_refuses_what_reaches_out_by_key_and_says_how_to_allow_it(run, capsys, monkeypatch, key):
    monkeypatch.setenv("SECRET", "hunter2hunter2")
    directory, recipe = run
    written(directory, recipe, key, REACHES[key])
    assert evaluate([str(directory), "rows.jsonl"]) == 2
    message = capsys.readouterr().err
    assert key in message
    assert "do:    pass --trust-run if the run is yours" in message
    assert "hunter2" not in message


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("reward.function", ["--reward", "math"]),
        ("reward.parts", ["--reward", "math"]),
        ("rollout.environment", ["rollout.environment=single_turn"]),
        ("ray.address", ["ray.address=null"]),
        ("model.trust_remote_code", ["--trust-remote-code"]),
        *((key, ["--trust-run"]) for key in REACHES if key not in ("base", "model.path")),
    ],
)
def test_what_the_command_line_names_or_allows_is_let_through(run, tmp_path, monkeypatch, key, words):
    """As far as the weights, which this checkpoint has none of."""
    monkeypatch.setenv("SECRET", "hunter2hunter2")
    directory, recipe = run
    written(directory, recipe, key, REACHES[key])
    arguments = parse([str(directory), "rows.jsonl", *words])
    found = FoundCheckpoint(directory / "checkpoints/step_3", 3, recipe)
    (tmp_path / "scratch").mkdir()
    with pytest.raises(ConfigError, match="the config of"):
        load_evaluation(arguments, found, tmp_path / "scratch")


def test_what_the_command_line_names_takes_the_place_of_the_runs(run, tmp_path):
    directory, recipe = run
    written(directory, recipe, "ray.env", {"PYTHONPATH": "lib"})
    written(directory, recipe, "reward.parts", {"evil.module:reward": 1.0})
    words = ["ray.env={OMP_PROC_BIND: close}"]
    arguments = parse([str(directory), "rows.jsonl", "--reward", "numeric", *words])
    (tmp_path / "scratch").mkdir()
    taken = _of_run(arguments, FoundCheckpoint(directory / "checkpoints/step_3", 3, recipe), tmp_path / "scratch")
    assert (taken["ray"]["env"], taken["reward"]["parts"]) == ({}, {})


@pytest.mark.parametrize("recipe", [{"model": 3}, {"model": {"path": 3}}, {"data": 3}, {"x": {}}])
def test_a_recipe_of_another_shape_is_refused(run, capsys, monkeypatch, recipe):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # else a path that is no directory is looked for there
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    directory, _ = run
    written(directory, recipe)
    assert evaluate([str(directory), "rows.jsonl", "--trust-run"]) == 2
    assert export([str(directory), str(directory / "out"), "--trust-run"]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"path": "org/model"}, ["--model", "{model}"]),
        ({"path": "{model}", "trust_remote_code": True}, ["--trust-remote-code"]),
        ({"path": "${oc.env:SECRET}"}, ["--model", "{model}"]),
        ({"path": "org/model", "trust_remote_code": True}, ["--model", "{model}", "--trust-remote-code"]),
    ],
)
def test_an_export_takes_neither_code_nor_hub_models_from_a_run(run, tmp_path, capsys, monkeypatch, section, words):
    monkeypatch.setenv("SECRET", "hunter2hunter2")
    directory, _ = run
    place = str(tmp_path / "model")
    written(directory, {"model": {key: place if value == "{model}" else value for key, value in section.items()}})
    out = str(tmp_path / "out")
    assert export([str(directory), out]) == 2
    message = capsys.readouterr().err
    assert "do:    pass --trust-run" in message
    assert "hunter2" not in message
    assert export([str(directory), out, *(place if word == "{model}" else word for word in words)]) == 2
    assert "the config of" in capsys.readouterr().err, "it came as far as the model"


def test_what_is_allowed_is_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("PLACE", "org/model")
    section = {"path": "${oc.env:PLACE}", "trust_remote_code": True}
    found = FoundCheckpoint(tmp_path, 3, {"model": section})
    assert model_of(found, trust_run=True) == ModelConfig(path="org/model", trust_remote_code=True)
    plain = FoundCheckpoint(tmp_path, 3, {"model": {"path": str(tmp_path)}})
    assert not model_of(plain).trust_remote_code
    assert model_of(plain, trust_code=True).trust_remote_code
