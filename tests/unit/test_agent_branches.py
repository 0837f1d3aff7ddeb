"""Agents whose requests are a tree of conversations: what of it is recorded, and that each sampled token is it once."""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.chat.fields import ApiError
from asyncrl.chat.reply import written_parts
from asyncrl.data.call_splitter import joined_parts
from asyncrl.environments.agent_requests import ChatReply, parse_request
from asyncrl.environments.agent_session import AgentSession, Speech, TurnLimit
from asyncrl.environments.environment import TrajectoryLimits
from asyncrl.rewards import RewardResult
from asyncrl.rollout.sample_files import SampleFile
from asyncrl.types import Generation, Segment
from tests.environments import QWEN, chat_with, task_of
from tests.make import begun

CHAT = chat_with()
LIMITS = TrajectoryLimits(total_tokens=5000, response_tokens=5000, turn_tokens=500)
LAST_PLACE = 10
"""A request continues an earlier reply by its place; from here on it begins a conversation."""

requests = st.lists(
    st.tuples(st.integers(0, LAST_PLACE + 3), st.sampled_from(["a", "b"]), st.sampled_from(["yes", "no", "12"])),
    min_size=1,
    max_size=12,
)


class Policy:
    """Says what it is told; every token has a log-probability that no other has, and every response two versions."""

    chat = CHAT

    def __init__(self, replies):
        self.made: list[Generation] = []
        self._replies = iter(replies)

    async def generate(self, prompt_ids, max_tokens=None, stop=(), hear=None):
        ids = np.concatenate([CHAT.encode(next(self._replies)), CHAT.encode("<|im_end|>")])
        told = sum(len(each.token_ids) for each in self.made)
        logprobs = -1 - np.arange(told, told + len(ids)).astype(np.float32)
        version = 2 * len(self.made)
        segments = Segment(0, 1, version, 0), Segment(1, len(ids), version + 1, 0)
        self.made.append(Generation(np.array(prompt_ids), ids, logprobs, segments, "stop"))
        return self.made[-1]

    def decode(self, token_ids):
        return CHAT.decode(token_ids)


def conversed(drawn, *, all_branches=True):
    """The policy, and the trajectory of an agent that makes these requests."""
    policy = Policy([reply for _, _, reply in drawn])
    session = AgentSession(policy, LIMITS, TurnLimit(100, "max_turns"), "hermes", all_branches=all_branches)

    async def agent():
        nodes = []
        for place, text, _ in drawn:
            before = nodes[place] if place < len(nodes) else []
            messages = [*before, {"role": "user", "content": text}]
            reply = await session.answer(parse_request({"messages": messages}))
            nodes.append([*messages, reply.message])

    asyncio.run(agent())
    return policy, session.trajectory(RewardResult(1.0)).normalized().validate()


def test_what_an_agent_leaves_under_way_is_in_no_trajectory():
    """It would come after the reward was asked for."""
    policy, held = Policy(["final answer", "stray"]), asyncio.Event()
    session = AgentSession(policy, LIMITS, TurnLimit(100, "max_turns"), "hermes", all_branches=True)
    ask = parse_request({"messages": [{"role": "user", "content": "a"}]})

    async def agent():
        await session.answer(ask)
        generate = policy.generate

        async def late(*args):
            await held.wait()
            return await generate(*args)

        policy.generate = late
        stray = await begun(session.answer(ask))
        session.close()
        assert session.judged_text("done") == "done"
        held.set()
        with pytest.raises(ApiError, match="has returned"):
            await stray

    asyncio.run(agent())
    assert session.judged_text(None) == "final answer"
    assert not session.trajectory(RewardResult(1.0)).branches


@settings(max_examples=60, deadline=None)
@given(requests)
def test_every_sampled_token_is_trained_once_after_what_it_was_sampled_after(drawn):
    policy, trajectory = conversed(drawn)
    sampled = {}
    for made in policy.made:
        whole = np.concatenate([made.prompt_ids, made.token_ids]).tolist()
        for segment in made.segments:
            for i in range(segment.start, segment.stop):
                sampled[float(made.logprobs[i])] = whole[: len(made.prompt_ids) + i + 1], segment.version
    trained = []
    for sequence in trajectory.sequences:
        whole = np.concatenate([sequence.prompt_ids, sequence.response_ids]).tolist()
        for segment in sequence.segments:
            for i in range(segment.start, segment.stop):
                assert sequence.loss_mask[i] == (segment.kind == "policy")
                if sequence.loss_mask[i]:
                    trained.append(float(sequence.logprobs[i]))
                    assert sampled[trained[-1]] == (whole[: len(sequence.prompt_ids) + i + 1], segment.version)
                else:
                    assert sequence.logprobs[i] == 0
    assert sorted(trained) == sorted(sampled)
    counted = {"agent_requests": len(drawn), "agent_branches": len(trajectory.sequences)}
    assert dict(trajectory.reward_parts) == {**counted, "agent_trained_share": 1}


