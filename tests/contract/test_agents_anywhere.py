"""Agents outside of the rollouter: programs, containers, and endpoints behind other addresses."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from asyncrl.environments import check_environment
from asyncrl.errors import ConfigError, ProcessDied
from tests.contract.test_agent_endpoint import ask, client_of
from tests.contract.test_tool_use import recipe_with, text_of
from tests.environments import assert_exact, call_text, play, task_of
from tests.server_process import free_port
from tests.unit.test_recipes import ROOT
from tests.waiting import is_alive, until, wait_until

pytestmark = pytest.mark.timeout(400)

CALCULATOR = ROOT / "recipes" / "agents" / "calculator.py"
IMAGE = "python:3.12-slim"
GREETS = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
body = json.dumps({"messages": [{"role": "user", "content": json.dumps(task, sort_keys=True)}]}).encode()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
urllib.request.urlopen(request).read()
"""


def agent_recipe(*overrides, command=None):
    own = ["rollout.environment=agent", *overrides]
    return recipe_with(*own, *([f"rollout.agent.command={json.dumps(command)}"] if command else []))


def assert_it_calculated(trajectory, session):
    assert_exact(trajectory, session)
    assert session.rewarded == ["It is 408."]
    assert dict(trajectory.reward_parts) == {
        "correct": 1,
        "agent_requests": 2,
        "agent_branches": 1,
        "agent_trained_share": 1,
    }
    assert "<tool_response>\n408\n</tool_response>" in text_of(session, trajectory.response_ids)
    assert '"name": "calculator"' in text_of(session, trajectory.prompt_ids)


async def test_a_program_is_recorded_token_by_token(started):
    environment = await started(agent_recipe(command=[sys.executable, str(CALCULATOR)]))
    call = call_text("calculator", expression="12*34")
    assert_it_calculated(*await play(environment, f"let me see {call}", "It is 408."))


async def test_a_program_is_told_its_task_without_the_truth_and_may_leave_the_answer_to_the_policy(started):
    environment = await started(agent_recipe(command=[sys.executable, "-c", GREETS]))
    trajectory, session = await play(environment, "My answer.", task=task_of([1], "2+3?", level=3))
    assert_exact(trajectory, session)
    assert session.rewarded == ["My answer."]
    told = text_of(session, trajectory.prompt_ids).split("user\n")[1].split("<|im_end|>")[0]
    assert json.loads(told) == {
        "messages": [{"role": "user", "content": "2+3?"}],
        "data_source": "test",
        "extra": {"level": "3"},
        "ordinal": 0,
        "index": 0,
    }


async def test_a_program_that_fails_fails_its_attempt_with_what_it_said(started):
    fails = GREETS + "sys.exit('my own fault')"
    environment = await started(agent_recipe(command=[sys.executable, "-c", fails]))
    with pytest.raises(ProcessDied, match=r"exit code 1; its standard error ends with:\nmy own fault"):
        await play(environment, "yes")
    environment = await started(agent_recipe(command=[sys.executable, "-c", "print('no request')"]))
    with pytest.raises(ValueError, match="made no request that was answered"):
        await play(environment)


async def test_a_program_that_meets_a_limit_ends_its_trajectory(started):
    recipe = agent_recipe("rollout.agent.max_turns=2", command=[sys.executable, str(CALCULATOR)])
    environment = await started(recipe)
    call = call_text("calculator", expression="1+1")
    trajectory, session = await play(environment, call, call)
    assert_exact(trajectory, session)
    assert (trajectory.turns, trajectory.finish_reason) == (2, "length")


async def test_as_many_programs_run_at_once_as_the_recipe_says(started, tmp_path):
    counts = f"""
import os, time
place = {str(tmp_path)!r}
mine = os.path.join(place, str(os.getpid()))
open(mine, "w").close()
print(len(os.listdir(place)))
time.sleep(0.2)
os.remove(mine)
"""
    environment = await started(
        agent_recipe("rollout.agent.max_programs=1", command=[sys.executable, "-c", counts + GREETS])
    )
    played = await asyncio.gather(*(play(environment, "yes") for _ in range(4)))
    assert [session.rewarded for _, session in played] == [["1"]] * 4


LEAVES_A_CHILD = """
import subprocess, sys
print("5", flush=True)
code = "import time; time.sleep(600)"
subprocess.Popen([sys.executable, "-c", code], start_new_session={own_session})
"""


