"""Tools and the dialects of the server, over real sockets: OpenAI's and Anthropic's own clients, in loops of several
turns, against scripted replicas."""

import json

import pytest

from asyncrl.data.tool_calls import written
from tests.environments import ADD, QWEN
from tests.serving import ASK, REFUSED_SCHEMA, byte_tokenizer, serving

TOOL = ADD
LONG = {"max_model_len": 4096}
SIMPLE = (
    "{% for m in messages %}{{ '<assistant>' if m.role == 'assistant' else '<user>' }}{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Knows neither tools nor calls."""


def turns(parser):
    first = "let me see" if parser != "json" else ""
    calls = "\n".join(written("add", {"a": a, "b": 4}, parser) for a in (2, 3))
    return [f"{first} {calls}", written("add", {"a": 6, "b": 7}, parser), "It is 13 — é."]


def tokenizer_with(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def result_of(arguments):
    made = json.loads(arguments) if isinstance(arguments, str) else arguments
    return str(made["a"] + made["b"])


async def text_and_calls(client, messages, *, stream, **options):
    """(content, [(id, name, arguments)], finish_reason) of one chat completion."""
    made = await client.chat.completions.create(model="tiny", messages=messages, tools=[TOOL], stream=stream, **options)
    if not stream:
        choice = made.choices[0]
        calls = [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
        return choice.message.content or "", calls, choice.finish_reason
    text, calls, reason = "", {}, None
    async for piece in made:
        delta, reason = piece.choices[0].delta, piece.choices[0].finish_reason or reason
        text += delta.content or ""
        for call in delta.tool_calls or ():
            kept = calls.setdefault(call.index, ["", "", ""])
            kept[0] += call.id or ""
            kept[1] += call.function.name or ""
            kept[2] += call.function.arguments or ""
    return text, [tuple(call) for _, call in sorted(calls.items())], reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("parser", "template"), [("hermes", QWEN), ("hermes", SIMPLE), ("json", SIMPLE), ("tagged", SIMPLE)]
)
async def test_a_loop_of_tool_calls_with_openais_client(parser, template, stream):
    tokenizer = tokenizer_with(template)
    replies = turns(parser)
    async with serving(reply=replies, parser=parser, tokenizer=tokenizer, chunk_tokens=2, **LONG) as served:
        messages, found = [{"role": "user", "content": "2+4, 3+4, 6+7?"}], []
        for _ in range(3):
            text, calls, reason = await text_and_calls(served.openai, messages, stream=stream)
            found.append((text, [(name, json.loads(arguments)) for _, name, arguments in calls], reason))
            made = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
            messages.append({"role": "assistant", "content": text, **({"tool_calls": made} if made else {})})
            assert len({i for i, _, _ in calls}) == len(calls)
            messages += [{"role": "tool", "tool_call_id": i, "content": result_of(a)} for i, _, a in calls]
        said = "let me see" if parser != "json" else ""
        expected = [
            (said, [("add", {"a": 2, "b": 4}), ("add", {"a": 3, "b": 4})], "tool_calls"),
            ("", [("add", {"a": 6, "b": 7})], "tool_calls"),
            ("It is 13 — é.", [], "stop"),
        ]
        assert found == expected
        prompts = [tokenizer.decode(r.prompt_ids.tolist()) for r in served.engines[0].requests]
        assert all('"name": "add"' in prompt for prompt in prompts), "every prompt names the tool"
        if template == SIMPLE:
            earlier = [written("add", {"a": a, "b": b}, parser) for a, b in ((2, 4), (3, 4), (6, 7))]
            assert all(call in prompts[2] for call in earlier), "calls that the template does not know are written"
        assert "13" in prompts[2]


async def test_one_call_at_most_ends_the_reply_there():
    reply = turns("hermes")[0]
    async with serving(reply=reply, tick_s=0.0005, chunk_tokens=4, **LONG) as served:
        for stream in (False, True):
            text, calls, reason = await text_and_calls(
                served.openai, ASK["messages"], stream=stream, parallel_tool_calls=False
            )
            assert (text, len(calls), reason) == ("let me see", 1, "tool_calls")
        body = {**ASK, "tools": [TOOL], "parallel_tool_calls": False, "return_token_ids": True}
        chat = (await served.post("/v1/chat/completions", body)).json()
        end = reply.index("</tool_call>") + len("</tool_call>")
        assert bytes(chat["choices"][0]["token_ids"]).decode() == reply[:end], "tokens after the call are not counted"
        assert chat["usage"]["completion_tokens"] == end


async def test_what_is_no_call_stays_text_and_no_tools_means_none():
    broken = '<tool_call>{"name": "add", "arguments": 3}</tool_call> and <tool_call>'
    async with serving(reply=broken, **LONG) as served:
        for stream in (False, True):
            assert await text_and_calls(served.openai, ASK["messages"], stream=stream) == (broken, [], "stop")
    whole = written("add", {"a": 1}, "hermes")
    async with serving(reply=whole, **LONG) as served:
        for stream in (False, True):
            found = await text_and_calls(served.openai, ASK["messages"], stream=stream, tool_choice="none")
            assert found == (whole, [], "stop")
        cut = await text_and_calls(served.openai, ASK["messages"], stream=False, max_tokens=20)
        assert cut == (whole[:20], [], "length")
        prompts = {len(r.prompt_ids) for r in served.engines[0].requests}
        assert min(prompts) < 30, "a request that forbids tools does not name them"


async def test_the_asked_form_of_a_reply_is_guided_or_asked_for_in_the_prompt():
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    named = {"type": "function", "function": {"name": "add"}}
    asked = [
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": named},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
    ]
    mixed = {"tools": [TOOL], "response_format": {"type": "json_object"}}
    async with serving(**LONG) as served:
        for body in (*asked, mixed):
            answer = await served.post("/v1/chat/completions", {**ASK, **body})
            assert answer.status_code == 200, answer.text
        said = [byte_tokenizer().decode(r.prompt_ids.tolist()) for r in served.engines[0].requests]
        wishes = ["Call a tool now.", "Call the tool add now.", "Answer with nothing but JSON of this schema"]
        wishes += [json.dumps(schema), 'If you call no tool, answer with nothing but JSON of this schema: {"type": "ob']
        assert all(wish in text for wish, text in zip(wishes, said, strict=True)), said
    call = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
    async with serving(reply=call, guided=True, **LONG) as served:
        for body in asked:
            answer = await served.post("/v1/chat/completions", {**ASK, **body})
            assert answer.status_code == 200, answer.text
            message = answer.json()["choices"][0]["message"]
            if "tools" in body:
                assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 1, "b": 2}
            else:
                assert message["content"] == call
        guides = [json.loads(r.sampling.json_schema) for r in served.engines[0].requests]
        assert guides[0]["properties"] == {"name": {"const": "add"}, "arguments": {"$ref": "#/$defs/arguments0"}}
        assert guides[0]["$defs"] == {"arguments0": TOOL["function"]["parameters"]}
        assert guides[:2] == [guides[0]] * 2
        assert guides[2:] == [{"type": "object"}, schema]


async def test_a_schema_that_the_engine_refuses_is_the_fault_of_the_request():
    schema = {"type": "object", "description": REFUSED_SCHEMA}
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    flat = {"type": "function", "name": "add", "parameters": schema}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    flat_form = {"type": "json_schema", "name": "x", "schema": schema}
    asked = [
        ("chat/completions", {**ASK, "tools": [tool], "tool_choice": "required"}, "tools"),
        ("chat/completions", {**ASK, "response_format": form}, "response_format"),
        ("responses", {"input": "x", "tools": [flat], "tool_choice": "required"}, "tools"),
        ("responses", {"input": "x", "text": {"format": flat_form}}, "text"),
    ]
    async with serving(guided=True, **LONG) as served:
        for path, body, param in asked:
            for stream in (False, True):
                answer = await served.post(f"/v1/{path}", {**body, "stream": stream})
                error = answer.json()["error"]
                assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_value", param), error
                assert "no such keyword" in error["message"]
        assert served.fleet.not_serving() is None
        assert (await served.post("/v1/chat/completions", ASK)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_body_that_is_nested_deeply_is_refused_and_no_defect(path):
    async with serving(guided=True, **LONG) as served:
        for levels in (40, 150, 300):
            schema = {"type": "object"}
            for _ in range(levels):
                schema = {"properties": {"a": schema}}
            body = {
                "/v1/chat/completions": {**ASK, "tools": [{"function": {"name": "f", "parameters": schema}}]},
                "/v1/responses": {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": schema}]},
                "/v1/messages": {**ASK, "max_tokens": 5, "tools": [{"name": "f", "input_schema": schema}]},
            }[path]
            answer = await served.post(path, body)
            assert answer.status_code == 400, answer.text
            assert "nested deeper than 64 levels" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"functions": [{"name": "add"}]}, "functions"),
        ({"tools": [{**TOOL, "function": {**TOOL["function"], "description": "x" * 200_000}}]}, "tools"),
        ({"tools": [{**TOOL, "function": {"name": "add", "parameters": {"enum": [0] * 100_000}}}]}, "tools"),
        ({"tools": [{**TOOL, "function": {"name": "add", "parameters": {"enum": [[]] * 100_000}}}]}, "tools"),
    ],
)
async def test_tools_that_make_no_sense_are_refused_by_name(body, param):
    async with serving(guided=True) as served:
        answer = await served.post("/v1/chat/completions", {**ASK, **body})
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert error["param"].startswith(param), error
        assert len(error["message"]) < 400


