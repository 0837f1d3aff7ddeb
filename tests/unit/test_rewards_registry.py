import asyncio
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy
import numpy as np
import pytest

from asyncrl.config.model import ModelConfig
from asyncrl.config.rewards import CodeRewardConfig, GroupRewardConfig, JudgeConfig, RemoteRewardConfig, RewardConfig
from asyncrl.data.rows import ChatMessage, PromptRow, parse_record
from asyncrl.errors import ConfigError, DataError
from asyncrl.rewards import REWARDS, RewardResult, build_reward, check_rows
from asyncrl.rewards.custom import CustomReward
from asyncrl.rewards.group import build_group_reward
from asyncrl.rewards.pairwise import bradley_terry, win_rates
from asyncrl.rollout.judge import Judge, read_worth
from asyncrl.types import Generation, Segment
from tests.make import row
from tools.make_tiny_model import build_tokenizer

ROW = row("four  legs")

CUSTOM = __name__
"""The module of a user's functions: this one."""


def length_reward(response, row):
    return RewardResult(float(len(response)), (("length", float(len(response))), ("correct", 0.5)))


def bare_number(response, row):
    return len(response)


async def waits(response, row):
    await asyncio.sleep(0)
    return RewardResult(float(id(asyncio.get_running_loop()) % 1000))


async def waits_bare(response, row):
    return True


def returns(result):
    """A function of the user that returns this for every response."""
    return lambda response, row: result


text = returns("1.0")
not_finite = returns(float("nan"))
numpy_part = returns(RewardResult(numpy.float32(0.5), (("correct", numpy.float32(0.5) > 0.25),)))
nan_part = returns(RewardResult(1.0, (("style", float("nan")),)))
dict_parts = returns(RewardResult(1.0, {"style": 1.0}))
bare_parts = returns(RewardResult(1.0, (1.0, 2.0)))
text_part = returns(RewardResult(1.0, (("style", "good"),)))
text_reward = returns(RewardResult("1.0"))


def wrong_arguments(response):
    return RewardResult(0.0)


not_a_function = 3


def build(name: str):
    return build_reward(RewardConfig(function=name))


def test_built_in_rewards_are_found_by_name() -> None:
    config = {"pattern": "x", "remote": RemoteRewardConfig(url="http://localhost:1/")}
    for name in REWARDS:
        if name != "reasoning_gym":  # an extra: tests/contract/test_reasoning_gym.py, and below where it is missing
            assert callable(build_reward(RewardConfig(function=name, **config)))


def test_a_reward_whose_package_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'asyncrl\[reasoning-gym\]'"):
        build("reasoning_gym")


def test_exact_reward_ignores_whitespace_only() -> None:
    exact = build("exact")
    assert exact(" four legs\n", ROW) == RewardResult(1.0, (("correct", 1.0),))
    assert exact("four legs.", ROW).reward == 0.0
    assert exact("Four legs", ROW).reward == 0.0


def test_an_unknown_name_suggests_the_closest() -> None:
    with pytest.raises(ConfigError, match=r"(?s)asked: reward.function=maths\n.*'math'"):
        build("maths")
    with pytest.raises(ConfigError, match=r"(?s)asked: reward.parts=exakt\n.*'exact'"):
        build_reward(RewardConfig(parts={"math": 1.0, "exakt": 1.0}))


def test_a_function_of_the_user_is_used() -> None:
    reward = build(f"{CUSTOM}:length_reward")
    assert reward("abc", ROW).reward == 3.0
    assert build(f"{CUSTOM}:bare_number")("abcd", ROW) == RewardResult(4.0)


def test_scalars_of_numpy_are_numbers() -> None:
    assert build(f"{CUSTOM}:numpy_part")("x", ROW) == RewardResult(0.5, (("correct", 1.0),))


def test_an_async_function_keeps_its_event_loop() -> None:
    reward = build(f"{CUSTOM}:waits")
    assert reward("", ROW) == reward("", ROW)
    assert build(f"{CUSTOM}:waits_bare")("", ROW) == RewardResult(1.0)
    asyncio.set_event_loop(None)


@pytest.mark.parametrize("target", ["missing_function", "not_a_function", "wrong_arguments"])
def test_what_is_no_reward_function_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match=f"reward.function={CUSTOM}:{target}"):
        build(f"{CUSTOM}:{target}")


def test_a_missing_module_is_refused() -> None:
    with pytest.raises(ConfigError, match="no_such_module_here"):
        build("no_such_module_here:reward")


