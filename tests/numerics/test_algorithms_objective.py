"""The objective against its formula in float64 numpy, and that no order, packing or split of its tokens matters."""

from dataclasses import replace
from pkgutil import resolve_name
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch

from asyncrl.algorithms import build_advantage, build_correction, build_loss, build_objective
from asyncrl.algorithms.kl import importance_weighted, kl_estimate
from asyncrl.algorithms.loss import FittedCorrection, LossInputs
from asyncrl.config.algorithm import AlgorithmConfig, CorrectionConfig, KlConfig
from asyncrl.config.algorithm_parts import ADVANTAGES, CORRECTIONS, LOSSES
from asyncrl.config.load import presets
from asyncrl.errors import ConfigError
from asyncrl.trainer.backends import BACKENDS
from asyncrl.trainer.packing import PackingRules, plan_step
from asyncrl.types import GroupSummary, LeaseManifest, Lengths
from tests.make import quickstart
from tests.numerics.losses import Tokens, clipped_surrogate, draw, slopes

WEIGHING = [name for name, spec in CORRECTIONS.items() if spec.weighs]
BOUNDS = {"icepop": (0.5, 1.8), "geometric_rejection": (0.8, 1.2), "off_policy_mask": (0.0, 0.1)}


def everything(loss: str, weighing: str = "truncated_is", **changes) -> AlgorithmConfig:
    """A recipe with all that can stand in an objective at once, of `WEIGHING` one: each makes the ratio a whole
    importance weight."""
    ratio = "behavior" if loss == "dppo" else "proximal"
    weighing = "masked_is" if loss == "dppo" else weighing
    names = [weighing, *(name for name in CORRECTIONS if name not in WEIGHING)]
    bounds = [(name, *BOUNDS.get(name, (0.0, 1.5))) for name in names]
    return AlgorithmConfig(
        loss=loss,
        ratio=ratio,
        corrections=[CorrectionConfig(name=name, low=low, high=high) for name, low, high in bounds],
        kl=KlConfig(coefficient=0.1, estimator="k3"),
        entropy_coefficient=0.02,
        **changes,
    )


def gradients(objective, tokens: Tokens) -> tuple[float, np.ndarray, np.ndarray, dict[str, float]]:
    """The scalar, its gradients with respect to log-probabilities and entropies, and the statistics."""
    inputs = replace(tokens.torch(), fitted={"m2po": torch.tensor(0.2)})
    total, seen = objective(inputs)
    total.backward()
    assert not any(value.requires_grad for _, value in seen.sums)
    assert inputs.logprobs.grad is not None
    entropy = inputs.entropy.grad if inputs.entropy.grad is not None else torch.zeros_like(inputs.entropy)
    values = {name: value.item() for name, value in seen.sums} | {"ratio_max": seen.ratio_max.item()}
    return total.item(), inputs.logprobs.grad.numpy(), entropy.numpy(), values


def test_the_composition_is_its_formula():
    t = draw(0)
    config = AlgorithmConfig(
        clip_low=0.2,
        clip_high=0.28,
        ratio="proximal",
        corrections=[
            CorrectionConfig(name="truncated_is", high=1.2),
            CorrectionConfig(name="geometric_rejection", low=0.9, high=1.1),
        ],
        kl=KlConfig(coefficient=0.3, estimator="k2"),
        entropy_coefficient=0.05,
    )
    m = np.exp(t.old_logprobs - t.behavior_logprobs)
    weight = np.minimum(m, 1.2)
    for tokens in t.trajectories():
        mean = np.log(m[tokens])[t.mask[tokens]].mean() if t.mask[tokens].any() else 0.0
        weight[tokens] *= 0.9 <= np.exp(mean) <= 1.1
    assert 0 < (weight == 0).sum() < len(weight)

    def paper(logprobs):
        kl = (logprobs - t.reference) ** 2 / 2
        return (t.weights * (weight * clipped_surrogate(t, logprobs) + 0.3 * kl - 0.05 * t.entropy))[t.mask].sum()

    total, slope, entropy, _ = gradients(build_objective(config), t)
    assert total == pytest.approx(paper(t.logprobs), rel=1e-12)
    np.testing.assert_allclose(slope, slopes(paper, t.logprobs), atol=2e-7)
    np.testing.assert_allclose(entropy, np.where(t.mask, -0.05 * t.weights, 0))


