"""What distillation needs of recipes, trajectories and micro-batches."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.queue.masking import mask_older
from asyncrl.queue.saved_state import load_groups, save_groups
from asyncrl.trainer.step.batch import pack
from asyncrl.types import Lengths, TrainSequence
from tests.make import group, quickstart, trajectory

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
        for found, given in zip(kept[1].trajectories, members, strict=True):
            for name, array in given.extra.items():
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
