"""Calls within one response, over a scripted policy and real tool processes: what is inserted, limits, errors."""

import json
from dataclasses import replace

import pytest

from asyncrl.config.environments import InterleavedConfig
from asyncrl.config.model import ModelConfig
from asyncrl.data.tokenizer import PromptRenderer
from asyncrl.environments import check_environment, prompt_tools
from asyncrl.errors import ConfigError
from tests.contract.test_tool_use import Shouts, recipe_with, text_of
from tests.environments import PLAIN, QWEN, ScriptedSession, assert_exact, chat_with, task_of, tokenizer_with

SETTINGS = "rollout.interleaved_tool_use"
INTERLEAVED = "rollout.environment=interleaved_tool_use"


@pytest.fixture
def run(started):
    """run(*replies, overrides=(), texts=...) -> (trajectory, session): the policy writes one reply after another, where
    generation begins again."""

    async def call(*replies, overrides=(), texts=None, **script):
        chat, recipe = chat_with(), recipe_with(INTERLEAVED, *overrides)
        if texts is not None:
            recipe = replace(recipe, rollout=replace(recipe.rollout, interleaved_tool_use=texts))
        session = ScriptedSession(chat, *replies, end="", **script)
        environment = await started(recipe, chat)
        return await environment.run(task_of(chat.encode("<|im_start|>user\nwhat?<|im_end|>\n")), session), session

    return call


async def test_results_stand_in_the_response_and_are_not_trained(run):
    trajectory, session = await run("I try <tool>12*34</tool>", " and <tool>408+1</tool>", "so it is 409.")
    assert_exact(trajectory, session)
    assert text_of(session, trajectory.response_ids) == (
        "I try <tool>12*34</tool><result>408</result> and <tool>408+1</tool><result>409</result>so it is 409."
    )
    assert (
        text_of(session, trajectory.response_ids[~trajectory.loss_mask]) == "<result>408</result><result>409</result>"
    )
    assert session.rewarded == ["so it is 409."]
    assert trajectory.finish_reason == "stop"
    assert dict(trajectory.reward_parts) == {"correct": 1, "tool_calls": 2, "tool_errors": 0}
    assert [budget + len(prompt) for budget, prompt in zip(session.budgets, session.prompts, strict=True)] == [
        400 + len(session.prompts[0])
    ] * 3, "one budget for the whole response"


async def test_the_reward_may_get_the_whole_response(run):
    _, session = await run("<tool>1+1</tool>", "two", overrides=[f"{SETTINGS}.judged=response"])
    assert session.rewarded == ["<tool>1+1</tool><result>2</result>two"]


@pytest.mark.parametrize("reply", ["The answer is 4.", "I never close <tool>1+1", "2 < 3 > 1 </too"])
async def test_a_response_without_a_closed_call_is_the_models_text(run, reply):
    trajectory, session = await run(reply)
    assert text_of(session, trajectory.response_ids) == reply
    assert trajectory.loss_mask.all()
    assert session.rewarded == [reply]
    assert dict(trajectory.reward_parts)["tool_calls"] == 0


async def test_a_closing_text_that_closes_nothing_is_the_models_text_which_goes_on(run):
    trajectory, session = await run("no </tool>", " yes <tool>1", "+1</tool> <tool>2</tool>")
    # the second reply ended by itself: what it opened is text
    assert len(session.prompts) == 2
    assert text_of(session, trajectory.response_ids) == "no </tool> yes <tool>1"
    assert trajectory.loss_mask.all()
    trajectory, session = await run("no </tool", ">")
    assert len(session.prompts) == 1
    trajectory, session = await run("no </tool>", " yes <tool>3</tool>", "!")
    assert text_of(session, trajectory.response_ids) == "no </tool> yes <tool>3</tool><result>3</result>!"
    assert session.rewarded == ["!"]


async def test_the_last_opening_text_opens_the_call(run):
    trajectory, session = await run("<tool>a <tool>1+2</tool>", ".")
    assert text_of(session, trajectory.response_ids) == "<tool>a <tool>1+2</tool><result>3</result>."


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("1/0", "ZeroDivisionError"),
        ('{"sum": "1"}', "calculator takes expression"),
        ('{"name": "calculater", "arguments": {}}', "there is no tool 'calculater'; the tools are calculator"),
        ('{"name": "calculator", "arguments": 3}', "the arguments are no object"),
    ],
)
async def test_what_goes_wrong_is_the_result(run, call, error):
    trajectory, session = await run(f"<tool>{call}</tool>", "I see")
    assert_exact(trajectory, session)
    inserted = text_of(session, trajectory.response_ids[~trajectory.loss_mask])
    assert inserted.startswith("<result>Error: ")
    assert error in inserted
    assert dict(trajectory.reward_parts) == {"correct": 1, "tool_calls": 1, "tool_errors": 1}
    assert session.rewarded == ["I see"]


@pytest.mark.parametrize(
    "call", ["2*3", '{"expression": "2*3"}', '{"name": "calculator", "arguments": {"expression": "2*3"}}']
)
async def test_a_call_of_the_only_tool_needs_no_name(run, call):
    trajectory, session = await run(f"<tool>{call}</tool>", ".")
    assert text_of(session, trajectory.response_ids[~trajectory.loss_mask]) == "<result>6</result>"


