"""Recipes and data files that are broken at random: each ends with exit code 2 and the three lines, or in a plan that
makes sense."""

import contextlib
import dataclasses
import io
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from asyncrl.commands import train as cli
from asyncrl.config.load import known_keys, load_recipe
from asyncrl.data.dataset import load_rows
from asyncrl.errors import ConfigError, DataError
from tests.environments import QWEN, tokenizer_with
from tests.unit.test_recipes import ROOT

pytestmark = pytest.mark.timeout(900)

KEYS = known_keys()
SECTIONS = sorted({key.rpartition(".")[0] for key in KEYS if "." in key})
NUMBERS = [
    0,
    1,
    -1,
    3,
    2**31,
    2**63,
    10**18,
    10**59,
    10**400,
    0.5,
    -0.5,
    1e-300,
    1e308,
    -1e308,
    math.inf,
    -math.inf,
    math.nan,
]
WORDS = [
    *["", " ", "???", "auto", "none", "off", "on", "yes", "x", "x" * 5000, "ä\u202e\n", "\x00", "1e3", "0x10", "-1"],
    *["/", "/dev/zero", "/dev/null", "../../x", "~nouser/x", "./x", "a/b/c/d", "runs/none", "cuda:99", "os:system"],
    *["${oc.env:NOPE}", "${..x}", "${trainer.lr}", "${nothing}", "${", "math", "a:b"],
]
NESTED: Any = 1
for _ in range(300):
    NESTED = [NESTED]
