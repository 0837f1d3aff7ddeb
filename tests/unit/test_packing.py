"""Properties of the packing planner, over random leases."""

from dataclasses import replace
from itertools import chain, combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.trainer.length_classes import MAX_WORK_RATIO, length_classes, spared_work
from asyncrl.trainer.packing import PackingRules, plan_step
from asyncrl.trainer.step.batch import PackedLayout, SharedRow, pack
from asyncrl.types import GroupSummary, LeaseManifest, Lengths, Segment, TrainSequence, Trajectory
from tests.make import quickstart

LONGEST = 40


def lease(groups: list[list[tuple[int, int, int]]]) -> tuple[LeaseManifest, list[np.ndarray]]:
    """Groups of (prompt, response, trained) token counts; advantages that name their trajectory."""
    summaries = tuple(
        GroupSummary(
            ordinal=10 * i,
            attempt=0,
            lengths=tuple(Lengths(*t) for t in trajectories),
            rewards=(0.0,) * len(trajectories),
            lags=(),
            segments=1,
            interrupted=0,
        )
        for i, trajectories in enumerate(groups)
    )
    return LeaseManifest(7, summaries), [100.0 * i + np.arange(len(g)) for i, g in enumerate(groups)]


def plans_of(groups, num_plans, budget, **more):
    manifest, advantages = lease(groups)
    rules = PackingRules(num_plans=num_plans, max_tokens_per_microbatch=budget, **more)
    return plan_step(manifest, advantages, rules)


def planned(plan):
    return [s for run in plan.microbatches for s in run]


@st.composite
def trajectory(draw):
    response = draw(st.integers(0, 25))
    return draw(st.integers(1, 15)), response, draw(st.integers(0, response))


leases = st.lists(st.lists(trajectory(), min_size=1, max_size=6), min_size=1, max_size=6)
ranks = st.integers(1, 5)
budgets = st.integers(LONGEST, 150)


@given(leases, ranks, budgets)
def test_every_trajectory_exactly_once_with_its_own_advantage(groups, num_plans, budget):
    plans = plans_of(groups, num_plans, budget)
    found = sorted((s.ordinal, s.index, s.advantage, s.lengths) for plan in plans for s in planned(plan))
    assert found == [(10 * i, j, 100.0 * i + j, Lengths(*t)) for i, g in enumerate(groups) for j, t in enumerate(g)]


@given(leases, ranks, budgets)
def test_budget_count_normalizer_and_ordinals(groups, num_plans, budget):
    plans = plans_of(groups, num_plans, budget)
    assert len(plans) == num_plans
    assert len({len(p.microbatches) for p in plans}) == 1
    assert len(plans[0].microbatches) >= 1
    trained = sum(t[2] for g in groups for t in g)
    for plan in plans:
        assert plan.step == 7
        assert {s.token_weight for s in planned(plan)} <= {1 / max(1, trained)}
        assert all(sum(s.lengths.total for s in run) <= budget for run in plan.microbatches)
        assert list(plan.keys) == sorted({(s.ordinal, s.index) for s in planned(plan)})


@given(leases, ranks, budgets)
def test_ranks_differ_by_at_most_one_sequence_and_pack_similar_lengths_together(groups, num_plans, budget):
    lengths = [[s.lengths.total for s in planned(plan)] for plan in plans_of(groups, num_plans, budget)]
    tokens = [sum(of_rank) for of_rank in lengths]
    assert max(tokens) - min(tokens) <= max(p + r for g in groups for p, r, _ in g)
    assert lengths == [sorted(of_rank, reverse=True) for of_rank in lengths]


def test_tokens_are_balanced_rather_than_sequences():
    plans = plans_of([[(2, 10, 10), (1, 3, 3), (1, 3, 3), (1, 3, 3)]], 2, 100)
    assert [[s.lengths.total for s in planned(p)] for p in plans] == [[12], [4, 4, 4]]


@given(leases, ranks, budgets)
def test_no_microbatch_more_than_the_fullest_rank_needs(groups, num_plans, budget):
    """Two neighbouring runs of the rank that decides the count never fit into one."""
    plans = plans_of(groups, num_plans, budget)
    assert any(
        all(run for run in plan.microbatches)
        and all(
            sum(s.lengths.total for s in a) + b[0].lengths.total > budget
            for a, b in zip(plan.microbatches, plan.microbatches[1:], strict=False)
        )
        for plan in plans
    )


