"""Trajectories with branches from the record to the plan of a step: lag, masks, files, weights, advantages."""

import pickle
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.recipe import trains_branches
from asyncrl.errors import ConfigError, LedgerError
from asyncrl.queue.masking import StoredGroup, mask_older, oldest_trained, summarize
from asyncrl.queue.message_queue import MessageQueue
from asyncrl.queue.saved_state import ARRAYS, load_groups, load_partials, save_groups, save_partials
from asyncrl.trainer.packing import PackingRules, plan_step
from asyncrl.trainer.planner import StepPlanner
from asyncrl.trainer.step.batch import pack
from asyncrl.types import (
    LeaseManifest,
    Lengths,
    PartialGroup,
    PartialTrajectory,
    Segment,
    Ticket,
    TrainSequence,
    Trajectory,
    TrajectoryGroup,
)
from tests.make import group, queue_spec, quickstart, train, trajectory

ALL = "rollout.agent.train=all_branches"


def branched(*versions, seed=0, reward=0.0):
    """A trajectory of the first versions with a branch for each of the others; four tokens each."""
    first, *others = versions
    branches = tuple(trajectory(prompt=2 + i, versions=v, seed=seed + 50 + i) for i, v in enumerate(others))
    return replace(trajectory(versions=first, seed=seed, reward=reward), branches=branches)


def pair(ordinal=0, attempt=0):
    """Trajectory 0 has two branches, trajectory 1 one."""
    members = branched((4, 5), (3,), (5,), seed=1, reward=1.0), branched((5,), (2, 5), seed=2)
    return TrajectoryGroup(ordinal, attempt, members).validate()


def assert_same(a, b):
    assert (a.ordinal, a.attempt, len(a.sequences)) == (b.ordinal, b.attempt, len(b.sequences))
    for x, y in zip(a.sequences, b.sequences, strict=True):
        assert (x.segments, x.reward, x.finish_reason) == (y.segments, y.reward, y.finish_reason)
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(x, name), getattr(y, name))
            assert getattr(x, name).dtype == getattr(y, name).dtype


def test_a_groups_sequences_are_its_trajectories_and_then_their_branches():
    whole = pair()
    assert whole.sequences[:2] == whole.trajectories
    assert whole.sequences[2:] == (*whole.trajectories[0].branches, *whole.trajectories[1].branches)
    assert whole.owners == (0, 1, 0, 0, 1)
    assert whole.oldest_version == 2, "of all branches"


def test_a_branch_has_neither_branches_nor_a_reward():
    whole = branched((1,), (1,))
    with pytest.raises(ValueError, match="reward of its own"):
        replace(whole, branches=(trajectory(reward=1.0),)).validate()
    with pytest.raises(ValueError, match="has branches"):
        replace(whole, branches=(whole,)).validate()
    with pytest.raises(ValueError, match="prompt_ids is empty"):
        replace(whole, branches=(trajectory(prompt=0),)).validate()


def test_nothing_of_an_untrained_trajectory_is_trained():
    assert [s.num_trained_tokens for s in branched((1,), (1,), (2,)).untrained().sequences] == [0, 0, 0]


def test_branches_survive_processes_and_files(tmp_path):
    groups = [pair(), group(7, versions=(1, 2)), pair(9, attempt=1)]
    save_groups(tmp_path, groups)
    for before, sent, loaded in zip(groups, pickle.loads(pickle.dumps(groups)), load_groups(tmp_path), strict=True):
        assert_same(before, sent)
        assert_same(before, loaded)
        assert before.owners == sent.owners == loaded.owners
    save_groups(tmp_path, [])
    assert load_groups(tmp_path) == []
    done = PartialGroup(Ticket(0, 0, 2), tuple(PartialTrajectory(done=t) for t in pair().trajectories))
    save_partials(tmp_path, [done])
    (loaded,) = load_partials(tmp_path)
    assert loaded.num_tokens == done.num_tokens == 5 * 4
    assert_same(pair(), TrajectoryGroup(0, 0, tuple(t.done for t in loaded.trajectories)))


def test_files_from_before_there_were_branches_are_read(tmp_path):
    save_groups(tmp_path, [group(7)])
    described = tmp_path / "groups.json"
    assert ', "branches": []' in described.read_text()
    described.write_text(described.read_text().replace(', "branches": []', ""))
    assert_same(group(7), load_groups(tmp_path)[0])


