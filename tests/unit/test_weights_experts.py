"""Fused experts come apart as the checkpoint has them."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen3MoeConfig

from asyncrl.weights.experts import MODEL_TYPES, unfused

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 3,
    "moe_intermediate_size": 8,
}


@pytest.mark.parametrize("config", [Qwen3MoeConfig, Qwen2MoeConfig])
def test_the_parts_are_those_of_the_checkpoint_and_share_the_models_storage(tmp_path, config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**SIZES))
    assert model.config.model_type in MODEL_TYPES
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    parts = {name: part for fused, tensor in model.state_dict().items() for name, part in unfused(fused, tensor)}
    assert set(parts) == set(stored)
    for name, part in parts.items():
        assert part.is_contiguous()
        assert torch.equal(part, stored[name]), name
    parts["model.layers.0.mlp.experts.1.up_proj.weight"].fill_(3)
    assert (model.model.layers[0].mlp.experts.gate_up_proj[1, 8:] == 3).all()
    assert (model.model.layers[0].mlp.experts.gate_up_proj[1, :8] != 3).all()
