"""The HTTP side of a fleet over real sockets, with scripted replicas in this process and OpenAI's own client."""

import asyncio
import json

import httpx
import numpy as np
import openai
import pytest
import ray
from ray.cluster_utils import Cluster

from asyncrl.chat.http import MAX_BODY_BYTES
from asyncrl.errors import ConfigError, RunFailed
from asyncrl.inference.replica_actor import require_gpus
from asyncrl.serving.discovery import DiscoveryFile, FleetAddress
from asyncrl_testing.local import publish
from tests.serving import ASK, REPLY, GatedTokenizer, byte_tokenizer, serving
from tests.waiting import until

JSON = {"content-type": "application/json"}
BEGUN = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{"


# -- what OpenAI's client reads ----------------------------------------------------------------------------------


async def test_a_chat_as_openai_reads_it():
    async with serving() as served:
        answer = await served.openai.chat.completions.create(model="tiny", **ASK)
        choice = answer.choices[0]
        assert choice.message.content == REPLY
        assert choice.message.role == "assistant"
        assert choice.finish_reason == "stop"
        prompt = "<user>hello<end><assistant>"
        assert answer.usage.prompt_tokens == len("hello") + prompt.count("<")
        assert answer.usage.completion_tokens == len(REPLY.encode()) + 1
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert [m.id for m in (await served.openai.models.list()).data] == ["tiny"]


@pytest.mark.parametrize("chunk_tokens", [1, 2, 7])
async def test_a_streamed_chat_is_the_same_text_in_whole_characters(chunk_tokens):
    async with serving(chunk_tokens=chunk_tokens, tick_s=0.0005) as served:
        stream = await served.openai.chat.completions.create(
            model="tiny", **ASK, stream=True, stream_options={"include_usage": True}
        )
        pieces = [piece async for piece in stream]
        deltas = [piece.choices[0].delta.content or "" for piece in pieces if piece.choices]
        assert "".join(deltas) == REPLY
        assert not any("\ufffd" in delta for delta in deltas)
        assert len(deltas) > 4, "it came in one piece"
        assert [p.choices[0].finish_reason for p in pieces if p.choices].count("stop") == 1
        assert pieces[0].choices[0].delta.role == "assistant"
        assert pieces[-1].choices == []
        assert pieces[-1].usage.completion_tokens == len(REPLY.encode()) + 1


async def test_a_model_is_found_by_its_name_also_with_slashes():
    async with serving(name="runs/tiny") as served:
        (listed,) = (await served.openai.models.list()).data
        assert await served.openai.models.retrieve("runs/tiny") == listed
        for path in ("/v1/models/runs/tiny", "/v1/models/runs%2Ftiny"):
            assert (await served.get(path)).json()["max_model_len"] == 512
        with pytest.raises(openai.NotFoundError, match="gpt-9"):
            await served.openai.models.retrieve("gpt-9")


async def test_completions_of_texts_and_token_ids_in_any_shape():
    async with serving() as served:
        for prompt, count in (("ab", 1), (["ab", "cd"], 2), ([97, 98], 1), ([[97, 98], [99]], 2)):
            answer = await served.openai.completions.create(model="tiny", prompt=prompt, n=2, max_tokens=4)
            assert [c.index for c in answer.choices] == list(range(2 * count))
            assert all(c.text == "Stra" and c.finish_reason == "length" for c in answer.choices)
            assert answer.usage.completion_tokens == 8 * count
        asked = {tuple(request.prompt_ids.tolist()) for request in served.engines[0].requests}
        assert asked == {(97, 98), (99, 100), (99,)}


async def test_token_ids_out_are_those_that_were_sampled():
    async with serving() as served:
        for stream in (False, True):
            body = {"prompt": [[97, 98], [99]], "return_token_ids": True, "max_tokens": 12, "stream": stream}
            response = await served.post("/v1/completions", body)
            bodies = events(response) if stream else [response.json()]
            for index, prompt in enumerate([[97, 98], [99]]):
                parts = [c for body in bodies for c in body["choices"] if c["index"] == index]
                assert [i for c in parts for i in c.get("token_ids", [])] == list(REPLY.encode()[:12])
                assert parts[0]["prompt_token_ids"] == prompt
        chat = (await served.post("/v1/chat/completions", {**ASK, "return_token_ids": True})).json()
        assert chat["prompt_token_ids"] == [257, *b"hello", 256, 258]
        assert chat["choices"][0]["token_ids"] == [*REPLY.encode(), 256]


def events(response):
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_logprobs_of_the_sampled_tokens():
    async with serving(reply="aé") as served:
        chat = await served.openai.chat.completions.create(model="tiny", **ASK, logprobs=True)
        content = chat.choices[0].logprobs.content
        assert [c.token for c in content] == ["a", "\ufffd", "\ufffd", "<end>"]
        assert [c.logprob for c in content] == [-0.25 if i % 2 else -0.5 for i in (*"aé".encode(), 256)]
        assert content[0].bytes == [97]
        assert content[1].bytes is None
        done = await served.openai.completions.create(model="tiny", prompt="x", logprobs=0)
        assert done.choices[0].logprobs.token_logprobs == [c.logprob for c in content]
        assert done.choices[0].logprobs.text_offset == [0, 1, 1, 2]
        stream = await served.openai.chat.completions.create(model="tiny", **ASK, logprobs=True, stream=True)
        streamed = [c.logprob async for p in stream if p.choices[0].logprobs for c in p.choices[0].logprobs.content]
        assert streamed == [c.logprob for c in content]


# -- how an answer ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_across_tokens(chunk_tokens, stream):
    async with serving(chunk_tokens=chunk_tokens, tick_s=0.0005) as served:
        body = {"prompt": "x", "max_tokens": 400, "stop": ["€ and", "nowhere"], "stream": stream, "ignore_eos": True}
        response = await served.post("/v1/completions", {**body, "return_token_ids": True})
        bodies = events(response) if stream else [response.json()]
        parts = [b["choices"][0] for b in bodies if b["choices"]]
        assert "".join(c["text"] for c in parts) == "Straße — 12"
        ids = [i for c in parts for i in c.get("token_ids", [])]
        assert bytes(ids).decode() == "Straße — 12€ and", "the tokens end with the one that completed the stop string"
        assert (parts[-1]["finish_reason"], parts[-1]["stop_reason"]) == ("stop", "€ and")
        await until(lambda: served.engines[0].health().running == 0, "it still generates")
        assert served.engines[0].health().generated_tokens < 400


async def test_stop_tokens_min_tokens_and_ignore_eos():
    async with serving(reply="ab.cd.ef") as served:

        async def ask(**options):
            body = {"prompt": "x", "max_tokens": 30, **options}
            return (await served.post("/v1/completions", body)).json()["choices"][0]

        one = await ask(stop_token_ids=[ord(".")])
        assert (one["text"], one["finish_reason"], one["stop_reason"]) == ("ab", "stop", ord("."))
        assert (await ask(stop_token_ids=[ord(".")], min_tokens=4))["text"] == "ab.cd"
        assert (await ask(stop=".", min_tokens=4))["text"] == "ab.cd"
        assert (await ask())["stop_reason"] is None
        forever = await ask(ignore_eos=True)
        assert forever["finish_reason"] == "length"
        assert forever["text"].startswith("ab.cd.efab.cd")
        assert "<end>" in (await ask(ignore_eos=True, skip_special_tokens=False))["text"]


async def test_sampling_fields_reach_the_engine_and_seeds_differ_between_choices():
    async with serving() as served:
        body = {"prompt": "x", "n": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_tokens": 9, "min_tokens": 2}
        await served.post("/v1/completions", body | {"seed": 5})
        await served.post("/v1/completions", body | {"seed": 5})
        requests = served.engines[0].requests
        for request in requests:
            sampling = request.sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
            assert (sampling.max_tokens, sampling.min_tokens, sampling.stop_token_ids) == (9, 2, (256,))
        seeds = [request.seed for request in requests]
        assert sorted(seeds[:3]) == sorted(seeds[3:])
        assert len(set(seeds)) == 3
        await served.post("/v1/completions", {"prompt": "x"})
        await served.post("/v1/completions", {"prompt": "x"})
        assert len({r.seed for r in requests}) == 5, "without a seed every request has another"


# -- versions, sessions, prefixes --------------------------------------------------------------------------------


async def test_a_publish_in_the_middle_shows_in_the_versions_of_the_tokens():
    async with serving(tick_s=0.002, reply="x" * 60) as served:
        asking = asyncio.create_task(served.post("/v1/completions", {"prompt": "x", "max_tokens": 60}))
        await until(lambda: served.engines[0].health().generated_tokens > 20, "it does not generate")
        await publish(served.replicas[0], 1, 7)
        response = await asking
        body = response.json()
        first, second = body["choices"][0]["weight_versions"]
        assert (first["version"], second["version"]) == (0, 7)
        assert (first["start"], first["end"], second["end"]) == (0, second["start"], 60)
        assert body["weight_version"] == 7
        assert response.headers["x-weight-version"] == "7"
        assert body["choices"][0]["text"] == "x" * 60
        asked = await served.post("/v1/completions", {"prompt": "x", "max_tokens": 4, "stream": True})
        assert asked.headers["x-weight-version"] == "7"
        assert events(asked)[-1]["choices"][0]["weight_versions"] == [{"version": 7, "start": 0, "end": 4}]


async def test_sessions_and_prefixes_stay_on_their_replica_and_find_its_cache():
    async with serving(4, reply="short") as served:
        homes = {}
        for _ in range(3):
            for user in range(6):
                response = await served.post("/v1/chat/completions", ASK, x_session_id=f"user {user}")
                homes.setdefault(user, set()).add(response.headers["x-replica-id"])
        assert all(len(home) == 1 for home in homes.values())
        assert len({*map(tuple, homes.values())}) == 4

        turns = {user: [{"role": "user", "content": f"{user} " * 30}] for user in range(6)}
        cached, homes = 0, {}
        for turn in range(3):
            for user in range(6):
                response = await served.post("/v1/chat/completions", {"messages": turns[user], "max_tokens": 4})
                homes.setdefault(user, set()).add(response.headers["x-replica-id"])
                hit = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert (hit >= 48) == (turn > 0)
                cached += hit
                turns[user].append({"role": "user", "content": f"more {turn} " * 5})
        assert all(len(home) == 1 for home in homes.values())
        assert len({*map(tuple, homes.values())}) == 4
        page = (await served.get("/metrics")).text
        assert value(page, "asyncrl_cached_prompt_tokens_total") >= cached
        assert 0.3 < value(page, "asyncrl_prefix_cache_hit_rate") < 1


async def test_the_id_of_the_turn_before_keeps_a_conversation_on_its_replica():
    """Clients name the header of the turn before, the id of its body, or one id for all turns."""
    async with serving(4, reply="short") as served:
        for kind in ("header", "body", "constant"):
            for user in range(4):
                words = {"x_request_id": f"{user} of {kind}"} if kind == "constant" else {}
                homes = set()
                for turn in range(4):
                    question = {"messages": [{"role": "user", "content": f"{user} {turn}"}]}  # no common prefix
                    response = await served.post("/v1/chat/completions", question, **words)
                    homes.add(response.headers["x-replica-id"])
                    own, made = response.headers["x-request-id"], response.json()["id"]
                    assert made == f"chatcmpl-{own}"
                    assert not turn or own == words["x_request_id"].removeprefix("chatcmpl-")
                    words = {"x_request_id": made if kind == "body" else own}
                assert len(homes) == 1, (kind, user)
        answers = [await served.post("/v1/completions", {"prompt": [5, i], "max_tokens": 2}) for i in range(8)]
        assert len({a.headers["x-replica-id"] for a in answers}) == 4, "without an id the least loaded one, in turn"
        assert len({a.headers["x-request-id"] for a in answers}) == 8
        streamed = await served.post("/v1/completions", {"prompt": "a", "max_tokens": 4, "stream": True})
        named = {"x_request_id": streamed.headers["x-request-id"]}
        for _ in range(3):
            again = await served.post("/v1/completions", {"prompt": "b", "max_tokens": 4}, **named)
            assert again.headers["x-replica-id"] == streamed.headers["x-replica-id"]
        refused = await served.post("/v1/completions", {"prompt": "x", "n": 0}, x_request_id="mine")
        assert (refused.status_code, refused.headers["x-request-id"]) == (400, "mine")


async def test_each_replica_has_an_address_of_its_own():
    async with serving(3, reply="short") as served:
        for replica_id in (2, 0, 1):
            client = openai.AsyncOpenAI(
                base_url=f"{served.url}/replicas/{replica_id}/v1", api_key="none", max_retries=0
            )
            for _ in range(3):
                raw = await client.chat.completions.with_raw_response.create(model="tiny", **ASK)
                assert raw.headers["x-replica-id"] == str(replica_id)
            assert [model.id async for model in client.models.list()] == ["tiny"]
        answered = await served.post("/replicas/1/v1/messages", {**ASK, "max_tokens": 4, "model": "tiny"})
        assert (answered.status_code, answered.headers["x-replica-id"]) == (200, "1")
        health = await served.get("/replicas/1/health")
        assert (health.status_code, health.json()) == (200, {"serving": 1, "replicas": 1})
        wrong = await served.post("/replicas/7/v1/chat/completions", ASK)
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "replica_not_found")
        assert "ask [0, 1, 2]" in wrong.json()["error"]["message"]


async def test_a_request_for_a_replica_that_died_waits_for_its_replacement():
    async with serving(2, reply="short", max_restarts=1) as served:
        served.channels[1].die()
        await served.fleet.refresh()
        response = await served.post("/replicas/1/v1/completions", {"prompt": "x", "max_tokens": 4})
        assert (response.status_code, response.headers["x-replica-id"]) == (200, "1")


def value(page, name):
    (line,) = [line for line in page.splitlines() if line.startswith(name + " ")]
    return float(line.split()[-1])


# -- errors ------------------------------------------------------------------------------------------------------


async def test_errors_as_openai_reads_them():
    async with serving() as served:
        with pytest.raises(openai.BadRequestError) as caught:
            await served.openai.chat.completions.create(model="tiny", **ASK, functions=[{"name": "x"}])
        assert (caught.value.param, caught.value.code) == ("functions", "unsupported_parameter")
        with pytest.raises(openai.NotFoundError, match="gpt-9"):
            await served.openai.chat.completions.create(model="gpt-9", **ASK)
        with pytest.raises(openai.BadRequestError, match="no such role") as caught:
            await served.openai.chat.completions.create(model="tiny", messages=[{"role": "alien", "content": "x"}])
        assert caught.value.param == "messages"
        with pytest.raises(openai.BadRequestError, match=r"600 tokens.*512") as caught:
            await served.openai.completions.create(model="tiny", prompt="x" * 600)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match=r"max_tokens=510.*at most 509"):
            await served.openai.completions.create(model="tiny", prompt="xxx", max_tokens=510)
        with pytest.raises(openai.BadRequestError, match=r"token id 259 .* 259 ids"):
            await served.openai.completions.create(model="tiny", prompt=[259])
        assert served.engines[0].requests == []