def test_the_lag_of_a_trajectory_is_that_of_its_oldest_token_over_all_branches():
    whole = pair()
    summary = summarize(StoredGroup(whole, 5), whole, step=6, max_lag=4)
    assert summary.owners == (0, 1, 0, 0, 1)
    assert (summary.trained_tokens, summary.lag_max, len(summary.rewards)) == (20, 4, 2)
    oldest = [max(part.lag for part in summary.lags if part.trajectory == i) for i in range(2)]
    assert oldest == [3, 4]
    assert summary.lag_sum == sum(
        6 - s.version for t in whole.sequences for s in t.segments for _ in range(s.start, s.stop)
    )
    assert (summary.interrupted, summary.version_span) == (2, 2 + 3), "counted over the branches of a trajectory"
    with pytest.raises(LedgerError, match="lag 4 > 3"):
        summarize(StoredGroup(whole, 5), whole, step=6, max_lag=3)


def test_late_tokens_of_branches_are_masked_too():
    whole = pair()
    masked = mask_older(whole, 4)
    assert [s.loss_mask.tolist() for s in masked.sequences] == [[True] * 4] * 2 + [
        [False] * 4,
        [True] * 4,
        [False, False, True, True],
    ]
    assert all(s.loss_mask.all() for s in whole.sequences), "the group itself stays as it was put"
    assert mask_older(whole, 2) is whole
    assert [oldest_trained(whole, v) for v in (0, 2, 3, 4, 5, 6)] == [2, 2, 3, 4, 5, None]
    summary = summarize(StoredGroup(whole, 5), masked, step=6, max_lag=2)
    assert (summary.masked_tokens, summary.trained_tokens, summary.lag_max) == (6, 14, 2)


@pytest.fixture
def spec(tmp_path):
    return queue_spec(tmp_path, groups_per_step=1, on_overdue="mask")


async def put(queue, made):
    (ticket,) = (await queue.admit(1, 0)).tickets
    await queue.put(ticket, replace(made, ordinal=ticket.ordinal, attempt=ticket.attempt))


async def test_a_queue_bounds_the_lag_by_the_oldest_branch_and_restores_it(spec, tmp_path):
    """Group 1 is two steps late in a branch only: that branch is masked, before and after a restart."""
    queue = MessageQueue(spec)
    tickets = (await queue.admit(2, 0)).tickets
    await queue.put(tickets[0], group(0))
    await train(queue, 0)
    await put(queue, group(versions=(1,)))
    await train(queue, 1)
    late = TrajectoryGroup(1, 0, (branched((2,), (0,), reward=1.0), branched((1, 2), (1,))))
    await queue.put(tickets[1], late)
    await queue.capture([])
    await queue.save(tmp_path)
    restored = MessageQueue(spec)
    await restored.load(tmp_path)
    for each in (queue, restored):
        (summary,) = (await train(each, 2)).groups
        assert (summary.ordinal, summary.masked_tokens, summary.lag_max) == (1, 4, 1)
        assert [n.trained for n in summary.lengths] == [4, 4, 0, 4]
        assert summary.owners == (0, 1, 0, 1)


async def test_a_branch_of_a_version_that_does_not_exist_is_generated_again(spec):
    queue = MessageQueue(spec)
    await put(queue, TrajectoryGroup(0, 0, (branched((0,), (7,)), branched((0,)))))
    counts = await queue.counts()
    assert (counts.ready, counts.running) == (0, 1)


@given(
    st.lists(
        st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=4), min_size=1, max_size=4
    ),
    st.sampled_from(["token_mean", "sequence_mean", "fixed"]),
    st.booleans(),
    st.integers(1, 3),
)
def test_every_token_counts_once_in_the_objective(drawn, aggregation, share, ranks):
    """drawn: of each group, of each trajectory, the trained tokens of each branch."""
    groups = [
        TrajectoryGroup(i, 0, tuple(tree(counts, seed=10 * i + j) for j, counts in enumerate(members)))
        for i, members in enumerate(drawn)
    ]
    manifest = LeaseManifest(0, tuple(summarize(StoredGroup(g, 0), g, step=0, max_lag=0) for g in groups))
    advantages = [10.0 * i + np.arange(len(g.trajectories)) for i, g in enumerate(groups)]
    rules = PackingRules(
        num_plans=ranks,
        max_tokens_per_microbatch=20,
        aggregation=aggregation,
        fixed_tokens=7,
        share_prompts=share,
    )
    plans = plan_step(manifest, advantages, rules)
    planned = [s for plan in plans for run in plan.microbatches for s in run]
    keys = [(g.ordinal, i) for g in groups for i in range(len(g.sequences))]
    assert sorted((s.ordinal, s.index) for s in planned) == keys
    per_trajectory = [[sum(counts) for counts in members] for members in drawn]
    everything = [n for members in per_trajectory for n in members]
    for s in planned:
        owner = groups[s.ordinal].owners[s.index]
        assert (s.owner, s.advantage) == (owner, 10.0 * s.ordinal + owner)
        own, learning = per_trajectory[s.ordinal][owner], sum(n > 0 for n in everything)
        expected = {
            "token_mean": 1 / max(1, sum(everything)),
            "sequence_mean": 1 / (learning * own) if own else 0.0,
            "fixed": 1 / (len(everything) * 7),
        }
        assert s.token_weight == pytest.approx(expected[aggregation])


