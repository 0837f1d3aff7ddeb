import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from asyncrl.config.load import load_recipe
from asyncrl.config.paths import MADE_BY, how_to_make, is_place
from asyncrl.data.dataset import load_rows
from asyncrl.data.model_files import check_model
from asyncrl.data.tokenizer import vocabulary
from asyncrl.errors import ConfigError, DataError
from asyncrl.types import ModelFacts
from tests.make import ROOT

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 192, "max_position_embeddings": 1024}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "model.safetensors").write_bytes(b"x")
    (directory / "tokenizer.json").write_text("{}")
    return directory


def test_a_complete_directory(model: Path) -> None:
    assert check_model(str(model)) == ModelFacts(
        str(model), True, "Qwen3ForCausalLM", 192, 1024, layer_kinds=frozenset({"full_attention"})
    )


def test_sizes_of_a_multimodal_model_are_those_of_its_text_part(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 7}}))
    assert check_model(str(model)).vocab_size == 7


@pytest.mark.parametrize(
    ("missing", "found"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", "no weights"),
        ("tokenizer.json", "no tokenizer"),
    ],
)
def test_a_missing_file_is_named(model: Path, missing: str, found: str) -> None:
    (model / missing).unlink()
    with pytest.raises(ConfigError, match=rf"asked: model\.path={model}\nfound: {found}"):
        check_model(str(model))


@pytest.mark.parametrize(
    ("config", "tensors", "is_refused"),
    [
        ({"tie_word_embeddings": True}, {"model.embed_tokens.weight": 1, "lm_head.weight": 2}, True),
        ({"tie_word_embeddings": True}, {"transformer.wte.weight": 1, "lm_head.weight": 2}, True),
        ({"text_config": {"tie_word_embeddings": True}}, {"m.embed_tokens.weight": 1, "lm_head.weight": 2}, True),
        ({"tie_word_embeddings": True}, {"model.embed_tokens.weight": 1, "lm_head.weight": 1}, False),
        ({"tie_word_embeddings": True}, {"model.embed_tokens.weight": 1}, False),
        ({"tie_word_embeddings": False}, {"model.embed_tokens.weight": 1, "lm_head.weight": 2}, False),
    ],
)
@pytest.mark.parametrize("num_files", [1, 2])
def test_an_output_layer_beside_a_tied_one_is_refused(model: Path, config, tensors, is_refused, num_files) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | config))
    entries = [(name, np.full((3, 2), value, np.float16)) for name, value in tensors.items()]
    for number in range(num_files):
        save_file(dict(entries[number::num_files]), model / f"model{'-2' * number}.safetensors", {"format": "pt"})
    if not is_refused:
        assert check_model(str(model)).is_local
        return
    with pytest.raises(ConfigError, match=r"found: config.json ties(?s:.*)tie_word_embeddings to false"):
        check_model(str(model))


@pytest.mark.parametrize("content", [b"", b"x", b"not a safetensors file", b"\xff" * 64, b"\2\0\0\0\0\0\0\0[]"])
def test_a_damaged_file_is_left_to_the_load(model: Path, content) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    (model / "model.safetensors").write_bytes(content)
    assert check_model(str(model)).is_local


def test_a_tied_output_layer_of_another_width_is_left_to_the_load(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    same = {"model.embed_tokens.weight": np.ones((3, 2), np.float32), "lm_head.weight": np.ones((3, 2), np.float16)}
    save_file(same, model / "model.safetensors")
    assert check_model(str(model)).is_local


def test_dropout_is_a_fact(model: Path) -> None:
    noise = {
        "attention_dropout": 0.1,
        "resid_pdrop": 0.2,
        "router_jitter_noise": 0.01,
        "hidden_dropout": 0,
        "dropout": None,
    }
    (model / "config.json").write_text(json.dumps(CONFIG | noise))
    assert check_model(str(model)).noise == ("attention_dropout=0.1", "resid_pdrop=0.2", "router_jitter_noise=0.01")
    (model / "config.json").write_text(json.dumps(CONFIG | noise | {"model_type": "phimoe"}))
    assert check_model(str(model)).noise == ("attention_dropout=0.1", "resid_pdrop=0.2"), "its routers sample with it"


def test_weights_and_tokenizer_may_have_other_names(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    (model / "tokenizer.json").rename(model / "tokenizer.model")
    assert check_model(str(model)).is_local


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_config_is_refused(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json is not"):
        check_model(str(model))


def test_an_unfinished_download_is_noticed(model: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"names 1 files that are not there, first model-00002\.safetensors"):
        check_model(str(model))


@pytest.mark.parametrize("path", ["runs/x", "models/x", "here/x", "./x", "/no/such/model", "~/no-such-model", "a/b/c"])
def test_what_can_only_be_a_place_here_is_refused_and_never_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    for reads in (check_model, lambda p: vocabulary(p, trust_remote_code=False)):
        with pytest.raises(ConfigError, match=rf"asked: model\.path={path}\nfound: no such directory"):
            reads(path)


def test_the_command_that_makes_what_a_recipe_reads_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every recipe whose model and data are not from the hub."""
    monkeypatch.chdir(tmp_path)
    named = set()
    for file in sorted((ROOT / "recipes").glob("*.yaml")):
        recipe = load_recipe(file, [])
        places = [recipe.model.path, recipe.data.train, *recipe.data.eval.values()]
        shipped = {p for p in places if is_place(p) and (ROOT / p).is_file() and p.startswith("recipes/")}
        named |= {p for p in places if is_place(p)} - shipped
        if is_place(recipe.model.path):
            with pytest.raises(ConfigError, match=re.escape(f"make it with `{MADE_BY[recipe.model.path]}`")):
                check_model(recipe.model.path)
        if is_place(recipe.model.path) and recipe.data.train not in shipped:
            with pytest.raises(DataError, match=re.escape(f"make it with `{MADE_BY[recipe.data.train]}`")):
                load_rows(recipe.data.train)
    assert named <= MADE_BY.keys()
    assert {MADE_BY[name] for name in named} == {*MADE_BY.values()}
    for written in ("./runs/tiny-qwen3", str(tmp_path / "runs" / "tiny-qwen3")):
        assert how_to_make(written) == MADE_BY["runs/tiny-qwen3"]
    assert how_to_make("runs/mine") is None
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for program, what, *_ in map(shlex.split, MADE_BY.values()):
        assert what in targets if program == "make" else (ROOT / what).is_file()


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match="found: a file"):
        check_model(str(tmp_path / "weights.bin"))


def test_a_hub_name_is_reported_without_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("Qwen/Qwen2.5-7B", "gpt2"):
        assert check_model(name) == ModelFacts(name, is_local=False)
