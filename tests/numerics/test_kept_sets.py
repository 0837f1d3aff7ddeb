"""Filtered sampling with its sets: the trainer's probabilities are among the tokens that the engine kept."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.config.algorithm import AlgorithmConfig, KlConfig
from asyncrl.errors import GenerationError
from asyncrl.trainer.token_logprobs import among_kept, logprobs_beside
from asyncrl.types.metrics import Metric
from asyncrl_testing.backend_suite import write_model
from asyncrl_testing.engine_suite import Client, complete, make_request
from tests.numerics.one_rank import build, embedded_engine, leased, trajectory_of

pytestmark = pytest.mark.usefixtures("process_group")

N, V, K = 12, 30, 7
FILTERS = {"top_k": 6, "top_p": 0.8, "temperature": 0.7}


def test_value_entropy_and_gradient_are_those_of_a_softmax_over_the_kept_tokens():
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, 8, generator=g).requires_grad_(), torch.randn(V, 8, generator=g)
    kept = torch.stack([torch.randperm(V, generator=g)[:K] for _ in range(N)])
    for row in range(N):
        kept[row, 1 + row % K :] = -1
    kept[3] = -1  # nothing was recorded
    targets = kept[:, 0].clamp(min=0)
    beside = logprobs_beside(hidden, weight, None, targets, kept.clamp(min=0), temperature=0.7)
    logprobs, entropy = among_kept(*beside, kept >= 0)
    logits, allowed = hidden.double() @ weight.T.double() / 0.7, torch.zeros(N, V, dtype=torch.bool)
    for row in range(N):
        allowed[row, kept[row][kept[row] >= 0]] = True
    allowed[3] = True
    logp = logits.masked_fill(~allowed, -torch.inf).log_softmax(-1)
    wanted = logp.gather(-1, targets[:, None])[:, 0]
    wanted_entropy = -(logp.exp() * logp.masked_fill(~allowed, 0)).sum(-1)
    torch.testing.assert_close(logprobs.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), wanted_entropy, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(N, generator=g)
    (found,) = torch.autograd.grad(((logprobs + 0.3 * entropy) * upstream).sum(), hidden)
    (expected,) = torch.autograd.grad(((wanted + 0.3 * wanted_entropy) * upstream).sum(), hidden)
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("policy"))


async def sampled(path, count=6):
    """Trajectories of the embedded engine with filters, and their sets."""
    async with embedded_engine(path) as engine:
        for wrong in ({"top_k": 0}, {"top_k": 4, "temperature": 0.0}):
            with pytest.raises(GenerationError, match="kept with top_k"):
                await complete(engine, kept=True, **wrong)
        requests = [make_request(prompt=range(1, 4 + 3 * i), seed=i, kept=True, **FILTERS) for i in range(count)]
        beside = Client(engine, make_request(top_k=20, max_tokens=10, kept=True))
        done = [await client.done() for client in [Client(engine, request) for request in requests]]
        assert all(c.extra["kept_ids"].shape[1] == 20 for c in (await beside.done()).chunks if len(c.token_ids))
    found = [trajectory_of(client, "kept_ids") for client in done]
    rows = [(token, row) for t in found for token, row in zip(t.response_ids, t.extra["kept_ids"], strict=True)]
    assert all(token in row for token, row in rows)
    assert any(-1 in row for _, row in rows), "top_p keeps fewer"
    return found


async def test_what_was_sampled_with_filters_has_the_probability_that_the_engine_reports(path):
    plan, by_key = leased(await sampled(path), 1.0, 64)
    algorithm = AlgorithmConfig(entropy_coefficient=0.01, kl=KlConfig(coefficient=0.1))

    def trained(trajectories, *, over_kept):
        temperature = FILTERS["temperature"]
        backend = build(path, algorithm, temperature=temperature, max_grad_norm=0, over_kept=over_kept)
        return backend.train_step(plan, trajectories)

    exact, biased = trained(by_key, over_kept=True), trained(by_key, over_kept=False)
    assert exact.ratio_max == pytest.approx(1, abs=1e-3)
    assert exact.mean(Metric.RATIO_MEAN) == pytest.approx(1, abs=1e-4)
    assert exact.mean(Metric.KL_REFERENCE) == pytest.approx(0, abs=1e-6)
    assert exact.mean(Metric.ENTROPY) < np.log(FILTERS["top_k"])
    assert biased.mean(Metric.RATIO_MEAN) < 0.9
    lacking = {key: replace(t, extra={}) for key, t in by_key.items()}
    with pytest.raises(ValueError, match="has no kept_ids"):
        trained(lacking, over_kept=True)
