"""Rewards of groups and pairs, and what a judge's answers come to."""

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest

from asyncrl.config.model import ModelConfig
from asyncrl.config.rewards import GroupRewardConfig, JudgeConfig
from asyncrl.data.rows import ChatMessage, PromptRow
from asyncrl.errors import ConfigError
from asyncrl.rewards import RewardResult
from asyncrl.rewards.group import build_group_reward
from asyncrl.rewards.pairwise import bradley_terry, win_rates
from asyncrl.rollout.judge import Judge, read_worth
from asyncrl.types import Generation, Segment
from tools.make_tiny_model import build_tokenizer

ROW = PromptRow((ChatMessage("user", "What is 3 + 4?"),), "7", "arithmetic", (), "sums.jsonl:12")
GIVEN = {}


def given(responses, row):
    return GIVEN["value"]


def longer(first, second, row):
    return float(len(first) > len(second))


def of_one(response):
    return 0.0


def wins_of(strengths):
    s = np.array(strengths, float)
    return s[:, None] / (s[:, None] + s[None, :])


def test_win_rates_are_means_over_the_others():
    wins = np.array([[9.0, 1.0, 0.5], [0.0, 9.0, 0.25], [0.5, 0.75, 9.0]])
    assert win_rates(wins).tolist() == [0.75, 0.125, 0.625]
    assert wins[0, 0] == 9, "it was not changed"


def test_bradley_terry_finds_the_strengths_that_made_the_comparisons():
    """With all pairs alike the prior draws them together, in their order; the chance of an average member is 1/2."""
    found = bradley_terry(wins_of([8.0, 4.0, 2.0, 1.0]))
    assert (np.diff(found) < 0).all()
    assert found[0] + found[3] == pytest.approx(1)
    assert bradley_terry(np.full((3, 3), 0.5)).tolist() == pytest.approx([0.5] * 3)
    sure = bradley_terry(np.triu(np.ones((3, 3)), 1))
    assert np.isfinite(sure).all()
    assert sure[0] > sure[1] > sure[2]


def test_bradley_terry_solves_its_equations():
    wins = wins_of([3.0, 1.0, 0.2]) * 0.9 + 0.05
    found = bradley_terry(wins)
    s = found / (1 - found)
    games = wins + 0.25
    np.fill_diagonal(games, 0)
    expected = wins_of(s) * (games + games.T)
    np.fill_diagonal(expected, 0)
    assert expected.sum(1) == pytest.approx(games.sum(1), abs=1e-6)


@pytest.mark.parametrize("wins", [np.ones((1, 1)), np.ones((2, 3)), np.full((2, 2), 0.7), np.full((2, 2), np.nan)])
def test_impossible_comparisons_are_refused(wins):
    for scores in (win_rates, bradley_terry):
        with pytest.raises(ValueError, match="wins must be"):
            scores(wins)


def test_a_group_reward_is_one_for_each_response():
    reward = build_group_reward(GroupRewardConfig(function=f"{__name__}:given"))
    GIVEN["value"] = [1, RewardResult(2.0, (("style", 0.5),)), np.float32(3)]
    found = reward(["a", "b", "c"], ROW)
    assert found == (RewardResult(1.0), RewardResult(2.0, (("style", 0.5),)), RewardResult(3.0))
    assert build_group_reward(GroupRewardConfig()) is None


@pytest.mark.parametrize(
    ("value", "error", "found"),
    [
        ([1.0], ValueError, "1 rewards for 2 responses"),
        ([1.0, math.nan], ValueError, "finite number"),
        ([1.0, "good"], TypeError, "str instead of RewardResult"),
        (0.5, TypeError, "float instead of a list"),
        (None, TypeError, "NoneType instead of a list"),
    ],
)
def test_a_wrong_group_reward_is_named(value, error, found):
    GIVEN["value"] = value
    with pytest.raises(error, match=found):
        build_group_reward(GroupRewardConfig(function=f"{__name__}:given"))(["a", "b"], ROW)


def test_pairs_come_to_win_rates():
    reward = build_group_reward(GroupRewardConfig(function=f"{__name__}:longer", pairwise=True))
    found = reward(["aaa", "a", "aa"], ROW)
    assert [result.reward for result in found] == [1.0, 0.0, 0.5]


@pytest.mark.parametrize("name", ["of_one", "nothing"])
def test_a_function_of_something_else_is_refused(name):
    with pytest.raises(ConfigError, match=r"reward\.group\.function"):
        build_group_reward(GroupRewardConfig(function=f"{__name__}:{name}"))


