"""Small real objects that several tests need."""

import asyncio
import importlib.util
from collections.abc import Coroutine
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.config.load import load_recipe
from asyncrl.config.recipe import Recipe
from asyncrl.data.rows import ChatMessage, PromptRow
from asyncrl.queue.message_queue import MessageQueue, QueueSpec
from asyncrl.types import LeaseManifest, Segment, Ticket, Trajectory, TrajectoryGroup

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"


def trajectory(*, prompt=3, response=4, versions=(0,), reward=0.0, seed=0) -> Trajectory:
    """`response` tokens split evenly over segments of `versions`."""
    rng = np.random.default_rng(seed)
    cuts = np.linspace(0, response, len(versions) + 1).astype(int)
    segments = tuple(
        Segment(int(a), int(b), version, 0)
        for a, b, version in zip(cuts[:-1], cuts[1:], versions, strict=True)
        if b > a
    )
    return Trajectory(
        prompt_ids=rng.integers(0, 100, prompt).astype(np.int32),
        response_ids=rng.integers(0, 100, response).astype(np.int32),
        logprobs=-rng.random(response).astype(np.float32),
        loss_mask=np.ones(response, np.bool_),
        segments=segments,
        reward=reward,
    )


@cache
def quickstart(*overrides: str) -> Recipe:
    """Its recipe, with these overrides."""
    return load_recipe(QUICKSTART, list(overrides))


def planned(*overrides: str) -> Recipe:
    """A small recipe for the planner: one replica with room for every response; training waits for publishes."""
    sizes = ["batch.groups_per_step=4", "batch.group_size=2", "rollout.num_replicas=1", "rollout.torch.num_slots=256"]
    return quickstart(*sizes, "rollout.sampling.max_response_tokens=100000", "weights.overlap=false", *overrides)


def row(truth: str, content: str = "?") -> PromptRow:
    """A question and its truth."""
    return PromptRow((ChatMessage("user", content),), truth, "test", (), "f:1")


def group(ordinal=0, attempt=0, *, rewards=(0.0, 1.0), versions=(0,)) -> TrajectoryGroup:
    members = [trajectory(reward=r, versions=versions, seed=ordinal * 100 + i) for i, r in enumerate(rewards)]
    return TrajectoryGroup(ordinal, attempt, tuple(members))


def queue_spec(directory: Path, **changes: Any) -> QueueSpec:
    """Two groups a step, with a lag of one step and two attempts, or with `changes`."""
    recipe = quickstart("batch.groups_per_step=2", "staleness.max_lag=1", "run.max_steps=50", "rollout.max_attempts=2")
    return changed(QueueSpec(recipe, directory / "events.jsonl"), **changes)


def changed(spec: QueueSpec, **changes: Any) -> QueueSpec:
    """The spec with other values of these keys of its recipe."""
    recipe, sections = spec.recipe, ("batch", "staleness", "rollout", "algorithm")
    values = {s: {n: v for n, v in changes.items() if hasattr(getattr(recipe, s), n)} for s in sections}
    return replace(spec, recipe=remade(recipe, values))


def remade(record: Any, values: dict[str, Any]) -> Any:
    """The record with other values of these keys, all put in at once; `a.b` is a key of the record `a`."""
    parts: dict[str, Any] = {}
    for key, value in values.items():
        name, _, rest = key.partition(".")
        parts[name] = parts.get(name, {}) | {rest: value} if rest else value
    return replace(record, **{n: remade(getattr(record, n), v) if isinstance(v, dict) else v for n, v in parts.items()})


async def put(queue: MessageQueue, *tickets: Ticket, **options: Any) -> None:
    """A group of each ticket's version, or with `options` of `group`."""
    for t in tickets:
        await queue.put(t, group(t.ordinal, t.attempt, versions=(t.version,), **options))


async def train(queue: MessageQueue, step: int) -> LeaseManifest:
    """What the step has leased; it is committed and published."""
    manifest = await queue.lease(step, 0)
    assert isinstance(manifest, LeaseManifest), manifest
    await queue.commit(step)
    await queue.published(step + 1)
    return manifest


async def begun(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task that had its first turn."""
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    return task


needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed (asyncrl[megatron])"
)


def require_sglang() -> None:
    """Skips where SGLang is not installed; fails where it cannot be used."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("needs the package sglang: make test-sglang")
    from asyncrl.inference.sglang.support import check_sglang

    check_sglang()


def require_vllm() -> None:
    """Skips the test where vLLM is not installed; fails where it is and cannot be used."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs the package vllm: make install-vllm")
    from asyncrl.inference.vllm.support import check_vllm

    check_vllm()