async def test_what_is_no_request():
    async with serving() as served, httpx.AsyncClient(base_url=served.url, headers=JSON) as http:
        broken = await http.post("/v1/completions", content=b"{")
        assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
        for response, status in ((await http.get("/nope"), 404), (await http.get("/v1/completions"), 405)):
            assert response.status_code == status
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "body",
    [
        rb'{"prompt": "a\ud800b"}',
        rb'{"prompt": ["a", "\uDFFF\uD83D"]}',
        rb'{"a\ud800b": 1, "prompt": "a"}',
        b'{"prompt": "a\xed\xa0\x80b"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"seed": ' + b"9" * 10_000 + b"}",
    ],
    ids=["text", "list", "key", "raw", "no UTF-8", "deep", "long number"],
)
async def test_bodies_that_are_no_unicode_or_no_json(body):
    async with serving() as served, httpx.AsyncClient(base_url=served.url, headers=JSON) as http:
        response = await http.post("/v1/completions", content=body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
        pair = await http.post("/v1/completions", content=rb'{"prompt": "\ud83d\ude00", "max_tokens": 1}')
        assert pair.status_code == 200
        assert bytes(served.engines[0].requests[-1].prompt_ids.tolist()).decode() == "😀"


async def test_numbers_beyond_all_bounds_name_their_field():
    async with serving() as served, httpx.AsyncClient(base_url=served.url, headers=JSON) as http:
        for number in (b"Infinity", b"NaN", b"1e999", b"1" + b"0" * 400):
            for field in ("temperature", "top_p", "max_tokens"):
                content = b'{"prompt": "a", "%s": %s}' % (field.encode(), number)
                response = await http.post("/v1/completions", content=content)
                assert (response.status_code, response.json()["error"]["param"]) == (400, field)


async def test_a_body_that_does_not_arrive():
    async with serving(timeout_s=0.2) as served:
        reader, writer = await asyncio.open_connection(*served.url.removeprefix("http://").split(":"))
        writer.write(BEGUN)
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 10)
        writer.close()
        await until(lambda: served.metrics.in_flight == 0, "it still waits for the body")