async def test_a_program_that_leaves_a_child_with_its_output_has_ended_with_its_own_exit(started):
    leaves = LEAVES_A_CHILD.replace("{own_session}", "False")
    environment = await started(agent_recipe(command=[sys.executable, "-c", leaves + GREETS]))
    _, session = await play(environment, "yes")
    assert session.rewarded == ["5"]


async def test_a_program_whose_child_keeps_its_output_in_a_session_of_its_own_fails_its_attempt(started, tmp_path):
    leaves = LEAVES_A_CHILD.replace("subprocess.Popen", "child = subprocess.Popen").replace("{own_session}", "True")
    leaves += f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
    environment = await started(agent_recipe(command=[sys.executable, "-c", leaves + GREETS]))
    with pytest.raises(ProcessDied, match="exit code 0, but a process outside of its group holds its output open"):
        await play(environment, "yes")
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


async def test_a_trajectory_that_is_cancelled_ends_its_program_and_what_that_started(started, tmp_path):
    hangs = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open({str(tmp_path / "new")!r}, "w") as file:
    file.write(f"{{os.getpid()}} {{child.pid}}")
os.rename({str(tmp_path / "new")!r}, {str(tmp_path / "pids")!r})
time.sleep(600)
"""
    environment = await started(agent_recipe(command=[sys.executable, "-c", hangs]))
    running = asyncio.create_task(play(environment))
    await until((tmp_path / "pids").exists)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: not any(map(is_alive, pids)))


WRITES_ITS_PID = "import os, time; open({path!r}, 'w').write(str(os.getpid())); time.sleep(600)"
OWNER = """
import asyncio, sys
from tests.contract.test_agents_anywhere import DiesWithItsFirstProcess, agent_recipe, play
from asyncrl.environments import build_environment
from tests.environments import chat_with
async def main():
    environment = build_environment(agent_recipe(command=[sys.executable, "-c", {program!r}]), chat_with())
    await environment.start()
    await play(environment)
with asyncio.Runner(loop_factory=lambda: {loop}) as runner:
    runner.run(main())
