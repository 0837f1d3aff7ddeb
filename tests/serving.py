"""A fleet of scripted replicas behind a real socket, for tests of the HTTP side; `python -m tests.serving` is one in a
process of its own, which serves until its input ends."""

import argparse
import asyncio
import logging
import resource
import socket
import sys
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import openai
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrl.chat.connection_limits import ConnectionLimiter, ConnectionLimits, connections_that_fit
from asyncrl.chat.server import Server
from asyncrl.config.model import ModelConfig
from asyncrl.driver.fleet.replica_pool import PoolSettings, ReplicaPool
from asyncrl.errors import BadRequest
from asyncrl.inference.replica import Replica
from asyncrl.rollout.generation import GenerationClient
from asyncrl.rollout.router import BLOCK_TOKENS, prefix_blocks
from asyncrl.serving.app import Api, ServedModel
from asyncrl.serving.fleet import Fleet
from asyncrl.serving.metrics import ServingMetrics
from asyncrl.serving.model_text import ModelText
from asyncrl.types import ReplicaTable
from asyncrl_testing.fake_engine import FakeEngine, FakeScript
from asyncrl_testing.local import LocalReplicaChannel
from tests.waiting import until

SPECIALS = ["<end>", "<user>", "<assistant>"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'alien' %}{{ raise_exception('no such role') }}{% endif %}"
    "<user>{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
REFUSED_SCHEMA = "refuse this"
REPLY = "Straße — 12€ and a 😀. The end of it."


def byte_tokenizer(kind=PreTrainedTokenizerFast):
    """A token is a byte, `ids[b]` of byte b is b; special tokens follow."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = {bytes_of(letter): letter for letter in alphabet}
    vocabulary = {letters[b]: b for b in range(256)} | {text: 256 + i for i, text in enumerate(SPECIALS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return kind(tokenizer_object=tokenizer, eos_token="<end>", chat_template=TEMPLATE)


def bytes_of(letter):
    """The byte that GPT-2's alphabet writes as `letter`."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    table = {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}
    return table[letter]


class GatedTokenizer(PreTrainedTokenizerFast):
    """Takes as long as its `gate` is closed, and cannot decode byte 1 where special tokens are shown."""

    def __init__(self, **options):
        super().__init__(**options)
        self.gate = threading.Event()
        self.gate.set()
        self.encoded = []

    def encode(self, text, **options):
        self.encoded.append(text)
        assert self.gate.wait(10)
        return super().encode(text, **options)

    def decode(self, ids, *, skip_special_tokens=False, **options):
        if 1 in ids and not skip_special_tokens:
            raise LookupError("byte 1")
        return super().decode(ids, skip_special_tokens=skip_special_tokens, **options)


class ScriptedEngine(FakeEngine):
    """Answers `reply`'s bytes and an end token; finds in its prefix cache what it was asked before. Of several replies
    it says the one of this turn: as many as there are replies in the prompt come before it. Refuses JSON schemas that
    hold `REFUSED_SCHEMA`."""

    def __init__(self, script, reply=REPLY):
        super().__init__(script)
        self.replies = [[*text.encode(), 256] for text in ([reply] if isinstance(reply, str) else reply)]
        self.requests = []
        self._cache = set()

    async def generate(self, request):
        self.requests.append(request)
        if REFUSED_SCHEMA in (request.sampling.json_schema or ""):
            raise BadRequest(f"the schema: no such keyword: {REFUSED_SCHEMA}")
        blocks = prefix_blocks(request.prompt_ids)
        cached = BLOCK_TOKENS * sum(block in self._cache for block in blocks)
        self._cache.update(blocks)
        async for chunk in super().generate(request):
            yield chunk if chunk.finish_reason is None else chunk._replace(cached_tokens=cached)

    def _sample(self, stream):
        request = stream.request
        prompt = request.prompt_ids[: len(request.prompt_ids) - request.first_position].tolist()
        turn = prompt.count(258) or bytes(i for i in prompt if i < 256).count(b"<|im_start|>assistant")
        reply = self.replies[min(max(turn, 1), len(self.replies)) - 1]
        token = reply[(request.first_position + stream.produced) % len(reply)]
        stream.ids.append(token)
        stream.produced += 1
        if token in request.sampling.stop_token_ids and stream.produced > request.sampling.min_tokens:
            return "stop"
        return "length" if stream.produced == request.sampling.max_tokens else None


