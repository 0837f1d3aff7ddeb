"""A trajectory of several turns that was cut off goes on from its record: environments ask the same again."""

from dataclasses import replace

import numpy as np
import pytest

from asyncrl.environments import build_environment
from asyncrl.rewards import RewardResult
from asyncrl.rollout.sessions import RolloutSession, SessionTools
from asyncrl.types import SamplingParams
from tests.contract.test_agent_endpoint import calls_a_tool
from tests.contract.test_tool_use import recipe_with
from tests.environments import ScriptedSession, call_text, chat_with, task_of

pytestmark = pytest.mark.contract


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


@pytest.mark.parametrize("environment", ["tool_use", "agent"])
async def test_a_replay_comes_to_the_same_tokens(environment):
    name, arguments = ("calculator", {"expression": "2+3"}) if environment == "tool_use" else ("add", {"a": 2, "b": 3})
    replies = call_text(name, **arguments), call_text(name, **arguments), "It is 5."
    recipe = recipe_with(
        f"rollout.environment={environment}",
        f"rollout.agent.function={calls_a_tool.__module__}:{calls_a_tool.__name__}",
    )
    chat = chat_with()
    made = build_environment(recipe, chat)
    await made.start()
    try:
        task = task_of(chat.encode("<|im_start|>user\n2+3?<|im_end|>\n"))
        session = ScriptedSession(chat, *replies)
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
    finally:
        await made.close()
    assert again.response_ids.tolist() == first.response_ids.tolist()
    assert again.segments == first.segments
    assert client.sampling == [replace(sampling, max_tokens=min(400, session.budgets[-1]))]