"""


class DiesWithItsFirstProcess(asyncio.SelectorEventLoop):
    """Kills its own process a second after it has started one, before whoever asked for that hears of it."""

    def __init__(self, pid_file):
        super().__init__()
        self.pid_file = Path(pid_file)

    async def subprocess_exec(self, *args, **kwargs):
        transport, _ = await super().subprocess_exec(*args, **kwargs)
        self._die(transport.get_pid())

    def _die(self, started):
        self.pid_file.write_text(str(started))
        time.sleep(1)  # time in which a program would start
        os.kill(os.getpid(), signal.SIGKILL)


def owner_of(program, loop="asyncio.SelectorEventLoop()"):
    """A process of its own that runs the program for a trajectory, in that loop."""
    script = OWNER.format(program=program, loop=loop)
    return subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_a_program_does_not_outlive_a_rollouter_that_is_killed(tmp_path):
    owner = owner_of(WRITES_ITS_PID.format(path=str(tmp_path / "pid")))
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), within_s=100)
    pid = int((tmp_path / "pid").read_text())
    assert is_alive(pid)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_until(lambda: not is_alive(pid))


@pytest.mark.slow
def test_a_rollouter_that_is_killed_before_its_reaper_knows_of_a_program_leaves_none(tmp_path):
    program = WRITES_ITS_PID.format(path=str(tmp_path / "program"))
    owner = owner_of(program, f"DiesWithItsFirstProcess({str(tmp_path / 'started')!r})")
    assert owner.wait(100) == -signal.SIGKILL
    started = int((tmp_path / "started").read_text())
    wait_until(lambda: not is_alive(started))
    assert not (tmp_path / "program").exists(), "it has not run"


@asynccontextmanager
async def forwarded(port):
    """Another port of this machine that leads there, as a proxy or the port of a container does."""

    async def serve(reader, writer):
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", port)

        async def copy(source, sink):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
            sink.close()

        await asyncio.gather(copy(reader, to_writer), copy(to_reader, writer), return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


SEEN = []


async def notes_its_address(base_url, api_key, task):
    SEEN.append((base_url, api_key))
    return await ask(client_of(base_url, api_key), [{"role": "user", "content": "go"}])


async def is_asked_by_another_name(base_url, api_key, task):
    headers = {"Host": "agents.example:443", "Authorization": f"Bearer {api_key}"}
    body = {"messages": [{"role": "user", "content": "go"}]}
    async with httpx.AsyncClient(headers=headers, timeout=20) as client:
        answer = await client.post(f"{base_url}/chat/completions", json=body)
        stranger = await client.post(f"{base_url}/chat/completions", json=body, headers={"Authorization": "Bearer x"})
    assert stranger.status_code in (401, 403)
    return f"{answer.status_code}"


def function(agent):
    return f"rollout.agent.function={__name__}:{agent.__name__}"


async def test_the_endpoint_listens_where_it_is_told(started):
    port = free_port()
    environment = await started(agent_recipe(function(notes_its_address), f"rollout.agent.port={port}"))
    SEEN.clear()
    await play(environment, "yes")
    await play(environment, "yes")
    assert {url for url, _ in SEEN} == {f"http://127.0.0.1:{port}/v1"}
    assert len({key for _, key in SEEN}) == 2, "each trajectory has a key of its own"
    with pytest.raises(ConfigError, match=rf"rollout\.agent\.port={port}(?s:.)*in use"):
        await started(agent_recipe(function(notes_its_address), f"rollout.agent.port={port}"))


async def test_agents_reach_the_endpoint_through_a_proxy(started):
    port = free_port()
    async with forwarded(port) as other:
        told = f"rollout.agent.advertise=http://localhost:{other}/v1"
        environment = await started(agent_recipe(function(notes_its_address), f"rollout.agent.port={port}", told))
        SEEN.clear()
        trajectory, session = await play(environment, "yes")
        assert_exact(trajectory, session)
        assert [url for url, _ in SEEN] == [f"http://localhost:{other}/v1"]


@pytest.mark.parametrize(
    ("overrides", "status"),
    [
        ((), "403"),
        (("rollout.agent.advertise='http://127.0.0.1:{port}/v1'",), "200"),
    ],
)
async def test_a_foreign_name_is_refused_unless_the_endpoint_is_advertised(started, overrides, status):
    """By an endpoint for its own machine: a web page may have made a browser ask. A key is needed in any case."""
    environment = await started(agent_recipe(function(is_asked_by_another_name), *overrides))
    if status == "403":
        with pytest.raises(ValueError, match="made no request that was answered"):
            await play(environment, "yes")
    else:
        _, session = await play(environment, "yes")
        assert session.rewarded == [status]


async def test_an_endpoint_for_other_machines_is_told_by_the_name_of_its_own(started):
    told = "rollout.agent.advertise='http://{host}:{port}/v1'"
    for overrides in ((), (told,)):
        environment = await started(agent_recipe(function(names_its_host), "rollout.agent.host=0.0.0.0", *overrides))
        _, session = await play(environment, "yes")
        assert session.rewarded == [socket.gethostname()]


async def names_its_host(base_url, api_key, task):
    address = urlsplit(base_url)
    await ask(client_of(f"http://127.0.0.1:{address.port}/v1", api_key), [{"role": "user", "content": "go"}])
    return base_url.removeprefix("http://").partition(":")[0]


def test_a_program_that_is_not_there_is_refused_before_the_run():
    with pytest.raises(ConfigError, match="there is no program no-such-agent here"):
        check_environment(agent_recipe(command=["no-such-agent"]))
    check_environment(agent_recipe(command=[sys.executable]))


@pytest.fixture
def docker():
    """The program, where it has the image already."""
    found = shutil.which("docker")
    if found is None or subprocess.run([found, "image", "inspect", IMAGE], capture_output=True, timeout=60).returncode:
        pytest.skip(f"needs Docker with the image {IMAGE}")
    return found


async def test_an_agent_in_a_container(started, docker):
    """The command of recipes/agent_program.yaml."""
    command = [docker, "run", "--rm", "-i", "--init", "--network=host", "-e", "OPENAI_BASE_URL", "-e", "OPENAI_API_KEY"]
    command += ["-v", f"{CALCULATOR.parent}:/agents:ro", IMAGE, "python", "/agents/calculator.py"]
    environment = await started(agent_recipe(command=command))
    call = call_text("calculator", expression="12*34")
    assert_it_calculated(*await play(environment, f"let me see {call}", "It is 408."))