def test_too_few_sequences_give_empty_microbatches():
    groups = [[(10, 20, 20), (10, 20, 20), (1, 0, 0)]]
    assert [[len(run) for run in p.microbatches] for p in plans_of(groups, 2, 30)] == [[1, 1], [1, 0]]
    plans = plans_of(groups, 5, 61)
    assert [[len(run) for run in p.microbatches] for p in plans] == [[1], [1], [1], [0], [0]]
    assert plans[4].keys == ()


def test_a_rank_with_fewer_tokens_halves_its_fullest_microbatch():
    groups = [[(10, 20, 20), (5, 5, 5), (5, 5, 5), (5, 5, 5), (5, 6, 5), (10, 20, 20)]]
    assert all(all(p.microbatches) for p in plans_of(groups, 2, 32))


def test_a_sequence_over_the_budget_is_refused():
    with pytest.raises(ValueError, match=r"sequence 1 of group 0 has 31 tokens.*max_tokens_per_microbatch=30"):
        plans_of([[(10, 20, 20), (10, 21, 21)]], 1, 30)


@pytest.mark.parametrize("spoil", [lambda a: a[:1], lambda a: [a[0], a[1][:1]], lambda a: [a[0], a[1] * np.nan]])
def test_advantages_must_fit_the_groups(spoil):
    manifest, advantages = lease([[(1, 2, 2), (1, 2, 2)], [(1, 2, 2), (1, 2, 2)]])
    with pytest.raises(ValueError, match="advantage"):
        plan_step(manifest, spoil(advantages), PackingRules(num_plans=1, max_tokens_per_microbatch=30))


@given(leases, ranks)
def test_the_divisor_of_fixed_depends_on_no_mask(groups, num_plans):
    plans = plans_of(groups, num_plans, LONGEST, aggregation="fixed", fixed_tokens=25)
    assert {s.token_weight for p in plans for s in planned(p)} == {1 / (sum(map(len, groups)) * 25)}


def rows(plan):
    """For each micro-batch of a plan the tokens that are computed when prompts are shared."""
    return [
        sum(max(s.lengths.prompt for s in run if s.ordinal == ordinal) for ordinal in {s.ordinal for s in run})
        + sum(s.lengths.response for s in run)
        for run in plan.microbatches
    ]


SHARED = st.lists(
    st.tuples(st.integers(1, 15), st.lists(st.integers(0, 25), min_size=1, max_size=6)).map(
        lambda group: [(group[0], response, response) for response in group[1]]
    ),
    min_size=1,
    max_size=6,
)


@given(SHARED, ranks, budgets)
def test_sharing_prompts_keeps_groups_together(groups, num_plans, budget):
    plans = plans_of(groups, num_plans, budget, share_prompts=True)
    found = sorted((s.ordinal, s.index) for p in plans for s in planned(p))
    assert found == [(10 * i, j) for i, group in enumerate(groups) for j in range(len(group))]
    assert all(sum(s.lengths.total for s in run) <= budget for p in plans for run in p.microbatches)
    longest = max(group[0][0] + sum(response for _, response, _ in group) for group in groups)
    tokens = [
        sum(
            max(s.lengths.prompt for s in of_group) + sum(s.lengths.response for s in of_group)
            for ordinal in {ordinal for ordinal, _ in p.keys}
            for of_group in [[s for s in planned(p) if s.ordinal == ordinal]]
        )
        for p in plans
    ]
    assert num_plans > 1 or sum(tokens) == sum(g[0][0] + sum(r for _, r, _ in g) for g in groups)
    assert max(tokens) - min(tokens) <= longest
    for plan in plans:
        order = [s.ordinal for s in planned(plan)]
        changes = sum(a != b for a, b in pairwise(order))
        assert num_plans > 1 or changes == len({ordinal for ordinal, _ in plan.keys}) - 1


@pytest.mark.parametrize(
    ("overrides", "shares"),
    [
        ((), True),
        (("trainer.fsdp.share_prompts=false",), False),
        (("trainer.fsdp.param_dtype=bfloat16",), False),
        (("trainer.fsdp.param_dtype=bfloat16", "trainer.device=cpu"), True),
        (("trainer.fsdp.param_dtype=bfloat16", "trainer.fsdp.attention=packed_sdpa"), True),
        (("trainer.fsdp.attention=flash_attention_2",), False),
        (("algorithm.router_aux_coefficient=0.01",), False),
    ],
)
def test_ranks_are_balanced_by_shared_prompts_only_where_they_share_them(overrides, shares):
    assert PackingRules.of(quickstart(*overrides)).share_prompts is shares


