"""Agents written against the real OpenAI client, in front of a scripted policy."""

import asyncio
import json

import httpx
import numpy as np
import openai
import pytest

from asyncrl.environments import build_environment
from asyncrl.errors import GenerationError
from tests.contract.test_tool_use import recipe_with, text_of
from tests.environments import ADD, ScriptedSession, assert_exact, call_text, chat_with, play, task_of

TOOLS = [ADD]


def client_of(base_url, api_key):
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key)


async def ask(client, messages, **options):
    answer = await client.chat.completions.create(model="any", messages=messages, **options)
    return answer.choices[0].message.content


async def calls_a_tool(base_url, api_key, task):
    client = client_of(base_url, api_key)
    messages = [{"role": "user", "content": task.row.messages[-1].content}]
    while True:
        answer = await client.chat.completions.create(model="any", messages=messages, tools=TOOLS, temperature=0.3)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content
        assert answer.choices[0].finish_reason == "tool_calls"
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            result = str(arguments["a"] + arguments["b"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def streams(base_url, api_key, task):
    client = client_of(base_url, api_key)
    messages = [{"role": "user", "content": "one"}]
    text = ""
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 30}
    async for piece in await client.chat.completions.create(model="any", messages=messages, **options):
        if piece.choices:
            text += piece.choices[0].delta.content or ""
        else:
            assert piece.usage.completion_tokens in (len(text) + 1, len("<think>hm</think>one") + 1)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "two"}]
    await ask(client, messages)


async def rewrites_history(base_url, api_key, task):
    client = client_of(base_url, api_key)
    first = [{"role": "user", "content": "draft"}]
    draft = await ask(client, first)
    await ask(client, [*first, {"role": "assistant", "content": draft}, {"role": "user", "content": "dead end"}])
    await ask(client, [*first, {"role": "assistant", "content": draft}, {"role": "user", "content": "better"}])
    await ask(client, [{"role": "user", "content": "anew"}])
    await ask(client, [*first, {"role": "assistant", "content": draft}, {"role": "user", "content": "at last"}])


async def goes_on_for_ever(base_url, api_key, task):
    client = client_of(base_url, api_key)
    messages = [{"role": "user", "content": "go"}]
    while True:
        messages += [{"role": "assistant", "content": await ask(client, messages)}, {"role": "user", "content": "more"}]


async def exits_when_cut(base_url, api_key, task):
    try:
        await goes_on_for_ever(base_url, api_key, task)
    except openai.BadRequestError:
        raise SystemExit(1) from None


async def raises(base_url, api_key, task):
    await ask(client_of(base_url, api_key), [{"role": "user", "content": "go"}])
    raise LookupError("the agent lost its way")


async def asks_nothing(base_url, api_key, task):
    return "42"


async def asks_again_and_again(base_url, api_key, task):
    """As harnesses with retries of their own do it, whatever the error."""
    messages, error = [{"role": "user", "content": "go"}], ""
    while True:
        try:
            await ask(client_of(base_url, api_key), [*messages, {"role": "user", "content": error}])
        except openai.BadRequestError as refused:
            error = str(refused)
            await asyncio.sleep(0.01)


async def answers_with_the_refusal(base_url, api_key, task):
    client, messages = client_of(base_url, api_key), [{"role": "user", "content": "go"}]
    try:
        for _ in range(9):
            await ask(client, messages)
    except openai.BadRequestError as refused:
        return refused.message


async def swallows(base_url, api_key, task):
    try:
        await ask(client_of(base_url, api_key), [{"role": "user", "content": "go"}])
    except openai.OpenAIError:
        return "all is well"


