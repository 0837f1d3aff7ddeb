"""Reward remote against a local server that fails in every way."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from asyncrl.config.rewards import RemoteRewardConfig, RewardConfig
from asyncrl.data.rows import ChatMessage, PromptRow
from asyncrl.errors import DeadlineExceeded, ProcessDied
from asyncrl.rewards import RewardResult, build_reward

pytestmark = pytest.mark.timeout(180)

ROW = PromptRow((ChatMessage("user", "2+2?"),), "4", "sums", (("level", "1"),), "f:1")
GOOD = json.dumps({"reward": 0.5, "parts": {"style": 1}}).encode()


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, script):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = list(script)
        self.bodies: list[dict] = []
        self.ended = threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append(json.loads(body))
        what = self.server.script.pop(0) if len(self.server.script) > 1 else self.server.script[0]
        if what == "hang":
            self.server.ended.wait(20)
        elif what == "close":
            self.connection.close()
        elif isinstance(what, int):
            self.send_error(what, "told so")
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(len(what) + (50 if what == b"{}cut" else 0)))
            self.end_headers()
            self.wfile.write(what)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def serve():
    servers: list[Server] = []

    def started(*script) -> Server:
        servers.append(Server(script))
        threading.Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return servers[-1]

    yield started
    for server in servers:
        server.ended.set()
        server.shutdown()
        server.server_close()


def reward_of(server: Server, timeout_s: float = 30.0, **settings):
    url = f"http://127.0.0.1:{server.server_address[1]}/reward"
    remote = RemoteRewardConfig(url=url, **{"timeout_s": 5.0, "retries": 2, "backoff_s": 0.01} | settings)
    return build_reward(RewardConfig(function="remote", timeout_s=timeout_s, remote=remote))


def test_the_request_and_the_answer(serve) -> None:
    server = serve(GOOD)
    assert reward_of(server)("four", ROW) == RewardResult(0.5, (("style", 1.0),))
    assert server.bodies == [
        {
            "response": "four",
            "prompt": [{"role": "user", "content": "2+2?"}],
            "ground_truth": "4",
            "data_source": "sums",
            "extra": {"level": "1"},
        }
    ]


@pytest.mark.parametrize("failure", [429, 500, 503, "close", b"{}cut"])
def test_it_asks_again_after_a_failure_that_may_pass(serve, failure) -> None:
    server = serve(failure, failure, GOOD)
    assert reward_of(server)("four", ROW).reward == 0.5
    assert len(server.bodies) == 3


def test_an_answer_that_does_not_come_is_asked_for_again(serve) -> None:
    server = serve("hang", GOOD)
    remote = RemoteRewardConfig(url=f"http://127.0.0.1:{server.server_address[1]}/", timeout_s=0.5, backoff_s=0.01)
    assert build_reward(RewardConfig(function="remote", remote=remote))("four", ROW).reward == 0.5


def test_it_gives_up_after_its_retries(serve) -> None:
    server = serve(503)
    with pytest.raises(ProcessDied, match=r"(?s)f:1.*3 request\(s\) failed; the last: HTTP 503") as caught:
        reward_of(server)("four", ROW)
    assert str(caught.value.process) == "reward model"
    assert len(server.bodies) == 3


def test_it_ends_before_it_would_be_killed(serve) -> None:
    with pytest.raises(DeadlineExceeded, match="no time is left for another"):
        reward_of(serve("hang"), timeout_s=1.0)("four", ROW)


@pytest.mark.parametrize("code", [400, 401, 404, 422])
def test_a_refusal_is_final(serve, code) -> None:
    server = serve(code)
    with pytest.raises(ValueError, match=f"HTTP {code}: "):
        reward_of(server)("four", ROW)
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"nonsense",
        b"[1]",
        b"[" * 200_000,
        b"{}",
        b'{"reward": "1"}',
        b'{"reward": NaN}',
        b'{"reward": -1e999}',
        b'{"reward": 1%s}' % (b"0" * 400),
        b'{"reward": 1%s}' % (b"0" * 5000),
        b'{"reward": 1, "parts": [2]}',
        b'{"reward": 1, "parts": {"a": -1%s}}' % (b"0" * 400),
    ],
    ids=range(11),
)
def test_an_answer_without_a_reward_is_an_error(serve, answer) -> None:
    with pytest.raises(ValueError, match=r"(?s)a reward for f:1"):
        reward_of(serve(answer))("four", ROW)


def test_nobody_there(serve) -> None:
    server = serve(GOOD)
    reward = reward_of(server)
    server.shutdown()
    server.server_close()
    with pytest.raises(ProcessDied, match="Connection"):
        reward("four", ROW)
