"""Sandboxes of agents: what every backend does, and the pool that lends them. In containers the command lines are
checked against a stand-in; with SANDBOX_RUNTIME set, against a real one."""

import asyncio
import io
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
import uuid
from contextlib import asynccontextmanager, contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from asyncrl.config.environments import AgentConfig, SandboxConfig
from asyncrl.data.rows import ChatMessage, PromptRow
from asyncrl.environments import check_environment, sandboxes
from asyncrl.environments.sandboxes import BACKENDS, SandboxPool, _archive, source_of
from asyncrl.errors import ConfigError, ProcessDied
from asyncrl.workers.sandbox import confined, locked_directory, remove_stale_sandboxes
from tests.contract.test_agents_anywhere import GREETS, agent_recipe
from tests.environments import play, task_of
from tests.processes import ROOT
from tests.waiting import until, wait_until

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part of it is Linux's"),
]

INSTALLED = os.environ.get("SANDBOX_RUNTIME", "")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Directories of sandboxes lie in one of their own, in which nothing is left."""
    place = Path(tempfile.mkdtemp(prefix="sandboxes-"))
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setenv("FAKE_CONTAINERS", str(place))
    yield place
    left = list(place.iterdir())
    shutil.rmtree(place)
    assert not left


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A `docker` that runs everything on this machine."""
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/container_runtime.py "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


@pytest.fixture(params=["local", "stand-in", "installed"])
def config(request):
    """The settings of a backend."""
    if request.param == "local":
        return SandboxConfig(backend="local")
    if request.param == "stand-in":
        request.getfixturevalue("stand_in")
        return SandboxConfig(backend="docker", image="any")
    if not INSTALLED:
        pytest.skip("SANDBOX_RUNTIME does not name a runtime and an image, such as `podman python:3.12-slim`")
    backend, image = INSTALLED.split()
    return SandboxConfig(backend=backend, image=image)


@asynccontextmanager
async def opened(config):
    sandbox = BACKENDS[config.backend](config)
    try:
        await sandbox.reset()
        yield sandbox
    finally:
        await sandbox.close()


def marked(mark):
    """Processes with the mark in their command line."""
    found = (p.info for p in psutil.process_iter(["cmdline", "status"]))
    return [p for p in found if mark in " ".join(p["cmdline"] or ()) and p["status"] != psutil.STATUS_ZOMBIE]


# What every backend does.


async def test_a_command_reads_prints_fails_and_is_told_its_variables(config):
    async with opened(config) as sandbox:
        ended = await sandbox.run(
            ["sh", "-c", 'cat; echo "$WORD$HF_TOKEN"; ls -A; echo err >&2; exit 3'], b"in\n", {"WORD": "a b"}
        )
        assert (ended.exit_code, ended.stdout, ended.stderr) == (3, b"in\na b\n", b"err\n")
        assert (await sandbox.run(["no-such-program"])).exit_code in (126, 127, 255)
        assert (await sandbox.run(["sh", "-c", "kill -9 $$"])).exit_code == 137


async def test_long_streams_pass(config):
    data = os.urandom(1 << 22)
    async with opened(config) as sandbox:
        assert (await sandbox.run(["cat"], data)).stdout == data
        assert (await sandbox.run(["true"], data)).exit_code == 0, "it does not read"


async def test_files_stay_until_the_reset_and_belong_to_one_sandbox(config):
    async with opened(config) as sandbox, opened(config) as other:
        await sandbox.run(["sh", "-c", "mkdir -p a/b && echo 1 > a/b/c && chmod 000 a"])
        assert (await sandbox.run(["ls"])).stdout == b"a\n"
        assert (await other.run(["ls"])).stdout == b""
        await sandbox.reset()
        assert (await sandbox.run(["ls"])).stdout == b""


@pytest.mark.parametrize("end", ["reset", "close"])
async def test_nothing_that_was_started_goes_on(config, end):
    mark = f"sleep 3{uuid.uuid4().int % 10**8}"
    daemon = f'(setsid sh -c "{mark} & {mark}" > /dev/null 2>&1 &); echo begun'
    async with opened(config) as sandbox:
        assert (await sandbox.run(["sh", "-c", daemon])).stdout == b"begun\n"
        running = asyncio.create_task(sandbox.run(["sh", "-c", f"(setsid {mark} &); {mark}"]))
        await until(lambda: marked(mark))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await (sandbox.reset() if end == "reset" else sandbox.close())
        assert not marked(mark)
    await sandbox.close()


# What the pool does.


