"""Context parallelism of FSDP2: ranks that share the tokens of each row (gloo, two and four ranks) against one rank."""

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.trainer import FsdpConfig, LoraConfig
from asyncrl.kernels.routers import RouterTaps
from asyncrl.trainer.fsdp.context import ContextRanks
from asyncrl.trainer.fsdp.models import Policy
from asyncrl.trainer.step.batch import PackedLayout, PackedTokens
from asyncrl_testing.backend_suite import VOCAB_SIZE, random_lease, weights_of
from asyncrl_testing.random_model import random_qwen3_moe
from asyncrl_testing.rank_processes import run_ranks
from tests.backends import save
from tests.numerics import one_rank
from tests.numerics.test_fsdp_ranks import FITTED, PPO, assert_close_metrics, assert_close_weights, build

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("process_group")]

DEADLINE_S = 300
LEASES = [random_lease(80 + step, step=step) for step in range(3)]
BUDGET = 32
"""Of tokens: several micro-batches, of lengths that no number of ranks divides."""
SIZES = {**one_rank.SIZES, "initializer_range": 0.2}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES | {"num_key_value_heads": 4})),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "mixture": lambda: random_qwen3_moe(vocab_size=VOCAB_SIZE),
    "sliding": lambda: Qwen3ForCausalLM(
        Qwen3Config(
            **SIZES | {"num_key_value_heads": 1}, use_sliding_window=True, sliding_window=5, max_window_layers=0
        )
    ),
}
SHARED = FsdpConfig(context_parallel=2)
FULL = FsdpConfig(context_parallel=2, shard_ranks=2, reduce_every_microbatch=False)
CASES = {  # name -> number of ranks, model, settings beside the model
    "llama over two": (2, "llama", {"fsdp": SHARED}),
    "qwen3 over two, computed again, prompts apart": (
        2,
        "qwen3",
        {"fsdp": replace(SHARED, share_prompts=False), "recompute": "selective"},
    ),
    "critic and reference": (2, "qwen3", {"fsdp": SHARED, "algorithm": PPO}),
    "adapters": (2, "qwen3", {"fsdp": SHARED, "lora": LoraConfig(rank=4)}),
    "routers that are balanced": (2, "mixture", {"fsdp": SHARED, "algorithm": FITTED}),
    "a sliding window": (2, "sliding", {"fsdp": SHARED}),
    "qwen3 over four, with copies of its two key heads": (4, "qwen3", {"fsdp": FsdpConfig(context_parallel=4)}),
    "two pairs, each with a copy of the model": (4, "qwen3", {"fsdp": FULL, "recompute": "full"}),
    "two pairs, one copy over all": (4, "llama", {"fsdp": SHARED}),
}
SAVED = {2: "llama over two", 4: "two pairs, each with a copy of the model"}


def one_rank(settings):
    """The same settings without sharing."""
    return {**settings, "fsdp": replace(settings["fsdp"], context_parallel=1, shard_ranks=None)}


def train(backend, leases, plan, num_plans):
    plans = [lease.plans(num_plans, BUDGET)[plan] for lease in leases]
    return [asdict(backend.train_step(plan, lease.trajectories)) for plan, lease in zip(plans, leases, strict=True)]


def longest_seen(backend):
    """Tokens of the longest row that the first layer gets, as it gets them."""
    seen = [0]

    def watch(layer, args, kwargs):
        seen[0] = max(seen[0], (args[0] if args else kwargs["hidden_states"]).shape[1])

    backend._policy.causal_lm.base_model.layers[0].register_forward_pre_hook(watch, with_kwargs=True)
    return seen


