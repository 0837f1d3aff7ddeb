import asyncio
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from asyncrl.config.rewards import CodeRewardConfig, RemoteRewardConfig, RewardConfig
from asyncrl.data.rows import parse_record
from asyncrl.errors import ConfigError, DataError
from asyncrl.rewards import REWARDS, RewardResult, build_reward, check_rows
from asyncrl.rewards.custom import CustomReward
from tests.make import row

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