def test_kl_in_the_reward_and_no_coefficient_leave_the_loss_alone():
    t = draw(1)
    plain = gradients(build_objective(AlgorithmConfig()), t)
    for kl in (KlConfig(coefficient=0.5, place="reward"), KlConfig(coefficient=0.0)):
        found = gradients(build_objective(AlgorithmConfig(kl=kl)), t)
        assert found[0] == plain[0]
        np.testing.assert_array_equal(found[1], plain[1])


def test_statistics_against_numpy():
    t = draw(1)
    _, _, _, seen = gradients(build_objective(everything("clipped_surrogate")), t)
    log_ratio = (t.logprobs - t.behavior_logprobs)[t.mask]
    clip = np.exp(t.logprobs - t.old_logprobs)
    cut = ((t.advantages > 0) & (clip > 1.28)) | ((t.advantages < 0) & (clip < 0.8))
    d = (t.logprobs - t.reference)[t.mask]
    assert seen["train/clip_fraction"] == (cut & t.mask).sum()
    assert seen["train/clip_fraction_positive"] == (cut & t.mask & (t.advantages > 0)).sum() > 0
    assert seen["train/clip_fraction_negative"] == (cut & t.mask & (t.advantages < 0)).sum() > 0
    assert seen["train/ratio_mean"] == pytest.approx(np.exp(log_ratio).sum())
    assert seen["train/kl_behavior"] == pytest.approx(-log_ratio.sum())
    assert seen["train/entropy"] == pytest.approx(t.entropy[t.mask].sum())
    assert seen["train/kl_reference"] == pytest.approx((np.exp(-d) - 1 + d).sum())
    assert seen["ratio_max"] == pytest.approx(np.exp(log_ratio).max())
    over = t.mask & (np.exp(t.old_logprobs - t.behavior_logprobs) > 1.5)
    assert seen["train/touched_fraction/truncated_is"] == over.sum() > 0
    assert {name for name in seen if name.startswith("train/touched_fraction/")} == {
        f"train/touched_fraction/{name}" for name in ("truncated_is", *(set(CORRECTIONS) - set(WEIGHING)))
    }


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("seed", "weighing"), list(enumerate(WEIGHING)))
def test_neither_order_nor_split_of_the_trajectories_matters(loss, seed, weighing):
    t = draw(seed)
    objective = build_objective(everything(loss, weighing))
    total, slope, entropy, seen = gradients(objective, t)
    rng = np.random.default_rng(seed)
    for cuts in ([], [3], [1, 2, 5], [1, 2, 3, 4, 5, 6]):
        order = rng.permutation(len(t.trajectories()))
        found_total, found_seen = 0.0, dict.fromkeys(seen, 0.0)
        found_slope, found_entropy = np.zeros_like(slope), np.zeros_like(entropy)
        for part in np.split(order, cuts):
            index = np.concatenate([t.trajectories()[i] for i in part])
            value, found_slope[index], found_entropy[index], statistics = gradients(objective, t.pick(index))
            found_total += value
            for name, number in statistics.items():
                found_seen[name] = max(found_seen[name], number) if name == "ratio_max" else found_seen[name] + number
        assert found_total == pytest.approx(total, rel=1e-12)
        np.testing.assert_allclose(found_slope, slope, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(found_entropy, entropy, rtol=1e-12)
        assert found_seen == pytest.approx(seen, rel=1e-12)


def plan_total(config: AlgorithmConfig, groups: list[int], rules: PackingRules) -> tuple[float, dict]:
    """The objective of one step over `groups` as `plan_step` cuts it, and each trajectory's gradient."""
    size, tokens = 4, {ordinal: draw(ordinal, sizes=(5, 1, 9, 14), masked=0.2) for ordinal in range(6)}
    rewards = {ordinal: np.random.default_rng(ordinal).integers(0, 2, size).astype(float) for ordinal in tokens}
    summaries = []
    for ordinal in groups:
        t = tokens[ordinal]
        lengths = tuple(Lengths(3, len(i), int(t.mask[i].sum())) for i in t.trajectories())
        summaries.append(GroupSummary(ordinal, 0, lengths, tuple(rewards[ordinal]), (), 0, 0))
    manifest = LeaseManifest(0, tuple(summaries))
    advantages = [build_advantage(config.advantage)(rewards[ordinal]) for ordinal in groups]
    objective, total, found = build_objective(config), 0.0, {}
    for plan in plan_step(manifest, advantages, rules):
        for microbatch in plan.microbatches:
            parts = []
            for s in microbatch:
                index = tokens[s.ordinal].trajectories()[s.index]
                part = tokens[s.ordinal].pick(index)
                full = {"advantages": s.advantage, "weights": s.token_weight}
                parts.append(part.with_(**{name: np.full(len(index), x) for name, x in full.items()}))
            if not parts:
                continue
            value, slope, _, _ = gradients(objective, joined(parts))
            total += value
            ends = np.cumsum([len(p.logprobs) for p in parts])[:-1]
            found |= {(s.ordinal, s.index): g for s, g in zip(microbatch, np.split(slope, ends), strict=True)}
    return total, found


def joined(parts: list[Tokens]) -> Tokens:
    fields = {name: np.concatenate([getattr(p, name) for p in parts]) for name in Tokens.__dataclass_fields__}
    sizes = [len(p.logprobs) for p in parts]
    return Tokens(**fields | {"sequences": np.repeat(np.arange(len(parts)), sizes)})


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed"])
@pytest.mark.parametrize(("loss", "advantage"), [("clipped_surrogate", "grpo"), ("gspo", "rloo"), ("sapo", "maxrl")])
def test_neither_ranks_nor_micro_batches_nor_group_order_matter(aggregation, loss, advantage):
    config = everything(loss, aggregation=aggregation, advantage=advantage)
    one = PackingRules(num_plans=1, max_tokens_per_microbatch=10_000, aggregation=aggregation, fixed_tokens=16)
    total, slopes_of = plan_total(config, list(range(6)), one)
    assert total != 0
    for ranks, budget, groups in ((1, 17, range(6)), (3, 40, (5, 4, 3, 2, 1, 0)), (2, 10_000, (2, 0, 5, 1, 4, 3))):
        rules = replace(one, num_plans=ranks, max_tokens_per_microbatch=budget)
        found, slopes_found = plan_total(config, list(groups), rules)
        assert found == pytest.approx(total, rel=1e-12)
        assert slopes_found.keys() == slopes_of.keys()
        for key, slope in slopes_found.items():
            np.testing.assert_allclose(slope, slopes_of[key], rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e30])