class Served:
    """A fleet of scripted replicas behind a real socket."""

    def __init__(self, replicas, engines, channels, client, fleet, metrics):
        self.replicas, self.engines, self.channels = replicas, engines, channels
        self.client, self.fleet, self.metrics = client, fleet, metrics
        self.url = ""

    @property
    def openai(self):
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=20)

    async def post(self, path, body, **headers):
        async with httpx.AsyncClient(base_url=self.url, timeout=20) as http:
            return await http.post(path, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})

    async def get(self, path, **headers):
        async with httpx.AsyncClient(base_url=self.url, timeout=20) as http:
            return await http.get(path, headers=headers)


class LocalControl:
    """What a pool calls of a replica in this process; the channel to it dies with it."""

    def __init__(self, replica, channel):
        self._replica, self.channel = replica, channel

    async def placed(self, timeout_s): ...

    async def call(self, timeout_s, method, *args):
        self.channel._require_alive()
        return await asyncio.wait_for(method(self._replica, *args), timeout_s)

    def kill(self):
        self.channel.die()


@asynccontextmanager
async def serving(
    count=1,
    *,
    reply=REPLY,
    at_once=True,
    gate_timeout_s=5.0,
    api_key=None,
    timeout_s=20.0,
    max_requests=100,
    name="tiny",
    tokenizer=None,
    limits=None,
    local_only=False,
    send_buffer_bytes=None,
    max_restarts=0,
    guided=False,
    parser="auto",
    max_model_len=512,
    **script,
):
    script = {"tick_s": 0.0, "chunk_tokens": 3, "max_model_len": max_model_len, "guided": guided, **script}
    engines = [ScriptedEngine(FakeScript(start_version=0 if at_once else None, **script), reply) for _ in range(count)]

    def made(i, engine):
        return Replica(i, lambda: engine, gate_timeout_s=gate_timeout_s, serves_at_once=at_once)

    replicas = [made(i, engine) for i, engine in enumerate(engines)]
    channels = {i: LocalReplicaChannel(r) for i, r in enumerate(replicas)}
    client = GenerationClient(
        "test", ReplicaTable(), request_timeout_s=60, poll_interval_s=0.001, waits_for_replacements=True
    )
    settings = PoolSettings(max_restarts, 10, health_interval_s=60, health_timeout_s=10, serves_at_once=True)

    def spawn(i):
        if channels[i].spawned:
            engines[i] = ScriptedEngine(FakeScript(start_version=0, **script), reply)
            replicas[i] = made(i, engines[i])
            channels[i] = LocalReplicaChannel(replicas[i])
        channels[i].spawned = True
        return LocalControl(replicas[i], channels[i])

    for channel in channels.values():
        channel.spawned = False
    pool = ReplicaPool(spawn, count, settings, on_event=lambda event: None)

    async def route(table):
        rows = {i: replace(row, handle=row.handle.channel) for i, row in table.rows.items()}
        client.set_replicas(replace(table, rows=rows))

    await pool.start()
    await pool.set_listener(route)
    fleet = Fleet(client, pool, refresh_s=0.05)
    metrics = ServingMetrics()
    text = ModelText(
        tokenizer or byte_tokenizer(),
        ModelConfig(path=str(Path(__file__).parent)),
        None,
        max_model_len=max_model_len,
        parser=parser,
    )
    api = Api(
        ServedModel(name, text, 0.0, guided),
        fleet,
        metrics,
        api_key=api_key,
        request_timeout_s=timeout_s,
        max_requests=max_requests,
        local_only=local_only,
    )
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    limits = limits or ConnectionLimits(max_connections=1000, response_timeout_s=timeout_s + 5)
    server = Server(api.app(), ConnectionLimiter(limits, metrics.refusals), grace_s=1)
    served = Served(replicas, engines, channels, client, fleet, metrics)
    served.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    task = asyncio.create_task(server.serve([listener]))
    watch = asyncio.create_task(fleet.watch())
    try:
        await until(lambda: server.started)
        await fleet.refresh()
        yield served
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 10)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await client.close()
        await pool.stop(5)


ASK = {"messages": [{"role": "user", "content": "hello"}]}


async def _program() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--descriptors", type=int)
    parser.add_argument("--max-connections", type=int, help="as many as fit unless given")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (arguments.descriptors, arguments.descriptors))
    connections = arguments.max_connections or connections_that_fit(10_000)
    limits = ConnectionLimits(max_connections=connections, response_timeout_s=20, head_timeout_s=600)
    async with serving(limits=limits) as served:
        sys.stdout.write(f"{served.url}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    logging.basicConfig()
    asyncio.run(_program())