async def test_a_body_that_is_too_large():
    async with serving() as served:
        large = await served.post("/v1/completions", {"prompt": "a" * MAX_BODY_BYTES})
        assert large.status_code == 413
        assert served.metrics.in_flight == 0


async def test_a_client_that_leaves_while_it_sends_is_no_error():
    async with serving() as served:
        _, writer = await asyncio.open_connection(*served.url.removeprefix("http://").split(":"))
        writer.write(BEGUN)
        await writer.drain()
        await until(lambda: served.metrics.in_flight == 1, "it has not begun")
        writer.close()
        await until(lambda: served.metrics.in_flight == 0, "it still waits for the body")
        assert served.metrics.disconnects == 1
        assert dict(served.metrics.requests) == {("/v1/completions", 499): 1}


async def test_a_long_text_is_refused_before_it_is_tokenized():
    tokenizer = byte_tokenizer(GatedTokenizer)
    async with serving(tokenizer=tokenizer) as served:
        tokenizer.encoded.clear()
        longest = 512 * len("<assistant>")
        for path, body, param in (
            ("completions", {"prompt": ["a", "x" * (longest + 1)]}, "prompt"),
            ("chat/completions", {"messages": [{"role": "user", "content": "x" * longest}] * 2}, "messages"),
        ):
            response = await served.post(f"/v1/{path}", body)
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
            assert "512 tokens" in error["message"]
        assert tokenizer.encoded == ["a"]
        fitting = await served.post("/v1/completions", {"prompt": "<assistant>" * 500, "max_tokens": 1})
        assert fitting.json()["usage"]["prompt_tokens"] == 500