class Reader:
    """Answers as a judge that counts stars: `score` finds "yes" likelier with each star, `generate` writes `text`."""

    def __init__(self, tokenizer, text=""):
        self.tokenizer, self.text, self.asked = tokenizer, text, []

    async def score(self, tokens, start):
        question, answer = self.tokenizer.decode(tokens[:start]), self.tokenizer.decode(tokens[start:])
        self.asked.append(question)
        first, _, second = question.partition("#")
        stars = first.count("*") - second.count("*")
        logprobs = np.full(len(tokens) - start, -1.0, np.float32)
        logprobs[-1] += stars if answer == "yes" else 0
        return Generation(tokens[:start], tokens[start:], logprobs, (), "length")

    async def generate(self, prompt_ids, sampling):
        ids = np.array(self.tokenizer(self.text).input_ids, np.int32)
        return Generation(prompt_ids, ids, -np.ones(len(ids), np.float32), (Segment(0, len(ids), 0, 0),), "stop")


@pytest.fixture(scope="module")
def judge_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("judge")
    build_tokenizer().save_pretrained(path)
    (path / "config.json").write_text('{"eos_token_id": 2}')
    return ModelConfig(path=str(path))


def test_the_expected_worth_is_that_of_the_answers_by_their_probability(judge_model):
    config = JudgeConfig(weight=1, prompt="{prompt} ({truth}) {response}", answers={"yes": 1.0, "no": -1.0})
    reader = Reader(build_tokenizer())
    judge = Judge(config, judge_model, reader, max_model_len=4096)
    found = [asyncio.run(judge.score("*" * n, ROW)).reward for n in (0, 1, 3)]
    more = len(reader.tokenizer("yes").input_ids) - len(reader.tokenizer("no").input_ids)  # each costs 1
    assert found == pytest.approx([math.tanh((n - more) / 2) for n in (0, 1, 3)])
    assert "What is 3 + 4? (7) ***" in reader.asked[-1]


def test_answers_that_begin_alike_are_refused(judge_model):
    answers = {"yes": 1.0, "yes mostly": 0.5, "no": 0.0}
    config = JudgeConfig(weight=1, prompt="{response}", answers=answers)
    with pytest.raises(ConfigError, match="'yes' and 'yes mostly'"):
        Judge(config, judge_model, Reader(build_tokenizer()), max_model_len=4096)


def test_a_response_that_names_a_place_stays_as_it_is(judge_model):
    reader = Reader(build_tokenizer())
    asyncio.run(
        Judge(JudgeConfig(weight=1, prompt="{response}"), judge_model, reader, max_model_len=4096).score(
            "{truth}{prompt}", ROW
        )
    )
    assert "{truth}{prompt}" in reader.asked[0]


def test_a_judge_of_text_is_told_where_an_image_was(judge_model):
    reader, image = Reader(build_tokenizer()), "\ufffc" + "0a" * 14
    row = replace(ROW, messages=(replace(ROW.messages[-1], content=f"{image}What is drawn?"),))
    config = JudgeConfig(weight=1, prompt="{prompt} {response}")
    asyncio.run(Judge(config, judge_model, reader, max_model_len=4096).score(f"{image} a 3", row))
    assert "[image]What is drawn? [image] a 3" in reader.asked[0]


def test_pairs_are_judged_in_both_orders(judge_model):
    config = JudgeConfig(weight=1, prompt="{first}#{second}", pairwise=True)
    reader = Reader(build_tokenizer())
    found = asyncio.run(Judge(config, judge_model, reader, max_model_len=4096).compare(["*", "****", "**"], ROW))
    assert len(reader.asked) == 2 * 6, "two answers to each of six questions"
    rewards = [result.reward for result in found]
    assert rewards[1] > rewards[2] > rewards[0]
    assert sum(rewards) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("text", "answers", "worth"),
    [
        ("so: no. Verdict: yes", {"yes": 1.0, "no": 0.0}, 1.0),
        ("Verdict: yes. Verdict: no", {"yes": 1.0, "no": 0.0}, 0.0),
        ("Verdict: 7.5", {}, 7.5),
        ("Verdict: 1e999", {}, None),
        ("Verdict: maybe", {"yes": 1.0, "no": 0.0}, None),
        ("I cannot say", {}, None),
    ],
)
def test_what_a_judge_wrote_is_read(text, answers, worth):
    config = JudgeConfig(read="text", pattern=r"Verdict: ([\w.]+)", answers=answers)
    assert read_worth(text, config) == worth
