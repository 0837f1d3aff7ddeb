"""Tasks of reasoning-gym as rows, and their verifiers as a reward."""

import json

import pytest

from asyncrl.config.data import DataConfig
from asyncrl.config.rewards import ReasoningGymRewardConfig, RewardConfig
from asyncrl.data.dataset import GeneratedRows, load_rows
from asyncrl.errors import DataError
from asyncrl.rewards import build_reward, check_rows
from tools.make_reasoning_gym import main

reasoning_gym = pytest.importorskip("reasoning_gym", reason="pip install 'asyncrl[reasoning-gym]'")
pytestmark = pytest.mark.environments

SUMS = '{"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}'


def rows_of(path, *words):
    assert main([*words, "--out", str(path / "x")]) == 0
    return [load_rows(str(path / f"x_{part}.jsonl")) for part in ("train", "test")]


def reward(kind):
    return build_reward(RewardConfig(function="reasoning_gym", reasoning_gym=ReasoningGymRewardConfig(answer=kind)))


def test_sets_share_no_question_and_tasks_have_their_shares(tmp_path):
    words = ("--task", "chain_sum", "3", SUMS, "--task", "leg_counting", "1", "--train", "80", "--test", "20")
    train, test = rows_of(tmp_path, *words)
    assert (len(train), len(test)) == (80, 20)
    assert not {row.messages for row in train} & {row.messages for row in test}
    assert sum(row.data_source == "reasoning_gym/chain_sum" for row in train) == 60
    first = (tmp_path / "x_train.jsonl").read_bytes()
    rows_of(tmp_path, *words)
    assert (tmp_path / "x_train.jsonl").read_bytes() == first, "the same again"
    check_rows(RewardConfig(function="reasoning_gym"), [*train, *test])


def test_two_tasks_that_ask_the_same_share_no_question_either(tmp_path):
    words = ("--task", "chain_sum", SUMS, "--task", "chain_sum", SUMS, "--train", "200", "--test", "100")
    train, test = rows_of(tmp_path, *words)
    assert len({row.messages for row in (*train, *test)}) == 300


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("tags", "so <answer> {} </answer>", "{}"),
        ("boxed", r"\boxed{{{}}}", "{}"),
        ("last_number", "1 + 1 is {}.", "{} or 99"),
        ("whole", " {}\n", "it is {}, I think, or so"),
    ],
)
def test_the_verifier_judges_the_answer_in_its_form(tmp_path, kind, right, wrong):
    ((row, *_), _) = rows_of(tmp_path, "--task", "chain_sum", SUMS, "--train", "4", "--test", "1")
    judged = reward(kind)
    assert judged(right.format(row.ground_truth), row).parts == (("correct", 1.0), ("answered", 1.0))
    found = judged(wrong.format(row.ground_truth), row)
    assert dict(found.parts)["correct"] == 0
    assert found.reward < 1
    assert judged("", row).parts == (("correct", 0.0), ("answered", 0.0))


def test_entries_of_every_task_are_made_again(tmp_path):
    tasks = [name for name in sorted(reasoning_gym.factory.DATASETS) if name != "composite"]
    lines = []
    for name in tasks:
        dataset = reasoning_gym.create_dataset(name, seed=3, size=3)
        entry = dataset[2]
        lines.append(
            {
                "prompt": entry["question"],
                "answer": None if entry["answer"] is None else str(entry["answer"]),
                "extra_info": {"task": name, "config": {}, "seed": 3, "index": 2},
            }
        )
    path = tmp_path / "all.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    check_rows(RewardConfig(function="reasoning_gym"), load_rows(str(path)))


@pytest.mark.parametrize(
    ("extra", "found"),
    [
        ({}, "no entry of reasoning-gym"),
        ({"task": "chain_sums", "config": {}, "seed": 1, "index": 0}, "no such task"),
        ({"task": "chain_sum", "config": {}, "seed": 1, "index": 0}, "another version"),
    ],
)
def test_a_row_without_its_entry_is_refused(tmp_path, extra, found):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"prompt": "1 + 1?", "answer": "2", "extra_info": extra}))
    with pytest.raises(DataError, match=found):
        check_rows(RewardConfig(function="reasoning_gym"), load_rows(str(path)))


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--task", "chain_sums"), "name one of chain_sum"),
        (("--task", "chain_sum", '{"max_terms": 2, "max_digits": 1, "min_digits": 1}'), "different questions"),
        (("--task", "chain_sum", '{"terms": 2}'), "the task refuses it"),
        (("--task", "chain_sum", "-1"), "neither a weight nor a configuration"),
    ],
)
def test_what_cannot_be_made_is_refused(tmp_path, capsys, words, found):
    assert main([*words, "--train", "900", "--test", "9", "--out", str(tmp_path / "x")]) == 2
    assert found in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_entries_are_drawn_without_end_and_judged(tmp_path):
    tasks = {"chain_sum": {"weight": 3, "config": json.loads(SUMS)}, "leg_counting": {}}
    data = DataConfig(train="asyncrl.rewards.reasoning_gym:Entries", options={"tasks": tasks})
    entries = GeneratedRows(data.train, data.options, "0 train", data)
    found = [entries.row(index, lambda row: True) for index in range(200)]
    assert 130 < sum(row.data_source == "reasoning_gym/chain_sum" for row in found) < 170
    check_rows(RewardConfig(function="reasoning_gym"), found)
    assert all(reward("whole")(row.ground_truth, row).reward == 1 for row in found)
    for wrong, expected in (({}, "name one as"), ({"chain_sun": {}}, "chain_sum"), ({"chain_sum": {"w": 1}}, "not w")):
        with pytest.raises(DataError, match=expected):
            GeneratedRows(data.train, {"tasks": wrong}, "0", data)
