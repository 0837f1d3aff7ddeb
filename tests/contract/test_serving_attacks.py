"""Clients that mean no good, or read nothing, against both HTTP servers over real sockets: everybody else is served."""

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
from contextlib import asynccontextmanager

import httpx
import pytest

from asyncrl.chat.connection_limits import ConnectionLimits
from asyncrl.config.environments import AgentConfig
from asyncrl.environments.agent_server import AgentServer
from tests.environments import opened
from tests.processes import ROOT
from tests.serving import ASK, serving
from tests.waiting import until

BIG = {"prompt": [[7] * 500] * 8, "n": 64, "max_tokens": 1, "return_token_ids": True}
"""The answer has a megabyte."""
LONG = {"prompt": "x", "n": 32, "max_tokens": 400, "ignore_eos": True, "stream": True, "return_token_ids": True}
ENDS = (b'"weight_version":0}', b"data: [DONE]\n\n\r\n0\r\n\r\n")
"""Of their answers."""
SMALL = {"chunk_tokens": 100, "send_buffer_bytes": 4096}
"""What a client does not take stays with the server, not in the kernel."""


def limits(**given):
    return ConnectionLimits(**{"max_connections": 1000, "response_timeout_s": 20.0, **given})


@asynccontextmanager
async def agents(given):
    async with opened(AgentServer(AgentConfig(), given)) as server:
        yield server.url.removesuffix("/v1"), server.limiter.counts


@asynccontextmanager
async def models(given):
    async with serving(limits=given, local_only=True) as served:
        yield served.url, served.metrics.refusals


both = pytest.mark.parametrize("server", [models, agents])


class Client:
    """One connection that takes little at a time."""

    def __init__(self, url):
        self._address = url.removeprefix("http://").split(":")
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.setblocking(False)

    async def __aenter__(self):
        host, port = self._address
        await asyncio.get_running_loop().sock_connect(self.socket, (host, int(port)))
        return self

    async def __aexit__(self, *_):
        self.socket.close()

    async def send(self, data):
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def post(self, body, path="/v1/completions", **headers):
        data = json.dumps(body).encode()
        headers = {"host": "127.0.0.1", "content-type": "application/json", "content-length": str(len(data)), **headers}
        head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        await self.send(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data)

    async def take(self, size=2**16):
        """b"" when the connection is closed."""
        try:
            return await asyncio.get_running_loop().sock_recv(self.socket, size)
        except ConnectionError:
            return b""

    async def closed(self):
        async with asyncio.timeout(60):
            while await self.take():
                pass


# -- connections that ask nothing --------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("first", [b"", b"G", b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\nG"])
async def test_a_head_that_does_not_end_is_cut_off_however_it_is_sent(server, first):
    async with server(limits(head_timeout_s=0.3)) as (url, counts), Client(url) as client:
        await client.send(first)

        async def goes_on():
            while first:
                await client.send(b"ET / HTTP/1.1\r\nx: 1\r\n" if first == b"G" else b"x")
                await asyncio.sleep(0.02)

        sending = asyncio.create_task(goes_on())
        await client.closed()
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await sending
        assert counts == {"head": 1}


@both
async def test_who_waits_longest_makes_room(server):
    async with server(limits(max_connections=5)) as (url, counts), contextlib.AsyncExitStack() as opened:
        idle = [await opened.enter_async_context(Client(url)) for _ in range(30)]
        for client in idle[:25]:
            await client.closed()
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{url}/v1/models")).status_code in (200, 401)
        assert counts == {"room": 26}


async def test_a_request_that_is_answered_is_not_closed_for_others():
    async with serving(limits=limits(max_connections=5), tick_s=0.02) as served, contextlib.AsyncExitStack() as opened:
        body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
        asking = asyncio.create_task(served.post("/v1/completions", body))
        await until(lambda: served.metrics.in_flight, "it has not begun")
        for _ in range(30):
            await opened.enter_async_context(Client(served.url))
        await until(lambda: served.metrics.refusals["room"] >= 25, "nobody makes room")
        assert (await asking).json()["usage"]["completion_tokens"] == 200