def test_a_module_that_cannot_be_imported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reward_with_a_slip.py").write_text("def reward(response, row)\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="SyntaxError: expected ':'"):
        build("reward_with_a_slip:reward")


@pytest.mark.parametrize(
    ("target", "error", "found"),
    [
        ("text", TypeError, "str instead of RewardResult"),
        ("not_finite", ValueError, ".*nan"),
        ("nan_part", ValueError, "part style=nan"),
        ("text_part", ValueError, "part style='good'"),
        ("dict_parts", TypeError, "parts={'style': 1.0}"),
        ("bare_parts", TypeError, r"parts=\(1.0, 2.0\)"),
        ("text_reward", ValueError, "'1.0'"),
    ],
)
def test_a_result_of_another_kind_names_reward_and_row(target: str, error: type, found: str) -> None:
    with pytest.raises(error, match=rf"(?s){CUSTOM}:{target} of f:1\nfound: {found}"):
        build(f"{CUSTOM}:{target}")("x", ROW)


def test_rows_that_a_reward_cannot_judge_are_found_before_the_run() -> None:
    good = {"code": '"assert f()"', "numeric": "1", "multiple_choice": "B", "math": "1", "exact": "x"}
    bad = {"code": "19", "numeric": "many", "multiple_choice": "42", "math": "$"}
    rows = {truth: replace(ROW, ground_truth=truth, origin=f"f:{truth}") for truth in (*good.values(), *bad.values())}
    for name, truth in good.items():
        check_rows(RewardConfig(function=name), [rows[truth]])
    for name, truth in bad.items():
        with pytest.raises(DataError, match=rf"(?s)f:{re.escape(truth)}.*reward.function={name}"):
            check_rows(RewardConfig(function=name), [rows[good[name]], rows[truth]])
    with pytest.raises(DataError, match=r"(?s)f:many.*reward.parts="):
        check_rows(RewardConfig(parts={"exact": 1.0, "numeric": 1.0}), [rows["many"]])
    for broken in ('"def f(:"', '{"inputs": [3], "outputs": [3], "fn_name": "f"}', "[" * 100_000):
        with pytest.raises(DataError, match=r"(?s)the tests of f:1.*"):
            check_rows(RewardConfig(function="code"), [replace(ROW, ground_truth=broken)])


def test_several_rewards_are_one_weighted_sum() -> None:
    custom = f"{CUSTOM}:length_reward"
    reward = build_reward(RewardConfig(parts={custom: 0.25, "exact": 2.0, "math": -1.0}))
    result = reward("four legs", ROW)
    assert result.reward == pytest.approx(0.25 * 9 + 2.0 * 1)
    assert result.parts == (
        ("correct", 0.5),  # of the first that has one
        (custom, 9.0),
        (f"{custom}.length", 9.0),
        ("exact", 1.0),
        ("math", 0.0),
        ("math.answered", 0.0),
    )


def test_settings_that_cannot_be_used_are_named() -> None:
    with pytest.raises(ConfigError, match=r"(?s)asked: reward.pattern=\(.*missing \)"):
        build_reward(RewardConfig(function="regex", pattern="("))
    with pytest.raises(ConfigError, match=r"reward.remote.url is not set"):
        RewardConfig(parts={"remote": 1.0})
    with pytest.raises(ConfigError, match=r"reward.pattern is not set"):
        RewardConfig(function="regex")
    slow = CodeRewardConfig(timeout_s=60)
    with pytest.raises(ConfigError, match=r"(?s)reward.code.timeout_s=60.*reward.timeout_s=30"):
        RewardConfig(function="code", code=slow)
    assert RewardConfig(code=slow).function == "math"
    for key in ("timeout_s", "tolerance"):
        with pytest.raises(ConfigError, match=rf"reward.{key}=inf"):
            RewardConfig(**{key: float("inf")})


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str in ground_truth["target"]), "n": extra_info["n"], "source": data_source}


def trl_text(prompts, completions, solution, **kwargs):
    return [
        float(text == truth and prompt == "?")
        for prompt, text, truth in zip(prompts, completions, solution, strict=True)
    ]


async def trl_chat(completions, ground_truth, **kwargs):
    return [
        None if c[0]["content"] == "skip" else c[0]["content"] == g
        for c, g in zip(completions, ground_truth, strict=True)
    ]