def everything_asked(root, rank, context):
    """A mixture with recorded experts, further tokens and kept sets over a row of 13 tokens: outputs and gradients."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCAB_SIZE, (13,), generator=draw)
    tokens = PackedTokens(
        input_ids=ids[None],
        position_ids=torch.cat([torch.arange(9), torch.arange(4)])[None],
        layout=PackedLayout.of([9, 4], torch.device("cpu")),
        predictors=torch.tensor([2, 3, 5, 7, 9, 11]),
        targets=ids[[3, 4, 6, 8, 10, 12]],
        temperature=0.8,
        others=torch.randint(VOCAB_SIZE, (6, 3), generator=draw),
        experts=torch.randint(-1, 4, (13, 2, 2), generator=draw),
    )
    kept = torch.cat([tokens.targets[:, None], torch.tensor([[39, 38], [37, -1], [-1, -1]] * 2)], 1)
    found = {}
    for name, row in (("others", tokens), ("kept", replace(tokens, others=None, kept=kept, experts=None))):
        model = AutoModelForCausalLM.from_pretrained(root / "mixture", attn_implementation="packed_rows")
        outputs = Policy(model, context=context, taps=RouterTaps(model))(row, 0.8, routing=True)
        torch.manual_seed(7)
        sum((output * torch.randn_like(output)).sum() for output in outputs).backward()
        grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        for grad in grads.values() if context is not None else ():
            dist.all_reduce(grad)
        found[name] = [output.detach().numpy() for output in outputs], {k: g.numpy() for k, g in grads.items()}
    return found


def findings(root, name, rank, world_size):
    _, model, settings = CASES[name]
    context = settings["fsdp"].context_parallel
    plan, num_plans = rank // context, world_size // context
    backend = build(root / model, rank, world_size, **settings)
    first = LEASES[0].plans(num_plans, BUDGET)[plan]
    seen = longest_seen(backend)
    found = {"logprobs": {k: v.numpy() for k, v in backend.logprobs(first, LEASES[0].trajectories).items()}}
    if settings.get("algorithm", AlgorithmConfig()).needs_reference:
        found["kl"] = backend.reference_kl(first, LEASES[0].trajectories)
    found["steps"] = train(backend, LEASES[:2], plan, num_plans)
    found["weights"] = weights_of(backend)
    found["longest"] = seen[0]
    if name == SAVED.get(world_size):
        save(backend, root / f"saved{world_size}")
        resumed = build(root / model, rank, world_size, **settings)
        resumed.load(root / f"saved{world_size}")
        found["last"] = train(resumed, LEASES[2:], plan, num_plans)
    return found


def rank_main(root, rank, world_size, models):
    found = {name: findings(models, name, rank, world_size) for name, case in CASES.items() if case[0] == world_size}
    return found | {"everything": everything_asked(models, rank, ContextRanks(dist.group.WORLD))}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("context")
    for name, make in MODELS.items():
        torch.manual_seed(0)
        make().save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def shared(models):
    """Number of ranks -> what each of them found."""
    preload = ["tests.numerics.test_fsdp_ranks"]
    return {
        ranks: run_ranks(rank_main, models / f"ranks{ranks}", ranks, models, preload=preload, deadline_s=DEADLINE_S)
        for ranks in (2, 4)
    }


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_rows_train_as_one_rank_does(models, shared, name):
    ranks, model, settings = CASES[name]
    found = [rank[name] for rank in shared[ranks]]
    context = settings["fsdp"].context_parallel
    one = build(models / model, 0, 1, **one_rank(settings))
    (plan,) = LEASES[0].plans(1, BUDGET)
    expected = one.logprobs(plan, LEASES[0].trajectories)
    for rank in range(ranks):  # those that share a row have the same sequences
        assert found[rank]["logprobs"].keys() == found[rank // context * context]["logprobs"].keys()
    every = {key: value for rank in found for key, value in rank["logprobs"].items()}
    assert every.keys() == expected.keys()
    for rank in found:
        for key, value in rank["logprobs"].items():
            np.testing.assert_allclose(value, expected[key].numpy(), atol=1e-5)
    if "kl" in found[0]:
        kl = {key: value for rank in found for key, value in rank["kl"].items()}
        assert kl == pytest.approx(one.reference_kl(plan, LEASES[0].trajectories), abs=1e-4)
    seen = longest_seen(one)
    for a, b in zip(train(one, LEASES[:2], 0, 1), found[0]["steps"], strict=True):
        assert a["grad_norm"] > 0
        assert_close_metrics(a, b, rel=1e-4)
    assert_close_weights(weights_of(one), found[0]["weights"], tolerance=1e-4)
    assert {rank["longest"] for rank in found} <= {-(-n // context) for n in range(BUDGET // 2 + 1, BUDGET + 1)}
    assert BUDGET // 2 < seen[0] <= BUDGET, "one rank has whole rows"
    for other in found[1:]:
        assert other["steps"] == found[0]["steps"]
        assert all((other["weights"][key] == weight).all() for key, weight in found[0]["weights"].items())


@pytest.mark.parametrize("ranks", SAVED)
def test_all_that_a_policy_is_asked_for_is_that_of_one_rank(models, shared, ranks):
    expected = everything_asked(models, 0, None)
    for found in (rank["everything"] for rank in shared[ranks]):
        for name, (outputs, grads) in expected.items():
            for a, b in zip(outputs, found[name][0], strict=True):
                np.testing.assert_allclose(b, a, atol=1e-4, rtol=1e-4)
            assert found[name][1].keys() == grads.keys()
            for key, grad in grads.items():
                np.testing.assert_allclose(found[name][1][key], grad, atol=1e-4, rtol=1e-3, err_msg=key)


@pytest.mark.parametrize("ranks", SAVED)
def test_a_checkpoint_of_ranks_that_share_rows_goes_on_with_one(models, shared, ranks):
    _, model, settings = CASES[SAVED[ranks]]
    one = build(models / model, 0, 1, **one_rank(settings))
    one.load(models / f"saved{ranks}")
    assert_close_metrics(train(one, LEASES[2:], 0, 1)[0], shared[ranks][0][SAVED[ranks]]["last"][0], rel=1e-4)
