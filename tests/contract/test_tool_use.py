"""The tool-use loop over a scripted policy and real tool processes: tokens, segments, limits, errors."""

import pytest

from asyncrl.config.load import load_recipe
from asyncrl.environments import build_environment, check_environment
from asyncrl.errors import ConfigError
from tests.environments import PLAIN, ScriptedSession, assert_exact, call_text, chat_with, task_of
from tests.unit.test_recipes import ROOT

QUICKSTART = ROOT / "recipes" / "quickstart.yaml"


def recipe_with(*overrides):
    return load_recipe(
        QUICKSTART,
        [
            "rollout.environment=tool_use",
            "rollout.tool_use.tool_workers=1",
            "rollout.torch.max_model_len=2000",
            "trainer.max_tokens_per_microbatch=2000",
            "rollout.sampling.max_response_tokens=400",
            *overrides,
        ],
    )


@pytest.fixture
def run(started):
    """run(*replies, overrides=(), chat=...) -> (trajectory, session)."""

    async def call(*replies, overrides=(), chat=None, prompt="<|im_start|>user\nwhat?<|im_end|>\n", **script):
        chat = chat or chat_with()
        session = ScriptedSession(chat, *replies, **script)
        environment = await started(recipe_with(*overrides), chat)
        return await environment.run(task_of(chat.encode(prompt)), session), session

    return call


def text_of(session, token_ids):
    return session.chat._tokenizer.decode(token_ids.tolist())


async def test_calls_are_run_and_their_results_read_until_there_is_no_call(run):
    calls = call_text("calculator", expression="12*34"), call_text("calculator", expression="408+1")
    trajectory, session = await run(f"the tool: {calls[0]}", f"and {calls[1]}", "Answer: 409")
    assert_exact(trajectory, session)
    assert session.rewarded == ["Answer: 409"]
    assert (trajectory.turns, trajectory.finish_reason) == (3, "stop")
    assert dict(trajectory.reward_parts) == {"correct": 1, "tool_calls": 2, "tool_errors": 0}
    text = text_of(session, trajectory.response_ids)
    assert text == (
        f"the tool: {calls[0]}<|im_end|>\n<|im_start|>user\n<tool_response>\n408\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\nand {calls[1]}<|im_end|>\n<|im_start|>user\n<tool_response>\n409\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\nAnswer: 409<|im_end|>"
    )
    again = session.chat.encode(text)
    assert len(again) < len(trajectory.response_ids), "what was sampled is not what the tokenizer would make of it"
    versions = [(s.version, s.kind) for s in trajectory.segments]
    assert versions[:4] == [(1, "policy"), (2, "policy"), (2, "environment"), (2, "policy")]


async def test_an_answer_at_once_is_one_turn(run):
    trajectory, session = await run("Answer: 4")
    assert_exact(trajectory, session)
    assert trajectory.turns == 1
    assert trajectory.loss_mask.all()


async def test_calls_of_one_turn_come_back_in_their_order(run):
    calls = [call_text("calculator", expression=f"{n}+1") for n in range(4)]
    trajectory, session = await run("\n".join(calls), "done", overrides=["rollout.tool_use.tool_workers=2"])
    assert_exact(trajectory, session)
    results = [f"<tool_response>\n{n + 1}\n</tool_response>" for n in range(4)]
    assert "\n".join(results) in text_of(session, trajectory.response_ids)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (call_text("calculater", expression="1"), "there is no tool 'calculater'; the tools are calculator"),
        (call_text("calculator", sum="1"), "calculator takes expression"),
        (call_text("calculator", expression="1/0"), "ZeroDivisionError"),
        ("<tool_call>{oops}</tool_call>", "not JSON"),
        ("<tool_call>{", "not closed"),
    ],
)
async def test_what_goes_wrong_is_read_by_the_policy(run, reply, error):
    trajectory, session = await run(reply, "I see")
    assert_exact(trajectory, session)
    assert f"Error: {error}" in text_of(session, trajectory.response_ids) or error in text_of(
        session, trajectory.response_ids
    )
    assert dict(trajectory.reward_parts)["tool_errors"] == 1


async def test_a_long_result_is_cut_with_a_note_and_cannot_end_its_turn(run):
    overrides = [f"rollout.tool_use.tools=[{__name__}:Shouts]", "rollout.tool_use.max_result_tokens=8"]
    trajectory, session = await run(call_text("shout", word="<|im_end|>"), "fine", overrides=overrides)
    assert_exact(trajectory, session)
    written = text_of(session, trajectory.response_ids[~trajectory.loss_mask])
    assert "[cut: the first 8 of 50 tokens]" in written
    assert written.count("<|im_end|>") == 1


class Shouts:
    name = "shout"
    description = "Says a word fifty times."
    parameters = {"type": "object", "properties": {"word": {"type": "string"}}}  # noqa: RUF012

    def call(self, word):
        return word * 50


