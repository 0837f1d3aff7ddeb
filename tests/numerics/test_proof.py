"""The proof at load: which way the rows of a model take, and what is refused with the number that was measured."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    FalconH1Config,
    Gemma2Config,
    GptOssConfig,
    Lfm2Config,
    Mamba2Config,
    MiniCPM3Config,
    NemotronConfig,
    Qwen3Config,
    SeedOssConfig,
)

from asyncrl.config.trainer import LoraConfig
from asyncrl.errors import ConfigError
from asyncrl.trainer.fsdp.attention import PACKED_SDPA, register_packed_attention
from asyncrl.trainer.fsdp.lora import add_adapters
from asyncrl.trainer.fsdp.proof import Way, prove
from tests.numerics.one_rank import SIZES

MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
PACKED = Way(PACKED_SDPA)


def model_of(config):
    register_packed_attention()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.eval()


@pytest.mark.parametrize(
    ("config", "way"),
    [
        (lambda: Qwen3Config(**SIZES), PACKED),
        (lambda: Cohere2Config(**SIZES, logit_scale=0.25, sliding_window=9), Way(PACKED_SDPA, scale=0.25)),
        (lambda: MiniCPM3Config(**SIZES | LATENT, dim_model_base=8), Way(PACKED_SDPA, scale=0.25)),
        (lambda: NemotronConfig(**SIZES), Way("sdpa", pads=True)),
        (lambda: Gemma2Config(**SIZES, final_logit_softcapping=0.1), Way("eager", pads=True, cap=0.1)),
        (lambda: FalconH1Config(**SIZES, **MAMBA), Way("sdpa", pads=True)),
        (lambda: Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]), Way("sdpa", pads=True)),
        (lambda: GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1), PACKED),
        (
            lambda: Mamba2Config(
                vocab_size=64, hidden_size=32, num_heads=4, head_dim=16, num_hidden_layers=2, state_size=8, n_groups=1
            ),
            Way("eager", pads=True),
        ),
    ],
)
def test_the_first_way_that_is_exact_is_taken(config, way):
    model = model_of(config())
    found = prove(model, PACKED_SDPA)
    assert (found.attention, found.pads) == (way.attention, way.pads)
    assert (found.scale, found.cap) == (pytest.approx(way.scale, rel=1e-5), way.cap)
    assert not model.training
    assert prove(model, PACKED_SDPA, "padded").pads


@pytest.mark.parametrize(
    ("config", "packing", "reason"),
    [
        (lambda: FalconH1Config(**SIZES, **MAMBA), "packed", r"a sequence is changed by 0\.\d+"),
        (lambda: NemotronConfig(**SIZES), "packed", "packed with packed_sdpa: it cannot run"),
        (lambda: SeedOssConfig(**SIZES, residual_dropout=0.5), "auto", "two passes in training differ by"),
    ],
)
def test_what_no_way_computes_exactly_is_refused_with_the_number(config, packing, reason):
    with pytest.raises(ConfigError, match=reason):
        prove(model_of(config()), PACKED_SDPA, packing)


@pytest.mark.parametrize(
    ("bend", "cap", "reason"),
    [
        (lambda logits: logits + logits.square(), 0.0, "from every multiple of the output layer"),
        (lambda logits: logits.clamp(-0.1, 0.1), 0.1, "from the output layer's with the cap 0.1"),
    ],
)
def test_logits_that_are_bent_otherwise_are_refused(bend, cap, reason):
    model = model_of(Qwen3Config(**SIZES, final_logit_softcapping=cap))
    model.register_forward_hook(lambda module, args, output: setattr(output, "logits", bend(output.logits)) or output)
    with pytest.raises(ConfigError, match=reason):
        prove(model, PACKED_SDPA)


def test_weights_that_are_no_numbers_are_refused():
    model = model_of(Qwen3Config(**SIZES))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(ConfigError, match="not finite"):
        prove(model, PACKED_SDPA)


def test_every_linear_layer_of_a_hybrid_but_mambas_output_gets_an_adapter():
    model = model_of(FalconH1Config(**SIZES, **MAMBA))
    add_adapters(model, LoraConfig(rank=2))
    adapted = {name.split(".lora_A")[0].rpartition(".")[2] for name, _ in model.named_parameters() if ".lora_A" in name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "gate_proj", "up_proj", "down_proj"}