async def test_with_several_tools_a_call_names_one(run):
    tools = [f"rollout.tool_use.tools=[calculator, {Shouts.__module__}:Shouts]"]
    call = json.dumps({"name": "calculator", "arguments": {"expression": "2*3"}})
    trajectory, session = await run(f"<tool>{call}</tool>", "<tool>2*3</tool>", ".", overrides=tools)
    inserted = text_of(session, trajectory.response_ids[~trajectory.loss_mask])
    assert inserted.startswith("<result>6</result><result>Error: the call is not JSON")
    assert 'write <tool>{"name": "NAME", "arguments": {...}}</tool></result>' in inserted
    assert dict(trajectory.reward_parts)["tool_errors"] == 1


@pytest.mark.parametrize("word", ["<|im_end|>", "</result>"])
async def test_a_result_can_end_neither_itself_nor_the_response(run, word):
    overrides = [f"rollout.tool_use.tools=[{Shouts.__module__}:Shouts]", "rollout.tool_use.max_result_tokens=2000"]
    overrides += ["rollout.sampling.max_response_tokens=1500"]
    trajectory, session = await run(f"<tool>{word}</tool>", "fine", overrides=overrides)
    assert_exact(trajectory, session)
    inserted = session.chat._tokenizer.decode(
        trajectory.response_ids[~trajectory.loss_mask].tolist(), clean_up_tokenization_spaces=False
    )
    assert inserted == f"<result>{(word[0] + ' ' + word[1:]) * 50}</result>"


@pytest.mark.parametrize("close", ["```", "\n```"])
async def test_a_fence_may_close_what_a_fence_opens(run, close):
    """Generation stops at the opening fence, too, and goes on."""
    fences = InterleavedConfig(open="```python\n", close=close, result_open="\n```output\n", result_close="\n```\n")
    trajectory, session = await run("Let me see:\n```", "python\n6*7\n```", "42.", texts=fences)
    text = "Let me see:\n```python\n6*7\n```\n```output\n42\n```\n42."
    assert text_of(session, trajectory.response_ids) == text
    assert text_of(session, trajectory.response_ids[~trajectory.loss_mask]) == "\n```output\n42\n```\n"
    assert session.rewarded == ["42."]


async def test_the_limit_of_calls_cuts_the_response_off(run):
    trajectory, session = await run(*["<tool>1+1</tool>"] * 9, overrides=[f"{SETTINGS}.max_calls=2"])
    assert_exact(trajectory, session)
    assert trajectory.finish_reason == "length"
    assert dict(trajectory.reward_parts)["tool_calls"] == 2
    assert text_of(session, trajectory.response_ids).endswith("</result><tool>1+1</tool>")
    assert session.rewarded == ["<tool>1+1</tool>"]


CALL, RESULT = len("<tool>1+1</tool>"), len("<result>2</result>")


@pytest.mark.parametrize(
    ("budget", "prompts", "length"),
    [
        (CALL - 1, 1, CALL - 1),  # within the call: it is not made
        (CALL, 1, CALL),  # no room for the result
        (CALL + RESULT, 1, CALL),  # nor for anything after it
        (CALL + RESULT + 1, 2, CALL + RESULT + 1),
        (2 * CALL + RESULT, 2, 2 * CALL + RESULT),
    ],
)
async def test_the_budget_holds_for_the_whole_response(run, budget, prompts, length):
    limit = [f"rollout.sampling.max_response_tokens={budget}"]
    trajectory, session = await run(*["<tool>1+1</tool>"] * 9, overrides=limit)
    assert_exact(trajectory, session)
    assert len(session.prompts) == prompts
    assert (len(trajectory.response_ids), trajectory.finish_reason) == (length, "length")
    assert trajectory.segments[-1].kind == "policy"


async def test_a_closing_text_that_closes_nothing_at_the_end_of_the_budget_ends_the_response(run):
    trajectory, _ = await run("no </tool>", overrides=["rollout.sampling.max_response_tokens=10"])
    assert (len(trajectory.response_ids), trajectory.finish_reason) == (10, "length")


@pytest.mark.parametrize("template", [QWEN, PLAIN])
def test_prompts_say_in_words_how_to_use_the_tools(template):
    tokenizer = tokenizer_with(template)
    recipe = recipe_with(INTERLEAVED)
    renderer = PromptRenderer(tokenizer, ModelConfig(path="/"), prompt_tools(recipe, tokenizer))
    prompt = tokenizer.decode(renderer.prompt_ids(task_of([1]).row).tolist())
    assert "write <tool>ARGUMENTS</tool>. Its result follows as <result>...</result>." in prompt
    assert '"name": "calculator"' in prompt
    assert "<tool_call>" not in prompt, "the template would teach another form"
    assert prompt_tools(recipe_with(INTERLEAVED, f"{SETTINGS}.describe_tools=false"), tokenizer) is None


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ([f"{SETTINGS}.close=''"], "interleaved_tool_use.close=''"),
        ([f"{SETTINGS}.open='\ufffd'"], "interleaved_tool_use.open"),
        (["rollout.sampling.stop=['</tool>']"], "what ends a response could not be told"),
        (["rollout.sampling.stop=['ok', '</']"], r"stop='</' with rollout\.interleaved_tool_use"),
        ([f"{SETTINGS}.max_calls=0"], "max_calls=0"),
        (["rollout.tool_use.tools=[abacus]"], "abacus"),
    ],
)
def test_settings_that_cannot_work_are_refused(overrides, found):
    with pytest.raises(ConfigError, match=found):
        check_environment(recipe_with(INTERLEAVED, *overrides))


def test_a_closing_text_that_ends_every_response_is_refused():
    recipe = recipe_with(INTERLEAVED, f"{SETTINGS}.close='<|im_end|>'")
    with pytest.raises(ConfigError, match="it ends every response of this model"):
        prompt_tools(recipe, tokenizer_with(QWEN))
