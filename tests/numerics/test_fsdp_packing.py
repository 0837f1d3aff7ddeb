"""FSDP2 on one rank: packed training against plain Hugging Face forward passes, one sequence at a time."""

import shutil
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
)

from asyncrl.config.algorithm import AlgorithmConfig, KlConfig
from asyncrl.config.load import presets
from asyncrl.config.model import ModelConfig
from asyncrl.config.trainer import FsdpConfig, TrainerConfig
from asyncrl.errors import ConfigError, GenerationError
from asyncrl.inference.torch_engine.runner import load_model as serve
from asyncrl.trainer.fsdp.model import Kernels, choose_attention, load_model
from asyncrl.trainer.fsdp.optimizer import build_optimizer
from asyncrl.trainer.packing import PackingRules, plan_step
from asyncrl.trainer.step.batch import pack
from asyncrl.types import Lengths, Segment, TrainSequence, Trajectory
from asyncrl.weights.stored_layout import StoredLayout
from asyncrl_testing.backend_suite import random_lease, weights_of
from tests.make import quickstart
from tests.numerics import one_rank
from tests.numerics.one_rank import CPU, single_logprobs

pytestmark = pytest.mark.usefixtures("process_group")

SIZES = {**one_rank.SIZES, "initializer_range": 0.2, "max_position_embeddings": 128}
MODELS = {
    "qwen3": lambda: Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=False),
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False, attention_bias=True),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, tie_word_embeddings=False
    ),
    "seed-oss with dropout": lambda: SeedOssConfig(
        **SIZES, attention_dropout=0.2, residual_dropout=0.2, tie_word_embeddings=False
    ),
    "granite, scaled": lambda: GraniteConfig(
        **SIZES, logits_scaling=4.0, embedding_multiplier=2.0, residual_multiplier=0.5, attention_multiplier=0.2
    ),
    "falcon-h1": lambda: FalconH1Config(
        **SIZES, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=8
    ),
    "qwen3-next without experts": lambda: Qwen3NextConfig(
        **SIZES,
        num_experts=0,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    "mistral-sliding": lambda: MistralConfig(**SIZES, sliding_window=5, tie_word_embeddings=True),
}


@pytest.fixture(scope="module")
def model_paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config())
        with torch.no_grad():  # norms start as ones and biases as zeros, where mistakes would not show
            for p in model.parameters():
                p.add_(0.05 * torch.randn_like(p))
        model.save_pretrained(root / name)
    return root


build = partial(one_rank.build, max_grad_norm=0)