class Process:
    """A server in a process of its own that may open few files."""

    def __init__(self, process, url, log):
        self.process, self.url, self.log = process, url, log

    @property
    def descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    async def is_well(self):
        async with httpx.AsyncClient(timeout=10) as http:
            assert (await http.get(f"{self.url}/health")).status_code == 200
            asked = await http.post(f"{self.url}/v1/completions", json={"prompt": "x", "max_tokens": 1})
            assert asked.status_code == 200

    async def refusals(self, reason):
        async with httpx.AsyncClient(timeout=10) as http:
            page = (await http.get(f"{self.url}/metrics")).text
        (line,) = [line for line in page.splitlines() if f'refusals_total{{reason="{reason}"}}' in line]
        return float(line.split()[-1])


@pytest.fixture
async def process(tmp_path):
    """process(*options) -> Process"""
    async with contextlib.AsyncExitStack() as ended:

        async def start(*options):
            with (tmp_path / "log.txt").open("w") as log:
                made = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "tests.serving", *options),
                    cwd=ROOT,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                )

            async def end():
                made.stdin.close()
                async with asyncio.timeout(30):
                    assert await made.wait() == 0

            ended.push_async_callback(end)
            async with asyncio.timeout(60):
                url = (await made.stdout.readline()).decode().strip()
            assert url, (tmp_path / "log.txt").read_text()
            return Process(made, url, tmp_path / "log.txt")

        yield start


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reason"),
    [((), "room"), (("--max-connections", "10000"), "descriptors")],
    ids=["as many as fit", "more than fit"],
)
async def test_hundreds_of_idle_connections_with_few_descriptors(process, options, reason):
    server = await process("--descriptors", "100", *options)
    await server.is_well()
    before = server.descriptors
    async with contextlib.AsyncExitStack() as opened:
        for number in range(400):
            client = await opened.enter_async_context(Client(server.url))
            with contextlib.suppress(ConnectionError):  # it may have made room already
                await client.send((b"", b"G", b"GET /health HTTP/1.1\r\nx: ")[number % 3])
            if number % 80 == 79:
                await server.is_well()
        assert await server.refusals(reason) > 100
    await until(lambda: server.descriptors <= before, "descriptors are lost")
    await server.is_well()
    log = server.log.read_text()
    assert len(log) < 2000, log
    assert log.count("told once a minute") <= 2


# -- what is no HTTP, and what is not meant for the server -------------------------------------------------------


@both
async def test_what_is_no_http_costs_one_line_of_log(server, caplog):
    caplog.set_level(logging.INFO)
    async with server(limits()) as (url, counts):
        for sent in (
            b"\x16\x03\x01\r\n\r\n",
            b"GET / HTTP/1.1\r\nupgrade\r\n\r\n",
            b"POST / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        ):
            for _ in range(20):
                async with Client(url) as client:
                    await client.send(sent)
                    assert b" 400 " in await client.take()
                    await client.closed()
        assert counts == {"malformed": 60}
        upgrade = {"connection": "upgrade", "upgrade": "websocket"}
        broken = b"POST /v1/models HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1\r\na"
        for _ in range(20):
            async with httpx.AsyncClient() as http:
                assert (await http.get(f"{url}/v1/models", headers=upgrade)).status_code in (200, 401)
            async with Client(url) as client:  # what follows an answer that did not wait for it
                await client.send(broken)
                assert b" 405 " in await client.take()
                await client.send(b"no chunk\r\n")
                await client.closed()
        assert counts == {"malformed": 80}
    told = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(told) == 1, [r.getMessage() for r in told]


@both
async def test_a_page_in_a_browser_cannot_ask(server):
    """What a browser sends to another origin without asking first, and what it sends by a name that was rebound."""
    path = "/v1/chat/completions"
    key = {"authorization": "Bearer none"}
    async with server(limits()) as (url, _), httpx.AsyncClient(base_url=url) as http:
        for host in (
            "evil.example",
            "evil.example:8000",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "",
            "[::1",
            "1",
        ):
            for method, asked in (("POST", path), ("GET", "/v1/models")):
                answer = await http.request(method, asked, json=ASK, headers={"host": host, **key})
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "wrong_host"), host
        for host in ("localhost", "LOCALHOST:1", "me.localhost", "127.0.0.1", "127.0.0.2:80", "[::1]:80", "10.1.2.3"):
            assert (await http.get("/v1/models", headers={"host": host})).status_code in (200, 401), host
        assert "access-control-allow-origin" not in (await http.options(path, headers={"origin": "http://a"})).headers


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (None, 415),
        ("", 415),
        ("text/plain", 415),
        ("text/plain; application/json", 415),
        ("text/plain, application/json", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
    ],
)
async def test_only_what_is_said_to_be_json_is_read(kind, status):
    async with serving() as served, httpx.AsyncClient(base_url=served.url) as http:
        headers = {} if kind is None else {"content-type": kind}
        answer = await http.post("/v1/chat/completions", content=json.dumps(ASK), headers=headers)
        assert answer.status_code == status
        assert bool(served.engines[0].requests) == (status == 200)


