"""NeMo Gym's own servers, which ask our endpoint."""

import asyncio
import os
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest

from asyncrl.data.rows import parse_record
from asyncrl.environments import check_environment
from asyncrl.errors import ConfigError, GenerationError
from tests.contract.test_tool_use import recipe_with, text_of
from tests.environments import ScriptedSession, assert_exact, chat_with
from tests.server_process import free_port
from tests.unit.test_recipes import ROOT

VENV = ROOT / ".venv-nemo-gym"
AGENT = "example_single_tool_call_simple_agent"
SERVERS = (
    "resources_servers/example_single_tool_call",
    "responses_api_agents/simple_agent",
    "responses_api_models/openai_model",
)
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ASKED = {
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "How is it in Oslo?"}]}],
    "tools": [{"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}],
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'


def recipe_of(head, port, **settings):
    own = [f"rollout.nemo_gym.{name}={value}" for name, value in settings.items()]
    own += ["rollout.environment=nemo_gym", "reward.function=zero", f"rollout.agent.port={port}"]
    return recipe_with(*own, f"rollout.nemo_gym.head={head}")


@pytest.fixture(scope="module")
def gym(tmp_path_factory):
    """(address of the head server, port of the endpoint) while NeMo Gym's servers run."""
    if not (VENV / "bin" / "gym").exists():
        pytest.skip("NeMo Gym is not installed: make install-nemo-gym")
    directory, head, port = tmp_path_factory.mktemp("gym"), free_port(), free_port()
    for server in SERVERS:  # instead of an environment for each, which it would make with uv
        (directory / server).mkdir(parents=True)
        (directory / server / ".venv").symlink_to(VENV)
    command = [VENV / "bin" / "gym", "env", "start", "--resources-server", "example_single_tool_call"]
    command += ["--model-type", "openai_model", "--model", "policy", "--model-api-key", "none"]
    command += ["--model-url", f"http://127.0.0.1:{port}/v1", "+skip_venv_if_present=true"]
    command += [f"+uv_venv_dir={directory}", f"+head_server.port={head}", "+head_server.host=127.0.0.1"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=directory, stdout=log, stderr=log, start_new_session=True,
            env=own | {"RAY_ADDRESS": "local", "PATH": f"{VENV / 'bin'}:{os.environ['PATH']}"},
        )  # fmt: skip
        try:
            wait_until_ready(process, directory / "log")
            yield f"http://127.0.0.1:{head}", port
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            finally:
                os.killpg(process.pid, signal.SIGKILL)


def wait_until_ready(process, log):
    until = time.monotonic() + 240
    while "All 3 / 3 servers ready" not in log.read_text():
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < until, log.read_text()[-3000:]
        time.sleep(0.5)


async def play(environment, *replies, **extra):
    session = ScriptedSession(chat_with(), *replies)
    row = parse_record({"responses_create_params": ASKED, **extra}, "test:1")
    async with asyncio.timeout(60):
        return await environment.run(SimpleNamespace(row=row), session), session


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_its_agent_uses_its_tool_and_its_verifier_judges(gym, started):
    recipe = recipe_of(*gym, agent=AGENT)
    check_environment(recipe)
    environment = await started(recipe)
    trajectory, session = await play(environment, CALL, "It is cold.", reward=0.0)  # of an earlier collection
    assert_exact(trajectory, session)
    assert (trajectory.reward, session.rewarded) == (1.0, [])
    assert dict(trajectory.reward_parts) == {"agent_requests": 2, "agent_branches": 1, "agent_trained_share": 1}
    assert "The weather in Oslo is cold." in text_of(session, trajectory.response_ids)
    several = await asyncio.gather(*(play(environment, f"{n} degrees") for n in range(5)))
    assert [text_of(s, t.response_ids) for t, s in several] == [f"{n} degrees<|im_end|>" for n in range(5)]
    with pytest.raises(GenerationError, match=rf"nobody.*\n.*{AGENT}"):
        await play(environment, "hi", agent_ref={"name": "nobody"})
    with pytest.raises(ConfigError, match=AGENT):
        check_environment(recipe_of(*gym, agent="nobody"))


def test_a_gym_that_is_not_there_is_an_error_before_the_run():
    for port, found in ((free_port(), "gym env start"), (0, "rollout.agent.port")):
        with pytest.raises(ConfigError, match=found):
            check_environment(recipe_of(f"http://127.0.0.1:{free_port()}", port))
