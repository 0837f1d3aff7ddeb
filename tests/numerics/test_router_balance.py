"""The load-balancing loss of a mixture: its formula in float64, and that packing does not matter."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from asyncrl.algorithms.router_balance import balance_weights, routing_sums
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.errors import ConfigError
from asyncrl_testing.backend_suite import VOCAB_SIZE, random_lease, weights_of
from asyncrl_testing.random_model import random_qwen3_moe, write_random_qwen3
from tests.numerics import one_rank
from tests.numerics.one_rank import plan_of

pytestmark = pytest.mark.usefixtures("process_group")

LAYERS, TOKENS, EXPERTS, TOP = 3, 50, 8, 2
COEFFICIENT = 0.5


def logits_of(seed, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(TOKENS, EXPERTS, generator=g, dtype=dtype).requires_grad_() for _ in range(LAYERS)]


def paper(layers: list[np.ndarray]) -> float:
    """Switch Transformer eq. 4 to 6, expert by expert, mean over layers; top-K counts."""
    total = 0.0
    for logits in layers:
        given = np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
        chosen = np.argsort(-given, axis=-1)[:, :TOP]
        for expert in range(EXPERTS):
            total += EXPERTS * (chosen == expert).any(-1).mean() * given[:, expert].mean()
    return total / len(layers)


def sums_of(layers):
    given = [x.float().softmax(-1) for x in layers]
    return routing_sums([(scores, scores.topk(TOP).indices) for scores in given])


def whole_loss(layers):
    counts, probabilities = sums_of(layers)
    tokens = torch.tensor(float(len(layers[0])))
    return (balance_weights(counts / tokens, tokens) * probabilities).sum()


def test_it_is_the_papers_formula():
    layers = logits_of(0)
    assert whole_loss(layers).item() == pytest.approx(paper([x.detach().numpy() for x in layers]), rel=1e-6)


@pytest.mark.parametrize("seed", [1, 2])
def test_for_one_layer_it_is_hugging_faces_with_its_gradient(seed):
    (ours, *_), (theirs, *_) = logits_of(seed, torch.float32), logits_of(seed, torch.float32)
    found, expected = whole_loss([ours]), load_balancing_loss_func((theirs,), EXPERTS, TOP)
    found.backward()
    expected.backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)


# -- in training ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    root = tmp_path_factory.mktemp("mixture")
    random_qwen3_moe(vocab_size=VOCAB_SIZE, hidden_size=32, head_dim=8, moe_intermediate_size=16).save_pretrained(root)
    return str(root)


def build(path, coefficient=COEFFICIENT, **trainer):
    return one_rank.build(path, AlgorithmConfig(router_aux_coefficient=coefficient), max_grad_norm=0, **trainer)


def without_advantages(lease):
    return replace(lease, advantages=tuple(np.zeros_like(a) for a in lease.advantages))


def reference(lease):
    """The loss and the norm of its gradient of the whole model in float64, one sequence after the other."""
    model = random_qwen3_moe(vocab_size=VOCAB_SIZE, hidden_size=32, head_dim=8, moe_intermediate_size=16)
    model.set_experts_implementation("eager")  # the other one has no float64
    model = model.double().requires_grad_(True)
    rows = []
    for t in lease.trajectories.values():
        ids = torch.tensor(np.concatenate([t.prompt_ids, t.response_ids]), dtype=torch.int64)[None]
        rows.append(model.model(input_ids=ids, output_router_logits=True).router_logits)
    loss = 0
    for layer in range(len(rows[0])):
        given = torch.cat([row[layer] for row in rows]).softmax(-1)
        chosen = torch.zeros_like(given).scatter_(1, given.topk(2, dim=-1).indices, 1.0)
        loss = loss + 8 * (chosen.mean(0) * given.mean(0)).sum() / len(rows[0])
    (COEFFICIENT * loss).backward()
    squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    return loss.item(), torch.stack(squares).sum().sqrt().item()


@pytest.mark.parametrize("budget", [32, 64, 4096])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_loss_and_gradient_of_an_update_are_those_of_float64_whatever_the_packing(path, budget, recompute):
    lease = without_advantages(random_lease(0))
    loss, norm = reference(lease)
    backend = build(path, recompute=recompute)
    metrics = backend.train_step(plan_of(lease, budget), lease.trajectories)
    assert metrics.loss == pytest.approx(COEFFICIENT * loss, rel=1e-5)
    assert metrics.grad_norm == pytest.approx(norm, rel=1e-4)
    assert metrics.mean("train/router_balance") == pytest.approx(loss, rel=1e-5)
    assert loss > 2.01


def test_it_stands_beside_the_policys_loss_and_moves_the_same_weights_for_every_packing(path):
    lease = random_lease(1)
    found = []
    for budget, coefficient in ((32, COEFFICIENT), (4096, COEFFICIENT), (4096, 0.0)):
        backend = build(path, coefficient)
        metrics = backend.train_step(plan_of(lease, budget, num_minibatches=2), lease.trajectories)
        found.append((metrics, weights_of(backend)))
    (small, weights), (large, other), (plain, _) = found
    assert small.loss == pytest.approx(large.loss, rel=1e-5)
    assert small.grad_norm == pytest.approx(large.grad_norm, rel=1e-4)
    for name, values in weights.items():
        np.testing.assert_allclose(values, other[name], atol=2e-5, err_msg=name)
    assert "train/router_balance" not in dict(plain.means)
    # the metric weighs updates by their trained tokens, the loss all alike
    assert large.loss - plain.loss == pytest.approx(COEFFICIENT * large.mean("train/router_balance"), rel=0.02)


def test_the_load_becomes_even(path):
    lease = without_advantages(random_lease(2))
    backend = build(path, lr=1e-2)
    seen = [backend.train_step(plan_of(lease, 64), lease.trajectories).mean("train/router_balance") for _ in range(12)]
    assert seen[-1] - 2 < 0.5 * (seen[0] - 2)


def test_a_dense_model_is_refused(tmp_path):
    write_random_qwen3(tmp_path, vocab_size=VOCAB_SIZE)
    with pytest.raises(ConfigError, match="has no experts") as caught:
        build(str(tmp_path))
    assert len(str(caught.value).splitlines()) == 3