def test_functions_written_for_verl_and_trl_run_as_they_are() -> None:
    truth = {"prompt": [{"role": "user", "content": "?"}], "data_source": "nq", "extra_info": {"n": 5}}
    asked = parse_record(truth | {"reward_model": {"ground_truth": {"target": ["a", "b"]}}}, "f:1")
    verl = build_reward(RewardConfig(function=f"{CUSTOM}:compute_score"))
    assert verl("b", asked) == RewardResult(1.0, (("n", 5.0),))
    text = build_reward(RewardConfig(function=f"{CUSTOM}:trl_text"))
    assert text("4", parse_record({"prompt": "?", "solution": "4"}, "f:1")).reward == 1.0
    chat = build_reward(RewardConfig(function=f"{CUSTOM}:trl_chat"))
    row_of_chat = parse_record({"prompt": truth["prompt"], "answer": "4"}, "f:1")
    assert [chat(said, row_of_chat).reward for said in ("4", "5", "skip")] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("value", [numpy.bool_(True), numpy.array(1.0), numpy.float32(1), True])
def test_scalars_of_any_kind_are_rewards(value) -> None:
    assert CustomReward("f", returns(value))("", ROW).reward == 1.0


@pytest.mark.parametrize("name", ["math", "exact", "numeric", "multiple_choice", "regex", "code"])
def test_every_built_in_reward_pays_nothing_for_a_thought_without_an_end(name) -> None:
    right = {"multiple_choice": ("B", "(B)"), "code": ('["assert f() == 4"]', "```python\ndef f():\n    return 4\n```")}
    truth, said = right.get(name, ("4", "4" if name == "exact" else "Answer: 4"))
    reward = build_reward(RewardConfig(function=name, pattern="Answer: {truth}"))
    asked = row(truth)
    begun = replace(asked, thinks=True)
    assert reward(f"<think>hm</think>{said}", asked).reward == reward(f"hm</think>{said}", begun).reward == 1.0
    assert reward(f"<think>{said}", asked).reward == reward(said, begun).reward == 0.0


def test_a_pattern_with_the_marks_of_thoughts_sees_them() -> None:
    reward = build_reward(RewardConfig(function="regex", pattern="<think>.+</think>"))
    assert reward("<think>hm</think>4", ROW).reward == 1.0


@pytest.mark.parametrize("name", ["exact", "math", "numeric", "regex", "multiple_choice"])
@pytest.mark.parametrize("answer", [{}, {"answer": ["4", "four"]}])
def test_built_in_rewards_refuse_a_row_without_a_text_as_truth(name, answer) -> None:
    asked = parse_record({"prompt": "2+2?", **answer}, "f:1")
    with pytest.raises(DataError, match=r"(?s)f:1.*ground truth.*row\.truth\(\)"):
        check_rows(RewardConfig(function=name, pattern="{truth}"), [asked])
    check_rows(RewardConfig(function=f"{CUSTOM}:trl_text"), [asked])


# -- rewards of groups and pairs, and what a judge's answers come to ---------------------------------------------------


SUM = PromptRow((ChatMessage("user", "What is 3 + 4?"),), "7", "arithmetic", (), "sums.jsonl:12")
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
    found = reward(["a", "b", "c"], SUM)
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
        build_group_reward(GroupRewardConfig(function=f"{__name__}:given"))(["a", "b"], SUM)


def test_pairs_come_to_win_rates():
    reward = build_group_reward(GroupRewardConfig(function=f"{__name__}:longer", pairwise=True))
    found = reward(["aaa", "a", "aa"], SUM)
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
    found = [asyncio.run(judge.score("*" * n, SUM)).reward for n in (0, 1, 3)]
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
            "{truth}{prompt}", SUM
        )
    )
    assert "{truth}{prompt}" in reader.asked[0]


def test_a_judge_of_text_is_told_where_an_image_was(judge_model):
    reader, image = Reader(build_tokenizer()), "\ufffc" + "0a" * 14
    row = replace(SUM, messages=(replace(SUM.messages[-1], content=f"{image}What is drawn?"),))
    config = JudgeConfig(weight=1, prompt="{prompt} {response}")
    asyncio.run(Judge(config, judge_model, reader, max_model_len=4096).score(f"{image} a 3", row))
    assert "[image]What is drawn? [image] a 3" in reader.asked[0]


def test_pairs_are_judged_in_both_orders(judge_model):
    config = JudgeConfig(weight=1, prompt="{first}#{second}", pairwise=True)
    reader = Reader(build_tokenizer())
    found = asyncio.run(Judge(config, judge_model, reader, max_model_len=4096).compare(["*", "****", "**"], SUM))
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