OTHERS = [None, True, False, [], {}, [1], ["x"], {"x": 1}, {"math": 0}, {"x": {"y": 1}}, [[]], [None], {"": ""}, NESTED]
VALUES = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(WORDS),
    st.sampled_from(OTHERS),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
)
PATHS = st.one_of(
    st.sampled_from(KEYS),
    st.sampled_from(SECTIONS),
    st.sampled_from(["base", "trainr.lr", "trainer.lr.x", "data.eval.x", "data.mixture.x.path", ""]),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A recipe whose model is a tokenizer and no more, with two rows to train on."""
    place = tmp_path_factory.mktemp("fuzzed")
    tokenizer_with(QWEN).save_pretrained(place)
    (place / "config.json").write_text("{}")
    (place / "model.safetensors").write_bytes(b"")
    for name in ("train", "test"):
        rows = [json.dumps({"prompt": f"word {name} {i}", "answer": str(i)}) for i in range(2)]
        (place / f"{name}.jsonl").write_text("\n".join(rows))
    return place


def recipe_of(place: Path) -> dict[str, Any]:
    return {
        "base": str(ROOT / "configs" / "cpu.yaml"),
        "model": {"path": str(place)},
        "data": {"train": f"{place}/train.jsonl", "eval": {"held_out": f"{place}/test.jsonl"}, "max_prompt_tokens": 64},
        "rollout": {"sampling": {"max_response_tokens": 64}},
    }


def put(recipe: dict[str, Any], path: str, value: Any) -> None:
    *sections, last = path.split(".")
    for section in sections:
        inner = recipe.get(section)
        recipe[section] = recipe = inner if isinstance(inner, dict) else {}
    recipe[last] = value


def judged(recipe: Path, *overrides: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a dry run."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = cli.main([str(recipe), *overrides, "--dry-run"])
    return code, out.getvalue(), err.getvalue()


def assert_judged(recipe: Path, *overrides: str) -> None:
    code, out, err = judged(recipe, *overrides)
    if code == 0:
        assert "the recipe is valid" in out
        assert nonsense(load_recipe(recipe, list(overrides))) == []
        return
    assert code == 2, err
    lines = err.splitlines()
    assert [sum(line.startswith(start) for line in lines) for start in ("asked: ", "found: ", "do:    ")] == [
        1,
        1,
        1,
    ], err


def nonsense(value: Any, key: str = "") -> list[str]:
    """What no user can mean, of a recipe that was accepted: numbers without an end, sizes of no machine, names that
    lead elsewhere, and values that are still to be filled in."""
    if dataclasses.is_dataclass(value):
        return [
            w for f in dataclasses.fields(value) for w in nonsense(getattr(value, f.name), f"{key}.{f.name}".strip("."))
        ]
    if isinstance(value, dict):
        return [w for name, item in value.items() for w in nonsense(item, f"{key}.{name}")]
    if isinstance(value, list):
        return [w for i, item in enumerate(value) for w in nonsense(item, f"{key}.{i}")]
    if isinstance(value, bool) or value is None:
        return []
    if isinstance(value, int | float):
        return [] if abs(value) <= 2**53 or key.startswith("data.curriculum.m") else [f"{key}={value}"]
    bad = (
        "???" in value
        or "\x00" in value
        or (key == "run.name" and ("/" in value or not value.strip() or len(value) > 255))
    )
    return [f"{key}={value!r}"] if bad else []


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(PATHS, VALUES), min_size=1, max_size=3))
@example(changes=[("eval.temperature", math.inf)])
@example(changes=[("trainer.device", "1e308")])
@example(changes=[("trainer.device", 1e308)])
@example(changes=[("rollout.torch.device", "/dev/zero")])
@example(changes=[("reward.parts", {"math": 0})])
@example(changes=[("staleness.max_lag", 10**18)])
@example(changes=[("reward.code.cpu_s", 10**59)])
@example(changes=[("trainer.lora.alpha", 1e308)])
@example(changes=[("trainer.lr", "???")])
@example(changes=[("run.name", "../../x")])
@example(changes=[("run.name", "/")])
@example(changes=[("model.path", "a/b/c/d")])
@example(changes=[("model", ["x"])])
@example(changes=[("data.eval", "${oc.env:NOPE}")])
@example(changes=[("trainer.lr", "${..x}")])
@example(changes=[("observability.sinks", {"x": 1})])
@example(changes=[("trainer.lr", 10**400)])
@example(changes=[("teacher.revision", "\x00")])
@example(changes=[("base", 5)])
@example(changes=[("base", [5])])
def test_a_recipe_with_changed_values(changes, files):
    recipe = recipe_of(files)
    for path, value in changes:
        put(recipe, path, value)
    file = files / "changed.yaml"
    file.write_text(yaml.safe_dump(recipe, allow_unicode=True))
    assert_judged(file)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 8), st.binary(max_size=6)), min_size=1, max_size=4),
)
@example(cuts=[(0, 600, b"[" * 3000)])
def test_a_recipe_whose_text_is_damaged(cuts, files):
    text = yaml.safe_dump(recipe_of(files)).encode()
    for at, length, inserted in cuts:
        at = min(at, len(text))
        text = text[:at] + inserted + text[at + length :]
    file = files / "damaged.yaml"
    file.write_bytes(text)
    assert_judged(file)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(overrides=st.lists(st.one_of(st.tuples(PATHS, VALUES), st.text(max_size=20)), min_size=1, max_size=3))
def test_overrides_of_any_kind(overrides, files):
    file = files / "plain.yaml"
    file.write_text(yaml.safe_dump(recipe_of(files)))
    words = [o if isinstance(o, str) else f"{o[0]}={o[1]}" for o in overrides]
    assert_judged(file, *(f"x{word}" if word.startswith("-") else word for word in words))  # no options of argparse


def test_bases_that_include_each_other_many_times(tmp_path):
    """Each of 14 includes the two after it: 2**14 ways."""
    for i in range(14):
        (tmp_path / f"{i}.yaml").write_text(f"base: [{i + 1}.yaml, {i + 1}.yaml]\n")
    (tmp_path / "14.yaml").write_text("trainer: {lrr: 1}\n")
    with pytest.raises(ConfigError, match="base"):
        load_recipe(tmp_path / "0.yaml", [])


def test_what_never_ends_or_cannot_be_a_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    pipe = f"{tmp_path}/pipe.jsonl"
    for source in ("/dev/zero", "/dev/tty", pipe, str(tmp_path), "~nouser/x.jsonl", "x" * 5000, "a\x00.jsonl"):
        with pytest.raises(ConfigError, match=r"asked: .*\nfound: .*\ndo: "):
            load_rows(source)


ROW = {"prompt": [{"role": "user", "content": "1+1="}], "data_source": "s", "reward_model": {"ground_truth": "2"}}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_broken_data_file_is_named_or_its_rows_are_whole(data, tmp_path_factory):
    place = tmp_path_factory.getbasetemp() / "broken.jsonl"
    kind = data.draw(st.sampled_from(["bytes", "value", "cut", "parquet"]))
    lines = [json.dumps(ROW).encode()] * 3
    if kind == "bytes":
        lines[1] = data.draw(st.binary(max_size=40))
    elif kind == "cut":
        lines[1] = lines[1][: data.draw(st.integers(0, len(lines[1])))]
    elif kind == "value":
        row = json.loads(json.dumps(ROW))
        where = data.draw(
            st.sampled_from(["prompt", "data_source", "reward_model", "extra_info", "reward_model.ground_truth"])
        )
        put(row, where, data.draw(JSON))
        lines[1] = json.dumps(row).encode()
    content = b"\n".join(lines)
    if kind == "parquet":
        place, content = place.with_suffix(".parquet"), data.draw(st.binary(max_size=60)) + b"PAR1"
    place.write_bytes(content)
    try:
        rows = load_rows(str(place))
    except DataError as error:
        told = str(error)
    else:
        assert all(row.messages and row.ground_truth.strip() for row in rows)
        return
    assert [line.partition(":")[0] for line in told.splitlines()] == ["asked", "found", "do"], told