def test_few_groups_are_divided_among_many_ranks():
    plans = plans_of([[(4, 8, 8)] * 16, [(4, 8, 8)] * 16], 4, 1000, share_prompts=True)
    assert [len(run) for p in plans for run in p.microbatches] == [8, 8, 8, 8]
    assert {sum(rows(p)) for p in plans} == {8 * 8 + 2 * 4} == {rows(plans[0])[0]}


def minibatches(groups, rules, *, order=None, step=7):
    """The ordinals that each update trains, over all ranks."""
    manifest, advantages = lease(groups)
    order = range(len(groups)) if order is None else order
    manifest = replace(manifest, step=step, groups=tuple(manifest.groups[i] for i in order))
    plans = plan_step(manifest, [advantages[i] for i in order], rules)
    return [
        sorted({s.ordinal for plan in plans for run in plan.updates[number] for s in run})
        for number in range(len(plans[0].updates))
    ]


def shuffling(num_plans=1, num_minibatches=4, **more):
    return PackingRules(num_plans=num_plans, max_tokens_per_microbatch=LONGEST, num_minibatches=num_minibatches, **more)


@given(leases, ranks, st.integers(1, 4), st.integers(1, 3), st.integers(0, 99), st.randoms())
def test_each_epoch_trains_every_group_once_and_the_order_of_the_lease_does_not_matter(
    groups, num_plans, num_minibatches, num_epochs, seed, random
):
    rules = shuffling(num_plans, num_minibatches, num_epochs=num_epochs, seed=seed)
    found = minibatches(groups, rules)
    assert len(found) == num_minibatches * num_epochs
    for epoch in range(num_epochs):
        part = found[epoch * num_minibatches : (epoch + 1) * num_minibatches]
        assert sorted(ordinal for update in part for ordinal in update) == [10 * i for i in range(len(groups))]
        assert max(map(len, part)) - min(map(len, part)) <= 1
    order = list(range(len(groups)))
    random.shuffle(order)
    assert minibatches(groups, rules, order=order) == found


def test_updates_are_drawn_by_run_step_and_epoch_and_are_the_same_on_any_number_of_ranks():
    groups = [[(1, 3, 3)] * 2 for _ in range(16)]
    by_deadline = [[10 * i for i in range(start, start + 4)] for start in range(0, 16, 4)]
    rules = shuffling(num_epochs=3)
    found = minibatches(groups, rules)
    epochs = [found[i : i + 4] for i in (0, 4, 8)]
    for other in (
        by_deadline,
        minibatches(groups, rules, step=8)[:4],
        minibatches(groups, shuffling(seed=1)),
        *epochs[1:],
    ):
        assert epochs[0] != other
    assert epochs[1] != epochs[2]
    assert minibatches(groups, shuffling(num_plans=3, num_epochs=3)) == found


def test_the_first_update_of_many_steps_is_as_old_as_the_last():
    """Leases are in the order of deadlines: their first group is the oldest."""
    groups, first, last = [[(1, 3, 3)] for _ in range(8)], [], []
    for step in range(400):
        update, *_, final = minibatches(groups, shuffling(num_minibatches=2), step=step)
        first += update
        last += final
    assert abs(np.mean(first) - np.mean(last)) < 3  # of 40 in the order of the lease; 1 is a standard error


@given(leases, ranks, budgets)
def test_filled_microbatches_hold_everything_in_no_more_passes(groups, num_plans, budget):
    cut, filled = (plans_of(groups, num_plans, budget, fills=fills) for fills in (False, True))
    for before, after in zip(cut, filled, strict=True):
        assert after.keys == before.keys
        assert sum(map(len, after.microbatches)) == len(after.keys)
        assert all(sum(s.lengths.total for s in run) <= budget for run in after.microbatches)
        assert len(after.microbatches) <= len(before.microbatches)


def test_long_and_short_sequences_fill_a_microbatch_together():
    groups = [[(10, 60, 60), (10, 20, 20)] for _ in range(12)]
    passes = [len(plans_of(groups, 1, 100, fills=fills)[0].microbatches) for fills in (False, True)]
    assert passes == [16, 12]


