"""The training step over plain torch and over FSDP2, on one rank: the same numbers."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.trainer.packing import PackingRules, plan_step
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl_testing.backend_suite import random_lease
from asyncrl_testing.plain_backend import PlainBackend
from tests.backends import fsdp_backend
from tests.make import quickstart
from tools.make_tiny_model import Settings, build_model, build_tokenizer

pytestmark = pytest.mark.usefixtures("process_group")

PPO = [
    "algorithm.advantage=gae",
    "algorithm.gae.lam=0.9",
    "algorithm.critic.lr=1e-3",
    "algorithm.critic.warmup_steps=1",
]
KL_REWARD = ["algorithm.kl.coefficient=0.05", "algorithm.kl.place=reward"]
FITTED = "algorithm.corrections=[{name: truncated_is, high: 1.05, normalize: true}, {name: m2po, high: 1.0}]"
LOSS = ["algorithm.kl.coefficient=0.1", "algorithm.entropy_coefficient=0.02", "trainer.weight_decay=0.1"]
SEVERAL = ["batch.num_minibatches=2", "batch.num_epochs=2"]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """The quickstart's model before its warm-up."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("model")
    build_model(Settings(), build_tokenizer()).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([], id="quickstart"),
        pytest.param([*PPO, *KL_REWARD, *SEVERAL, "rollout.sampling.temperature=0.8"], id="ppo"),
        pytest.param(["algorithm.ratio=proximal", FITTED, *LOSS, *SEVERAL], id="decoupled"),
        pytest.param([*KL_REWARD, "algorithm.advantage=reinforce_plus_plus_baseline"], id="reinforce_plus_plus"),
    ],
)
def test_steps_of_the_quickstart_are_those_of_fsdp(tiny_model, overrides):
    recipe = quickstart(f"model.path={tiny_model}", *overrides)
    spec = TrainerSpec.of(recipe)
    plain = PlainBackend(spec)
    fsdp = fsdp_backend(spec)
    rules = replace(PackingRules.of(recipe), max_tokens_per_microbatch=64)
    for step in range(4):
        lease = random_lease(step, num_groups=4, group_size=4, step=step)
        (plan,) = plan_step(lease.manifest, lease.advantages, rules)
        trajectories = lease.trajectories
        if step == 0:  # sampled by the policy itself; later ones are far from it, and clipped
            own = plain.logprobs(plan, trajectories)
            trajectories = {key: replace(t, logprobs=own[key].numpy()) for key, t in trajectories.items()}
        expected, found = fsdp.train_step(plan, trajectories), plain.train_step(plan, trajectories)
        assert found.lr == expected.lr
        assert (found.trained_tokens, found.packed_tokens) == (expected.trained_tokens, expected.packed_tokens)
        assert [name for name, _ in found.means] == [name for name, _ in expected.means]
        numbers = [(m.loss, m.grad_norm, m.ratio_max, *(value for _, value in m.means)) for m in (found, expected)]
        np.testing.assert_allclose(*numbers, rtol=2e-4, atol=1e-5, err_msg=f"step {step}: {expected.means}")
    expected, found = fsdp.logprobs(plan, trajectories), plain.logprobs(plan, trajectories)
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, atol=1e-4)
    start = PlainBackend(spec).logprobs(plan, trajectories)
    assert max(float((found[key] - start[key]).abs().max()) for key in found if len(found[key])) > 0.01  # it learned