# -- the Responses API -------------------------------------------------------------------------------------------

FLAT = {"type": "function", "name": "add", "description": "adds", "parameters": TOOL["function"]["parameters"]}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_loop_of_tool_calls_with_the_responses_api(stream):
    tokenizer = tokenizer_with(QWEN)
    async with serving(reply=turns("hermes"), tokenizer=tokenizer, chunk_tokens=2, **LONG) as served:
        items, found = [{"role": "user", "content": "2+4, 3+4, 6+7?"}], []
        for _ in range(3):
            options = {"model": "tiny", "instructions": "Be brief.", "input": items, "tools": [FLAT]}
            if stream:
                text = ""
                async with served.openai.responses.stream(**options) as events:
                    async for event in events:
                        text += event.delta if event.type == "response.output_text.delta" else ""
                    answer = await events.get_final_response()
                assert text == answer.output_text
            else:
                answer = await served.openai.responses.create(**options)
            assert (answer.status, answer.model) == ("completed", "tiny")
            assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
            calls = [item for item in answer.output if item.type == "function_call"]
            found.append((answer.output_text, [(c.name, json.loads(c.arguments)) for c in calls]))
            items += [item.model_dump(exclude_none=True) for item in answer.output]
            items += [
                {"type": "function_call_output", "call_id": c.call_id, "output": result_of(c.arguments)} for c in calls
            ]
        assert found == [
            ("let me see", [("add", {"a": 2, "b": 4}), ("add", {"a": 3, "b": 4})]),
            ("", [("add", {"a": 6, "b": 7})]),
            ("It is 13 — é.", []),
        ]
        prompt = tokenizer.decode(served.engines[0].requests[-1].prompt_ids.tolist())
        assert "Be brief." in prompt.split("# Tools")[0]
        one_turn = '<|im_start|>assistant\nlet me see\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 4}}'
        assert one_turn in prompt, "text and calls of one turn are one message"


