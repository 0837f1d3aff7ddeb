"""A mixture of experts in one run: trained, published and served, and what samples is what is trained."""

import json
import shutil

import pytest

from tests.e2e.conftest import ROOT, SMALL, assert_sound

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def mixture(inputs, tmp_path_factory):
    """A Qwen3-MoE of four experts with random weights, for the tokenizer of the tiny model."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tiny = ROOT / "runs" / "tiny-qwen3"
    path = tmp_path_factory.mktemp("mixture") / "model"
    shutil.copytree(tiny, path, ignore=shutil.ignore_patterns("*.safetensors", "tiny_model.json"))
    of_tiny = json.loads((tiny / "config.json").read_text())
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **{key: of_tiny[key] for key in ("vocab_size", "eos_token_id", "pad_token_id", "max_position_embeddings")},
        hidden_size=128,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        norm_topk_prob=True,
        initializer_range=0.2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_every_version_samples_as_it_is_trained(mixture, start, engine):
    """In sync the ratio of trainer and engine is 1 for each token of each version, unless weights went wrong."""
    if engine == "vllm":
        pytest.importorskip("vllm", reason="needs the package vllm: make install-vllm", exc_type=ImportError)
    fast = "mode=sync", "trainer.lr=0.01", "reward.function=tests.e2e.faulty:odd_length", "weights.verify=always"
    alone = f"model.path={mixture}", "rollout.num_replicas=1", "run.max_steps=4"
    run = start(*SMALL, *fast, *alone, recipe="quickstart" if engine == "torch" else "quickstart_vllm")
    assert run.wait() == 0, run.log
    assert_sound(run, max_lag=0, steps=4)
    assert all(record["train/grad_norm"] > 0.1 for record in run.metrics), "each version differs from the one before"
    assert [record["train/ratio_max"] for record in run.metrics] == pytest.approx([1] * 4, abs=1e-3)
    assert [record["train/kl_behavior"] for record in run.metrics] == pytest.approx([0] * 4, abs=1e-5)
