"""Megatron-core at each layout, on CPU ranks over gloo, against FSDP2 on one rank in this process.

Two ranks run one layout after another, four the others. They load the model, compute log-probabilities, make two
optimizer steps, export, save, and resume; all of it is compared.
"""

from dataclasses import asdict
from functools import cache

import numpy as np
import pytest
import torch

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.model import ModelConfig
from asyncrl.config.trainer import MegatronConfig
from asyncrl.trainer.backends import open_checkpoint
from asyncrl_testing.backend_suite import assert_same_weights, random_lease, weights_of
from asyncrl_testing.rank_processes import run_ranks
from tests.backends import fsdp_backend, megatron_backend, rank_spec
from tests.make import needs_megatron
from tests.numerics.test_fsdp_ranks import assert_close_metrics, assert_close_weights, saved_between

pytestmark = [pytest.mark.slow, needs_megatron]

VOCAB_SIZE = 41  # odd: every layout pads it
LEASES = [random_lease(40 + step, step=step) for step in range(3)]
BUDGET = 40
SHAPE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2,
    "attention_dropout": 0.1,
}  # fmt: skip
DEADLINE_S = 280
LAYOUTS = {
    "dp2": ("qwen3", 2, MegatronConfig()),
    "tp2": ("qwen3", 2, MegatronConfig(tensor_parallel=2, sequence_parallel=False)),
    "tp2-sp": ("llama", 2, MegatronConfig(tensor_parallel=2)),
    "pp2": ("qwen3", 2, MegatronConfig(pipeline_parallel=2)),
    "vpp": ("qwen2", 2, MegatronConfig(pipeline_parallel=2, chunks_per_stage=2)),
    "tp4": ("qwen3", 4, MegatronConfig(tensor_parallel=4)),
    "tp2-pp2": ("qwen3", 4, MegatronConfig(tensor_parallel=2, pipeline_parallel=2)),
    "cp2": ("qwen3", 2, MegatronConfig(context_parallel=2)),
    "cp2-tp2": ("llama", 4, MegatronConfig(context_parallel=2, tensor_parallel=2)),
    "cp2-pp2": ("qwen2", 4, MegatronConfig(context_parallel=2, pipeline_parallel=2)),
    "cp2-ep2": ("mixture", 2, MegatronConfig(context_parallel=2, expert_parallel=2)),
    "ep2": ("mixture", 2, MegatronConfig(expert_parallel=2)),
    "etp2": ("mixture", 2, MegatronConfig(tensor_parallel=2)),
    "tp2-ep2": ("shared", 2, MegatronConfig(tensor_parallel=2, expert_parallel=2, expert_tensor_parallel=1)),
}
"""Name -> model, ranks, layout."""
RECOMPUTE = {"tp2-sp": "full", "cp2": "full"}


def build_model(kind):
    import transformers as hf

    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    if kind == "qwen3":
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**SHAPE, tie_word_embeddings=True))
    elif kind == "qwen2":
        shape = {key: value for key, value in SHAPE.items() if key != "head_dim"}
        model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**shape, tie_word_embeddings=False))
    elif kind == "llama":
        rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
        config = hf.LlamaConfig(**SHAPE, rope_parameters=rope, max_position_embeddings=1 << 17)
        model = hf.LlamaForCausalLM(config)
    elif kind == "mixture":
        model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SHAPE, **experts, norm_topk_prob=True, mlp_only_layers=[1]))
    else:
        shape = {key: value for key, value in SHAPE.items() if key != "head_dim"}
        config = hf.Qwen2MoeConfig(**shape, **experts, shared_expert_intermediate_size=24, norm_topk_prob=False)
        model = hf.Qwen2MoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            torch.nn.init.normal_(parameter, mean=float(name.endswith("weight")), std=0.1)
    return model


def spec_of(path, world_size, backend, layout=None, recompute="auto", **algorithm):
    algorithm = AlgorithmConfig(entropy_coefficient=0.01, **algorithm)
    return rank_spec(path, world_size, backend, layout, algorithm, max_grad_norm=0.5, recompute=recompute)


def run(make, plan_of, directory):
    """Everything that is compared. `make`: a backend; `plan_of`: the plan of this rank for a lease."""
    backend = make()
    found = {"loaded": weights_of(backend), "senders": [(s.rank, s.first_tensor) for s in backend.sending_ranks()]}
    found |= saved_between(backend, plan_of, LEASES, directory)
    resumed = make()
    resumed.load(directory)
    found["resumed"] = asdict(resumed.train_step(plan_of(LEASES[2]), LEASES[2].trajectories))
    found["resumed_weights"] = weights_of(resumed)
    return found


def rank_main(root, rank, world_size, paths):
    """What this rank finds at each layout of as many ranks. `paths`: kind of model -> its directory."""
    from megatron.core import parallel_state

    found = {}
    for name, (kind, ranks, layout) in LAYOUTS.items():
        if ranks == world_size and kind in paths:
            found[name] = at_layout(
                root / name, rank, world_size, paths[kind], layout, recompute=RECOMPUTE.get(name, "auto")
            )
            parallel_state.destroy_model_parallel()
    return found