async def asks_what_is_not_served(base_url, api_key, task):
    client = client_of(base_url, api_key)
    messages = [{"role": "user", "content": "go"}]
    for param, options in (
        ("n", {"n": 2}),
        ("functions", {"extra_body": {"functions": [{"name": "add"}]}}),
        ("logit_bias", {"logit_bias": {"1": 5}}),
        ("max_tokens", {"max_tokens": 0}),
        ("stream_options", {"extra_body": {"stream_options": [1]}}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "add", "parameters": [1]}}]}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "add", "parameters": {"properties": [1]}}}]}),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            await ask(client, messages, **options)
        assert error.value.param == param
    with pytest.raises(openai.BadRequestError):
        await ask(client, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    with pytest.raises(openai.AuthenticationError):
        await ask(client_of(base_url, "another key"), messages)
    for calls in (5, [5], [{"function": {"name": "add", "arguments": "[1]"}}]):
        with pytest.raises(openai.BadRequestError) as error:
            await ask(client, [*messages, {"role": "assistant", "content": "", "tool_calls": calls}])
        assert error.value.param == "messages"
    assert [m.id for m in (await client.models.list()).data] == ["policy"]
    assert (await client.models.retrieve("any")).id == "any"
    with pytest.raises(openai.NotFoundError, match="/v1/responses"):
        await client.embeddings.create(model="any", input="text")
    options = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    answer = await client.chat.completions.create(model="any", messages=messages, **options)
    (choice,) = answer.choices
    told = [(token.token, token.logprob) for token in choice.logprobs.content]
    assert told == [(letter, -1) for letter in (*"fine", "")]
    assert len(choice.token_ids) == len(told) < len(choice.prompt_token_ids)
    return choice.message.content


async def calls_a_tool_by_responses(base_url, api_key, task):
    client = client_of(base_url, api_key)
    flat = [{"type": "function", **TOOLS[0]["function"]}, {"type": "web_search"}]
    extra = {"reasoning": {"summary": "auto"}, "store": True, "extra_body": {"client_metadata": {"a": "b"}}}
    items = [{"role": "user", "content": task.row.messages[-1].content}]
    while True:
        async with client.responses.stream(model="any", input=items, tools=flat, **extra) as events:
            async for _ in events:
                pass
            answer = await events.get_final_response()
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        for call in calls:
            arguments = json.loads(call.arguments)
            result = str(arguments["a"] + arguments["b"])
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


async def calls_a_tool_by_messages(base_url, api_key, task):
    import anthropic

    client = anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)
    schema = TOOLS[0]["function"]
    options = {"model": "any", "max_tokens": 200}
    options["tools"] = [{"name": "add", "description": "adds", "input_schema": schema["parameters"]}]
    messages = [{"role": "user", "content": task.row.messages[-1].content}]
    assert (await client.messages.count_tokens(model="any", messages=messages)).input_tokens > 5
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        await client.messages.batches.list()
    # What Claude Code sends, and a stop sequence that never comes.
    options |= {"stop_sequences": ["never said"], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    options["extra_body"] = {"context_management": {"edits": []}, "output_config": {"effort": "high"}}
    options["tools"] += [{"type": "web_search_20250305", "name": "web_search"}]
    while True:
        answer = await client.messages.create(messages=messages, **options)
        messages.append({"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in answer.content]})
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            assert answer.stop_reason == "end_turn"
            return answer.content[0].text
        assert answer.stop_reason == "tool_use"
        results = [
            {"type": "tool_result", "tool_use_id": c.id, "content": str(c.input["a"] + c.input["b"])} for c in calls
        ]
        messages.append({"role": "user", "content": results})


@pytest.fixture
def run(started):
    """run(agent, *replies) -> (trajectory, session)."""

    async def call(agent, *replies, overrides=(), **script):
        name = f"rollout.agent.function={__name__}:{agent.__name__}"
        environment = await started(recipe_with("rollout.environment=agent", name, *overrides))
        return await play(environment, *replies, task=task_of([1, 2, 3], "2+3?"), **script)

    return call


async def test_an_agent_with_tools_is_recorded_token_by_token(run):
    call = call_text("add", a=2, b=3)
    trajectory, session = await run(calls_a_tool, f"let me see {call}", "It is 5.")
    assert_exact(trajectory, session)
    assert session.rewarded == ["It is 5."]
    assert (trajectory.turns, trajectory.finish_reason) == (2, "stop")
    assert dict(trajectory.reward_parts) == {
        "correct": 1,
        "agent_requests": 2,
        "agent_branches": 1,
        "agent_trained_share": 1,
    }
    prompt = text_of(session, trajectory.prompt_ids)
    assert '"name": "add"' in prompt
    assert prompt.endswith("<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n")
    assert text_of(session, trajectory.response_ids) == (
        f"let me see {call}<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nIt is 5.<|im_end|>"
    )
    assert len(session.chat.encode(text_of(session, trajectory.response_ids))) < len(trajectory.response_ids)


@pytest.mark.parametrize("agent", [calls_a_tool_by_responses, calls_a_tool_by_messages])
async def test_agents_of_other_apis_are_recorded_as_one_conversation_too(run, agent):
    if agent is calls_a_tool_by_messages:
        pytest.importorskip("anthropic", reason="Anthropic's client is not installed: pip install anthropic")
    call = call_text("add", a=2, b=3)
    trajectory, session = await run(agent, f"let me see {call}", "It is 5.")
    assert_exact(trajectory, session)
    assert session.rewarded == ["It is 5."]
    assert dict(trajectory.reward_parts) == {
        "correct": 1,
        "agent_requests": 2,
        "agent_branches": 1,
        "agent_trained_share": 1,
    }
    assert "<tool_response>\n5\n</tool_response>" in text_of(session, trajectory.response_ids)


async def test_a_streamed_answer_and_the_text_of_the_last_reply(run):
    trajectory, session = await run(streams, "first", "second")
    assert_exact(trajectory, session)
    assert session.rewarded == ["second"]
    assert session.budgets[0] == 30


async def test_thoughts_of_earlier_turns_are_kept_as_they_were_sampled(run):
    trajectory, session = await run(streams, "<think>hm</think>one", "two")
    assert_exact(trajectory, session)
    assert "<think>hm</think>one<|im_end|>\n<|im_start|>user\ntwo" in text_of(session, trajectory.response_ids)


async def test_rewritten_history_forks_and_the_last_branch_is_the_trajectory(run):
    last = ["rollout.agent.train=last_branch"]
    trajectory, session = await run(rewrites_history, "draft", "bad", "good", "new", "final", overrides=last)
    trajectory.validate()
    assert dict(trajectory.reward_parts)["agent_branches"] == 4
    assert trajectory.turns == 2
    text = text_of(session, trajectory.response_ids)
    assert text == "draft<|im_end|>\n<|im_start|>user\nat last<|im_end|>\n<|im_start|>assistant\nfinal<|im_end|>"
    first = len(session.prompts[0]) + len("draft") + 1
    whole = np.concatenate([trajectory.prompt_ids, trajectory.response_ids])
    for prompt in (session.prompts[1], session.prompts[2], session.prompts[4]):
        assert np.array_equal(prompt[:first], whole[:first]), "the draft's tokens are kept in every branch"
    assert np.array_equal(whole[: len(session.prompts[4])], session.prompts[4])
    assert {s.version for s in trajectory.segments} == {1, 2, 5, 6}


async def test_all_branches_are_recorded_each_reply_in_one_of_them(run):
    overrides = ["rollout.agent.train=all_branches"]
    trajectory, session = await run(rewrites_history, "draft", "bad", "good", "new", "final", overrides=overrides)
    trajectory.validate()
    said = [text_of(session, sequence.policy_ids) for sequence in trajectory.sequences]
    assert said == [f"{text}<|im_end|>" for text in ("draft<|im_end|>final", "bad", "good", "new")]
    assert dict(trajectory.reward_parts)["agent_branches"] == 4
    for branch, number in zip(trajectory.branches, (1, 2, 3), strict=True):
        assert np.array_equal(branch.prompt_ids, session.prompts[number])
        assert branch.segments[0].version == number + 1


@pytest.mark.parametrize(
    ("overrides", "turns"),
    [(["rollout.agent.max_turns=3"], 3), (["rollout.tool_use.max_trajectory_tokens=60"], 2)],
    ids=["turns", "length"],
)
async def test_an_agent_that_goes_on_for_ever_is_cut_off(run, overrides, turns):
    trajectory, session = await run(goes_on_for_ever, *["I go on"] * 9, overrides=overrides)
    assert_exact(trajectory, session)
    assert (trajectory.turns, trajectory.finish_reason) == (turns, "length")
    assert session.rewarded == ["I go on"]


async def test_an_agent_that_exits_when_it_is_cut_off_is_one_that_was_cut_off(run):
    trajectory, _ = await run(exits_when_cut, *["I go on"] * 9, overrides=["rollout.agent.max_turns=2"])
    assert (trajectory.finish_reason, trajectory.turns) == ("length", 2)


async def asks_at_once(base_url, api_key, task):
    client, messages = client_of(base_url, api_key), [{"role": "user", "content": "go"}]
    found = await asyncio.gather(*(ask(client, messages) for _ in range(5)), return_exceptions=True)
    return " ".join(sorted(text for text in found if isinstance(text, str)))


async def test_concurrent_requests_keep_the_limit_and_those_below_it_are_waited_for(run, monkeypatch):
    generate = ScriptedSession.generate

    async def late(self, *args):
        await asyncio.sleep(1.5)
        return await generate(self, *args)

    monkeypatch.setattr(ScriptedSession, "generate", late)
    overrides = ["rollout.agent.max_turns=2", "rollout.agent.grace_s=1"]
    trajectory, session = await run(asks_at_once, *"abcde", overrides=overrides)
    assert (trajectory.finish_reason, session.rewarded) == ("length", ["a b"])
    assert dict(trajectory.reward_parts)["agent_requests"] == 2


@pytest.mark.parametrize("agent", [asks_again_and_again, answers_with_the_refusal])
async def test_after_a_limit_an_agent_is_ended_and_the_policys_last_reply_is_judged(run, agent):
    overrides = ["rollout.agent.max_turns=2", "rollout.agent.grace_s=0.2"]
    trajectory, session = await run(agent, "first", "last", overrides=overrides)
    assert (trajectory.finish_reason, session.rewarded) == ("length", ["last"])


async def test_a_stream_that_is_silent_shows_that_it_lives(run, monkeypatch):
    monkeypatch.setattr("asyncrl.environments.agent_server.PING_S", 0.02)

    async def agent(base_url, api_key, task):
        asked = {"messages": [{"role": "user", "content": "go"}], "stream": True}
        seen = []
        headers, url = {"authorization": f"Bearer {api_key}"}, f"{base_url}/chat/completions"
        async with httpx.AsyncClient() as client, client.stream("POST", url, json=asked, headers=headers) as response:
            async for line in response.aiter_lines():
                if line:
                    seen.append(line)
                if seen.count(": the model is writing") == 2:
                    go.set()
        assert (seen[0][:6], seen[-1]) == ("data: ", "data: [DONE]")
        assert json.loads(seen[0][6:])["choices"][0]["delta"]["role"] == "assistant"

    go = asyncio.Event()
    generate = ScriptedSession.generate

    async def late(self, *args):
        await go.wait()
        return await generate(self, *args)

    monkeypatch.setattr(ScriptedSession, "generate", late)
    monkeypatch.setitem(globals(), "streams", agent)
    agent.__name__ = "streams"
    _, session = await run(agent, "done")
    assert session.rewarded == ["done"]


@pytest.mark.parametrize(
    ("path", "where"), [("chat/completions", "choices"), ("messages", "delta"), ("responses", "delta")]
)
async def test_what_is_sampled_is_streamed_before_the_reply_ends(run, monkeypatch, path, where):
    """A thought, then text; the client has both before the call that follows is sampled. Nothing comes twice."""
    reply = '<think>Z</think>Y\n<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    go, seen = asyncio.Event(), []
    generate = ScriptedSession.generate

    async def slow(self, prompt_ids, max_tokens, stop, hear):
        made = await generate(self, prompt_ids, max_tokens, stop)
        for count in range(1, len("<think>Z</think>Y\n<t")):
            hear(made.token_ids[:count])
            await asyncio.sleep(0)
        await asyncio.wait_for(go.wait(), 10)
        return made

    async def agent(base_url, api_key, task):
        asked = {"messages": [{"role": "user", "content": "go"}], "stream": True, "max_tokens": 500, "tools": TOOLS}
        if path == "messages":
            asked["tools"] = [{"name": "add", "input_schema": TOOLS[0]["function"]["parameters"]}]
        elif path == "responses":
            asked = {"input": "go", "stream": True, "tools": [{"type": "function", **TOOLS[0]["function"]}]}
        headers, url = {"authorization": f"Bearer {api_key}"}, f"{base_url}/{path}"
        async with httpx.AsyncClient() as client, client.stream("POST", url, json=asked, headers=headers) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {") and where in (event := json.loads(line[6:])):
                    seen.append(json.dumps(event[where]))
                    if "Y" in seen[-1]:
                        go.set()

    monkeypatch.setattr(ScriptedSession, "generate", slow)
    monkeypatch.setitem(globals(), "streams", agent)
    agent.__name__ = "streams"
    await run(agent, reply)
    told = [letter for piece in seen for letter in "ZY" if letter in piece]
    assert told == ["Z", "Y"]


async def test_an_agent_that_raises_or_asks_nothing_fails_the_attempt(run):
    with pytest.raises(LookupError, match="lost its way"):
        await run(raises, "hello")
    with pytest.raises(ValueError, match="no request"):
        await run(asks_nothing)


async def test_a_failed_generation_fails_the_attempt_whatever_the_agent_makes_of_it(run):
    with pytest.raises(GenerationError, match="no replica"):
        await run(swallows, GenerationError("no replica"), "never asked for again")
    with pytest.raises(ZeroDivisionError):
        await run(swallows, ZeroDivisionError())


async def test_what_is_not_served_is_refused_by_name_and_costs_no_turn(run):
    trajectory, _ = await run(asks_what_is_not_served, "fine", overrides=["rollout.agent.max_turns=1"])
    assert dict(trajectory.reward_parts)["agent_requests"] == 1


async def test_the_key_dies_with_its_trajectory_and_the_server_with_its_environment(run):
    kept = []

    async def agent(base_url, api_key, task):
        kept.append((base_url, api_key))
        return await ask(client_of(base_url, api_key), [{"role": "user", "content": "go"}])

    environment = build_environment(
        recipe_with("rollout.environment=agent", f"rollout.agent.function={__name__}:raises"), chat_with()
    )
    environment._agent = agent
    await environment.start()
    await environment.run(task_of([1]), ScriptedSession(chat_with(), "hi"))
    client = client_of(*kept[0])
    with pytest.raises(openai.AuthenticationError):
        await ask(client, [{"role": "user", "content": "again"}])
    await environment.close()
    with pytest.raises(openai.APIConnectionError):
        await ask(
            openai.AsyncOpenAI(base_url=kept[0][0], api_key="x", max_retries=0), [{"role": "user", "content": "a"}]
        )