@pytest.mark.parametrize(
    ("overrides", "fills"),
    [
        ([], False),
        (["trainer.fsdp.attention=varlen", "trainer.fsdp.share_prompts=false"], True),
        (["trainer.fsdp.attention=varlen"], False),
        (["trainer.device=cuda", "trainer.fsdp.param_dtype=bfloat16", "model.inference_dtype=bfloat16"], True),
        (["trainer.device=cuda"], False),
    ],
)
def test_microbatches_are_filled_where_attention_pads_nothing(overrides, fills):
    assert PackingRules.of(quickstart(*overrides)).fills == fills


@given(leases, ranks, budgets, st.data())
def test_what_teaches_nothing_comes_first_on_every_rank_and_nothing_else_does(groups, num_plans, budget, data):
    manifest, advantages = lease(groups)
    advantages = [values * data.draw(st.sampled_from([0.0, 1.0])) for values in advantages]
    rules = PackingRules(num_plans=num_plans, max_tokens_per_microbatch=budget, skips_silent=True)
    plans = plan_step(manifest, advantages, rules)
    every = plan_step(manifest, advantages, replace(rules, skips_silent=False))
    assert [p.silent for p in every] == [(0,)] * num_plans
    assert len({(plan.silent, *map(len, plan.updates)) for plan in plans}) == 1, "passes are collective"
    weights = [{(s.ordinal, s.index): s.token_weight for p in made for s in planned(p)} for made in (plans, every)]
    assert weights[0] == weights[1], "each token has its share as before"
    taught = [s.advantage != 0 for plan in plans for run in plan.updates[0][plan.silent[0] :] for s in run]
    silent = [s.advantage != 0 for plan in plans for run in plan.updates[0][: plan.silent[0]] for s in run]
    assert not any(silent)
    assert all(taught) or not any(taught), "a step that teaches nothing has one backward pass"


@given(leases, ranks, budgets)
def test_a_padded_microbatch_is_within_the_budget_as_it_is_padded(groups, num_plans, budget):
    plans = plans_of(groups, num_plans, budget, pads=True)
    for run in (run for plan in plans for run in plan.microbatches if run):
        assert len(run) * max(s.lengths.total for s in run) <= budget
    assert sorted((s.ordinal, s.index) for plan in plans for s in planned(plan)) == [
        (10 * i, j) for i, group in enumerate(groups) for j in range(len(group))
    ]
    assert len({len(plan.microbatches) for plan in plans}) == 1


# -- classes of similar length -----------------------------------------------------------------------------------------


LENGTHS = st.lists(st.integers(1, 12) | st.integers(1, 400), min_size=1, max_size=8)
RATIOS, SPARED = st.sampled_from([1.0, 1.05, 1.25, 2.0]), st.sampled_from([0, 20, 4096])


def work(lengths, classes):
    return sum(len(c) * max(lengths[i] for i in c) ** 2 for c in classes)


def exact(lengths):
    return sum(n**2 for n in lengths)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=200), RATIOS, SPARED)
@settings(max_examples=60, deadline=None)
def test_each_sequence_is_in_one_class_and_the_work_is_bounded(lengths, max_ratio, spared):
    classes = length_classes(lengths, max_ratio=max_ratio, spared=spared)
    assert sorted(np.concatenate(classes).tolist()) == list(range(len(lengths)))
    assert work(lengths, classes) <= max_ratio * exact(lengths) + spared
    assert all((np.diff(c) > 0).all() for c in classes)
    for one, other in pairwise(classes):  # sequences of one length share a class
        assert min(lengths[i] for i in one) > max(lengths[i] for i in other)


@given(LENGTHS, RATIOS, SPARED)
def test_fewer_classes_break_the_limit_and_as_many_do_no_less_work(lengths, max_ratio, spared):
    found = length_classes(lengths, max_ratio=max_ratio, spared=spared)
    distinct = sorted(set(lengths), reverse=True)
    members = [[i for i, n in enumerate(lengths) if n == size] for size in distinct]
    for count in range(1, len(found) + 1):
        least = min(
            work(lengths, [list(chain(*members[low:high])) for low, high in pairwise([0, *cuts, len(distinct)])])
            for cuts in combinations(range(1, len(distinct)), count - 1)
        )
        if count < len(found):
            assert least > max_ratio * exact(lengths) + spared
        else:
            assert work(lengths, found) == least