async def test_others_are_answered_while_a_prompt_is_tokenized():
    tokenizer = byte_tokenizer(GatedTokenizer)
    async with serving(tokenizer=tokenizer) as served:
        tokenizer.gate.clear()
        slow = asyncio.create_task(served.post("/v1/completions", {"prompt": "slow", "max_tokens": 2}))
        try:
            await until(lambda: "slow" in tokenizer.encoded, "it is not tokenized")
            assert (await asyncio.wait_for(served.get("/health"), 5)).status_code == 200
            quick = served.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 2})
            assert (await asyncio.wait_for(quick, 5)).status_code == 200
            assert not slow.done()
        finally:
            tokenizer.gate.set()
        assert (await slow).json()["choices"][0]["text"] == "St"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [[[2, 1, 2]], "abc"], ids=["in the prompt", "in the answer"])
async def test_a_tokenizer_that_fails_ends_one_request_only(prompt, stream):
    tokenizer = byte_tokenizer(GatedTokenizer)
    async with serving(tokenizer=tokenizer, reply="ab\x01cd" * 20, tick_s=0.002) as served:
        body = {"prompt": prompt, "max_tokens": 60, "stream": stream}
        others = [asyncio.create_task(served.post("/v1/completions", body)) for _ in range(3)]
        failed = await served.post("/v1/completions", {**body, "skip_special_tokens": False})
        assert "LookupError: byte 1" in failed.text
        assert '"internal_error"' in failed.text
        assert [other.status_code for other in await asyncio.gather(*others)] == [200] * 3
        await until(lambda: served.engines[0].health().running == 0, "it still generates")
        assert (await served.post("/v1/completions", body)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_more_requests_than_are_served_at_once_are_sent_away(stream):
    async with serving(max_requests=2, tick_s=0.005) as served:
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": stream}
        async with httpx.AsyncClient(base_url=served.url, timeout=20) as http:
            running = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(2)]
            await until(lambda: served.engines[0].health().generated_tokens > 4, "they do not generate")
            assert served.metrics.in_flight == 2
            refused = await served.post("/v1/chat/completions", ASK)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["type"] == "rate_limit_error"
            with pytest.raises(openai.RateLimitError, match="2 requests are in flight"):
                await served.openai.chat.completions.create(model="tiny", **ASK)
            for path in ("/health", "/metrics", "/v1/models"):
                assert (await served.get(path)).status_code == 200
            running[0].cancel()
            await until(lambda: served.metrics.in_flight == 1, "the place is not given back")
            assert (await served.post("/v1/chat/completions", ASK)).status_code == 200
            assert (await running[1]).status_code == 200
        await until(lambda: served.metrics.in_flight == 0, "a place is lost")
        for bad in ({"prompt": ""}, {"prompt": "x" * 600}):
            assert (await served.post("/v1/completions", bad)).status_code == 400
        assert served.metrics.in_flight == 0