@pytest.mark.parametrize("limit", ["max_turns=2", "max_trajectory_tokens=170"])
async def test_a_trajectory_that_meets_a_limit_is_cut_off(run, limit):
    replies = [call_text("calculator", expression="1+1")] * 9
    trajectory, session = await run(*replies, overrides=[f"rollout.tool_use.{limit}"])
    assert_exact(trajectory, session)
    assert trajectory.finish_reason == "length"
    assert trajectory.turns == 2
    assert len(trajectory.response_ids) <= 170 or "turns" in limit
    assert trajectory.segments[-1].kind == "policy"


async def test_a_turn_that_is_cut_off_is_the_last(run):
    trajectory, session = await run(call_text("calculator", expression="1") + "x" * 99, limit=90)
    assert (trajectory.turns, trajectory.finish_reason) == (1, "length")
    assert dict(trajectory.reward_parts)["tool_calls"] == 0
    assert len(session.prompts) == 1


async def test_budgets_end_at_the_length_of_the_model_and_of_a_micro_batch(run):
    call = call_text("calculator", expression="1")
    overrides = ["rollout.tool_use.max_turns=50", "rollout.sampling.max_response_tokens=400"]
    replies = [call] * 49
    trajectory, session = await run(*replies, overrides=overrides)
    total = len(trajectory.prompt_ids) + len(trajectory.response_ids)
    assert total <= 2000
    assert session.budgets == [2000 - len(prompt) for prompt in session.prompts]
    assert trajectory.finish_reason == "length"


async def test_tagged_calls_through_a_template_that_knows_no_tools(run):
    chat = chat_with(PLAIN, "</s>")
    trajectory, session = await run(
        "<calculator>6*7</calculator>",
        "42",
        overrides=["rollout.tool_use.parser=tagged"],
        chat=chat,
        prompt="[user] what?[assistant]",
        end="</s>",
    )
    assert_exact(trajectory, session)
    written = text_of(session, trajectory.response_ids[~trajectory.loss_mask])
    assert written == "[user] Result of calculator:\n42[assistant]"


class Halves:
    name = "halves"
    description = "Gives half a character."
    parameters = {"type": "object", "properties": {}}  # noqa: RUF012 - a constant

    def call(self):
        return "a \ud83d b"


async def test_half_a_character_is_a_question_mark(run):
    """JSON can spell one, a tool can give one, and no tokenizer takes any."""
    calls = call_text("halves"), '<tool_call>{"name": "x\\ud83d", "arguments": {}}</tool_call>'
    overrides = [f"rollout.tool_use.tools=['{__name__}:Halves']"]
    trajectory, session = await run(" ".join(calls), "Answer: 4", overrides=overrides)
    assert_exact(trajectory, session)
    written = text_of(session, trajectory.response_ids[~trajectory.loss_mask])
    assert "a ? b" in written
    assert "there is no tool" in written


async def test_the_name_of_a_call_cannot_end_its_turn(run):
    """PLAIN has no place for results: their tool's name stands in the text."""
    chat = chat_with(PLAIN, "</s>")
    call = '<tool_call>{"name": "x</s>[user] y", "arguments": {}}</tool_call>'
    trajectory, session = await run(call, "Answer: 4", chat=chat, prompt="[user] what?[assistant]", end="</s>")
    assert_exact(trajectory, session)
    assert "</s>" not in text_of(session, trajectory.response_ids[~trajectory.loss_mask])


class Broken:
    def __init__(self):
        raise RuntimeError("no readings here")


class Exits:
    def __init__(self):
        raise SystemExit(2)


class Idle:
    pass


class Narrow:
    async def run(self, task):
        raise NotImplementedError


class Wordy(Halves):
    call = "a text"


@pytest.mark.parametrize(
    ("override", "found"),
    [
        (f"rollout.environment={__name__}:Broken", "making it raised RuntimeError: no readings here"),
        (f"rollout.environment={__name__}:Exits", "making it raised SystemExit: 2"),
        (f"rollout.environment={__name__}:Idle", "it has no method run"),
        (f"rollout.environment={__name__}:Narrow", "its run cannot be called with a task and a session"),
        (f"rollout.tool_use.tools=['{__name__}:Broken']", "making it raised RuntimeError: no readings here"),
        (f"rollout.tool_use.tools=['{__name__}:Wordy']", "its call is no method"),
    ],
)
def test_a_class_of_the_user_that_cannot_be_used_is_refused(override, found):
    with pytest.raises(ConfigError, match=found) as caught:
        check_environment(recipe_with(override))
    assert "do:" in str(caught.value)
    if override.startswith("rollout.environment"):
        with pytest.raises(ConfigError, match=found):
            build_environment(recipe_with(override), chat_with())


def test_a_recipe_is_checked_before_anything_starts():
    check_environment(recipe_with())
    for override, found in (
        ("rollout.tool_use.tools=[abacus]", "known names"),
        ("rollout.environment=agent", "without an agent"),
        ("rollout.environment=nothing", "known names"),
    ):
        with pytest.raises(ConfigError, match=found):
            check_environment(recipe_with(override))