@settings(max_examples=30, deadline=None)
@given(requests)
def test_the_trajectory_is_what_it_is_without_its_branches(drawn):
    _, whole = conversed(drawn)
    _, last = conversed(drawn, all_branches=False)
    assert not last.branches
    for name in ("prompt_ids", "response_ids", "logprobs", "loss_mask"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(last, name))
    same = {"started_s": 0.0, "finished_s": 0.0, "branches": ()}
    described = [
        (t.segments, t.reward, t.reward_parts[:2], t.finish_reason, t.turns)
        for t in (replace(whole, **same), replace(last, **same))
    ]
    assert described[0] == described[1]


def test_what_a_sub_agent_says_between_two_requests_is_one_branch():
    """The main conversation goes on after it: that forks nothing."""
    drawn = [(99, "solve", "ask"), (99, "help", "first"), (1, "and", "second"), (0, "it says", "done")]
    policy, trajectory = conversed(drawn)
    main, sub = trajectory.sequences
    assert dict(trajectory.reward_parts) == {"agent_requests": 4, "agent_branches": 2, "agent_trained_share": 1}
    assert (main.turns, sub.turns) == (2, 2)
    assert main.policy_ids.tolist() == [*policy.made[0].token_ids, *policy.made[3].token_ids]
    assert sub.policy_ids.tolist() == [*policy.made[1].token_ids, *policy.made[2].token_ids]
    np.testing.assert_array_equal(sub.prompt_ids, policy.made[1].prompt_ids)


def test_samples_show_what_an_agent_sent_and_where_its_branches_part(tmp_path):
    drawn = [(99, "draft", "one"), (0, "again", "bad"), (0, "better", "good")]
    _, trajectory = conversed(drawn)
    file, row = SampleFile(tmp_path / "samples.jsonl", 4, lambda text: text), task_of([1], "the row's").row
    group = SimpleNamespace(trajectories=(trajectory,), ordinal=0, attempt=0)
    asyncio.run(file.offer(group, SimpleNamespace(version=0), row, CHAT.decode_shown))
    sample = json.loads((tmp_path / "samples.jsonl").read_text())
    assert sample["prompt"].endswith("user\ndraft<|im_end|>\n<|im_start|>assistant\n")
    (branch,) = sample["branches"]
    assert (branch["response"], branch["turns"]) == ("bad", 1)
    assert branch["text"].startswith("again")
    assert branch["main_text"].startswith("better")
    assert "better" in sample["response"]


def test_a_fork_has_what_it_shares_as_its_prompt():
    drawn = [(99, "draft", "one"), (0, "again", "bad"), (1, "more", "worse"), (0, "better", "good")]
    policy, trajectory = conversed(drawn)
    main, fork = trajectory.sequences
    np.testing.assert_array_equal(fork.prompt_ids, policy.made[1].prompt_ids)
    assert main.policy_ids.tolist() == [*policy.made[0].token_ids, *policy.made[3].token_ids]
    assert fork.policy_ids.tolist() == [*policy.made[1].token_ids, *policy.made[2].token_ids]
    assert [s.version for s in fork.segments] == [2, 3, 3, 4, 5]


ADD = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'


def message_of(reply):
    """As clients read it."""
    writer = ChatReply("m", {})
    written_parts(writer, reply.parts)
    writer.end(reply.end)
    return writer.whole()["choices"][0]["message"]


def two_turns(reply, written_anew, *, exact=False, **body):
    """The number of branches of an agent that sends the first reply back as `written_anew` makes it."""
    policy = Policy([reply, "done"])
    session = AgentSession(policy, LIMITS, TurnLimit(9, "max_turns"), "hermes", True, exact)
    messages = [{"role": "user", "content": "go"}]

    async def agent():
        first = await session.answer(parse_request({"messages": messages, "tools": [ADD], **body}))
        sent = message_of(first)
        again = [*messages, *written_anew(sent), {"role": "user", "content": "and?"}]
        tools = {"tools": [ADD]} if "keeps_tools" not in body else {}
        await session.answer(parse_request({"messages": again, **tools}))

    asyncio.run(agent())
    return len(session.trajectory(RewardResult(1.0)).normalized().validate().sequences)