def at_layout(root, rank, world_size, path, layout, **trainer):
    spec = spec_of(path, world_size, "megatron", layout, **trainer)
    ranks = spec.trainer.layout

    def plan_of(lease):
        return lease.plans(ranks.num_plans, BUDGET)[ranks.plan_of(rank)]

    return run(lambda: megatron_backend(spec, rank, world_size), plan_of, root / "trainer")


@pytest.fixture(scope="module")
def references(paths, tmp_path_factory, process_group):
    """Kind of model -> what FSDP2 on one rank finds; made when it is asked for."""

    @cache
    def reference(kind):
        spec, root = spec_of(paths[kind], 1, "fsdp"), tmp_path_factory.mktemp(kind)
        return run(lambda: fsdp_backend(spec), lambda lease: lease.plans(1, BUDGET)[0], root / "trainer")

    return reference


def write_models(root, kinds):
    """Kind -> where its model is."""
    for kind in kinds:
        build_model(kind).save_pretrained(root / kind)
    return {kind: root / kind for kind in kinds}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"), {kind for kind, _, _ in LAYOUTS.values()})


@pytest.fixture(scope="module")
def two_ranks(paths, tmp_path_factory):
    root = tmp_path_factory.mktemp("two")
    return root, run_ranks(rank_main, root, 2, paths, preload=["tests.numerics.megatron_ranks"], deadline_s=DEADLINE_S)


@pytest.fixture(scope="module")
def four_ranks(paths, tmp_path_factory):
    root = tmp_path_factory.mktemp("four")
    return root, run_ranks(rank_main, root, 4, paths, preload=["tests.numerics.megatron_ranks"], deadline_s=DEADLINE_S)


@pytest.fixture(scope="module", params=list(LAYOUTS))
def outcome(request, references):
    """The reference, what the ranks found, and their directory."""
    kind, world_size, _ = LAYOUTS[request.param]
    root, found = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[world_size])
    return references(kind), [rank[request.param] for rank in found], root / request.param


def sent(ranks, key):
    """The tensors that all ranks send, in their order."""
    assert len({name for rank in ranks for name in rank[key]}) == sum(len(rank[key]) for rank in ranks), "sent once"
    return {name: weight for rank in ranks for name, weight in rank[key].items()}


def close(found, expected, tolerance):
    assert set(found) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=tolerance, rtol=0, err_msg=str(name))


def test_what_was_loaded_is_exported_bit_for_bit(outcome):
    reference, ranks, _ = outcome
    loaded = sent(ranks, "loaded")
    assert set(loaded) == set(reference["loaded"])
    assert not [n for n, w in loaded.items() if not np.array_equal(w, reference["loaded"][n])]
    for found in ranks:
        assert found["specs"] == [(name, weight.shape) for name, weight in loaded.items()]


def test_the_first_rank_of_each_stage_sends_its_tensors_and_no_others(outcome, request):
    _, ranks, _ = outcome
    layout = LAYOUTS[request.node.callspec.params["outcome"]][2]
    stages = layout.pipeline_parallel
    leaders = [stage * len(ranks) // stages for stage in range(stages)]
    for rank, found in enumerate(ranks):
        assert [sender for sender, _ in found["senders"]] == leaders
        firsts = [first for _, first in found["senders"]] + [len(found["specs"])]
        own = found["specs"][slice(*firsts[leaders.index(rank) :][:2])] if rank in leaders else []
        assert [name for name, _ in own] == list(found["loaded"])


def test_logprobs_are_those_of_hugging_face(outcome):
    reference, ranks, _ = outcome
    found = {key: value for rank in ranks for key, value in rank["logprobs"].items()}
    close(found, reference["logprobs"], 5e-6)


def test_metrics_of_two_steps_are_those_of_fsdp_and_the_same_on_every_rank(outcome):
    reference, ranks, _ = outcome
    assert all(rank["steps"] == ranks[0]["steps"] for rank in ranks)
    for found, expected in zip(ranks[0]["steps"], reference["steps"], strict=True):
        assert expected["grad_norm"] > 0.5, "clipped"
        assert_close_metrics(expected, found, rel=5e-5, floor=5e-6)


def test_weights_after_two_steps_are_those_of_fsdp(outcome):
    """Adam turns a gradient of rounding size into a step of lr, so single elements may differ by that."""
    reference, ranks, _ = outcome
    weights = sent(ranks, "weights")  # in the order of stages
    assert_close_weights(reference["weights"], {name: weights[name] for name in reference["weights"]}, tolerance=2e-5)


def test_resumed_training_is_bitwise_the_same(outcome):
    _, ranks, _ = outcome
    for rank in ranks:
        assert rank["resumed"] == rank["last"]
        assert_same_weights(rank["last_weights"], rank["resumed_weights"])


def test_the_checkpoint_reads_as_hugging_face_tensors(outcome):
    _, ranks, root = outcome
    found = dict(open_checkpoint(root / "trainer", "megatron").weights(ModelConfig()))
    weights = sent(ranks, "weights")
    assert set(found) == set(weights)
    assert_same_weights(weights, {name: found[name].numpy() for name in weights})
