"""FSDP2 on one rank, what it trains in a step, and what the embedded engine samples with the same weights."""

import numpy as np
import torch

from asyncrl.trainer.packing import PackingRules, plan_step
from asyncrl.types import GroupSummary, LeaseManifest, Lengths, Segment, Trajectory
from asyncrl_testing.backend_suite import VOCAB_SIZE
from tests.backends import fsdp_backend, trainer_spec
from tests.engines import running, torch_engine

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
"""Of a small Qwen3."""


def build(path, algorithm=None, **settings):
    """The backend; `settings` of `trainer_spec`."""
    return fsdp_backend(trainer_spec(path, algorithm, **{"lr": 1e-3, **settings}))


def plan_of(lease, budget=64, **rules):
    rules = PackingRules(num_plans=1, max_tokens_per_microbatch=budget, **rules)
    (plan,) = plan_step(lease.manifest, lease.advantages, rules)
    return plan


def embedded_engine(path):
    return running(torch_engine(path, real=True, num_slots=4, max_model_len=128, chunk_tokens=3))


def trajectory_of(client, name):
    """What a client of an engine got, with the array `name` of its tokens."""
    n, found = len(client.ids), [chunk.extra[name] for chunk in client.chunks if len(chunk.token_ids)]
    ids, logprobs = np.array(client.ids, np.int32), np.array(client.logprobs, np.float32)
    extra = {name: np.concatenate(found)}
    segments = (Segment(0, n, 0, 0),)
    return Trajectory(client.request.prompt_ids, ids, logprobs, np.ones(n, bool), segments, 0.0, extra=extra).validate()


def single_logprobs(model, trajectory, temperature=1.0):
    """[T] float64, by a forward pass of one sequence."""
    ids = torch.from_numpy(np.concatenate([trajectory.prompt_ids, trajectory.response_ids]).astype(np.int64))
    logp = (model(input_ids=ids[None]).logits[0].double() / temperature).log_softmax(-1)
    at = torch.arange(len(trajectory.prompt_ids), len(ids))
    return logp[at - 1, ids[at]]


def reference_step(model, lease, logprobs_of):
    """Loss and norm of the gradient of the whole lease, sequence by sequence, by the formula of the default loss."""
    total = sum(t.num_trained_tokens for t in lease.trajectories.values())
    loss = 0.0
    for (ordinal, index), t in lease.trajectories.items():
        if t.num_trained_tokens:
            ratio = (logprobs_of(model, t) - torch.from_numpy(t.logprobs)).exp()
            advantage = lease.advantages[ordinal][index]
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            part = -surrogate[torch.from_numpy(t.loss_mask)].sum() / total
            part.backward()
            loss += part.item()
    return loss, torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()


def leased(trajectories, advantage, budget):
    """The plan of a step over these trajectories, each a group, and the trajectories by their keys."""
    lengths = [(Lengths(len(t.prompt_ids), len(t.response_ids), t.num_trained_tokens),) for t in trajectories]
    groups = tuple(GroupSummary(i, 0, each, (0.0,), (), 1, 0) for i, each in enumerate(lengths))
    rules = PackingRules(num_plans=1, max_tokens_per_microbatch=budget)
    (plan,) = plan_step(LeaseManifest(0, groups), [np.full(1, advantage)] * len(groups), rules)
    return plan, {(i, 0): t for i, t in enumerate(trajectories)}
