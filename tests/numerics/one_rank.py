"""FSDP2 on one rank, what it trains in a step, and what the embedded engine samples with the same weights."""

from contextlib import asynccontextmanager

import numpy as np
import torch

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import TorchEngineConfig
from asyncrl.config.trainer import TrainerConfig
from asyncrl.inference.torch_engine.engine import TorchEngine
from asyncrl.trainer.fsdp.backend import FsdpBackend
from asyncrl.trainer.packing import PackingRules, plan_step
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl.types import GroupSummary, LeaseManifest, Lengths, Segment, Trajectory
from asyncrl_testing.backend_suite import VOCAB_SIZE
from asyncrl_testing.engine_client import within

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


def build(path, algorithm=None, *, dtype="float32", revision=None, temperature=1.0, total_steps=1, **settings):
    """The backend; `settings` of the trainer, and `over_kept` and `max_model_len`."""
    over_kept, max_model_len = settings.pop("over_kept", False), settings.pop("max_model_len", None)
    spec = TrainerSpec(
        model=ModelConfig(path=str(path), inference_dtype=dtype, revision=revision),
        trainer=TrainerConfig(**{"lr": 1e-3, **settings}),
        algorithm=algorithm or AlgorithmConfig(),
        temperature=temperature,
        total_steps=total_steps,
        over_kept=over_kept,
        max_model_len=max_model_len,
    )
    return FsdpBackend(spec, rank=0, world_size=1, device=CPU)


def plan_of(lease, budget=64, **rules):
    rules = PackingRules(num_plans=1, max_tokens_per_microbatch=budget, **rules)
    (plan,) = plan_step(lease.manifest, lease.advantages, rules)
    return plan


@asynccontextmanager
async def embedded_engine(path):
    settings = TorchEngineConfig(device="cpu", num_slots=4, max_model_len=128, chunk_tokens=3)
    engine = TorchEngine(ModelConfig(path=path), settings, load_real_weights=True)
    await within(engine.start())
    try:
        yield engine
    finally:
        await within(engine.stop())


def trajectory_of(client, name):
    """What a client of an engine got, with the array `name` of its tokens."""
    n, found = len(client.ids), [chunk.extra[name] for chunk in client.chunks if len(chunk.token_ids)]
    ids, logprobs = np.array(client.ids, np.int32), np.array(client.logprobs, np.float32)
    extra = {name: np.concatenate(found)}
    segments = (Segment(0, n, 0, 0),)
    return Trajectory(client.request.prompt_ids, ids, logprobs, np.ones(n, bool), segments, 0.0, extra=extra).validate()


def leased(trajectories, advantage, budget):
    """The plan of a step over these trajectories, each a group, and the trajectories by their keys."""
    lengths = [(Lengths(len(t.prompt_ids), len(t.response_ids), t.num_trained_tokens),) for t in trajectories]
    groups = tuple(GroupSummary(i, 0, each, (0.0,), (), 1, 0) for i, each in enumerate(lengths))
    rules = PackingRules(num_plans=1, max_tokens_per_microbatch=budget)
    (plan,) = plan_step(LeaseManifest(0, groups), [np.full(1, advantage)] * len(groups), rules)
    return plan, {(i, 0): t for i, t in enumerate(trajectories)}
