"""The presets of configs/algorithms: each is a few lines, loads below a recipe, and says which paper it is."""

import re
from typing import get_args, get_type_hints

import numpy as np
import pytest
import yaml

from asyncrl.algorithms.grpo import grpo_advantages
from asyncrl.algorithms.overlong import shaped_rewards
from asyncrl.config.algorithm import AdvantageName, AlgorithmConfig, CorrectionName, OverlongConfig
from asyncrl.config.load import load_recipe, presets
from tests.make import ROOT, quickstart

FILES = sorted((ROOT / "configs" / "algorithms").glob("*.yaml"))
every_preset = pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)


def test_all_of_them_are_there():
    found = {"dapo", "grpo", "dr_grpo", "gspo", "cispo", "sapo", "rloo", "maxrl", "ppo", "decoupled_ppo"}
    assert set(presets()) == found | {"reinforce_plus_plus", "dppo", "m2po"}


@every_preset
def test_its_values_arrive_and_a_recipes_own_keys_stand_above_it(file, tmp_path):
    plain = tmp_path / "plain.yaml"
    plain.write_text(
        "model: {path: m}\ndata: {train: t}\n"
        "rollout: {sampling: {max_response_tokens: 20480}}\n"
        f"algorithm: {{preset: {file.stem}, max_filtered_fraction: 0.5}}\n"
    )
    algorithm = load_recipe(plain, []).algorithm
    assert algorithm.max_filtered_fraction == 0.5
    written = yaml.safe_load(file.read_text())["algorithm"]
    for key, value in written.items():
        found = getattr(algorithm, key)
        if isinstance(value, dict):
            stated = {name: v for name, v in value.items() if v is not None}  # null is derived
            assert {name: getattr(found, name) for name in stated} == stated
        elif isinstance(value, list):
            assert [{name: getattr(f, name) for name in v} for f, v in zip(found, value, strict=True)] == value
        else:
            assert found == value
    own = load_recipe(plain, ["algorithm.clip_high=0.123"]).algorithm
    assert own.clip_high == 0.123


@every_preset
def test_it_is_a_few_lines_and_names_its_paper(file):
    text = file.read_text()
    assert text.startswith("# ")
    assert re.search(r"arXiv:\d{4}\.\d{5}", text)
    content = yaml.safe_load(text)
    assert list(content) == ["algorithm"]
    assert len(text.splitlines()) <= 16


def test_the_document_names_every_part_and_preset():
    text = (ROOT / "docs" / "algorithms.md").read_text()
    losses = get_args(get_type_hints(AlgorithmConfig)["loss"])
    names = [*get_args(AdvantageName), *get_args(CorrectionName), *losses, *presets()]
    assert not [name for name in names if f"`{name}`" not in text]


@every_preset
def test_where_negative_advantages_could_weigh_without_bound_a_dual_clip_holds_them(file):
    algorithm = quickstart(f"algorithm.preset={file.stem}").algorithm
    held_otherwise = algorithm.loss != "clipped_surrogate" or "m2po" in [c.name for c in algorithm.corrections]
    assert algorithm.dual_clip == (0 if held_otherwise else 10 if file.stem == "dapo" else 3)


@pytest.mark.parametrize("name", ["dapo", "dapo_qwen", "retool_qwen"])
def test_the_penalty_of_dapo_is_the_papers_on_the_scale_of_the_reward(name):
    """The paper's rewards are 1 and -1; the advantages of the same responses are the same here."""
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml", [])
    assert recipe.reward.function == "math"  # 1 or 0
    buffer, longest = recipe.algorithm.overlong.buffer_tokens, recipe.longest_response_tokens
    lengths = [longest - buffer, longest, longest - buffer, longest - buffer // 2]
    right = np.array([1.0, 1.0, 0.0, 0.0])
    ours = shaped_rewards(right, lengths, recipe.algorithm.overlong, longest)
    papers = shaped_rewards(2 * right - 1, lengths, OverlongConfig(buffer_tokens=buffer, penalty=1.0), longest)
    np.testing.assert_allclose(grpo_advantages(ours), grpo_advantages(papers), rtol=1e-5)
    full_and_right, short_and_wrong = grpo_advantages(ours)[1:3]
    assert full_and_right > short_and_wrong + 0.5
