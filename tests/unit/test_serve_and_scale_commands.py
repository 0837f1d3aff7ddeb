"""What `asyncrl-serve` does around its fleet: keys, the port, the discovery file, and how it ends."""

import asyncio
import errno
import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest
import uvicorn

from asyncrl.chat.connection_limits import REASONS, ConnectionLimiter, ConnectionLimits
from asyncrl.chat.server import bind, serve_until
from asyncrl.commands import new_log, serve
from asyncrl.config.serving import ServingConfig
from asyncrl.errors import ConfigError, RunFailed
from asyncrl.serving.discovery import DiscoveryFile, FleetAddress
from asyncrl.serving.fleet import ReplicaReport

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
