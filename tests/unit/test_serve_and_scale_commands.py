"""What `asyncrl-serve` does around its fleet: keys, the port, the discovery file, and how it ends."""

import asyncio
import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager

import pytest
import uvicorn

from asyncrl.chat.connection_limits import REASONS, ConnectionLimiter, ConnectionLimits
from asyncrl.chat.server import bind, serve_until
from asyncrl.commands import new_log, scale, serve
from asyncrl.commands.scale import describe, main
from asyncrl.config.serving import ServingConfig
from asyncrl.driver import scale_requests
from asyncrl.driver.fleet.fleet_size import MOST_WAITS, FleetLimits, FleetSize
from asyncrl.driver.scale_requests import ScaleDesk, ask
from asyncrl.errors import ConfigError, DeadlineExceeded, RunFailed
from asyncrl.serving.discovery import DiscoveryFile, FleetAddress
from asyncrl.serving.fleet import ReplicaReport
from asyncrl.types import FleetReport, ReplicaRow, ReplicaTable
from tests.waiting import wait_until

ADDRESS = FleetAddress("http://127.0.0.1:1", "tiny", "torch", 1, 2.0)


@pytest.mark.parametrize("key", ["", "  ", "secret\n", "schlüssel"])
def test_a_key_that_nobody_could_send_or_that_is_none_is_refused(key, monkeypatch, capsys):
    monkeypatch.delenv("ASYNCRL_API_KEY", raising=False)
    assert serve.main(["no/such/model", "--api-key", key]) == 2
    assert "--api-key" in capsys.readouterr().err
    monkeypatch.setenv("ASYNCRL_API_KEY", key)
    assert serve.main(["no/such/model"]) == 2
    assert "ASYNCRL_API_KEY" in capsys.readouterr().err


def test_the_command_line_goes_before_the_environment(monkeypatch):
    monkeypatch.setenv("ASYNCRL_API_KEY", "from-environment")
    parse = serve._parser().parse_intermixed_args
    assert serve._config(parse(["model"])).api_key == "from-environment"
    assert serve._config(parse(["model", "--api-key", "given"])).api_key == "given"
    monkeypatch.delenv("ASYNCRL_API_KEY")
    assert serve._config(parse(["model"])).api_key is None


def test_the_number_of_requests_is_bounded():
    with pytest.raises(ConfigError, match="--max-requests"):
        ServingConfig(max_requests=0)


def test_clients_may_queue_before_the_fleet_serves():
    with ExitStack() as opened:
        listener = opened.enter_context(bind("127.0.0.1", 0))
        for _ in range(50):
            opened.enter_context(socket.create_connection(listener.getsockname(), timeout=0.5))


def test_the_fleet_outlives_its_discovery_file(tmp_path, caplog):
    directory = tmp_path / "shared"
    file = DiscoveryFile(directory / "fleet.json", ADDRESS)
    with pytest.raises(FileNotFoundError):
        file.write([])
    directory.mkdir()
    file.write([ReplicaReport(0, "serving")])
    directory.rename(tmp_path / "away")
    for _ in range(3):
        file.write([ReplicaReport(0, "serving")])
    assert [r.levelname for r in caplog.records] == ["WARNING"], "told once, not every time"
    (tmp_path / "away").rename(directory)
    file.write([ReplicaReport(5, "serving")])
    assert [r["id"] for r in json.loads((directory / "fleet.json").read_text())["replicas"]] == [5]
    file.remove()
    assert not list(directory.iterdir())


def test_a_discovery_file_that_cannot_be_removed_does_not_keep_the_rest_from_ending(tmp_path, caplog):
    file = DiscoveryFile(tmp_path / "fleet.json", ADDRESS)
    file.write([])
    (tmp_path / "fleet.json").unlink()
    (tmp_path / "fleet.json").mkdir()
    file.remove()
    assert "cannot be removed" in caplog.text


def test_the_log_is_a_new_file_that_only_its_owner_reads(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"asyncrl-serve-{os.getpid()}.log").symlink_to(tmp_path / "another's")
    files = {new_log("asyncrl-serve") for _ in range(3)}
    assert len(files) == 3
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert not (tmp_path / "another's").exists()


