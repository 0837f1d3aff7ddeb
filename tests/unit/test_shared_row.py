"""Rows of a micro-batch in which trajectories share prompts: what a model reads is what each sequence is."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.trainer.step.batch import PackedLayout, SharedRow, pack
from asyncrl.types import Lengths, Segment, TrainSequence, Trajectory

ids = st.lists(st.integers(0, 9), min_size=1, max_size=6)
members = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 9), max_size=6), st.sampled_from([0, 0, 0, 1])),
    min_size=1,
    max_size=8,
)


def trajectory(prompt, response):
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
    chosen = [trajectory(prompts[group] + [7] * other, response) for group, response, other in drawn]
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
        (0, 0): trajectory([1, 2, 3], [4, 5]),
        (0, 1): trajectory([1, 2, 3], [4, 5, 6, 7]),
        (1, 0): trajectory([1, 2, 3], [4]),
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