def tree(counts, seed):
    """A trajectory whose branches have these numbers of trained tokens."""
    first, *others = (trajectory(response=n, seed=seed + i, prompt=2 + i) for i, n in enumerate(counts))
    return replace(first, branches=tuple(others))


def test_advantages_compare_trajectories_and_take_the_divergence_of_all_their_branches():
    kl = ["algorithm.kl.coefficient=0.5", "algorithm.kl.place=reward", "algorithm.advantage=dr_grpo"]
    planner = StepPlanner(quickstart(ALL, *kl))
    whole = pair()
    manifest = LeaseManifest(6, (summarize(StoredGroup(whole, 5), whole, step=6, max_lag=4),))
    (plan,) = planner.plan(manifest, {(0, 0): 0.1, (0, 1): 0.2, (0, 2): 0.4, (0, 3): 0.8, (0, 4): 1.6})
    found = {s.index: s.advantage for run in plan.microbatches for s in run}
    rewards = np.array([1 - 0.5 * (0.1 + 0.4 + 0.8), 0 - 0.5 * (0.2 + 1.6)])
    expected = (rewards - rewards.mean())[[0, 1, 0, 0, 1]]
    assert [found[i] for i in range(5)] == pytest.approx(expected.tolist())


def test_a_penalty_for_length_sees_the_last_branch_alone():
    overrides = ["algorithm.overlong.buffer_tokens=4", "rollout.sampling.max_response_tokens=6", ALL]
    planner = StepPlanner(quickstart(*overrides, "algorithm.advantage=dr_grpo"))
    members = trajectory(response=6), replace(trajectory(response=2), branches=(trajectory(response=6),))
    whole = TrajectoryGroup(0, 0, members)
    summary = summarize(StoredGroup(whole, 0), whole, step=0, max_lag=0)
    (plan,) = planner.plan(LeaseManifest(0, (summary,)))
    assert {s.index: s.advantage for run in plan.microbatches for s in run} == {0: -0.25, 1: 0.25, 2: 0.25}


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (["algorithm.advantage=gae"], "algorithm.advantage=gae"),
        (["algorithm.advantage=reinforce_plus_plus"], "algorithm.advantage=reinforce_plus_plus"),
        (["trainer.router_replay=rollout"], "router_replay=rollout"),
    ],
)
def test_what_is_defined_for_one_conversation_is_refused_by_name(overrides, found):
    assert not trains_branches(quickstart(*overrides)), "auto"
    assert trains_branches(quickstart())
    with pytest.raises(ConfigError, match=rf"all_branches with .*{found}"):
        quickstart(*overrides, ALL)


def test_a_checkpoints_branches_are_not_given_to_an_advantage_along_tokens():
    planner = StepPlanner(quickstart("algorithm.advantage=reinforce_plus_plus"))
    whole = pair()
    summary = summarize(StoredGroup(whole, 5), whole, step=6, max_lag=4)
    with pytest.raises(ConfigError, match="the group has branches"):
        planner.plan(LeaseManifest(6, (summary,)))


def test_an_environment_token_in_a_branch_has_no_lag():
    segments = Segment(0, 2, 5, 0), Segment(2, 4, 0, 0, "environment")
    branch = replace(trajectory(), segments=segments, loss_mask=np.array([True, True, False, False]))
    whole = TrajectoryGroup(0, 0, (replace(trajectory(versions=(5,)), branches=(branch,)).validate(),))
    assert (whole.oldest_version, summarize(StoredGroup(whole, 5), whole, step=5, max_lag=0).lag_max) == (5, 0)


# -- distillation ------------------------------------------------------------------------------------------------------


DISTILLS = ["teacher.path=t", "algorithm.distillation.coefficient=1", "algorithm.dynamic_sampling=false"]


