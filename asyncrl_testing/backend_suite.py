"""Conformance suite of every TrainBackend. A test class derives from it and provides `make_backend`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from asyncrl.errors import ConfigError, RunFailed, StorageError
from asyncrl.trainer.backend import TrainBackend
from asyncrl.trainer.packing import PackingRules, plan_step
from asyncrl.types import (
    GroupSummary,
    LeaseManifest,
    Lengths,
    RankPlan,
    Segment,
    Trajectory,
    TrajectoryGroup,
    TrajectoryKey,
)
from asyncrl.types.metrics import Metric

VOCAB_SIZE = 40
MakeBackend = Callable[[], TrainBackend]
"""A backend on one rank with the model of `write_model`, temperature 1, lr 1e-2 without warm-up, no weight decay, no
KL; the same weights at every call."""


def write_model(directory: Path) -> str:
    """Saves a Qwen3 of two layers with random weights below `directory`; returns that directory."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return str(directory)


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """Random groups as the queue would lease them, with random advantages."""

    manifest: LeaseManifest
    groups: tuple[TrajectoryGroup, ...]
    advantages: tuple[np.ndarray, ...]

    @property
    def trajectories(self) -> dict[TrajectoryKey, Trajectory]:
        return {(g.ordinal, i): t for g in self.groups for i, t in enumerate(g.trajectories)}

    def plans(self, num_plans: int = 1, budget: int = 256) -> tuple[RankPlan, ...]:
        return plan_step(
            self.manifest, self.advantages, PackingRules(num_plans=num_plans, max_tokens_per_microbatch=budget)
        )


def random_lease(
    seed: int, *, num_groups: int = 4, group_size: int = 3, max_response: int = 20, step: int = 0
) -> Lease:
    """Groups with responses of 0 to `max_response` tokens; in long ones of even length the
    environment wrote the middle."""
    draw = np.random.default_rng(seed)
    groups = []
    for ordinal in range(num_groups):
        prompt = draw.integers(0, VOCAB_SIZE, draw.integers(1, 12)).astype(np.int32)
        lengths = [int(draw.integers(0, max_response + 1)) for _ in range(group_size)]
        if ordinal == 0:
            lengths[0], lengths[-1] = 0, max_response
        groups.append(TrajectoryGroup(ordinal, 0, tuple(_trajectory(draw, prompt, n) for n in lengths)).validate())
    return Lease(
        manifest=LeaseManifest(step, tuple(_summary(g) for g in groups)),
        groups=tuple(groups),
        advantages=tuple(draw.normal(size=group_size) for _ in groups),
    )


def with_experts(lease: Lease, seed: int = 0, *, layers: int = 2, experts: int = 8, per_token: int = 2) -> Lease:
    """The lease with random recorded experts at every token of the policy, by default for `random_qwen3_moe`."""
    draw, groups = np.random.default_rng(seed), []
    for group in lease.groups:
        members = []
        for t in group.trajectories:
            chosen = draw.random((len(t.response_ids), layers, experts)).argsort(-1)[..., :per_token].astype(np.int16)
            chosen[~t.loss_mask] = -1
            members.append(replace(t, extra={"experts": chosen}).validate())
        groups.append(replace(group, trajectories=tuple(members)))
    return replace(lease, groups=tuple(groups))


def _trajectory(draw: np.random.Generator, prompt: np.ndarray, length: int) -> Trajectory:
    mask = np.ones(length, bool)
    segments = (Segment(0, length, 0, 0),) if length else ()
    if length >= 9 and length % 2 == 0:
        a, b = length // 3, 2 * length // 3
        mask[a:b] = False
        segments = (Segment(0, a, 0, 0), Segment(a, b, 0, 0, "environment"), Segment(b, length, 0, 0))
    return Trajectory(
        prompt_ids=prompt,
        response_ids=draw.integers(0, VOCAB_SIZE, length).astype(np.int32),
        logprobs=np.where(mask, -math.log(VOCAB_SIZE) + 0.2 * draw.normal(size=length), 0).astype(np.float32),
        loss_mask=mask,
        segments=segments,
        reward=float(draw.integers(0, 2)),
    )