def row(**extra):
    return PromptRow((ChatMessage("user", "repair it"),), "", "", tuple(extra.items()), "rows:1")


@pytest.fixture
def repository(tmp_path):
    """Files of a sandbox: a program with a fault, and its tests."""
    files = {"src/add.sh": "echo 4\n", "src/old.sh": "echo\n", "tests/test.sh": '[ "$(sh src/add.sh 2 3)" = 5 ]\n'}
    for name, text in files.items():
        path = tmp_path / "repository" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "repository"


def pool_of(config, repository, **changed):
    settings = {"files": str(repository), "check": ["sh", "tests/test.sh"], "solution": ["src"], **changed}
    kept = {name: getattr(config, name) for name in ("backend", "image")}
    return SandboxPool(AgentConfig(command=["sh"], max_programs=2, sandbox=SandboxConfig(**kept | settings)))


REPAIRS = "echo 'echo $(($1 + $2))' > src/add.sh"


@pytest.mark.parametrize(
    ("does", "passes"),
    [
        ("true", False),
        (REPAIRS, True),
        ("echo true > tests/test.sh", False),
        ("rm -r src && ln -s tests src && echo true > tests/add.sh", False),
        ("rm -r src; mkdir src; ln -s ../tests/test.sh src/add.sh; echo 'exit 0' > tests/test.sh", False),
        ("rm -r src", False),
        (f"{REPAIRS}; chmod 000 tests; echo 'exit 1' > sitecustomize.sh", True),
        (f"{REPAIRS}; (setsid sh -c 'while true; do echo false > tests/test.sh; done' > /dev/null 2>&1 &)", True),
    ],
)
async def test_the_check_sees_the_solution_and_nothing_else_of_the_agent(config, repository, does, passes):
    pool = pool_of(config, repository)
    async with pool.lease(row()) as sandbox:
        await sandbox.run(["sh", "-c", does])
        ended = await pool.check(sandbox, row())
        assert (ended.exit_code == 0) == passes
        left = (await sandbox.run(["ls", "-A"])).stdout.split()
        assert left in ([b"src", b"tests"], [b"tests"])
    await pool.close()
    assert pool.counts == {"live": 0, "opened": 1, "closed": 1, "failed": 0}


async def test_a_forged_archive_writes_the_solution_alone(repository):
    """Whoever rules the container may answer with any archive."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name in ("src/add.sh", "tests/test.sh", "src/../tests/test.sh", "/tmp/x", "../x", "src/../../x"):
            member = tarfile.TarInfo(name)
            member.size = 4
            archive.addfile(member, io.BytesIO(b"true"))
        link = tarfile.TarInfo("src/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        archive.addfile(link)
    for forged, names in (
        (made.getvalue(), ["src/add.sh"]),
        (b"no archive", []),
        (made.getvalue()[:700], ["src/add.sh"]),
    ):
        with tarfile.open(fileobj=io.BytesIO(_archive(repository, ["src"], forged))) as archive:
            assert [m.name for m in archive if m.isfile()] == ["tests/test.sh", *names]


async def test_a_row_names_its_files_below_those_of_the_recipe(repository):
    config = SandboxConfig(backend="local", files=str(repository))
    assert source_of(config, row()) == repository.resolve()
    assert source_of(config, row(files="src")) == (repository / "src").resolve()
    for elsewhere in ("..", "/etc", "none", "tests/test.sh"):
        with pytest.raises(ValueError, match=r"files='.*' of rows:1\n.*no directory below"):
            source_of(config, row(files=elsewhere))
    pool = pool_of(config, repository)
    with pytest.raises(ValueError, match="no directory below"):
        async with pool.lease(row(files="..")):
            pass
    await pool.close()
    assert pool.counts == {"live": 0, "opened": 1, "closed": 1, "failed": 0}


@pytest.mark.parametrize(("check", "most"), [("sleep 600", 1 << 26), ("true", 5000)], ids=["late", "large solution"])
async def test_a_check_that_hangs_or_a_solution_that_is_too_large_has_failed(
    config, repository, monkeypatch, check, most
):
    monkeypatch.setattr("asyncrl.environments.sandboxes.MAX_FILES_BYTES", most)
    pool = pool_of(config, repository, check=check.split(), check_timeout_s=3)
    async with pool.lease(row()) as sandbox:
        assert await pool.check(sandbox, row()) is None
    await pool.close()
    assert pool.counts["live"] == 0


async def test_as_many_live_as_the_recipe_says_and_a_lost_one_is_counted(stand_in, repository):
    config = SandboxConfig(backend="docker", image="any")
    pool, most = pool_of(config, repository), 0

    async def lease():
        nonlocal most
        async with pool.lease(row()) as sandbox:
            most = max(most, pool.counts["live"])
            await sandbox.run(["true"])

    await asyncio.gather(*(lease() for _ in range(5)))
    assert most <= 2

    async def loses_it(pool):
        async with pool.lease(row()) as sandbox:
            await asyncio.to_thread(subprocess.run, ["docker", "rm", "--force", "--volumes", sandbox._name], check=True)
            await sandbox.run(["ls"])

    with pytest.raises(ProcessDied, match=r"a sandbox: container asyncrl-(?s:.)*it has ended"):
        await loses_it(pool)
    missing = pool_of(SandboxConfig(backend="docker", image="missing"), repository)
    with pytest.raises(ProcessDied, match="no such image"):
        await loses_it(missing)
    await asyncio.gather(pool.close(), missing.close())
    assert pool.counts == {"live": 0, "opened": 6, "closed": 6, "failed": 1}
    assert missing.counts == {"live": 0, "opened": 1, "closed": 1, "failed": 1}


# Confinement by our own sandbox.

TRIES = """
import os, socket, urllib.request
port, other, outside = int(os.environ["PORT"]), int(os.environ["OTHER"]), os.environ["OUTSIDE"]
urllib.request.urlopen(f"http://127.0.0.1:{port}/").read()
tries = [
    lambda: socket.create_connection(("127.0.0.1", other), 5),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262),
    lambda: open(outside).read(),
    lambda: open(outside, "w"),
    lambda: os.kill(int(os.environ["OWNER"]), 0),
    lambda: os.kill(os.getppid(), 9),
]
for number, attempt in enumerate(tries):
    try:
        attempt()
        print("could", number)
    except OSError:
        pass
