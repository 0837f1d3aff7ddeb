"""What of the Megatron-core backend needs neither Megatron-core nor ranks: names, layouts, refusals, checkpoints."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.config.load import load_recipe
from asyncrl.config.trainer import MegatronConfig, TrainerConfig
from asyncrl.errors import ConfigError
from asyncrl.trainer.backends import BACKENDS, require_fits, require_trains, require_written_by
from asyncrl.trainer.megatron.names import Block, Coordinates, LocalTensor, describe, order
from asyncrl.trainer.megatron.sizes import ModelSizes
from asyncrl.trainer.megatron.stored_state import RankFiles, header
from asyncrl.trainer.megatron.supports import require_package
from asyncrl.types import ModelFacts

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart_megatron.yaml"

CONFIG = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 41,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
}  # fmt: skip
MIXTURE = CONFIG | {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16
}  # fmt: skip
SIZES = ModelSizes.of_config(CONFIG)


def trainer(num_ranks=1, **layout):
    return TrainerConfig(backend="megatron", num_ranks=num_ranks, megatron=MegatronConfig(**layout))


def facts(**changed):
    return ModelFacts.of_config("/model", CONFIG | changed)


def test_the_parts_of_all_ranks_make_the_whole_once():
    name, whole = "decoder.layers.1.self_attention.linear_qkv.weight", {"q": 32, "k": 16, "v": 16}
    for ranks in (1, 2, 4):
        seen = {p: torch.zeros(rows) for p, rows in whole.items()}
        for rank in range(ranks):
            found = describe(name, SIZES, Coordinates(tensor=rank, num_tensor=ranks), first_layer=2)
            assert found.is_split
            assert sum(b.length for b in found.blocks) == 64 // ranks
            for b in found.blocks:
                assert b.name.startswith("model.layers.3.self_attn.")
                seen[b.name.split(".")[4][0]][b.start : b.start + b.length] += 1
        assert all((counts == 1).all() for counts in seen.values())


def test_gate_and_up_stand_one_behind_the_other_on_each_rank():
    found = describe("decoder.layers.0.mlp.linear_fc1.weight", SIZES, Coordinates(tensor=1, num_tensor=2), 0)
    gate, up = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    assert found.blocks == (Block(gate, 0, 24, 0, 24), Block(up, 0, 24, 24, 24))


def test_padding_of_the_vocabulary_belongs_to_nobody():
    rows = [describe("output_layer.weight", SIZES, Coordinates(tensor=r, num_tensor=4), 0).blocks for r in range(4)]
    assert [sum(b.length for b in blocks) for blocks in rows] == [16, 16, 9, 0]
    tied = describe("output_layer.weight", replace(SIZES, tied=True), Coordinates(), 0)
    assert tied.blocks == (Block("model.embed_tokens.weight", 0, 0, 0, 41),)


@pytest.mark.parametrize("name", ["local_experts.1.linear_fc2.weight", "linear_fc2.weight1"])
def test_an_expert_is_numbered_over_all_ranks(name):
    at = Coordinates(expert=1, num_expert=2, expert_tensor=1, num_expert_tensor=2)
    found = describe(f"decoder.layers.0.mlp.experts.{name}", ModelSizes.of_config(MIXTURE), at, 0)
    assert found.blocks == (Block("model.layers.0.mlp.experts.3.down_proj.weight", 1, 8, 0, 8),)


def test_an_unknown_tensor_is_not_guessed():
    with pytest.raises(KeyError, match="linear_kv"):
        describe("decoder.layers.0.cross_attention.linear_kv.weight", SIZES, Coordinates(), 0)


def test_names_are_ordered_by_number():
    names = [f"model.layers.{i}.mlp.experts.{j}.up_proj.weight" for i in (0, 10, 2) for j in (10, 9)]
    ends = ["lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"]
    found = sorted([*names, *ends], key=order)
    assert [found[0], *found[-2:]] == ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    assert found[1:-2] == [names[1], names[0], names[5], names[4], names[3], names[2]]


@pytest.mark.parametrize(
    ("ranks", "layout", "changed", "words"),
    [
        (3, {"tensor_parallel": 3}, {}, "attention heads.*tensor_parallel to 2 or 4"),
        (8, {"tensor_parallel": 8}, {"num_attention_heads": 8, "intermediate_size": 36}, "feed-forward.*to 6 or 9"),
        (6, {"tensor_parallel": 6}, {"num_attention_heads": 12, "num_key_value_heads": 4}, "4 key-value.*to 4"),
        (3, {"pipeline_parallel": 3}, {}, "4 layers.*make it 2 or 4"),
        (2, {"pipeline_parallel": 2, "chunks_per_stage": 4}, {}, "chunks_per_stage=4.*4 layers"),
        (2, {"expert_parallel": 2}, {}, "no experts.*expert_parallel=1"),
        (3, {"expert_parallel": 3}, MIXTURE, "4, the experts.*to 2 or 4"),
        (2, {"tensor_parallel": 2, "sequence_parallel": False}, MIXTURE, "only with sequence parallelism"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_names_the_nearest_that_does(ranks, layout, changed, words):
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        require_fits(trainer(ranks, **layout), facts(**changed))


def test_layouts_that_fit():
    require_fits(trainer(8, tensor_parallel=4, pipeline_parallel=2), facts())
    require_fits(trainer(4, tensor_parallel=2, expert_parallel=2, expert_tensor_parallel=1), facts(**MIXTURE))
    require_fits(trainer(6, tensor_parallel=3), ModelFacts("org/model", is_local=False))
    require_fits(TrainerConfig(num_ranks=3), facts())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model_type": "gemma2"}, "architecture gemma2"),
        ({"layer_types": ["sliding_attention"] * 4, "sliding_window": 8}, "sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "kind yarn"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [4.0]}}, "kind longrope"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}}, "kind llama3"),
    ],
)
def test_a_model_that_would_train_wrongly_is_refused(changed, words):
    with pytest.raises(ConfigError, match=words):
        require_trains("megatron", facts(**changed))
    require_trains("megatron", facts())


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_a_quantised_checkpoint_is_refused_before_the_run(backend):
    """It was refused by the first publish, when everything had been loaded."""
    quantised = facts(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    with pytest.raises(ConfigError, match=r"(?s)critic.*quantised weights \(fp8\).*rollout\.vllm\.quantization"):
        require_trains(backend, quantised, "algorithm.critic.path")


def test_stages_that_send_have_what_they_need():
    staged = ["trainer.megatron.tensor_parallel=1", "trainer.megatron.pipeline_parallel=2"]
    assert load_recipe(QUICKSTART, staged).trainer.megatron.pipeline_parallel == 2
    short = ["weights.overlap=false", "trainer.collective_timeout_s=5", "weights.transfer_timeout_s=5"]
    with pytest.raises(ConfigError, match=r"collective_timeout_s above 5"):
        load_recipe(QUICKSTART, [*staged, *short])


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    with pytest.raises(
        ConfigError, match=r"(?s)absent_package.core is not installed.*pip install 'asyncrl\[megatron\]'"
    ):
        require_package(["absent_package.core", "json"])


def test_transformer_engine_is_asked_for_before_anything_starts():
    if importlib.util.find_spec("transformer_engine") is not None:
        pytest.skip("TransformerEngine is installed")
    with pytest.raises(ConfigError, match=r"(?s)layers=transformer_engine.*is not installed.*layers=local"):
        require_fits(trainer(layers="transformer_engine"), facts())


def test_checkpoints_of_one_backend_are_refused_by_the_other(tmp_path):
    for name, spec in BACKENDS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / spec.marker).touch()
        require_written_by(name, tmp_path / name)
        for other in set(BACKENDS) - {name}:
            with pytest.raises(ConfigError, match=f"(?s)it is of {name}.*trainer.backend={name}"):
                require_written_by(other, tmp_path / name)
    require_written_by("fsdp", tmp_path)  # no checkpoint: the backend says so


def write_checkpoint(directory, spoil=lambda text: text):
    """A matrix [4, 3], split by rows over two ranks, of which the first is written by two data-parallel ones."""
    whole = torch.arange(12.0).view(4, 3)
    halves = [LocalTensor((Block("w", 0, 2 * rank, 0, 2),), True, 0) for rank in range(2)]
    for file, (rank, start, stop) in enumerate([(0, 0, 4), (0, 4, 6), (1, 0, 6)]):
        flat = whole[2 * rank : 2 * rank + 2].flatten()[start:stop]
        text = header(file, 3, {"model": 7}, {"model.w": ((2, 3), start, stop, halves[rank])})
        save_file(
            {"model.w.master": flat}, directory / f"rank{file:05d}.safetensors", metadata={"asyncrl": spoil(text)}
        )
    return whole


def test_a_checkpoint_is_read_whole_and_by_any_other_split(tmp_path):
    whole = write_checkpoint(tmp_path)
    stored = RankFiles(tmp_path, "read it")
    assert (stored.names("model"), stored.names("critic"), stored.numbers) == (["w"], [], {"model": 7})
    assert torch.equal(stored.whole("model", "master", "w"), whole)
    middle, columns = torch.empty(2, 3), torch.empty(4, 2)
    stored.read_into(middle, LocalTensor((Block("w", 0, 1, 0, 2),), True, 0), "model", "master")
    assert torch.equal(middle, whole[1:3])
    with pytest.raises(ConfigError, match="has no x"):
        stored.whole("model", "master", "x")
    with pytest.raises(ConfigError, match="lacks 1 of 3 entries of w"):
        stored.read_into(torch.empty(3, 3), LocalTensor((Block("w", 0, 2, 0, 3),), True, 0), "model", "master")
    with pytest.raises(ConfigError, match=r"model.w.exp_avg of rank00000.safetensors cannot be read"):
        stored.whole("model", "exp_avg", "w")
    with pytest.raises(ConfigError, match="has the shape"):
        stored.read_into(columns, LocalTensor((Block("w", 0, 0, 0, 4),), True, 0), "model", "master")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text.replace('"format": 1', '"format": 2'),
        lambda text: text.replace('"shape": [2, 3]', '"shape": [2, -3]'),
        lambda text: text.replace('"blocks": [["w", 0', '"blocks": [[3, 0'),
        lambda text: text.replace('"world_size": 3', '"world_size": 4'),
        lambda text: text[:-1],
        lambda text: "[]",
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_in_words(tmp_path, spoil):
    write_checkpoint(tmp_path, spoil)
    with pytest.raises(ConfigError, match=r"(?s)asked: read it.*do: "):
        RankFiles(tmp_path, "read it")


def test_ranges_that_do_not_fit_their_tensors_are_refused(tmp_path):
    write_checkpoint(tmp_path, lambda text: text.replace('"range": [0, 6]', '"range": [0, 5]'))
    with pytest.raises(ConfigError, match="not of the range"):
        RankFiles(tmp_path, "read it").whole("model", "master", "w")
    with pytest.raises(ConfigError, match="no checkpoint there"):
        RankFiles(tmp_path / "absent", "read it")


def test_a_rank_does_not_import_wandb_whose_directories_it_would_leave(tmp_path):
    pytest.importorskip("megatron.core")
    code = (
        "import sys; from asyncrl.trainer.megatron.cpu import import_megatron; import_megatron();"
        "import asyncrl.trainer.megatron.models, asyncrl.trainer.megatron.publication;"
        "assert 'wandb' not in sys.modules; import wandb"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    subprocess.run(command, env=os.environ | {"TMPDIR": str(tmp_path)}, check=True, timeout=280)