@pytest.mark.parametrize("name", MODELS)
def test_packed_logprobs_are_those_of_single_sequences(model_paths, name):
    lease = random_lease(0, max_response=30)
    model = AutoModelForCausalLM.from_pretrained(model_paths / name, dtype=torch.float32)
    found = build(model_paths / name).logprobs(lease.plans()[0], lease.trajectories)
    for key, trajectory in lease.trajectories.items():
        with torch.no_grad():
            expected = single_logprobs(model, trajectory)
        torch.testing.assert_close(found[key].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("tied", "change", "found"),
    [
        (True, {"lm_head.weight": torch.ones(SIZES["vocab_size"], 32)}, "config.json ties the output layer"),
        (False, {"lm_head.weight": None}, "the first is lm_head.weight: they would be random"),
        (True, {"model.layers.1.self_attn.q_norm.weight": None}, "q_norm.weight: they would be random"),
    ],
    ids=["another output layer", "no output layer", "no norm"],
)
def test_files_that_contradict_their_config_are_refused(tmp_path, tied, change, found):
    config = Qwen3Config(**SIZES, tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | change
    save_file({n: t for n, t in tensors.items() if t is not None}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"^asked: train model.path=.*\nfound: .*{found}"):
        build(tmp_path)
    with pytest.raises(GenerationError, match=found):
        serve(ModelConfig(path=str(tmp_path)), CPU, real_weights=True, seed=0)


@pytest.mark.parametrize(("max_model_len", "factor"), [(16, 1.0), (64, 4.0)])
def test_rotary_factors_follow_the_longest_sequence_of_the_replicas_not_the_neighbours(tmp_path, max_model_len, factor):
    lists = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16, **lists}
    config = Phi3Config(**SIZES, rope_parameters=rope, original_max_position_embeddings=16, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    lease = random_lease(0, max_response=30)
    found = build(tmp_path, max_model_len=max_model_len).logprobs(lease.plans()[0], lease.trajectories)
    factors = {"short_factor": [factor] * 4, "long_factor": [factor] * 4}
    served = serve(ModelConfig(path=str(tmp_path)), CPU, real_weights=True, seed=0, max_model_len=max_model_len)
    assert factors.items() <= served.config.rope_parameters.items(), "in the embedded engine too"
    config.rope_parameters |= factors
    model = AutoModelForCausalLM.from_pretrained(tmp_path, config=config, dtype=torch.float32)
    for key, trajectory in lease.trajectories.items():
        with torch.no_grad():
            expected = single_logprobs(model, trajectory)
        torch.testing.assert_close(found[key].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("head", [True, False])
def test_ranks_that_read_no_weights_build_the_same_model(model_paths, name, head):
    first, second = (
        load_model(ModelConfig(path=str(model_paths / name)), FsdpConfig(), mesh, head=head)[0]
        for mesh in (SimpleNamespace(device_type="cpu", get_rank=lambda rank=rank: rank) for rank in range(2))
    )
    described = [[(n, p.shape, p.dtype, p.requires_grad) for n, p in m.named_parameters()] for m in (first, second)]
    assert described[0] == described[1], "the same names, and the same tensors tied"
    ours, theirs = dict(first.named_buffers()), dict(second.named_buffers())
    assert all(torch.equal(buffer, theirs[n]) for n, buffer in ours.items())
    assert first.config.to_dict() == second.config.to_dict()
    assert first.training == second.training


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_loss_gradient_and_update_are_the_references(model_paths, name, temperature):
    lease = random_lease(1)
    model = AutoModelForCausalLM.from_pretrained(model_paths / name, dtype=torch.float32)
    loss, norm = one_rank.reference_step(model, lease, partial(single_logprobs, temperature=temperature))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    optimizer.step()
    backend = build(model_paths / name, temperature=temperature)
    metrics = backend.train_step(lease.plans(budget=64)[0], lease.trajectories)
    assert metrics.loss == pytest.approx(loss, abs=1e-6)
    assert metrics.grad_norm == pytest.approx(norm, rel=1e-5)
    layout = StoredLayout.of(model)
    updated = {n: part for own, p in model.named_parameters() for n, part in layout.split(own, p)}
    for key, weight in weights_of(backend).items():
        # a gradient near zero has a sign of chance, and Adam's first step is the sign times lr
        difference = np.abs(weight - updated[key].detach().numpy())
        assert np.mean(difference > 1e-5) < 0.02, key
        assert difference.max() <= 2.1e-3, key


def test_neither_budget_nor_order_of_microbatches_matters(model_paths):
    lease = random_lease(2)
    steps = []
    for budget, turn in ((32, False), (64, False), (64, True), (1000, False)):
        (plan,) = lease.plans(budget=budget)
        if turn:
            plan = replace(plan, updates=(tuple(run[::-1] for run in plan.microbatches[::-1]),))
        steps.append((len(plan.microbatches), build(model_paths / "qwen3").train_step(plan, lease.trajectories)))
    single = replace(lease.plans()[0], updates=(tuple((s,) for run in lease.plans()[0].microbatches for s in run),))
    steps.append((len(single.microbatches), build(model_paths / "qwen3").train_step(single, lease.trajectories)))
    assert len({count for count, _ in steps}) >= 4
    for _, metrics in steps[1:]:
        assert metrics.loss == pytest.approx(steps[0][1].loss, abs=1e-6)
        assert metrics.grad_norm == pytest.approx(steps[0][1].grad_norm, rel=1e-5)
        assert metrics.mean("train/entropy") == pytest.approx(steps[0][1].mean("train/entropy"), rel=1e-5)
        assert metrics.ratio_max == pytest.approx(steps[0][1].ratio_max, rel=1e-5)


BY_ADVANTAGE = {
    name: found
    for name in presets()
    if (found := quickstart(f"algorithm.preset={name}", "algorithm.kl.coefficient=0").algorithm).learns_by_advantage
}


@pytest.mark.parametrize("preset", BY_ADVANTAGE)
def test_a_step_that_leaves_out_backward_passes_makes_exactly_the_same_update(model_paths, preset):
    lease = random_lease(5)
    advantages = [values * (number % 2) for number, values in enumerate(lease.advantages)]
    rules = PackingRules(num_plans=1, max_tokens_per_microbatch=64, skips_silent=True)
    (plan,) = plan_step(lease.manifest, advantages, rules)
    assert 0 < plan.silent[0] < len(plan.updates[0])
    found = []
    for each in (plan, replace(plan, silent=())):
        backend = build(model_paths / "qwen3", BY_ADVANTAGE[preset])
        found.append((backend.train_step(each, lease.trajectories), weights_of(backend)))
    (metrics, weights), (whole, expected) = found
    assert metrics == whole
    for key, weight in weights.items():
        np.testing.assert_array_equal(weight, expected[key], err_msg=key)


class Counted(TorchDispatchMode):
    """Operators and how often they ran."""

    def __init__(self):
        super().__init__()
        self.times = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.times[operator.name()] += 1
        return operator(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("recompute", "layers", "kernels"), [("none", 1, 1), ("selective", 2, 1), ("full", 2, 2), ("auto", 1, 1)]
)
def test_what_a_layer_computes_again_in_the_backward_pass(model_paths, recompute, layers, kernels):
    lease = random_lease(4)
    (plan,) = lease.plans(budget=64)
    backend = build(model_paths / "qwen3", recompute=recompute)
    calls = []
    # before, not after: recomputation stops at the last tensor that the backward pass needs
    backend._policy.causal_lm.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    with Counted() as counted:
        backend.train_step(plan, lease.trajectories)
    assert len(calls) == len(plan.microbatches) * layers
    forward = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert counted.times[forward] == kernels * counted.times[f"{forward}_backward"] > 0


def test_a_packed_row_restarts_positions_and_points_at_the_token_before():
    trajectories = {(0, 0): short([5, 6], [7, 8, 9], [True, False, True]), (1, 0): short([1], [2, 3], [True, True])}
    sequences = (
        TrainSequence(0, 0, 0.5, Lengths(prompt=2, response=3, trained=2), owner=0),
        TrainSequence(1, 0, -1.0, Lengths(prompt=1, response=2, trained=2), owner=0),
    )
    batch = pack(sequences, trajectories, predict="trained", device=CPU)
    tokens = batch.tokens
    assert tokens.input_ids.tolist() == [[5, 6, 7, 8, 9, 1, 2, 3]]
    assert tokens.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert tokens.layout.boundaries.tolist() == [0, 5, 8]
    assert (tokens.layout.max_length, tokens.layout.order, tokens.layout.places) == (5, None, None)
    (similar,) = tokens.layout.classes
    assert (similar.num_tokens, similar.num_sequences, similar.max_length) == (8, 2, 5)
    assert similar.slots.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert tokens.predictors.tolist() == [1, 3, 5, 6]
    assert tokens.targets.tolist() == [7, 9, 2, 3]
    assert batch.advantages.tolist() == [0.5, 0.5, -1.0, -1.0]
    assert batch.mask.tolist() == [True] * 4
    assert batch.sequences.tolist() == [0, 0, 1, 1]
    assert pack(sequences, trajectories, predict="trained", device=CPU, step=5).lags.tolist() == [2.0] * 4
    assert pack(sequences, trajectories, predict="response", device=CPU).tokens.predictors.tolist() == [1, 2, 3, 5, 6]


def short(prompt, response, mask):
    n = len(response)
    return Trajectory(
        np.array(prompt, np.int32),
        np.array(response, np.int32),
        np.full(n, -1, np.float32),
        np.array(mask),
        (Segment(0, n, 3, 0),),
        0.0,
    )


def test_only_matrices_that_are_neither_norms_nor_biases_are_decayed():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = torch.nn.Linear(2, 2)
            self.input_layernorm = torch.nn.LayerNorm((2, 2))
            self.expert_bias = torch.nn.Parameter(torch.zeros(2, 2))
            self.scale = torch.nn.Parameter(torch.zeros(2))

    block = Block()
    decayed, plain = build_optimizer(block, TrainerConfig(weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert [id(p) for p in decayed["params"]] == [id(block.proj.weight)]
    assert len(plain["params"]) == len(list(block.parameters())) - 1


def test_bfloat16_compute_keeps_float32_master_weights(model_paths):
    lease = random_lease(5)
    (plan,) = lease.plans()
    exact = build(model_paths / "qwen3")
    rounded = build(model_paths / "qwen3", fsdp=FsdpConfig(param_dtype="bfloat16"))
    a, b = exact.train_step(plan, lease.trajectories), rounded.train_step(plan, lease.trajectories)
    assert b.loss == pytest.approx(a.loss, abs=0.05)
    assert b.grad_norm == pytest.approx(a.grad_norm, rel=0.1)
    assert a.loss != b.loss
    weights = weights_of(rounded)
    assert any(not np.array_equal(w, torch.from_numpy(w).bfloat16().float().numpy()) for w in weights.values())


def test_gradients_are_clipped_to_the_global_norm(model_paths):
    """With beta1 = 0 and a huge eps, the step is proportional to the clipped gradient."""
    lease = random_lease(6)
    (plan,) = lease.plans()
    moved = []
    for limit in (0, 0.01):
        backend = build(
            model_paths / "qwen3", lr=1.0, adam_beta1=0.0, adam_beta2=0.0, adam_eps=1e3, max_grad_norm=limit
        )
        before = weights_of(backend)
        metrics = backend.train_step(plan, lease.trajectories)
        after = weights_of(backend)
        moved.append(np.sqrt(sum(((after[k] - before[k]) ** 2).sum() for k in before)))
    assert metrics.grad_norm > 0.1
    assert moved[1] / moved[0] == pytest.approx(0.01 / metrics.grad_norm, rel=0.02)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_tensors_are_those_of_the_model(model_paths, name, dtype):
    from safetensors.torch import load_file

    backend = build(model_paths / name, dtype=dtype)
    stored = load_file(model_paths / name / "model.safetensors")
    published = dict(backend.named_weights())
    assert set(published) == set(stored)  # what Hugging Face keeps of tied tensors
    for key, tensor in published.items():
        assert torch.equal(tensor, stored[key].to(getattr(torch, dtype))), key


def test_what_the_files_keep_in_float32_is_published_in_float32(model_paths, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(model_paths / "qwen3", tmp_path / "model")
    file, kept = tmp_path / "model/model.safetensors", "model.norm.weight"
    tensors = {n: t if n == kept else t.bfloat16() for n, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    backend = build(tmp_path / "model", dtype="bfloat16")
    specs, published = {s.name: s.dtype for s in backend.weight_specs()}, dict(backend.named_weights())
    assert {name for name, dtype in specs.items() if dtype == "float32"} == {kept}
    assert {name: str(t.dtype).removeprefix("torch.") for name, t in published.items()} == specs
    assert torch.equal(published[kept], tensors[kept])


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="absent"):
        build(tmp_path / "absent")


@pytest.mark.parametrize("head_dtype", ["param", "float32"])
def test_the_recipe_says_in_which_dtype_logits_are_formed(model_paths, head_dtype):
    """Of policy and reference alike: from the hidden states and the matrix as bfloat16 has them."""
    lease, path = random_lease(0), model_paths / "qwen3"
    fsdp = FsdpConfig(param_dtype="bfloat16", head_dtype=head_dtype)
    backend = build(path, AlgorithmConfig(kl=KlConfig(coefficient=0.1)), fsdp=fsdp)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    (plan,) = lease.plans()
    found, kept = backend.logprobs(plan, lease.trajectories), []
    for key, t in lease.trajectories.items():
        ids = torch.from_numpy(np.concatenate([t.prompt_ids, t.response_ids]).astype(np.int64))
        at = torch.arange(len(t.prompt_ids), len(ids))
        with torch.no_grad():
            hidden = model.model(input_ids=ids[None]).last_hidden_state[0, at - 1]
        logits = hidden.float() @ model.lm_head.weight.float().T
        kept.append((found[key] - logits.log_softmax(-1)[range(len(at)), ids[at]]).abs())
    errors = torch.cat(kept)
    assert errors.median() < 1e-6 if head_dtype == "float32" else errors.median() > 1e-4
    means = dict(backend.train_step(plan, lease.trajectories).means)
    assert means["train/kl_reference"] == 0, "policy and reference are equal"


HOPPER, OLD = (9, 0), (7, 5)
BFLOAT16 = FsdpConfig(param_dtype="bfloat16")


@pytest.mark.parametrize(
    ("fsdp", "kernels", "chosen"),
    [
        (FsdpConfig(), Kernels.of(CPU), "packed_sdpa"),
        (BFLOAT16, Kernels(None, flash_attn=True), "packed_sdpa"),
        (BFLOAT16, Kernels(HOPPER, flash_attn=True), "flash_attention_2"),
        (BFLOAT16, Kernels(HOPPER), "varlen"),
        (BFLOAT16, Kernels(HOPPER, flash_attn=True, fa4=True), "varlen"),
        (FsdpConfig(), Kernels(HOPPER, fa4=True), "packed_sdpa"),
        (BFLOAT16, Kernels(HOPPER, varlen=False), "packed_sdpa"),
        (BFLOAT16, Kernels(OLD), "packed_sdpa"),
        (FsdpConfig(), Kernels(HOPPER, flash_attn=True), "packed_sdpa"),
        (replace(BFLOAT16, context_parallel=2), Kernels(HOPPER, flash_attn=True), "varlen"),
        (replace(BFLOAT16, attention="packed_sdpa"), Kernels(HOPPER, flash_attn=True), "packed_sdpa"),
        (replace(BFLOAT16, attention="varlen"), Kernels(HOPPER, flash_attn=True), "varlen"),
    ],
)
def test_attention_is_chosen_by_what_can_run(fsdp, kernels, chosen):
    assert choose_attention(fsdp, kernels) == chosen


@pytest.mark.parametrize(
    ("attention", "kernels", "missing"),
    [
        ("flash_attention_2", Kernels.of(CPU), "a CUDA device and"),
        ("flash_attention_2", Kernels(HOPPER), "the package flash-attn"),
        ("varlen", Kernels.of(CPU), "a CUDA device"),
        ("varlen", Kernels(OLD), "a GPU of Ampere or later"),
        ("varlen", Kernels(HOPPER, varlen=False), "torch 2.11 or later"),
    ],
)
def test_attention_that_cannot_run_is_refused_by_name(attention, kernels, missing):
    with pytest.raises(ConfigError, match=f"trainer.fsdp.attention={attention}.*\n.*{missing}"):
        choose_attention(FsdpConfig(attention=attention), kernels)