async def test_responses_of_text_their_ends_and_refusals():
    async with serving(reply="one two", **LONG) as served:
        answer = await served.openai.responses.create(model="tiny", input="hello")
        assert (answer.output_text, answer.status) == ("one two", "completed")
        cut = await served.openai.responses.create(model="tiny", input="hello", max_output_tokens=3)
        assert (cut.output_text, cut.status, cut.incomplete_details.reason) == (
            "one",
            "incomplete",
            "max_output_tokens",
        )
        kinds = []
        async for event in await served.openai.responses.create(model="tiny", input="hello", stream=True):
            assert event.sequence_number == len(kinds)
            kinds.append(event.type)
        assert [kind.removeprefix("response.") for kind in (*kinds[:4], *kinds[-4:])] == [
            "created", "in_progress", "output_item.added", "content_part.added",
            "output_text.done", "content_part.done", "output_item.done", "completed",
        ]  # fmt: skip
        for body, param in (
            ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
            ({"input": []}, "input"),
            ({}, "input"),
            ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
            ({"input": [{"type": "reasoning"}]}, "input[0].type"),
            ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
            ({"input": "x", "max_output_tokens": 100_000}, "max_output_tokens"),
            ({"input": "x", "temperature": 9}, "temperature"),
            ({"input": "x", "tools": [{"type": "function"}]}, "tools"),
            ({"input": "x", "model": "other"}, "model"),
        ):
            answer = await served.post("/v1/responses", body)
            assert answer.status_code in (400, 404), (body, answer.text)
            assert answer.json()["error"]["param"].split("[")[0] == param.split("[")[0], (body, answer.text)


# -- the Messages API --------------------------------------------------------------------------------------------

ANTHROPIC = {"name": "add", "description": "adds", "input_schema": TOOL["function"]["parameters"]}