def test_junk_under_the_mask_reaches_neither_value_nor_gradient_nor_statistics(value, weighted):
    t, config = draw(3), everything("gspo")
    objective = build_objective(replace(config, kl=replace(config.kl, importance_weighted=weighted)))
    clean = gradients(objective, t)
    junk = {
        name: np.where(t.mask, getattr(t, name), value)
        for name in Tokens.__dataclass_fields__
        if name not in ("mask", "sequences")
    }
    dirty = gradients(objective, t.with_(**junk))
    assert dirty[0] == clean[0]
    np.testing.assert_array_equal(dirty[1], clean[1])
    np.testing.assert_array_equal(dirty[2], clean[2])
    assert dirty[3] == clean[3]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_micro_batch_without_a_trained_token_is_zero_and_can_be_differentiated(loss):
    """The placeholder by which a rank with nothing to train takes part in collectives."""
    place = Tokens(**{name: np.zeros(1) for name in Tokens.__dataclass_fields__})
    place = place.with_(mask=np.zeros(1, bool), sequences=np.zeros(1, np.int64), behavior_logprobs=np.array([np.nan]))
    total, slope, entropy, seen = gradients(build_objective(everything(loss)), place)
    assert total == 0
    assert not slope.any()
    assert not entropy.any()
    assert not any(seen.values())


