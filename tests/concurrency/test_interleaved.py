"""Calls within one response around scripted engines: closing texts over tokens and chunks, publishes, checkpoints."""

import asyncio
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data.stop_strings import StopTexts
from asyncrl.environments import build_environment
from asyncrl.rewards import RewardResult
from asyncrl.rollout.sessions import RolloutSession, SessionTools
from asyncrl.types import SamplingParams
from tests.concurrency.test_generation import Fleet
from tests.contract.test_tool_use import recipe_with
from tests.environments import opened, task_of
from tests.waiting import until

PROMPT = np.array([7, 8, 9], np.int32)
FIRST_FAKE = 7000
"""Tokens of the engine are 7000 and more, since prompts begin with 7; those that are inserted spell one character."""
ENDING = "THE END"


class Script:
    """What a policy writes, whatever its version is: the token at each place of the response has a text of its own.

    `parts`: tokens of the policy up to a call, and the characters of its result; a last part has none.
    """

    def __init__(self, parts):
        self.texts, self.mine = [], []
        for tokens, result in parts:
            self.texts += [*tokens, *result]
            self.mine += [True] * len(tokens) + [False] * len(result)

    @property
    def text(self):
        return "".join(self.texts)

    # -- as a Chat ------------------------------------------------------------------------------------------------

    def encode(self, text):
        return np.array([ord(character) for character in text], np.int32)

    def encode_after(self, head, text):
        return self.encode(text)

    def spell(self, ids):
        texts = [*self.texts, *"~" * 500]  # a replica samples on until it hears of the end
        return "".join(chr(i) if i < FIRST_FAKE else texts[i % 1000 - len(PROMPT)] for i in map(int, ids))

    decode = decode_turn = spell

    def harmless(self, text):
        return text


@st.composite
def scripts(draw):
    """Responses of several calls, cut into tokens anywhere: one may hold a closing text and go on after it."""
    words = st.text("ab<>/tol ", max_size=6).filter(lambda text: "</tool>" not in text)
    parts = []
    for _ in range(draw(st.integers(0, 3))):
        a, b = draw(st.integers(0, 99)), draw(st.integers(0, 99))
        spoken = draw(words)
        call = f"{spoken} <tool>{a}+{b}</tool>"
        after = draw(st.sampled_from(["", "\n", ">", " then"]))
        parts.append((_cut(draw, call, after), f"<result>{a + b}</result>"))
    if draw(st.booleans()):
        parts.append((_cut(draw, "odd </tool>", draw(st.sampled_from(["", "!"]))), ""))
    parts.append((_cut(draw, f"{draw(words)}{ENDING}", draw(st.sampled_from(["", "."]))), ""))
    return Script(parts)


def _cut(draw, text, after):
    """Tokens that spell the text; `after` belongs to the last of them."""
    places = sorted(draw(st.sets(st.integers(1, len(text) - 1), max_size=len(text) - 1)))
    tokens = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    return [*tokens[:-1], tokens[-1] + after]


def session_of(fleet, script, recorded=()):
    async def score(response, row):
        return RewardResult(float(ENDING in (response if isinstance(response, str) else script.spell(response))))

    stop = StopTexts([ENDING, "</tool>"], script.spell)
    tools = SessionTools(fleet.client, script, score, stop)
    return RolloutSession(tools, SamplingParams(max_tokens=400), "one", 3, recorded)


def check(trajectory, script):
    """The text is the script's. Each token of the policy says which version wrote it where, and it alone is trained."""
    trajectory.validate()
    assert script.spell(trajectory.response_ids) == script.text
    assert trajectory.loss_mask.tolist() == script.mine
    assert trajectory.reward == 1
    for segment in trajectory.segments:
        for place in range(segment.start, segment.stop):
            token = int(trajectory.response_ids[place])
            if segment.kind == "environment":
                assert (token, trajectory.logprobs[place]) == (ord(script.texts[place]), 0)
            else:
                assert token == segment.version * 10**6 + FIRST_FAKE + len(PROMPT) + place
                assert trajectory.logprobs[place] == (-0.5 if token % 2 == 0 else -0.25)


@pytest.fixture(scope="module")
def loop():
    """One event loop for all examples, so that they share tool processes."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def environment(loop):
    recipe = recipe_with("rollout.environment=interleaved_tool_use")
    made = build_environment(recipe, None)
    loop.run(made.start())
    yield made
    loop.run(made.close())


@settings(max_examples=40)
@given(script=scripts(), chunk_tokens=st.sampled_from([1, 2, 3, 16]), seed=st.integers(0, 99))
def test_tokens_masks_and_versions_are_exact_over_chunks_publishes_and_checkpoints(
    loop, environment, script, chunk_tokens, seed
):
    loop.run(one(environment, script, chunk_tokens, random.Random(seed)))


async def one(environment, script, chunk_tokens, rng):
    task = task_of(PROMPT)
    async with Fleet(version=1, tick_s=0.0005, chunk_tokens=chunk_tokens) as fleet, asyncio.timeout(60):
        session = session_of(fleet, script)
        running = asyncio.create_task(environment.run(task, session))
        for version in (2, 3):
            await asyncio.sleep(rng.random() * 0.01)
            await fleet.publish(version)
        recorded = session.calls  # as a checkpoint takes it
        trajectory = await running
        check(trajectory, script)
        # The run goes on from the checkpoint, with later weights: what was recorded stands.
        await fleet.publish(4)
        resumed = await environment.run(task, session_of(fleet, script, recorded))
        check(resumed, script)
        for call in recorded:
            at = len(call.prompt_ids) - len(PROMPT)
            assert resumed.response_ids[at : at + len(call.token_ids)].tolist() == call.token_ids.tolist()


async def test_a_response_goes_on_over_publishes_within_a_call_and_after_a_result(loop):
    """Not by luck: every version writes four tokens or so."""
    parts = [([*"I see <tool>12+30</tool>"], "<result>42</result>"), ([*f"and so on {ENDING}"], "")]
    script = Script(parts)
    made = build_environment(recipe_with("rollout.environment=interleaved_tool_use"), None)
    async with opened(made), Fleet(1, version=1, tick_s=0.001, chunk_tokens=2) as fleet, asyncio.timeout(60):
        running = asyncio.create_task(made.run(task_of(PROMPT), session_of(fleet, script)))
        version = 1
        while not running.done():
            sampled = fleet.engines[0].health().generated_tokens
            await until(
                lambda n=sampled: running.done() or fleet.engines[0].health().generated_tokens >= n + 4,
            )
            version += 1
            await fleet.publish(version)
        trajectory = await running
    check(trajectory, script)
    before, after = (
        {s.version for s in trajectory.segments if s.kind == "policy" and (s.start < len(parts[0][0])) == early}
        for early in (True, False)
    )
    assert len(before) > 1
    assert len(after) > 1
    assert max(before) <= min(after)