open("mine", "w").write("x")
print(os.listdir("."))
"""


@pytest.mark.parametrize("level", ["namespaces", "seccomp"])
def test_a_command_writes_its_directory_and_reaches_one_port(level, tmp_path):
    (tmp_path / "outside").write_text("secret")
    with locked_directory() as directory, serving() as port, socket.create_server(("127.0.0.1", 0)) as other:
        Path(directory, "work").mkdir()
        told = {"PORT": str(port), "OTHER": str(other.getsockname()[1]), "OUTSIDE": str(tmp_path / "outside")}
        line = confined([sys.executable, "-c", TRIES], directory, port=port, level=level)
        told |= {"PATH": os.environ["PATH"], "OWNER": str(os.getpid())}
        ended = subprocess.run(line, env=told, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "['mine']\n"), ended.stderr


@contextmanager
def serving():
    """The port of a web server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


STARTS = """
import subprocess, sys
from asyncrl.workers.sandbox import confined
process = subprocess.Popen(confined(["sh", "-c", sys.argv[1]], sys.argv[2], level=sys.argv[3]))
print(process.pid, flush=True)
sys.exit(process.wait())
"""


@pytest.mark.parametrize("level", ["namespaces", "seccomp", "none"])
@pytest.mark.parametrize("end", ["exit", "terminated", "owner killed"])
def test_daemons_and_forks_end_with_the_command_however_it_ends(level, end):
    mark = f"sleep 4{uuid.uuid4().int % 10**8}"
    forks = f"for i in 1 2 3; do (setsid sh -c '(setsid {mark} &) ; {mark}' > /dev/null 2>&1 &); done; echo begun"
    forks += "" if end == "exit" else "; sleep 600"
    with locked_directory() as directory:
        Path(directory, "work").mkdir()
        line = [sys.executable, "-c", STARTS, forks, directory, level]
        owner = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        lines = {owner.stdout.readline() for _ in range(2)}
        (pid,) = map(int, lines - {"begun\n"})
        if end != "exit":
            wait_until(lambda: len(marked(mark)) >= 6)
            os.kill(
                owner.pid if end == "owner killed" else pid, signal.SIGKILL if end == "owner killed" else signal.SIGTERM
            )
        owner.wait(60)
        wait_until(lambda: not marked(mark), within_s=10)


# Agents.

EDITS = GREETS + "open('src/add.sh', 'w').write('echo 5'); open('tests/test.sh', 'w').write('true')"
BOTH = [SandboxConfig(backend="local"), SandboxConfig(backend="docker", image="any")]


