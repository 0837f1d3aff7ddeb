"""Sandboxes of agents: what every backend does, and the pool that lends them. In containers the command lines are
checked against a stand-in; with SANDBOX_IMAGE set, against the runtime that is installed."""

import asyncio
import io
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import uuid
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from asyncrl.config.environments import AgentConfig, SandboxConfig
from asyncrl.data.rows import ChatMessage, PromptRow
from asyncrl.environments import check_environment
from asyncrl.environments.sandboxes import BACKENDS, SandboxPool, source_of
from asyncrl.errors import ConfigError, ProcessDied
from tests.contract.test_agents_anywhere import GREETS, agent_recipe
from tests.environments import assert_exact, play, task_of
from tests.processes import ROOT
from tests.waiting import until, wait_until

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part of it is Linux's"),
]

IMAGE = os.environ.get("SANDBOX_IMAGE", "")


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
    program.write_text(f"#!/bin/sh\nexec {sys.executable} {ROOT}/tests/container_runtime.py \"$@\"\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


@pytest.fixture(params=["local", "stand-in", "docker", "podman", "apptainer"])
def config(request):
    """The settings of a backend that can be used here."""
    name = request.param
    if name == "stand-in":
        request.getfixturevalue("stand_in")
        return SandboxConfig(backend="docker", image="any")
    if name != "local" and (not IMAGE or shutil.which(name) is None):
        pytest.skip(f"{name}: not installed, or SANDBOX_IMAGE does not name an image")
    return SandboxConfig(backend=name, image=IMAGE)


@asynccontextmanager
async def opened(config):
    sandbox = await BACKENDS[config.backend](config)
    try:
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
    assert pool.counts == {"live": 0, "opened": 1, "failed": 0}


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
    from asyncrl.environments.sandboxes import _archive

    for forged, names in ((made.getvalue(), ["src/add.sh"]), (b"no archive", []), (made.getvalue()[:700], ["src/add.sh"])):
        with tarfile.open(fileobj=io.BytesIO(_archive(repository, ["src"], forged))) as archive:
            assert [m.name for m in archive if m.isfile()] == ["tests/test.sh", *names]