async def test_a_key_is_asked_for():
    async with serving(api_key="secret") as served:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
            for path in ("/v1/models", "/metrics"):
                response = await served.get(path, **headers)
                assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (await served.get("/v1/models", authorization="Bearer secret")).status_code == 200
        assert (await served.get("/health")).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            await served.openai.chat.completions.create(model="tiny", **ASK)
        assert served.engines[0].requests == []


async def test_a_replica_without_committed_weights_answers_503_and_says_why():
    async with serving(at_once=False, gate_timeout_s=0.1) as served:
        for stream in (False, True):
            response = await served.post("/v1/chat/completions", {**ASK, "stream": stream})
            assert response.status_code == 503
            assert "no committed version yet" in response.json()["error"]["message"]
        health = await served.get("/health")
        assert health.status_code == 503
        assert "no replica has a committed version" in health.json()["error"]["message"]
        waiting = asyncio.create_task(served.post("/v1/chat/completions", ASK))
        await publish(served.replicas[0], 1, 3)
        assert (await waiting).json()["weight_version"] == 3
        await served.fleet.refresh()
        assert (await served.get("/health")).status_code == 200


async def test_a_request_has_a_deadline():
    async with serving(timeout_s=0.6, tick_s=0.01) as served:
        response = await served.post("/v1/completions", {"prompt": "x", "max_tokens": 400, "ignore_eos": True})
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        await until(lambda: served.engines[0].health().running == 0, "it still generates")
        stream = await served.openai.completions.create(
            model="tiny", prompt="x", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        with pytest.raises(openai.APIError, match="not finished in the longest time"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_generation(stream):
    async with serving(tick_s=0.005) as served:
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": stream, "n": 2}
        async with httpx.AsyncClient(base_url=served.url, timeout=20) as http:
            if stream:
                async with http.stream("POST", "/v1/completions", json=body) as response:
                    async for _ in response.aiter_lines():
                        break
            else:
                asking = asyncio.create_task(http.post("/v1/completions", json=body))
                await until(lambda: served.engines[0].health().generated_tokens > 4, "it does not generate")
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: served.engines[0].health().running == 0, "it still generates")
        await until(lambda: served.metrics.in_flight == 0, "it still counts as in flight")
        assert served.engines[0].health().generated_tokens < 800
        assert served.metrics.disconnects == 1
        assert served.client.loads == {0: 0}


# -- replicas that die -------------------------------------------------------------------------------------------


async def test_requests_of_a_lost_replica_go_on_elsewhere_and_it_is_replaced(tmp_path):
    async with serving(2, max_restarts=1, tick_s=0.002, reply="y" * 100) as served:
        first = served.engines[0]
        asking = [
            asyncio.create_task(served.post("/v1/completions", {"prompt": f"{i}", "max_tokens": 90})) for i in range(6)
        ]
        await until(lambda: all(e.health().generated_tokens > 30 for e in served.engines), "they do not generate")
        served.channels[0].die()
        responses = await asyncio.gather(*asking)
        assert [r.status_code for r in responses] == [200] * 6
        assert all(r.json()["choices"][0]["text"] == "y" * 90 for r in responses)
        await until(lambda: served.engines[0] is not first, "it is not replaced")
        await until(lambda: [r.alive for r in served.fleet.reports] == [True, True], "its replacement does not serve")
        assert "0,1" in [r.headers["x-replica-id"] for r in responses] or served.client.loads.keys() == {0, 1}
        page = (await served.get("/metrics")).text
        assert value(page, 'asyncrl_replica_up{replica="0"}') == 1
        assert value(page, "asyncrl_interruptions_total") >= 1
        for _ in range(6):
            assert (await served.post("/v1/chat/completions", ASK)).status_code == 200
        assert served.engines[0].requests, "the replacement is sent requests"


async def test_the_discovery_file_says_who_is_lost_and_why(tmp_path):
    async with serving(2, max_restarts=0) as served:
        served.channels[0].die()
        await until(lambda: [r.alive for r in served.fleet.reports] == [False, True], "nobody noticed")
        health = await served.get("/health")
        assert (health.status_code, health.json()) == (200, {"serving": 1, "replicas": 2})
        assert value((await served.get("/metrics")).text, 'asyncrl_replica_up{replica="0"}') == 0
        file = DiscoveryFile(tmp_path / "fleet.json", FleetAddress(served.url, "tiny", "fake", 1, 2.0))
        file.write(served.fleet.reports)
        found = json.loads((tmp_path / "fleet.json").read_text())
        assert (found["address"], found["model"], found["engine"], found["pid"]) == (served.url, "tiny", "fake", 1)
        rows = [(r["id"], r["alive"], r["state"], r["version"]) for r in found["replicas"]]
        assert rows == [(0, False, "dead", None), (1, True, "serving", 0)]
        assert "killed by the test" in found["replicas"][0]["detail"]
        assert [p.name for p in tmp_path.iterdir()] == ["fleet.json"]
        file.remove()
        assert not list(tmp_path.iterdir())


async def test_a_replica_with_a_dead_engine_is_replaced():
    async with serving(2, max_restarts=1) as served:
        dead = served.engines[0]
        dead.crash("out of memory")
        await until(lambda: served.engines[0] is not dead, "it is not replaced")
        await until(lambda: served.client.loads.keys() == {0, 1}, "its replacement gets no requests")
        for _ in range(4):
            assert (await served.post("/v1/chat/completions", ASK)).status_code == 200


async def test_while_all_are_lost_requests_wait_for_a_replacement():
    async with serving(1, max_restarts=1) as served:
        served.channels[0].die()
        assert (await served.post("/v1/chat/completions", ASK)).status_code == 200


async def test_when_none_may_be_replaced_health_says_so_and_the_watch_ends():
    async with serving(2, max_restarts=1) as served:
        watch = asyncio.create_task(served.fleet.watch())
        for channel in list(served.channels.values()):
            channel.die()
        with pytest.raises(RunFailed, match="max_replica_restarts"):
            await asyncio.wait_for(watch, 10)


async def test_many_requests_at_once_are_each_answered_once():
    async with serving(3, tick_s=0.0005) as served:
        bodies = [{"prompt": f"{i}", "max_tokens": 20, "return_token_ids": True} for i in range(60)]
        answers = await asyncio.gather(*(served.post("/v1/completions", body) for body in bodies))
        assert all(a.json()["choices"][0]["token_ids"] == list(REPLY.encode()[:20]) for a in answers)
        asked = sorted(bytes(r.prompt_ids.astype(np.uint8)).decode() for e in served.engines for r in e.requests)
        assert asked == sorted(str(i) for i in range(60))
        page = (await served.get("/metrics")).text
        assert value(page, 'asyncrl_requests_total{endpoint="/v1/completions",status="200"}') == 60
        assert value(page, "asyncrl_generated_tokens_total") == 1200


# -- room for the replicas ---------------------------------------------------------------------------------------


@pytest.fixture
def nodes_with_two_and_one_gpu():
    cluster = Cluster()
    for num_gpus in (2, 1):
        cluster.add_node(num_cpus=1, num_gpus=num_gpus, object_store_memory=80 * 2**20, include_dashboard=False)
    ray.init(address=cluster.address, log_to_driver=False)
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
def test_replicas_that_no_gpu_is_left_for_are_refused_at_once(nodes_with_two_and_one_gpu):
    for per_replica, count in ((0, 100), (1, 3), (2, 1), (0.33, 9), (0.04, 70)):
        require_gpus(per_replica, count)
    for per_replica, count, found in (
        (1, 4, "that is 4 GPUs, Ray's cluster has 3"),
        (2, 2, "that is 4 GPUs, Ray's cluster has 3"),
        (3, 1, "the largest has 2 GPUs"),
    ):
        with pytest.raises(ConfigError, match=found):
            require_gpus(per_replica, count)
