"""The tensors of a model, named and cut as its files have them, by transformers' own conversion."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig

from asyncrl.config.model import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.weights.stored_layout import StoredLayout, stored_layout

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
EXPERTS = {"num_experts": 3, "num_local_experts": 3, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS),
    "qwen2_moe": Qwen2MoeConfig(**SIZES, **EXPERTS),
    "mixtral": MixtralConfig(**SIZES, **EXPERTS),
    "tied": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES),
}


@pytest.fixture(params=CONFIGS)
def saved(request, tmp_path):
    """A model, where it was saved, and the tensors there."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param])
    model.save_pretrained(tmp_path)
    return model, ModelConfig(path=str(tmp_path)), load_file(tmp_path / "model.safetensors")


def test_the_parts_are_those_of_the_files_and_share_the_models_storage(saved):
    model, config, stored = saved
    layout = stored_layout(AutoModelForCausalLM.from_pretrained(config.path), config)
    state = model.state_dict()
    assert layout.shapes == {name: tuple(tensor.shape) for name, tensor in stored.items()}
    parts = {name: part for own in layout.wholes for name, part in layout.split(own, state[own])}
    for name, part in parts.items():
        assert torch.equal(part, stored[name]), name
    last = list(layout.wholes)[-2]  # of the last layer
    for _, part in layout.split(last, state[last]):
        part.fill_(3)
    assert (state[last] == 3).all()


def test_config_and_files_say_the_same_and_parts_join_to_the_models_tensors(saved):
    model, config, stored = saved
    layout = StoredLayout.of_model(config)
    assert layout == StoredLayout.of(model) == StoredLayout.of_config(model.config.to_dict())
    for name in layout.wholes:
        assert torch.equal(layout.joined(name, stored.__getitem__), model.state_dict()[name]), name


def test_tied_tensors_are_named_once_and_may_come_under_either_name():
    layout = StoredLayout.of(AutoModelForCausalLM.from_config(CONFIGS["tied"]))
    assert layout.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in layout.shapes


def test_adapters_are_named_after_the_weights_of_the_files():
    layout = StoredLayout.of(AutoModelForCausalLM.from_config(CONFIGS["mixtral"]))
    assert layout.of_factor("model.layers.0.mlp.gate.lora_A.weight") == (
        "model.layers.0.block_sparse_moe.gate.lora_A.weight"
    )
    with pytest.raises(ConfigError, match="hold its weight in 0 parts"):
        layout.of_factor("model.layers.0.mlp.other.lora_A.weight")


@pytest.mark.parametrize("harm", ["missing", "reshaped"])
def test_files_that_cannot_take_a_publish_are_refused_with_the_name(saved, harm):
    _, config, stored = saved
    name = sorted(stored)[-1]
    loaded = AutoModelForCausalLM.from_pretrained(config.path)
    values = stored.pop(name)
    if harm == "reshaped":
        stored[name] = values.repeat(*[2] * values.ndim)
    save_file(stored, f"{config.path}/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        stored_layout(loaded, config)


def test_a_critics_own_tensors_are_themselves_and_another_models_are_refused():
    layout = StoredLayout.of(AutoModelForCausalLM.from_config(CONFIGS["llama"]))
    [(name, part)] = layout.split("head.weight", torch.ones(1, 16))
    assert (name, tuple(part.shape)) == ("head.weight", (1, 16))
    with pytest.raises(ConfigError, match="the model that was trained"):
        layout.parts_of("model.norm.weight", (17,))
