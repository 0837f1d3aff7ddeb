"""What `asyncrl-eval` refuses, before anything starts: exit code 2, and a message that says what to do."""

import json
from pathlib import Path

import pytest

from asyncrl.commands.evaluate import load_evaluation, main, parse
from tests.environments import QWEN, tokenizer_with
from tests.make import ROOT

REMOTE = "rollout.engine=remote rollout.remote.urls=[http://a] rollout.num_replicas=1"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `model` (a tokenizer and no more), `rows.jsonl` and `bad.jsonl`."""
    root = tmp_path_factory.mktemp("place")
    tokenizer_with(QWEN).save_pretrained(root / "model")
    (root / "model" / "config.json").write_text("{}")
    (root / "model" / "model.safetensors").write_bytes(b"")
    remote = {"base": str(ROOT / "recipes" / "quickstart_remote.yaml")}
    (root / "remote.yaml").write_text(json.dumps(remote))
    (root / "rows.jsonl").write_text(json.dumps({"prompt": "1+1?", "answer": "2"}))
    (root / "bad.jsonl").write_text(json.dumps({"prompt": "1+1?"}))
    return root


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("model missing.jsonl", "the dataset missing.jsonl"),
        ("model bad.jsonl", "bad.jsonl:1"),
        ("./missing rows.jsonl", "./missing"),
        ("model rows.jsonl --samples 0", "eval.samples must be at least 1"),
        ("model rows.jsonl --samples 2 --pass-at 4", "pass@k needs at least k responses"),
        ("model rows.jsonl --max-prompts 0", "eval.max_prompts must be at least 1"),
        ("model rows.jsonl --replicas 0", "rollout.num_replicas must be at least 1"),
        ("model rows.jsonl --timeout -1", "eval.timeout_s must be above 0"),
        ("model rows.jsonl --reward nope", "reward.function=nope"),
        ("model rows.jsonl --rows missing/out.jsonl", "is no directory that can be written"),
        ("model rows.jsonl --rows bad.jsonl", "it exists"),
        ("model rows.jsonl eval.sample=2", "eval.sample"),
        (
            "model rows.jsonl rollout.engine=remote rollout.remote.urls=[http://a] rollout.num_replicas=1",
            "pass --engine",
        ),
        ("model rows.jsonl --recipe remote.yaml", "pass --engine"),
    ],
)
def test_bad_input_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch, capsys, words: str, found: str) -> None:
    monkeypatch.chdir(place)
    assert main(words.split()) == 2
    message = capsys.readouterr().err
    assert found in message
    assert "asked: " in message
    assert "do: " in message


def loaded(directory: Path, section: str, *words: str):
    """The recipe of an evaluation over a run's recipe with this section."""
    plain = "model: {path: model}\ndata: {train: rows.jsonl, max_prompt_tokens: 64}\neval: {every_steps: 0}\n"
    recipe = directory / "recipe.yaml"
    recipe.write_text(f"{plain}{section}\n")
    arguments = parse(["model", "rows.jsonl", "--recipe", str(recipe), *words])
    return load_evaluation(arguments, None, directory)


@pytest.mark.parametrize(
    "algorithm",
    [
        "{kl: {coefficient: 0.1, path: gone}}",
        "{advantage: gae, critic: {path: gone}}",
        "{advantage: teacher_only, distillation: {coefficient: 1}}\nteacher: {path: gone}\nbatch: {group_size: 1}",
    ],
)
def test_models_that_only_training_needs_may_be_gone(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, algorithm: str
) -> None:
    monkeypatch.chdir(place)
    found = loaded(tmp_path, f"algorithm: {algorithm}").algorithm
    assert (found.kl.path, found.critic.path) == (None, None)


def test_the_bounds_of_a_runs_fleet_do_not_hold_for_an_evaluation(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(place)
    fleet = "rollout: {num_replicas: 3, min_replicas: 2, max_replicas: 4}"
    for replicas in (1, 6):
        found = loaded(tmp_path, fleet, "--replicas", str(replicas)).rollout
        assert (found.num_replicas, found.most_replicas) == (replicas, replicas)


def test_a_list_that_is_none_is_refused(capsys) -> None:
    with pytest.raises(SystemExit) as error:
        main(["model", "rows.jsonl", "--pass-at", "1,x"])
    assert error.value.code == 2
    assert "'1,x' is no list of whole numbers such as 1,4" in capsys.readouterr().err