def test_each_reason_is_counted_always_and_told_once_a_minute(caplog):
    now = [0.0]
    guard = ConnectionLimiter(ConnectionLimits(max_connections=1, response_timeout_s=1), clock=lambda: now[0])
    for now[0] in (0.0, 0.1, 59.0, 60.0, 60.1, 130.0):
        for reason in REASONS:
            guard.count(reason)
    assert set(guard.counts.values()) == {6}
    assert [r.getMessage().count("; 1 so far") for r in caplog.records[: len(REASONS)]] == [1] * len(REASONS)
    assert len(caplog.records) == 3 * len(REASONS)


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "fits"),
    [(80, 4096, 1000, range(1000, 1001)), (80, 200, 1000, range(50, 199)), (80, 80, 1000, range(16, 79))],
)
def test_the_limit_on_descriptors_is_raised_as_far_as_connections_need_it(soft, hard, wanted, fits):
    program = f"""
import resource
from asyncrl.chat.connection_limits import connections_that_fit
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
print(connections_that_fit({wanted}), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    found, now, most = map(int, done.stdout.split())
    assert found in fits
    assert found < now <= hard
    assert most == hard
    assert ("ulimit" in done.stderr) == (found < wanted)


class Ending:
    """A real HTTP server, a fleet that is watched, and the wish to stop."""

    def __init__(self, listener):
        async def app(scope, receive, send): ...

        settings = uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(settings)
        self.stop = asyncio.get_running_loop().create_future()
        self.lost = asyncio.get_running_loop().create_future()
        self.serving = asyncio.create_task(self.server._serve([listener]))
        self.watching = asyncio.create_task(self._watch())

    async def _watch(self):
        await self.lost

    async def __call__(self):
        try:
            await asyncio.wait_for(serve_until(self.stop, self.server, self.serving, self.watching), 10)
        finally:
            assert self.serving.done()
            assert self.watching.done()

    async def started(self):
        async with asyncio.timeout(60):
            while not self.server.started:
                await asyncio.sleep(0.001)


async def test_an_http_server_that_cannot_go_on_is_told():
    listener = socket.create_server(("127.0.0.1", 0))
    os.close(listener.detach())
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        await Ending(listener)()


async def test_an_http_server_that_ends_without_a_reason_is_told():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ending = Ending(listener)
        await ending.started()
        ending.server.should_exit = True
        with pytest.raises(RunFailed, match="ended by itself"):
            await ending()


async def test_the_loss_of_the_fleet_and_the_wish_to_stop_end_the_server():
    for end in ("lost", "stop"):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ending = Ending(listener)
            await ending.started()
            if end == "stop":
                ending.stop.set_result(None)
                await ending()
                continue
            ending.lost.set_exception(RunFailed("all are lost"))
            with pytest.raises(RunFailed, match="all are lost"):
                await ending()


# -- `asyncrl-scale` against the driver's side of it -------------------------------------------------------------------


class Pool:
    def __init__(self, count):
        self.rows = {i: ReplicaRow(None, "serving", 0) for i in range(count)}

    @property
    def table(self):
        return ReplicaTable(0, dict(self.rows))

    def join(self, replica_id):
        self.rows[replica_id] = ReplicaRow(None, "serving", 0)

    def leave(self, replica_id, why):
        del self.rows[replica_id]


class Places:
    """For replicas 0 to 3 there is room at once, for others never."""

    async def ready(self, replica_id, timeout_s):
        if replica_id > 3:
            await asyncio.sleep(1000)

    async def give_back(self, replica_id): ...

    async def ending(self):
        return ()


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".lock").write_text(str(os.getpid()))
    return tmp_path


@contextmanager
def driver(run_dir, most=None, on_event=None):
    """The loops of a driver, in a thread; yields its events."""
    events, ended = [], threading.Event()

    async def loops():
        limits = FleetLimits(2, most)
        fleet = FleetSize(Pool(2), Places(), limits, start_timeout_s=1, on_event=on_event or events.append, look_s=0.01)
        works = [fleet.watch(), ScaleDesk(run_dir / "scale", fleet).serve()]
        tasks = [asyncio.create_task(work) for work in works]
        while not ended.is_set():
            await asyncio.sleep(0.01)
            assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=lambda: asyncio.run(loops()))
    thread.start()
    try:
        wait_until((run_dir / "scale").is_dir)
        yield events
    finally:
        ended.set()
        thread.join(20)


@pytest.fixture(autouse=True)
def _short_times(monkeypatch):
    monkeypatch.setattr(scale_requests, "LOOK_S", 0.01)
    monkeypatch.setattr(scale, "AGAIN_S", 0.02)


def test_it_shows_the_fleet_asks_for_another_and_waits_for_it(run_dir, capsys):
    with driver(run_dir) as events:
        assert main([str(run_dir)]) == 0
        assert (
            capsys.readouterr().out
            == "wanted 2 (from 2 to 10000), there 2\n  replica 0: serving\n  replica 1: serving\n"
        )
        assert main([str(run_dir), "replicas=4", "--wait", "20"]) == 0
        assert "wanted 4 (from 2 to 10000), there 4" in capsys.readouterr().out
        assert main([str(run_dir), "replicas=3", "--wait", "20"]) == 0
        assert [(e.replicas, e.former, e.asked_by) for e in events] == [(4, 2, "command"), (3, 4, "command")]
        assert not list((run_dir / "scale").iterdir()), "requests and answers are removed"
    assert not (run_dir / "scale").exists()


def test_what_cannot_be_is_refused_with_what_to_do(run_dir, capsys):
    with driver(run_dir, most=3) as events:
        for target, found in (("replicas=1", "rollout.num_replicas"), ("replicas=4", "rollout.max_replicas=3")):
            assert main([str(run_dir), target]) == 2
            told = capsys.readouterr().err
            assert told.startswith("asyncrl-scale: asked: ")
            assert found in told
            assert "do:    " in told
        for target in ("replicas=0", "replicas=-1", "replicas=two", "replicas=", "6", "ranks=4", "replicas=²"):
            assert main([str(run_dir), target]) == 2
            assert "write for example replicas=6" in capsys.readouterr().err
        assert [e.asked_by for e in events] == ["recipe"]


@pytest.mark.parametrize("number", ["10001", "99999999999999999999", "9" * 5000, "0" * 5000 + "1" * 5])
def test_an_absurd_number_is_refused_and_ends_nothing(run_dir, capsys, number):
    with driver(run_dir) as events:
        assert main([str(run_dir), f"replicas={number}"]) == 2
        assert "no run has more than 10000" in capsys.readouterr().err
        asked = json.dumps({"replicas": int(number[-4000:]), "until_s": time.time() + 60})
        (run_dir / "part").write_text(asked)
        (run_dir / "part").rename(run_dir / "scale" / "own.request.json")  # past the command
        answer = run_dir / "scale" / "own.answer.json"
        wait_until(lambda: answer.exists() and answer.read_text())
        assert "no run has more than 10000" in json.loads(answer.read_text())["error"]
        assert events == []


def test_many_replicas_wait_a_few_at_a_time(run_dir):
    with driver(run_dir):
        found = ask(run_dir / "scale", 10_000, 20)
        assert (found.target, len(found.waiting)) == (10_000, MOST_WAITS)
        assert len(describe(found).splitlines()) == 3 + MOST_WAITS
        wait_until(lambda: len(ask(run_dir / "scale", None, 20).states) == 4)
        assert len(ask(run_dir / "scale", None, 20).waiting) == MOST_WAITS
        assert ask(run_dir / "scale", 4, 20).target == 4
        wait_until(lambda: not ask(run_dir / "scale", None, 20).waiting)


def test_what_is_no_file_does_not_hold_the_driver_up_and_an_error_of_the_fleet_is_the_answer(run_dir):
    def told(event):
        if event.replicas == 4:
            raise RuntimeError("not four")

    with driver(run_dir, on_event=told):
        os.mkfifo(run_dir / "scale" / "a.request.json")
        (run_dir / "scale" / "b.request.json").mkdir()
        assert ask(run_dir / "scale", 3, 20).target == 3
        with pytest.raises(ConfigError, match="not four"):
            ask(run_dir / "scale", 4, 20)
        assert ask(run_dir / "scale", None, 20).target == 3


def test_what_is_not_reached_in_time_says_what_each_replica_waits_for(run_dir, capsys):
    with driver(run_dir):
        assert main([str(run_dir), "replicas=5", "--wait", "0.3"]) == DeadlineExceeded.exit_code
        told = capsys.readouterr().err
        assert "5 replicas" in told
        assert "replica 4: waits for a place" in told


def test_no_run_and_a_run_that_does_not_answer_are_told_apart(run_dir, tmp_path, capsys, monkeypatch):
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "no such directory" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(scale, "ANSWER_S", 0.1)
        assert main([str(run_dir)]) == DeadlineExceeded.exit_code
    assert "ask again when it trains" in capsys.readouterr().err
    (run_dir / ".lock").write_text("999999999")
    assert main([str(run_dir)]) == 2
    assert "no run is in progress there" in capsys.readouterr().err
    (run_dir / "scale").mkdir()  # what a killed run leaves
    monkeypatch.setattr(scale, "ELSEWHERE_S", 0.1)
    assert main([str(run_dir)]) == 2
    assert "no run is in progress on this machine" in capsys.readouterr().err
    (run_dir / ".lock").write_text(str(os.getpid()))
    monkeypatch.setattr(scale, "ANSWER_S", 0.1)
    assert main([str(run_dir), "replicas=3"]) == DeadlineExceeded.exit_code
    assert "has not answered within 0.1 s" in capsys.readouterr().err
    assert not list((run_dir / "scale").iterdir()), "nobody does later what nobody waits for"


@pytest.mark.parametrize(
    "request_text",
    [
        "",
        "[]",
        "{}",
        '{"replicas": true, "until_s": 1e12}',
        '{"replicas": 3, "until_s": "now"}',
        "[" * 5000,
        "\x00",
        "x" * 9000,
    ],
)
def test_a_request_that_is_none_is_answered_and_changes_nothing(run_dir, request_text):
    with driver(run_dir) as events:
        path = run_dir / "scale" / "strange.request.json"
        path.write_text(request_text)
        answer = run_dir / "scale" / "strange.answer.json"
        wait_until(answer.exists)
        assert "the request strange.request.json" in json.loads(answer.read_text())["error"]
        assert events == []


def test_a_request_that_comes_too_late_changes_nothing(run_dir):
    with driver(run_dir) as events:
        path = run_dir / "scale" / "late.request.json"
        (run_dir / "part").write_text(json.dumps({"replicas": 3, "until_s": time.time() - 1}))
        (run_dir / "part").rename(path)
        wait_until(lambda: not path.exists())
        assert events == []


def test_a_run_that_comes_up_answers_who_waits_for_it_and_nobody_else(run_dir):
    (run_dir / "scale").mkdir()  # of a run that was killed
    old = run_dir / "scale" / "old.request.json"
    old.write_text(json.dumps({"replicas": 4, "until_s": time.time() - 100}))
    with driver(run_dir) as events:
        assert ask(run_dir / "scale", 3, 20).target == 3
        assert [e.replicas for e in events] == [3]
        assert not old.exists()


def test_what_ask_returns_is_what_the_run_has(run_dir):
    with driver(run_dir):
        asked = ask(run_dir / "scale", 5, 20)
        assert (asked.target, asked.least, asked.most) == (5, 2, 10000)
        with pytest.raises(ConfigError, match="num_replicas"):
            ask(run_dir / "scale", 1, 20)
        while len((found := ask(run_dir / "scale", None, 20)).states) < 4:
            time.sleep(0.01)
        assert found == FleetReport(5, 2, 10000, dict.fromkeys(range(4), "serving"), {4: ""})
    assert "replica 4: waits for a place: it has begun to look" in describe(found)
