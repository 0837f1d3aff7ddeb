"""A trajectory of several turns that was cut off goes on from its record: environments ask the same again."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from asyncrl.data.stop_strings import StopTexts
from asyncrl.environments import build_environment
from asyncrl.rewards import RewardResult
from asyncrl.rollout.sessions import RolloutSession, SessionTools
from asyncrl.types import SamplingParams
from tests.contract.test_agent_endpoint import calls_a_tool
from tests.contract.test_tool_use import recipe_with
from tests.environments import ScriptedSession, call_text, chat_with, opened, task_of
from tests.unit.test_recipes import ROOT

AGENT = f"rollout.agent.function={calls_a_tool.__module__}:{calls_a_tool.__name__}"


class Client:
    """The rest of the last response, once; anything else would be a response that was recorded."""

    def __init__(self, last):
        self.last = last
        self.sampling = []

    async def generate(self, prompt_ids, sampling, *, draft, **_):
        self.sampling.append(sampling)
        assert len(self.sampling) == 1, "what was recorded is not sampled again"
        assert np.array_equal(draft.token_ids, self.last.token_ids[: draft.num_tokens])
        return self.last


async def score(response, row):
    return RewardResult(0.0, (("correct", 0.0),))


CALCULATES = call_text("calculator", expression="2+3")
ADDS = call_text("add", a=2, b=3)
PROGRAM = json.dumps([sys.executable, str(ROOT / "recipes" / "agents" / "calculator.py")])
GUESSES = json.dumps({"id": "tests.gymnasium_environments:Guess-v0", "workers": 1, "max_turns": 3})


@pytest.mark.parametrize(
    ("replies", "settings"),
    [
        ([CALCULATES, CALCULATES, "It is 5."], ["rollout.environment=tool_use"]),
        (["<tool>2+3</tool>", "</tool>", "It is 5."], ["rollout.environment=interleaved_tool_use"]),
        ([ADDS, ADDS, "It is 5."], ["rollout.environment=agent", AGENT]),
        ([CALCULATES, CALCULATES, "It is 5."], ["rollout.environment=agent", f"rollout.agent.command={PROGRAM}"]),
        (
            ["11", "22", "33"],
            ["rollout.environment=gymnasium", f"rollout.gymnasium={GUESSES}", "reward.function=zero"],
        ),
    ],
    ids=["tool_use", "interleaved_tool_use", "agent", "program", "gymnasium"],
)
async def test_a_replay_comes_to_the_same_tokens(replies, settings):
    if "gymnasium" in settings[0]:
        pytest.importorskip("gymnasium", reason="gymnasium is not installed: pip install 'asyncrl[gymnasium]'")
    recipe = recipe_with(*settings)
    chat = chat_with()
    async with opened(build_environment(recipe, chat)) as made:
        task = task_of(chat.encode("<|im_start|>user\n2+3?<|im_end|>\n"))
        end = "" if "interleaved" in settings[0] else "<|im_end|>"  # its calls end no turn
        session = ScriptedSession(chat, *replies, end=end)
        first = await made.run(task, session)
        record = list(session.made)
        cut = record[-1].segments[0]
        record[-1] = replace(
            record[-1],
            token_ids=record[-1].token_ids[: cut.stop],
            logprobs=record[-1].logprobs[: cut.stop],
            segments=(cut,),
            finish_reason="abort",
        )
        client = Client(session.made[-1])
        sampling = SamplingParams(max_tokens=400, temperature=0.7)
        again = await made.run(task, RolloutSession(SessionTools(client, chat, score), sampling, "", 0, record))
    assert again.response_ids.tolist() == first.response_ids.tolist()
    assert again.segments == first.segments
    assert client.sampling == [replace(sampling, max_tokens=min(400, session.budgets[-1]))]


async def test_concurrent_requests_come_in_any_order_in_a_replay():
    chat, made = chat_with(), []
    session = ScriptedSession(chat, "one", "two")
    for prompt in ([1, 2], [1, 3]):
        made.append(await session.generate(np.array(prompt)))
    again = RolloutSession(SessionTools(Client(None), chat, score), SamplingParams(max_tokens=9), "", 0, made)
    assert await again.generate(np.array([1, 3])) is made[1]
    assert again.calls == (made[1], made[0])
    assert again._recorded(np.array([1, 2]), 1) is None, "of a request with a lower limit"
    assert await again.generate(np.array([1, 2])) is made[0]
    assert again.calls == (made[1], made[0])


async def test_a_request_adds_to_the_texts_that_end_a_response():
    found = []

    class Asked:
        async def generate(self, prompt_ids, sampling, *, draft, **_):
            found.append(draft.looks_for_stop)

    tools = SessionTools(Asked(), chat_with(), score, None, lambda texts: StopTexts(texts, str))
    session = RolloutSession(tools, SamplingParams(max_tokens=9), "s", 0)
    for stop in ((), ("</code>",)):
        await session.generate(np.array([1, 2]), None, stop)
    assert found == [False, True]