def as_called_by(message, call_id, content=None):
    """A call with another id and text, and its result."""
    (call,) = message["tool_calls"]
    made = {"role": "assistant", "content": content, "tool_calls": [{**call, "id": call_id}]}
    return [made, {"role": "tool", "tool_call_id": call_id, "content": "3"}]


@pytest.mark.parametrize(
    ("reply", "written_anew", "body"),
    [
        ("fine", lambda m: [{"role": "assistant", "content": f" {m['content']}\n"}], {}),
        ("a  b\n\nc", lambda m: [{"role": "assistant", "content": "a b\nc"}], {}),
        ("<think>\nhm\n</think>\n\nyes", lambda m: [{"role": "assistant", "content": "yes"}], {}),
        ("<think>hm</think>yes", lambda m: [{"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}], {}),
        (f"I add.\n{CALL}", lambda m: as_called_by(m, m["tool_calls"][0]["id"]), {}),
        (f"I add.\n{CALL}", lambda m: as_called_by(m, "call_abcdefghijklmnop", "I add."), {}),
        (f"<think>hm</think>{CALL}", lambda m: as_called_by(m, "toolu_01"), {}),
        ("<think>hm</think>yes", lambda m: [{"role": "assistant", "content": "yes", "reasoning": " hm"}], {}),
        (f"<think>hm</think>I add.\n{CALL}", lambda m: as_called_by(m, m["tool_calls"][0]["id"], ""), {}),
        ("x = 1</code>", lambda m: [{"role": "assistant", "content": f"{m['content']}</code>"}], {"stop": ["</code>"]}),
        (
            "x = 1\n",
            lambda m: [{"role": "assistant", "content": f"{m['content']}</code>\nCalling tools:\n[]"}],
            {"stop": ["Calling tools:", "</code>"]},
        ),
        ("fine", lambda m: [m], {"keeps_tools": False}),
    ],
)
def test_a_reply_is_known_again_by_its_meaning(reply, written_anew, body):
    assert two_turns(reply, written_anew, **body) == 1


@pytest.mark.parametrize(
    ("reply", "written_anew"),
    [
        ("fine", lambda m: [{"role": "assistant", "content": "bad"}]),
        (CALL, lambda m: [{"role": "assistant", "content": "I added"}]),
        (CALL, lambda m: [{**as_called_by(m, "call_1")[0], "tool_calls": [called("add", '{"a": 4}')]}]),
        ("<think>one</think>", lambda m: [{"role": "assistant", "content": "two"}]),
    ],
)
def test_another_reply_is_none_of_the_policys(reply, written_anew):
    assert two_turns(reply, written_anew) == 2


def called(name, arguments):
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_an_exact_match_tells_what_meaning_does_not():
    anew = {"role": "assistant", "content": "yes"}
    assert two_turns("<think>hm</think>yes", lambda m: [anew], exact=True) == 2
    assert two_turns("yes", lambda m: [{**anew, "content": " yes "}], exact=True) == 1
    assert two_turns("<think>hm</think>yes", lambda m: [m], exact=True) == 1


def test_of_two_replies_with_the_same_call_the_one_whose_id_comes_back_goes_on():
    policy = Policy([CALL, CALL, "done"])
    session = AgentSession(policy, LIMITS, TurnLimit(9, "max_turns"), "hermes", all_branches=True)
    ask = {"messages": [{"role": "user", "content": "go"}], "tools": [ADD]}

    async def agent():
        first, _ = [await session.answer(parse_request(ask)) for _ in range(2)]
        sent = as_called_by(message_of(first), "call_00100")
        await session.answer(parse_request({**ask, "messages": [*ask["messages"], *sent]}))

    asyncio.run(agent())
    assert session.nodes[2].parent is session.nodes[0]


def test_a_request_that_is_sent_again_gets_the_same_reply_until_another_goes_on_from_it():
    policy = Policy(["one", "two", "three"])
    session = AgentSession(policy, LIMITS, TurnLimit(3, "max_turns"), "hermes", all_branches=True)
    ask = parse_request({"messages": [{"role": "user", "content": "go"}]})

    async def agent():
        first = await session.answer(ask)
        assert (await session.answer(replace(ask, is_repeated=True))) is first
        await session.answer(replace(ask, messages=(*ask.messages, first.message, *ask.messages)))
        assert (await session.answer(replace(ask, is_repeated=True))).message["content"] == "three"

    asyncio.run(agent())
    assert len(session.nodes) == 3


class Gated(Policy):
    """Replies to a prompt when its last text is let through."""

    def __init__(self, replies):
        super().__init__(replies)
        self.gates = {}

    async def generate(self, prompt_ids, max_tokens=None, stop=(), hear=None):
        text = CHAT.decode(prompt_ids).split("user\n")[-1][0]
        await self.gates.setdefault(text, asyncio.Event()).wait()
        return await super().generate(prompt_ids)


def asks(text, **options):
    return replace(parse_request({"messages": [{"role": "user", "content": text}]}), **options)


def test_requests_are_answered_concurrently_and_stand_in_the_order_in_which_they_came():
    policy = Gated(["second", "first"])
    session = AgentSession(policy, LIMITS, TurnLimit(2, "max_turns"), "hermes", all_branches=True)

    async def agent():
        first, second = [asyncio.create_task(session.read(session.begin(asks(text)))) for text in "ab"]
        with pytest.raises(ApiError, match="max_turns"):  # two are under way
            session.begin(asks("c"))
        for text, reply in (("b", second), ("a", first)):
            await asyncio.sleep(0)
            policy.gates[text].set()
            await reply

    asyncio.run(agent())
    assert [node.reply.message["content"] for node in session.nodes] == ["first", "second"]


@pytest.mark.parametrize("again", [{"is_repeated": True}, {"key": "k"}])
def test_a_client_that_has_lost_its_connection_joins_the_answer_that_is_under_way(again):
    policy = Gated(["one", "other"])
    session = AgentSession(policy, LIMITS, TurnLimit(2, "max_turns"), "hermes", all_branches=True)
    key = {name: value for name, value in again.items() if name == "key"}

    async def agent():
        lost = await begun(session.answer(asks("a", **key)))
        await asyncio.sleep(0)
        lost.cancel()
        joined = await begun(session.answer(asks("a", **again)))
        anew = await begun(session.answer(asks("a", **({"key": "other"} if key else {}))))
        await asyncio.sleep(0)
        policy.gates["a"].set()
        assert (await joined).message["content"] == "one"
        assert (await anew).message["content"] == "other"

    asyncio.run(agent())
    assert len(session.trajectory(RewardResult(1.0)).sequences) == len(policy.made) == 2


def test_an_answer_that_nobody_comes_back_for_is_given_up(monkeypatch):
    monkeypatch.setattr("asyncrl.environments.agent_session.REJOIN_S", 0.0)
    policy = Gated(["one", "two"])
    session = AgentSession(policy, LIMITS, TurnLimit(2, "max_turns"), "hermes", all_branches=True)

    async def agent():
        lost = await begun(session.answer(asks("a")))
        await asyncio.sleep(0)
        lost.cancel()
        await asyncio.sleep(0.01)
        policy.gates["a"].set()
        await session.answer(asks("a", is_repeated=True))

    asyncio.run(agent())
    assert len(policy.made) == len(session.nodes) == 1


THINKS = QWEN.replace("<|im_start|>assistant\\n' }}", "<|im_start|>assistant\\n<think>\\n' }}")


def test_a_template_that_begins_the_thought():
    """Its reply begins inside; what the agent says of it is judged as what is behind."""
    chat = chat_with(THINKS)
    assert chat.thinking().begun
    policy = Policy(["hm</think>4", "done"])
    policy.chat = chat
    session = AgentSession(policy, LIMITS, TurnLimit(9, "max_turns"), "hermes")
    reply = asyncio.run(session.answer(asks("a")))
    assert (reply.message["content"], reply.message["reasoning_content"]) == ("4", "hm")
    assert session.judged_text("4") == "</think>4"
    assert session.judged_text(None) == "hm</think>4"
    question = chat.prompt([{"role": "user", "content": "a"}])
    found = [chat.thinking(question, start).begun for start in ("", "<think>\nhm", "The answer")]
    assert found == [True, True, False]
    assert not chat.thinking(chat.encode("a<|im_end|>\n<|im_start|>assistant\n")).begun, "behind a result of a tool"


def test_a_retry_takes_the_answer_that_lost_its_reader():
    policy = Gated(["one", "two"])
    session = AgentSession(policy, LIMITS, TurnLimit(3, "max_turns"), "hermes", all_branches=True)

    async def agent():
        lost, other = [await begun(session.answer(asks("a"))) for _ in range(2)]
        await asyncio.sleep(0)
        lost.cancel()
        await asyncio.sleep(0)
        joined = await begun(session.answer(asks("a", is_repeated=True)))
        policy.gates["a"].set()
        return (await joined).message["content"], (await other).message["content"]

    assert asyncio.run(agent()) == ("one", "two")
    assert len(session.nodes) == 2


def test_the_end_of_an_agent_ends_its_answers():
    policy = Gated(["one"])
    session = AgentSession(policy, LIMITS, TurnLimit(3, "max_turns"), "hermes")

    async def agent():
        waiting = await begun(session.answer(asks("a")))
        await asyncio.sleep(0)
        session.close()
        for late in (waiting, session.answer(asks("b"))):
            with pytest.raises(ApiError, match="has returned"):
                await late

    asyncio.run(agent())
    assert not policy.made


def test_the_text_of_a_refusal_is_never_judged():
    session = AgentSession(Policy(["said"]), LIMITS, TurnLimit(1, "max_turns"), "hermes")
    asyncio.run(session.answer(asks("a")))
    with pytest.raises(ApiError) as limit:
        session.begin(asks("a"))
    session.refusals.append(limit.value)
    assert session.judged_text(f"Error: {str(limit.value)!r}") == "said"
    session.refusals.append(ApiError(400, "n: leave the field out", code="unsupported_parameter"))
    with pytest.raises(ValueError, match="text of a refusal: n: leave"):
        session.judged_text("n: leave the field out")


def test_the_share_that_is_trained_is_counted_and_told(caplog):
    drawn = [(99, "a", "yes"), (99, "b", "no"), (99, "c", "12")]
    _, trajectory = conversed(drawn, all_branches=False)
    assert dict(trajectory.reward_parts)["agent_trained_share"] < 0.5
    assert "rollout.agent.train); first: 'b' and 'a'" in caplog.text or "first: 'c' and 'a'" in caplog.text


def test_one_call_alone_is_sent_to_an_agent_that_takes_one():
    policy = Policy([CALL + CALL])
    session = AgentSession(policy, LIMITS, TurnLimit(9, "max_turns"), "hermes")
    ask = {"messages": [{"role": "user", "content": "go"}], "tools": [ADD], "parallel_tool_calls": False}
    reply = asyncio.run(session.answer(parse_request(ask)))
    assert len(reply.message["tool_calls"]) == 1


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SAID = [
    "<think>",
    "</think>",
    CALL,
    CALL[:20],
    "ST",
    "STOP",
    "é",
    "日",
    " ",
    "\n",
    "so",
    "<|im_start|>",
    "<|endoftext|>",
]
ADD = {"type": "function", "function": {"name": "add", "parameters": {}}}


def test_a_text_that_spells_a_special_token_is_kept():
    messages = [{"role": "user", "content": "go"}]
    request, prompt = parse_request({"messages": messages}), CHAT.prompt(messages)
    ids = np.concatenate([CHAT.encode(letter) for letter in "use <|im_end|> here"])
    said = Speech(CHAT, "hermes", request, prompt)
    assert joined_parts([*said.hear(ids), *said.finish()]) == ("use <|im_end|> here",)


@given(st.lists(st.sampled_from(SAID), max_size=8), st.lists(st.integers(1, 7)), st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_streamed_reply_is_the_same_however_its_tokens_come(said, sizes, with_tools, ends):
    body = {"messages": [{"role": "user", "content": "go"}], "stop": ["STOP"], "tools": [ADD] if with_tools else []}
    request, prompt = parse_request(body), CHAT.prompt([{"role": "user", "content": "go"}])
    ids = CHAT.encode("".join(said) + ("<|im_end|>" if ends else ""))
    cuts = sorted({min(len(ids), int(at)) for at in np.cumsum([*sizes, len(ids)])})
    whole, cut = (Speech(CHAT, "hermes", request, prompt) for _ in range(2))
    expected = joined_parts([*whole.hear(ids), *whole.finish()])
    pieces = [part for at in cuts for part in cut.hear(ids[:at])]
    assert joined_parts([*pieces, *cut.finish()]) == expected
    assert "<|im_" not in str(expected)
    assert "STOP" not in str(expected)