def sandbox_recipe(config, repository, program, *overrides):
    section = {"backend": config.backend, "image": config.image, "files": str(repository), "solution": ["src"]}
    section["check"] = ["sh", "-c", "sh tests/test.sh && echo judged"]
    settings = f"rollout.agent.sandbox={json.dumps(section)}"
    return agent_recipe(settings, *overrides, command=[sys.executable, "-c", program])


@pytest.mark.parametrize("config", BOTH, ids=lambda config: config.backend)
async def test_an_agent_works_in_its_sandbox_and_the_check_is_the_reward(started, stand_in, repository, config):
    for program, reward in ((EDITS, 1), (GREETS, 0)):
        environment = await started(sandbox_recipe(config, repository, program, "reward.function=zero"))
        trajectory, session = await play(environment, "yes", task=task_of([1], "go"))
        assert (trajectory.reward, dict(trajectory.reward_parts)["correct"]) == (reward, reward)
        assert session.rewarded == []
        await environment.close()
        assert environment.sandboxes == {"live": 0, "opened": 1, "closed": 1, "failed": 0}
    environment = await started(sandbox_recipe(config, repository, EDITS))
    _, session = await play(environment, "yes")
    assert session.rewarded == ["judged\n"], "any other reward reads what the check has printed"


@pytest.mark.parametrize("config", BOTH, ids=lambda config: config.backend)
async def test_a_trajectory_that_is_cancelled_leaves_no_sandbox(started, stand_in, repository, place, config):
    mark = f"sleep 5{uuid.uuid4().int % 10**8}"
    environment = await started(sandbox_recipe(config, repository, f"import os; os.system({mark!r})"))
    running = asyncio.create_task(play(environment))
    await until(lambda: marked(mark))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await environment.close()
    assert not marked(mark)
    assert not list(place.iterdir())


OWNER = """
import asyncio
from asyncrl.environments.sandboxes import BACKENDS
from asyncrl.config.environments import SandboxConfig
async def main():
    config = {config!r}
    sandbox = BACKENDS[config.backend](config)
    await sandbox.reset()
    await sandbox.run(["sh", "-c", "(setsid {mark} &); {mark}"])
asyncio.run(main())
"""


def test_a_killed_rollouter_leaves_no_sandbox(config, place):
    mark = f"sleep 6{uuid.uuid4().int % 10**8}"
    told = {**os.environ, "TMPDIR": str(place), "PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen([sys.executable, "-c", OWNER.format(config=config, mark=mark)], cwd=ROOT, env=told)
    wait_until(lambda: len(marked(mark)) >= 3, within_s=60)
    owner.kill()
    owner.wait(30)
    wait_until(lambda: not marked(mark), within_s=20)
    remove_stale_sandboxes()  # as the janitor of the run does, and the next sandbox
    wait_until(lambda: not list(place.iterdir()))


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (["sandbox.backend=lokal"], "did you mean 'local'"),
        (["sandbox.backend=podman", "sandbox.image=any"], "there is no program podman here"),
        (["sandbox.backend=docker"], "no image"),
        (["sandbox.backend=docker", "sandbox.image=any"], "Cannot connect to the Docker daemon"),
        (["sandbox.backend=local", "sandbox.files=/nowhere"], "no directory"),
        (["sandbox.backend=local", "sandbox.check=[pytest]"], "a check needs to know what"),
        (["sandbox.backend=local", "sandbox.check=[pytest]", "sandbox.solution=[src/../tests]"], "paths inside of it"),
        (["sandbox.backend=local", "host=0.0.0.0"], r"a program reaches 127\.0\.0\.1 alone"),
        (["sandbox.backend=local", "advertise=http://x/v1"], r"a program reaches 127\.0\.0\.1 alone"),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(overrides, found, tmp_path, monkeypatch):
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\necho Cannot connect to the Docker daemon >&2; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(ConfigError, match=found):
        check_environment(agent_recipe(*(f"rollout.agent.{o}" for o in overrides), command=["sh"]))


def test_a_machine_without_landlock_is_refused(monkeypatch):
    """By the code that a command ends with there; the kernel of this machine has it."""
    monkeypatch.setattr(sandboxes, "confined", lambda *_: ["sh", "-c", "echo neither Landlock >&2; exit 126"])
    with pytest.raises(ConfigError, match="neither Landlock"):
        check_environment(agent_recipe("rollout.agent.sandbox.backend=local", command=["sh"]))


def test_functions_have_no_sandbox():
    with pytest.raises(ConfigError, match=r"no rollout\.agent\.command"):
        check_environment(agent_recipe("rollout.agent.sandbox.backend=local", "rollout.agent.function=a:b"))