def test_a_dropped_token_keeps_its_share_and_its_regulariser():
    t = draw(4)
    far = t.with_(behavior_logprobs=t.old_logprobs - 5.0)
    config = AlgorithmConfig(
        ratio="proximal", corrections=[CorrectionConfig(name="masked_is")], kl=KlConfig(coefficient=0.1)
    )
    total, _, _, seen = gradients(build_objective(config), far)
    d = t.logprobs - t.reference
    assert total == pytest.approx((t.weights * 0.1 * (np.exp(-d) - 1 + d))[t.mask].sum(), rel=1e-9)
    assert seen["train/touched_fraction/masked_is"] == t.mask.sum()


@pytest.mark.parametrize("preset", presets())
def test_every_preset_composes_an_objective(preset):
    overrides = [f"algorithm.preset={preset}", "algorithm.clip_low=0.9", "algorithm.clip_high=9"]  # not all is clipped
    config = quickstart(*overrides).algorithm
    objective = build_objective(config)
    assert objective.loss == build_loss(config)
    assert [name for name, _ in objective.corrections] == [c.name for c in config.corrections]
    total, slope, _, _ = gradients(objective, draw(5))
    assert np.isfinite(total)
    assert slope.any()


@pytest.mark.parametrize(
    ("config", "key", "known"),
    [
        (AlgorithmConfig, "advantage", ADVANTAGES),
        (AlgorithmConfig, "loss", LOSSES),
        (CorrectionConfig, "name", CORRECTIONS),
    ],
)
def test_a_recipe_may_name_what_is_listed(config, key, known):
    assert get_args(get_type_hints(config)[key]) == tuple(known)


def test_every_entry_names_what_is_there():
    paths = [path for spec in ADVANTAGES.values() for path in (spec.of_group, spec.of_tokens) if path]
    paths += [spec.of for spec in (*LOSSES.values(), *CORRECTIONS.values())]
    paths += [path for spec in BACKENDS.values() for path in (spec.backend, spec.reader, spec.unsupported)]
    assert all(callable(resolve_name(path)) for path in paths)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_is_what_its_entry_says(name):
    """Fitted, weighing, dropping, one factor for a trajectory: seen in what it computes."""
    spec, t = CORRECTIONS[name], draw(3, spread=1.0)
    correction = build_correction(CorrectionConfig(name=name), AlgorithmConfig(ratio="proximal"))
    assert isinstance(correction, FittedCorrection) == spec.is_fitted
    fitted = {name: correction.fit([t.torch()], lambda sums: sums)} if spec.is_fitted else {}
    factor, touched = (x.numpy() for x in correction(replace(t.torch(), fitted=fitted)))
    assert touched.any(), "the draw is far enough from the policy"
    assert (factor[touched] == 0).all() == spec.drops
    kept = factor[t.mask & ~touched]
    assert (kept != 1).any() == spec.weighs
    whole = [len(set(factor[tokens][t.mask[tokens]])) <= 1 for tokens in t.trajectories()]
    assert all(whole) == (spec.scope == "trajectory")


def test_the_inputs_document_every_field():
    assert LossInputs.__doc__ is not None
    missing = [name for name in LossInputs.__dataclass_fields__ if f"{name}" not in LossInputs.__doc__]
    assert not missing