def anthropic_of(served, key="none"):
    anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed: pip install anthropic")
    return anthropic.AsyncAnthropic(base_url=served.url, api_key=key, max_retries=0, timeout=20)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_loop_of_tool_calls_with_anthropics_client(stream):
    tokenizer = tokenizer_with(QWEN)
    async with serving(reply=turns("hermes"), tokenizer=tokenizer, chunk_tokens=2, api_key="k", **LONG) as served:
        client = anthropic_of(served, "k")
        messages, found = [{"role": "user", "content": "2+4, 3+4, 6+7?"}], []
        for _ in range(3):
            options = {"model": "tiny", "max_tokens": 500, "system": "Be brief.", "tools": [ANTHROPIC]}
            if stream:
                async with client.messages.stream(messages=messages, **options) as events:
                    text = "".join([piece async for piece in events.text_stream])
                    answer = await events.get_final_message()
                assert text == "".join(block.text for block in answer.content if block.type == "text")
            else:
                answer = await client.messages.create(messages=messages, **options)
            calls = [block for block in answer.content if block.type == "tool_use"]
            found.append(
                ([getattr(b, "text", b.type) for b in answer.content], [c.input for c in calls], answer.stop_reason)
            )
            assert answer.usage.output_tokens > 5
            messages.append({"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in answer.content]})
            results = [{"type": "tool_result", "tool_use_id": c.id, "content": result_of(c.input)} for c in calls]
            messages.append({"role": "user", "content": results})
        assert found == [
            (["let me see", "tool_use", "tool_use"], [{"a": 2, "b": 4}, {"a": 3, "b": 4}], "tool_use"),
            (["tool_use"], [{"a": 6, "b": 7}], "tool_use"),
            (["It is 13 — é."], [], "end_turn"),
        ]
        prompt = tokenizer.decode(served.engines[0].requests[-1].prompt_ids.tolist())
        assert "Be brief." in prompt.split("# Tools")[0]
        assert "<tool_response>\n13\n</tool_response>" in prompt


async def test_messages_of_text_their_ends_and_refusals():
    async with serving(reply="one two three", api_key="k", **LONG) as served:
        client = anthropic_of(served, "k")
        ask = {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}
        for options, text, reason, stop in (
            ({"max_tokens": 99}, "one two three", "end_turn", None),
            ({"max_tokens": 3}, "one", "max_tokens", None),
            ({"max_tokens": 99, "stop_sequences": [" th"]}, "one two", "stop_sequence", " th"),
        ):
            answer = await client.messages.create(**ask, **options)
            assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == (text, reason, stop)
        anthropic = pytest.importorskip("anthropic")
        with pytest.raises(anthropic.AuthenticationError):
            await anthropic_of(served, "other").messages.create(**ask, max_tokens=5)
        with pytest.raises(anthropic.NotFoundError, match="other"):
            await client.messages.create(**{**ask, "model": "other"}, max_tokens=5)
        for body in (
            {"messages": ask["messages"]},
            {"max_tokens": 5, "messages": []},
            {"max_tokens": 5, **ask, "mcp_servers": [{"type": "url", "url": "http://a"}]},
            {"max_tokens": 5, **ask, "tools": [{"type": "custom", "name": "search"}]},
            {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            {"max_tokens": 5, **ask, "stop_sequences": [""]},
        ):
            answer = await served.post("/v1/messages", body, x_api_key="k")
            assert answer.status_code == 400, (body, answer.text)
            assert answer.json()["type"] == "error"
            assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_a_stream_that_fails_ends_with_an_error_event_and_its_client_raises(path):
    async with serving(reply="a" * 200, tick_s=0.02, timeout_s=0.9, chunk_tokens=1, **LONG) as served:
        body = {"input": "x"} if path == "/v1/responses" else {"max_tokens": 200, "messages": ASK["messages"]}
        response = await served.post(path, {**body, "stream": True})
        assert response.status_code == 200
        last = response.text.strip().split("\n\n")[-1]
        assert last.startswith("event: error\n")
        assert "fewer tokens" in last


async def test_openais_client_hands_on_what_went_wrong_in_a_response_stream():
    async with serving(reply="a" * 200, tick_s=0.02, timeout_s=0.9, chunk_tokens=1, **LONG) as served:
        events = [e async for e in await served.openai.responses.create(model="tiny", input="x", stream=True)]
        assert events[-1].type == "error"
        assert "fewer tokens" in events[-1].message