# -- answers that nobody takes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [BIG, LONG], ids=["whole", "stream"])
@pytest.mark.parametrize("reason", ["deadline", "stalled"])
async def test_an_answer_that_nobody_takes_is_in_flight_until_it_is_given_up(body, reason):
    limit_s, status = 2.0, ("/v1/completions", 200)
    while True:
        short = {"response_timeout_s" if reason == "deadline" else "stall_timeout_s": limit_s}
        async with serving(limits=limits(**short), **SMALL) as served, Client(served.url) as client:
            await client.post(body)
            await until(lambda: served.metrics.requests, "it is not answered")
            if not served.metrics.requests[status] and reason == "deadline" and limit_s < 30:
                limit_s *= 4  # a busy machine did not finish the answer before its deadline
                continue
            assert served.metrics.requests[status]
            assert served.metrics.in_flight == 1
            await until(lambda: served.metrics.in_flight == 0, "it is never given up")
            assert served.metrics.refusals == {reason: 1}
            assert served.client.loads == {0: 0}
            await client.closed()
            return


@pytest.mark.parametrize("body", [BIG, LONG], ids=["whole", "stream"])
async def test_a_reader_that_is_too_slow_for_the_time_of_its_request_is_cut_off(body):
    timeout_s, response_timeout_s = (20.0, 3.0) if body is BIG else (1.0, 20.0)
    given = limits(response_timeout_s=response_timeout_s)
    async with serving(timeout_s=timeout_s, limits=given, **SMALL) as served, Client(served.url) as client:
        await client.post(body, connection="close")
        received = b""
        async with asyncio.timeout(30):
            while piece := await client.take(500):
                received += piece
                await asyncio.sleep(0.01)
        await until(lambda: served.metrics.in_flight == 0, "it still counts")
        assert served.metrics.refusals == ({"deadline": 1} if body is BIG else {})
        assert (b"deadline_exceeded" in received) == (body is LONG)
        assert not received.endswith(ENDS)


async def test_requests_one_after_another_whose_answers_nobody_takes():
    async with serving(limits=limits(stall_timeout_s=0.3), **SMALL) as served, Client(served.url) as client:
        ask = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1000

        async def asks():
            while True:
                await client.send(ask)

        asking = asyncio.create_task(asks())
        await until(lambda: served.metrics.refusals["stalled"], "it is never given up")
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await asking


@pytest.mark.parametrize("body", [BIG, LONG], ids=["whole", "stream"])
async def test_a_slow_reader_gets_all_of_its_answer(body):
    """Slower than the time in which something must be taken, and than that for a head."""
    given = limits(stall_timeout_s=0.5, head_timeout_s=0.2)
    async with serving(limits=given, **SMALL) as served, Client(served.url) as client:
        await client.post(body, connection="close")
        received = b""
        while piece := await client.take(2**14):
            received += piece
            await asyncio.sleep(0.01)
        assert received.endswith(ENDS)
        assert len(received) > 100_000
        assert not served.metrics.refusals
        assert served.metrics.in_flight == 0


async def test_a_stream_that_takes_long_is_not_cut_off():
    given = limits(stall_timeout_s=0.1, head_timeout_s=0.1)
    async with serving(limits=given, tick_s=0.02) as served:
        stream = await served.openai.completions.create(
            model="tiny", prompt="x", max_tokens=100, stream=True, extra_body={"ignore_eos": True}
        )
        assert len([piece async for piece in stream]) > 30
        assert not served.metrics.refusals