def _summary(group: TrajectoryGroup) -> GroupSummary:
    trajectories = group.trajectories
    return GroupSummary(
        ordinal=group.ordinal,
        attempt=group.attempt,
        lengths=tuple(Lengths(len(t.prompt_ids), len(t.response_ids), t.num_trained_tokens) for t in trajectories),
        rewards=tuple(t.reward for t in trajectories),
        lags=(),
        segments=sum(len(t.segments) for t in trajectories),
        interrupted=0,
    )


def weights_of(backend: TrainBackend) -> dict[str, np.ndarray]:
    """Copies of the published tensors."""
    return {name: tensor.float().numpy().copy() for name, tensor in backend.named_weights()}


def assert_same_weights(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    """Bitwise."""
    assert list(a) == list(b)
    differing = [name for name in a if not np.array_equal(a[name], b[name])]
    assert not differing, differing


class TrainBackendSuite:
    def test_step_changes_every_weight_and_counts_exactly(self, make_backend: MakeBackend) -> None:
        backend, lease = make_backend(), random_lease(0)
        (plan,) = lease.plans()
        before = weights_of(backend)
        metrics = backend.train_step(plan, lease.trajectories)
        after = weights_of(backend)
        still = {name for name in before if np.array_equal(before[name], after[name])}
        assert all(name.endswith(".lora_A.weight") for name in still), "only with its other half at 0 it may stand"
        assert all(
            math.isfinite(v) for v in (metrics.loss, metrics.grad_norm, metrics.lr, *dict(metrics.means).values())
        ), metrics
        assert metrics.grad_norm > 0
        assert 0 <= metrics.mean(Metric.CLIPPED) <= 1
        assert 0 < metrics.mean(Metric.ENTROPY) <= math.log(VOCAB_SIZE) + 1e-6
        assert metrics.trained_tokens == sum(t.num_trained_tokens for t in lease.trajectories.values())
        lengths = [len(t.prompt_ids) + len(t.response_ids) for t in lease.trajectories.values()]
        assert metrics.packed_tokens == sum(lengths)

    def test_zero_advantages_change_nothing(self, make_backend: MakeBackend) -> None:
        backend, lease = make_backend(), random_lease(1)
        lease = replace(lease, advantages=tuple(np.zeros_like(a) for a in lease.advantages))
        before = weights_of(backend)
        metrics = backend.train_step(lease.plans()[0], lease.trajectories)
        assert metrics.grad_norm == 0
        assert metrics.loss == 0
        assert_same_weights(before, weights_of(backend))

    def test_positive_advantage_makes_a_response_likelier(self, make_backend: MakeBackend) -> None:
        backend, lease = make_backend(), random_lease(2, num_groups=2)
        lease = replace(lease, advantages=(np.array([0.0, 0.0, 1.0]), np.zeros(3)))
        (plan,) = lease.plans()
        before = backend.logprobs(plan, lease.trajectories)[0, 2].sum()
        for _ in range(3):
            backend.train_step(plan, lease.trajectories)
        assert backend.logprobs(plan, lease.trajectories)[0, 2].sum() > before + 0.1

    def test_on_policy_ratio_is_one(self, make_backend: MakeBackend) -> None:
        backend, lease = make_backend(), random_lease(3)
        (plan,) = lease.plans()
        own = backend.logprobs(plan, lease.trajectories)
        assert set(own) == set(lease.trajectories)
        for key, trajectory in lease.trajectories.items():
            assert own[key].shape == (len(trajectory.response_ids),)
            assert (own[key] <= 0).all()
        replayed = {k: replace(t, logprobs=own[k].numpy()) for k, t in lease.trajectories.items()}
        metrics = backend.train_step(plan, replayed)
        assert metrics.mean(Metric.RATIO_MEAN) == pytest.approx(1, abs=1e-5)
        assert metrics.ratio_max == pytest.approx(1, abs=1e-4)
        assert metrics.mean(Metric.KL_BEHAVIOR) == pytest.approx(0, abs=1e-5)
        assert metrics.mean(Metric.EFFECTIVE_SAMPLES) == pytest.approx(1, abs=1e-5)
        assert metrics.mean(Metric.CLIPPED) == 0

    def test_masked_tokens_do_not_count(self, make_backend: MakeBackend) -> None:
        lease = random_lease(4)
        (plan,) = lease.plans()
        spoilt = {
            k: replace(t, logprobs=np.where(t.loss_mask, t.logprobs, np.nan).astype(np.float32))
            for k, t in lease.trajectories.items()
        }
        assert any(np.isnan(t.logprobs).any() for t in spoilt.values())
        a, b = make_backend(), make_backend()
        assert a.train_step(plan, lease.trajectories) == b.train_step(plan, spoilt)
        assert_same_weights(weights_of(a), weights_of(b))

    def test_the_divergence_needs_a_reference(self, make_backend: MakeBackend) -> None:
        lease = random_lease(8)
        with pytest.raises(ValueError, match="coefficient"):
            make_backend().reference_kl(lease.plans()[0], lease.trajectories)

    def test_empty_microbatches_add_nothing(self, make_backend: MakeBackend) -> None:
        lease = random_lease(5)
        (plan,) = lease.plans()
        a, b = make_backend(), make_backend()
        plain = a.train_step(plan, lease.trajectories)
        padded = b.train_step(replace(plan, updates=(((), *plan.microbatches, ()),)), lease.trajectories)
        assert padded.loss == pytest.approx(plain.loss, abs=1e-7)
        assert padded.grad_norm == pytest.approx(plain.grad_norm, rel=1e-6)
        assert (padded.trained_tokens, padded.packed_tokens) == (plain.trained_tokens, plain.packed_tokens)
        for (name, x), y in zip(weights_of(a).items(), weights_of(b).values(), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-4, err_msg=name)

    def test_a_step_of_nothing_changes_nothing(self, make_backend: MakeBackend) -> None:
        backend = make_backend()
        before = weights_of(backend)
        metrics = backend.train_step(RankPlan(0, (((),),)), {})
        assert (metrics.loss, metrics.grad_norm, metrics.trained_tokens, metrics.packed_tokens) == (0, 0, 0, 0)
        assert backend.logprobs(RankPlan(0, (((),),)), {}) == {}
        assert_same_weights(before, weights_of(backend))

    @pytest.mark.parametrize("steps_before", [0, 2])
    def test_resumed_training_is_bitwise_the_same(
        self, make_backend: MakeBackend, tmp_path: Path, steps_before: int
    ) -> None:
        leases = [random_lease(10 + i, step=i) for i in range(steps_before + 2)]
        going_on = make_backend()
        _train(going_on, leases[:steps_before])
        going_on.capture()
        going_on.save(tmp_path / "trainer")
        saved = weights_of(going_on)
        expected = _train(going_on, leases[steps_before:])
        resumed = make_backend()
        _train(resumed, leases[-1:])  # leaves moments and weights that loading must replace
        resumed.load(tmp_path / "trainer")
        assert_same_weights(saved, weights_of(resumed))
        assert _train(resumed, leases[steps_before:]) == expected
        assert_same_weights(weights_of(going_on), weights_of(resumed))

    def test_what_was_captured_is_saved_whatever_was_trained_since(
        self, make_backend: MakeBackend, tmp_path: Path
    ) -> None:
        leases = [random_lease(20 + i, step=i) for i in range(4)]
        backend = make_backend()
        _train(backend, leases[:1])
        backend.capture()
        captured = weights_of(backend)
        expected = _train(backend, leases[1:])  # also replaces both moments, in place
        last = weights_of(backend)
        named = backend.save(tmp_path / "trainer")
        assert sorted(named) == sorted(path.name for path in (tmp_path / "trainer").iterdir())
        assert_same_weights(last, weights_of(backend))  # saving changes nothing
        backend.load(tmp_path / "trainer")
        assert_same_weights(captured, weights_of(backend))
        assert _train(backend, leases[1:]) == expected
        assert_same_weights(last, weights_of(backend))

    def test_saving_in_a_thread_while_training_goes_on(self, make_backend: MakeBackend, tmp_path: Path) -> None:
        lease, alone, busy = random_lease(30), make_backend(), make_backend()
        (plan,) = lease.plans()
        expected = [alone.train_step(plan, lease.trajectories) for _ in range(6)]
        alone_weights, first = weights_of(alone), weights_of(busy)
        metrics = []
        with ThreadPoolExecutor(1) as pool:
            for number in range(3):
                busy.capture()
                saving = pool.submit(busy.save, tmp_path / f"{number}")
                metrics += [busy.train_step(plan, lease.trajectories) for _ in range(2)]
                saving.result(timeout=60)
        assert metrics == expected  # neither disturbed the other
        assert_same_weights(alone_weights, weights_of(busy))
        alone.load(tmp_path / "0")
        assert_same_weights(first, weights_of(alone))
        alone.load(tmp_path / "2")
        assert [alone.train_step(plan, lease.trajectories) for _ in range(2)] == expected[4:]

    def test_a_capture_is_saved_once_and_a_later_one_replaces_it(
        self, make_backend: MakeBackend, tmp_path: Path
    ) -> None:
        backend, lease = make_backend(), random_lease(31)
        with pytest.raises(RuntimeError, match="before capture"):
            backend.save(tmp_path / "trainer")
        backend.capture()
        _train(backend, [lease])
        backend.capture()
        backend.save(tmp_path / "trainer")
        saved = weights_of(backend)
        with pytest.raises(RuntimeError, match="before capture"):  # the copy was freed
            backend.save(tmp_path / "again")
        _train(backend, [lease])
        backend.load(tmp_path / "trainer")
        assert_same_weights(saved, weights_of(backend))

    def test_a_directory_that_cannot_be_written_is_a_storage_error(
        self, make_backend: MakeBackend, tmp_path: Path
    ) -> None:
        (tmp_path / "file").touch()
        backend = make_backend()
        backend.capture()
        with pytest.raises(StorageError, match="file"):
            backend.save(tmp_path / "file" / "trainer")
        backend.capture()
        backend.save(tmp_path / "trainer")  # as whole as before
        backend.load(tmp_path / "trainer")

    def test_loading_from_nowhere_is_refused(self, make_backend: MakeBackend, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="no checkpoint"):
            make_backend().load(tmp_path / "absent")

    def test_weights_come_as_announced(self, make_backend: MakeBackend) -> None:
        backend = make_backend()
        specs = backend.weight_specs()
        weights = list(backend.named_weights())
        assert [s.name for s in specs] == [name for name, _ in weights]
        assert len({s.name for s in specs}) == len(specs)
        for spec, (_, tensor) in zip(specs, weights, strict=True):
            assert (spec.shape, spec.dtype) == (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            assert spec.nbytes == tensor.numel() * tensor.element_size()
            assert not tensor.requires_grad

    def test_a_step_that_is_not_finite_is_refused_and_changes_nothing(self, make_backend: MakeBackend) -> None:
        backend, lease = make_backend(), random_lease(6)
        (plan,) = lease.plans()
        before = weights_of(backend)
        spoilt = {k: replace(t, logprobs=np.full_like(t.logprobs, np.nan)) for k, t in lease.trajectories.items()}
        with pytest.raises(RunFailed, match="optimizer step 0"):
            backend.train_step(plan, spoilt)
        assert_same_weights(before, weights_of(backend))
        expected = make_backend().train_step(plan, lease.trajectories)
        assert backend.train_step(plan, lease.trajectories) == expected

    def test_trajectories_must_match_their_plan(self, make_backend: MakeBackend) -> None:
        backend, lease = make_backend(), random_lease(7)
        (plan,) = lease.plans()
        trajectories = lease.trajectories
        with pytest.raises(ValueError, match="sequence 1 of group 2"):
            backend.train_step(plan, {k: t for k, t in trajectories.items() if k != (2, 1)})
        key, long = next((k, t) for k, t in trajectories.items() if t.num_trained_tokens > 1)
        fewer = replace(long, loss_mask=np.zeros_like(long.loss_mask))
        with pytest.raises(ValueError, match=f"sequence {key[1]} of group {key[0]}"):
            backend.train_step(plan, trajectories | {key: fewer})


def _train(backend: TrainBackend, leases: Sequence[Lease]) -> list[object]:
    return [backend.train_step(lease.plans()[0], lease.trajectories) for lease in leases]