def test_a_long_tail_takes_few_classes():
    draw = np.random.default_rng(0)
    lengths = np.where(draw.random(256) < 0.05, 262, draw.integers(14, 54, 256))
    classes = length_classes(lengths, spared=spared_work("cpu"))
    assert len(classes) == 3
    assert work(lengths, classes) <= MAX_WORK_RATIO * exact(lengths) + spared_work("cpu")
    assert work(lengths, [range(256)]) > 10 * exact(lengths)
    assert len(length_classes([64] * 128)) == len(length_classes([8, 9, 30], spared=spared_work("cpu"))) == 1
    assert spared_work("cuda") > spared_work("cpu")


@pytest.mark.parametrize("bad", [{"lengths": []}, {"lengths": [3, 0]}, {"lengths": [3], "max_ratio": 0.9}])
def test_bad_input_is_named(bad):
    with pytest.raises(ValueError, match="no classes for lengths"):
        length_classes(**bad)


# -- rows in which trajectories share prompts: what a model reads is what each sequence is -----------------------------


ids = st.lists(st.integers(0, 9), min_size=1, max_size=6)
members = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 9), max_size=6), st.sampled_from([0, 0, 0, 1])),
    min_size=1,
    max_size=8,
)


def given_tokens(prompt, response):
    count = len(response)
    return Trajectory(
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        logprobs=np.zeros(count, np.float32),
        loss_mask=np.ones(count, bool),
        segments=(Segment(0, count, 0, 0),) if count else (),
        reward=0.0,
    )


@given(st.lists(ids, min_size=3, max_size=3), members)
def test_every_sequence_reads_its_own_tokens(prompts, drawn):
    """Now and then a member of a group has another prompt than its siblings."""
    chosen = [given_tokens(prompts[group] + [7] * other, response) for group, response, other in drawn]
    families = [group for group, _, _ in drawn]
    row = SharedRow.of(chosen, families)
    whole = [np.concatenate([t.prompt_ids, t.response_ids]) for t in chosen]
    places = np.arange(len(row.input_ids)) if row.rows is None else row.rows
    np.testing.assert_array_equal(row.input_ids[places], np.concatenate(whole))
    np.testing.assert_array_equal(row.positions[places], np.concatenate([np.arange(len(w)) for w in whole]))
    assert sorted(set(places)) == list(range(len(row.input_ids)))
    picks = [np.arange(len(t.response_ids)) for t in chosen]
    before, itself = row.predictions(picks)
    np.testing.assert_array_equal(row.input_ids[itself], np.concatenate([t.response_ids for t in chosen]))
    expected = [w[len(t.prompt_ids) - 1 : -1] for w, t in zip(whole, chosen, strict=True) if len(t.response_ids)]
    np.testing.assert_array_equal(row.input_ids[before], np.concatenate([*expected, np.zeros(0)]))
    np.testing.assert_array_equal(row.positions[itself], row.positions[before] + 1)

    layout = PackedLayout.of(row.lengths, torch.device("cpu"), rows=row.rows)
    tokens = torch.arange(len(row.input_ids))
    if layout.order is not None:
        assert torch.equal(tokens[layout.order][layout.places], tokens)
    one_family = {}
    for t, family in zip(chosen, families, strict=True):
        one_family.setdefault(family, t.prompt_ids.tobytes())
    if all(one_family[f] == t.prompt_ids.tobytes() for t, f in zip(chosen, families, strict=True)):
        distinct = sum(len(np.frombuffer(prompt, np.int32)) for prompt in one_family.values())
        assert len(row.input_ids) == distinct + sum(len(t.response_ids) for t in chosen)


@pytest.mark.parametrize(("share", "tokens"), [(True, 3 + 2 + 4 + 3 + 1), (False, 3 + 2 + 3 + 4 + 3 + 1)])
def test_groups_do_not_share_with_each_other(share, tokens):
    chosen = {
        (0, 0): given_tokens([1, 2, 3], [4, 5]),
        (0, 1): given_tokens([1, 2, 3], [4, 5, 6, 7]),
        (1, 0): given_tokens([1, 2, 3], [4]),
    }
    planned = [
        TrainSequence(*key, 1.0, Lengths(3, len(t.response_ids), len(t.response_ids)), owner=key[1])
        for key, t in chosen.items()
    ]
    batch = pack(tuple(planned), chosen, predict="trained", device=torch.device("cpu"), share_prompts=share)
    assert batch.tokens.input_ids.numel() == tokens
    assert batch.num_tokens == 5 + 7 + 4
    assert batch.tokens.targets.tolist() == [4, 5, 4, 5, 6, 7, 4]
    assert batch.sequences.tolist() == [0, 0, 1, 1, 1, 1, 2]