def taught(made, start=0, top=0):
    n = len(made.response_ids)
    logprobs = -np.arange(start, start + n, dtype=np.float32) / 8
    likeliest = np.arange(start, start + n * top, dtype=np.int32).reshape(n, top)
    beside = {"top_ids": likeliest, "top_logprobs": -likeliest.astype(np.float32) - 1} if top else {}
    return replace(made, extra={"teacher_logprobs": logprobs, **beside})


def test_a_teacher_is_served_with_room_for_the_longest_trajectory():
    recipe = quickstart(*DISTILLS, "teacher.num_replicas=2", "teacher.torch.num_slots=3")
    pool, replicas = recipe.pools["teacher"]
    assert (pool.model.path, replicas.num_replicas, replicas.torch.num_slots) == ("t", 2, 3)
    assert replicas.max_model_len == recipe.rollout.max_model_len + 1
    assert quickstart().pools == {}


def test_a_teacher_in_vllm_gives_as_many_tokens_as_are_asked_for():
    keys = [*DISTILLS, "teacher.engine=vllm", "algorithm.distillation.top_k=64"]
    assert quickstart(*keys).pools["teacher"][1].vllm.max_logprobs == 64
    assert quickstart(*keys[:-1]).pools["teacher"][1].vllm.max_logprobs == 20
    assert quickstart(*keys).kept_arrays == ("teacher_logprobs", "top_ids", "top_logprobs", "top_k=64")
    assert quickstart().kept_arrays == ()


def test_one_trajectory_a_prompt_is_enough_for_a_teacher():
    keys = ["algorithm.advantage=teacher_only", "batch.group_size=1"]
    assert quickstart(*DISTILLS, *keys).batch.group_size == 1


def test_further_arrays_travel_with_their_trajectory(tmp_path):
    plain, with_teacher = group(0), group(1)
    members = tuple(taught(t, i, top=3) for i, t in enumerate(with_teacher.trajectories))
    groups = [plain, replace(with_teacher, trajectories=members), group(2)]
    save_groups(tmp_path, groups)
    for kept in (load_groups(tmp_path), pickle.loads(pickle.dumps(groups))):
        assert [len(t.extra) for g in kept for t in g.trajectories] == [0, 0, 3, 3, 0, 0]
        for found, member in zip(kept[1].trajectories, members, strict=True):
            for name, array in member.extra.items():
                assert found.validate().extra[name].dtype == array.dtype
                assert found.extra[name].tolist() == array.tolist()
    older = replace(groups[1], trajectories=tuple(replace(t, segments=t.segments) for t in members))
    assert all(t.extra for t in mask_older(older, 1).trajectories)


def planned(made):
    plan = tuple(
        TrainSequence(0, i, 0.0, Lengths(3, len(t.response_ids), t.num_trained_tokens), owner=i)
        for i, t in enumerate(made)
    )
    return plan, {(0, i): t for i, t in enumerate(made)}


def test_a_micro_batch_has_the_teacher_at_the_trained_tokens():
    made = [taught(trajectory(response=n, seed=n), 10 * n) for n in (3, 2)]
    mask = np.array([True, False, True])
    made[0] = replace(made[0], loss_mask=mask)
    plan, found = planned(made)
    options = {"predict": "trained", "device": torch.device("cpu"), "extra": ("teacher_logprobs",)}
    batch = pack(plan, found, **options)
    expected = np.concatenate([made[0].extra["teacher_logprobs"][mask], made[1].extra["teacher_logprobs"]])
    assert batch.extra["teacher_logprobs"].tolist() == expected.tolist()
    inputs = batch.inputs(batch.behavior_logprobs, batch.behavior_logprobs, batch.behavior_logprobs)
    assert inputs.teacher_logprobs is batch.extra["teacher_logprobs"]
    assert pack((), {}, **options).extra["teacher_logprobs"].tolist() == [0]
    assert (batch.tokens.others, inputs.teacher_top_logprobs) == (None, None)
    found[0, 1] = trajectory(response=2, seed=2)
    with pytest.raises(ValueError, match="sequence 1 of group 0 has no teacher_logprobs"):
        pack(plan, found, **options)