def test_the_negative_half_of_the_clip_fraction_has_what_the_dual_clip_cuts():
    t = draw(6, masked=0)
    far = t.with_(advantages=-np.abs(t.advantages), old_logprobs=t.logprobs - 2.0, behavior_logprobs=t.logprobs - 2.0)
    for dual, share in ((0.0, 0), (3.0, len(t.mask)), (10.0, 0)):  # the ratio is 7.4
        _, slope, _, seen = gradients(build_objective(AlgorithmConfig(dual_clip=dual)), far)
        assert seen["train/clip_fraction"] == seen["train/clip_fraction_negative"] == share
        assert seen["train/clip_fraction_positive"] == 0
        assert (slope == 0).all() == (share > 0)


# -- importance-weighted divergences -----------------------------------------------------------------------------------


EVERY = torch.ones(30, dtype=torch.bool)


def three_policies(seed=0):
    """Logits of the policy, and log-probabilities of the reference and of the policy that sampled."""
    g = torch.Generator().manual_seed(seed)
    logits, other, lagging = (torch.randn(30, generator=g, dtype=torch.float64) for _ in range(3))
    behavior = (logits + 0.7 * lagging).log_softmax(-1)
    return logits.requires_grad_(), other.log_softmax(-1), behavior


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_mean_and_gradient_over_the_vocabulary_are_those_of_the_divergence(estimator):
    logits, reference, behavior = three_policies()
    logp = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)
    estimate = importance_weighted(kl_estimate(logp, reference, estimator, EVERY), logp, behavior, EVERY)
    mean = (behavior.exp() * estimate).sum()
    assert mean.item() == pytest.approx((logp.exp() * (logp - reference)).sum().item(), rel=1e-10)
    (found,) = torch.autograd.grad(mean, logits)
    torch.testing.assert_close(found, exact)


def test_the_objective_adds_the_weighted_estimate():
    t = draw(1)
    config = AlgorithmConfig(ratio="proximal", kl=KlConfig(coefficient=0.3, importance_weighted=True))
    objective = build_objective(config)

    def paper(logprobs):
        r, d = np.exp(logprobs - t.old_logprobs), logprobs - t.reference
        loss = -np.minimum(r * t.advantages, r.clip(0.8, 1.28) * t.advantages)
        kl = np.exp(logprobs - t.behavior_logprobs) * (np.exp(-d) - 1 + d)
        return (t.weights * (loss + 0.3 * kl))[t.mask].sum()

    inputs = t.torch()
    total, _ = objective(inputs)
    total.backward()
    assert total.item() == pytest.approx(paper(t.logprobs), rel=1e-12)
    np.testing.assert_allclose(inputs.logprobs.grad.numpy(), slopes(paper, t.logprobs), atol=2e-7)


@pytest.mark.parametrize("distance", [-200.0, 200.0, 1e4])
def test_huge_ratios_stay_finite(distance):
    t = draw(3).with_(behavior_logprobs=draw(3).logprobs - distance)
    inputs = t.torch(torch.float32)
    total, _ = build_objective(AlgorithmConfig(kl=KlConfig(coefficient=0.3, importance_weighted=True)))(inputs)
    total.backward()
    assert total.isfinite()
    assert inputs.logprobs.grad.isfinite().all()


@pytest.mark.parametrize(
    ("kl", "message"),
    [
        ({"coefficient": 0.1, "place": "reward"}, "no divergence in the loss"),
        ({"coefficient": 0.0}, "no divergence in the loss"),
        ({"coefficient": 0.1, "estimator": "k2"}, "its mean is not the divergence"),
    ],
)
def test_where_it_would_mean_nothing_it_is_refused(kl, message):
    with pytest.raises(ConfigError, match=message):
        KlConfig(**kl, importance_weighted=True)
    KlConfig(coefficient=0.1, estimator="k1", importance_weighted=True)