def test_a_micro_batch_asks_for_the_teachers_likeliest_tokens_at_the_trained_ones():
    made = [taught(trajectory(response=n, seed=n), 10 * n, top=2) for n in (3, 0, 2)]
    made[0] = replace(made[0], loss_mask=np.array([True, False, True]))
    plan, found = planned(made)
    options = {"predict": "trained", "device": torch.device("cpu"), "extra": ("top_ids", "top_logprobs")}
    batch = pack(plan, found, **options)
    assert batch.tokens.others.tolist() == [[30, 31], [34, 35], [20, 21], [22, 23]]
    assert batch.tokens.others.dtype == torch.int64
    inputs = batch.inputs(batch.behavior_logprobs, batch.behavior_logprobs, batch.behavior_logprobs)
    assert inputs.teacher_top_logprobs.tolist() == [[-31, -32], [-35, -36], [-21, -22], [-23, -24]]
    assert pack((), {}, **options).tokens.others.shape == (1, 1), "a placeholder"
    found[0, 2] = taught(made[2], 0, top=3)
    with pytest.raises(ValueError, match="rows of the shapes"):
        pack(plan, found, **options)


# -- what a trajectory may be ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "broken",
    [
        {"prompt_ids": np.zeros(0, np.int32)},
        {"logprobs": np.zeros(3, np.float32)},
        {"loss_mask": np.ones(5, np.bool_)},
        {"segments": ()},
        {"segments": (Segment(0, 3, 0, 0),)},
        {"segments": (Segment(0, 2, 0, 0), Segment(3, 4, 0, 0))},
        {"segments": (Segment(0, 4, 0, 0, "environment"),)},
        {"reward": float("nan")},
        {"extra": {"teacher_logprobs": np.zeros(3, np.float32)}},
        {"extra": {"teacher_logprobs": np.array([0, -1, -np.inf, 0], np.float32)}},
        {"extra": {"teacher_logits": np.zeros(4, np.float32)}},
        {"extra": {"top_ids": np.zeros(4, np.int32)}},
        {"extra": {"top_ids": np.zeros((3, 2), np.int32)}},
        {"extra": {"top_ids": np.full((4, 2), -1, np.int32)}},
        {"extra": {"top_logprobs": np.full((4, 2), -np.inf, np.float32)}},
    ],
)
def test_a_malformed_trajectory_is_refused(broken):
    good = trajectory().validate()
    with pytest.raises(ValueError, match=f"{next(iter(broken))}|segment"):
        replace(good, **broken).normalized().validate()


# -- arrays of others --------------------------------------------------------------------------------------------------


PLAIN = {
    "prompt_ids": np.array([5, 6], np.int32),
    "response_ids": np.array([7, 8, 9], np.int32),
    "logprobs": np.array([-0.5, -0.25, -1.0], np.float32),
    "loss_mask": np.array([True, True, False]),
    "segments": (Segment(0, 3, 1, 0),),
    "reward": 1.0,
    "reward_parts": (("exact", 1.0),),
}


class Marked(np.ndarray):
    """As memory-mapped arrays are."""


@pytest.mark.parametrize(
    "make", [list, tuple, pd.Series, torch.tensor, lambda a: a.astype(float), lambda a: a.view(Marked)],
    ids=["list", "tuple", "pandas", "torch", "float64", "subclass"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["prompt_ids", "response_ids", "logprobs", "loss_mask"])
def test_whatever_numpy_takes_for_an_array_becomes_a_plain_one(make, name):
    made = Trajectory(**PLAIN | {name: make(PLAIN[name])}).normalized().validate()
    for each, array in PLAIN.items():
        if isinstance(array, np.ndarray):
            found = getattr(made, each)
            assert type(found) is np.ndarray
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("reward", np.float32(1.0)), ("reward", 1), ("reward", True),
        ("reward_parts", [("exact", 1.0)]), ("reward_parts", (["exact", 1.0],)),
        ("reward_parts", (("exact", np.float64(1.0)),)),
        ("segments", [Segment(0, 3, 1, 0)]),
    ],
)  # fmt: skip
def test_numbers_and_sequences_become_plain_ones(name, given):
    made = Trajectory(**PLAIN | {name: given}).normalized().validate()
    assert type(made.reward) is float
    assert made.reward_parts == PLAIN["reward_parts"]
    assert type(made.reward_parts[0]) is tuple
    assert type(made.reward_parts[0][1]) is float
    assert made.segments == PLAIN["segments"]


def test_what_is_plain_already_is_not_copied():
    plain = Trajectory(**PLAIN)
    assert plain.normalized() is plain


def test_extra_and_branches_are_looked_at_too():
    with pytest.raises(ValueError, match="extra has"):
        Trajectory(**PLAIN, extra={"unknown": np.zeros(3)}).normalized()
    branch = Trajectory(**PLAIN | {"reward": 0, "reward_parts": (), "response_ids": [7, 8, 9]})
    made = Trajectory(**PLAIN, branches=(branch,)).normalized().validate()
    assert made.branches[0].response_ids.dtype == np.int32
