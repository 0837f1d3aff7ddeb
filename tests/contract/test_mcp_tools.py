"""Tools of real MCP servers, over standard input and output and over HTTP, called by a scripted policy."""

import asyncio
import json
import os
import signal
import sys
from contextlib import asynccontextmanager, suppress

import pytest

from asyncrl.environments import build_environment, check_environment, prompt_tools
from asyncrl.errors import ConfigError, ProcessDied
from asyncrl.types.images import ImageStore, images_in
from tests.contract.test_tool_use import recipe_with, text_of
from tests.environments import QWEN, assert_exact, call_text, chat_with, chat_with_images, play, tokenizer_with
from tests.server_process import listening
from tests.unit.test_recipes import ROOT
from tests.waiting import is_alive, until

pytest.importorskip("mcp", reason="the package mcp is not installed: pip install 'asyncrl[mcp]'")
pytestmark = pytest.mark.timeout(400)

SERVER = str(ROOT / "tests" / "mcp_tools.py")


def by_command(**changes):
    return json.dumps({"command": [sys.executable, SERVER], **changes})


def with_server(settings, *overrides, tools="[]", timeout_s=20):
    return recipe_with(
        f"rollout.tool_use.tools={tools}",
        f"rollout.tool_use.mcp={{office: {settings}}}",
        f"rollout.tool_use.tool_timeout_s={timeout_s}",
        *overrides,
    )


async def said(environment, name, **arguments):
    """What the policy reads when it calls this tool."""
    trajectory, session = await play(environment, call_text(name, **arguments), "done")
    assert_exact(trajectory, session)
    text = text_of(session, trajectory.response_ids[~trajectory.loss_mask])
    result = text.split("<tool_response>\n")[1].split("\n</tool_response>")[0]
    return result, dict(trajectory.reward_parts)["tool_errors"]


@pytest.fixture
def http_server():
    """The port of a server over HTTP."""
    with listening(sys.executable, SERVER) as (_, port):
        yield port


class Gateway:
    """Forwards connections to a port of this machine, which may change; without one it answers 502."""

    def __init__(self, target):
        self.target = target
        self.open = set()
        self.asked_to_end = asyncio.Event()

    async def __call__(self, reader, writer):
        self.open.add(writer)
        with suppress(OSError):
            if self.target is None:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            else:
                their_reader, their_writer = await asyncio.open_connection("127.0.0.1", self.target)
                self.open.add(their_writer)
                await asyncio.gather(_copy(reader, their_writer, self.asked_to_end), _copy(their_reader, writer))
        writer.close()

    def cut(self):
        for writer in self.open:
            writer.close()


async def _copy(reader, writer, asked_to_end=None):
    with suppress(OSError):
        while part := await reader.read(1 << 16):
            if asked_to_end is not None and part.startswith(b"DELETE "):
                asked_to_end.set()
            writer.write(part)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def gateway_to(target):
    """The gateway and its port."""
    gateway = Gateway(target)
    listening = await asyncio.start_server(gateway, "127.0.0.1", 0)
    try:
        yield gateway, listening.sockets[0].getsockname()[1]
    finally:
        gateway.cut()
        listening.close()


async def test_tools_of_a_command_are_named_in_prompts_called_and_read(started):
    recipe = with_server(by_command(), tools="[calculator]")
    check_environment(recipe)
    prompt = prompt_tools(recipe, tokenizer_with(QWEN))
    names = [schema["function"]["name"] for schema in prompt.schemas]
    assert names == ["calculator", "add", "die", "environment", "fail", "hang", "picture", "process_id", "rest"]
    assert prompt.schemas[1]["function"]["parameters"]["required"] == ["a", "b"]
    environment = await started(recipe)
    assert await said(environment, "add", a=2, b=3) == ("5", 0)
    assert await said(environment, "calculator", expression="6*7") == ("42", 0)
    both, session = await play(environment, call_text("add", a=1, b=1) + call_text("process_id"), "done")
    assert dict(both.reward_parts)["tool_calls"] == 2
    assert "<tool_response>\n2\n</tool_response>" in text_of(session, both.response_ids)


async def test_what_a_server_answers_to_wrong_calls_is_read_by_the_policy(started):
    environment = await started(with_server(by_command()))
    text, errors = await said(environment, "fail")
    assert text.startswith("Error: ")
    assert "nothing is here" in text
    assert errors == 1
    text, errors = await said(environment, "add", a="two", b=3)
    assert (text.startswith("Error: "), errors) == (True, 1)
    text, errors = await said(environment, "subtract", a=2, b=3)
    assert text.startswith("Error: there is no tool 'subtract'; the tools are add, die,")
    assert errors == 1


async def test_images_of_a_server_are_seen_by_a_policy_that_reads_them(started, tmp_path):
    environment = await started(with_server(by_command()))
    assert await said(environment, "picture") == ("a square:\n[image]", 0)
    chat = chat_with_images(tmp_path)
    seeing = f"data.image_directory={tmp_path / 'images'}"
    environment = await started(with_server(by_command(), seeing), chat)
    trajectory, session = await play(environment, call_text("picture"), "red", chat=chat)
    assert_exact(trajectory, session)
    (image,) = images_in(trajectory.response_ids)
    assert ImageStore(tmp_path / "images").open([image.key])[0].getpixel((0, 0)) == (255, 0, 0)
    assert f"a square:\n\ufffc{image.key}" in chat.decode_turn(trajectory.response_ids)


async def test_a_call_has_a_deadline_and_the_server_goes_on(started):
    environment = await started(with_server(by_command(), timeout_s=1))
    before = await said(environment, "process_id")
    assert await said(environment, "rest", seconds=60) == ("Error: rest took more than 1 s", 1)
    assert await said(environment, "process_id") == before


async def test_a_server_that_dies_fails_the_attempt_by_name_and_is_started_again(started):
    environment = await started(with_server(by_command()))
    before, _ = await said(environment, "process_id")
    resting = asyncio.create_task(said(environment, "rest", seconds=600))
    await said(environment, "process_id")  # asked after it, and answered
    with pytest.raises(ProcessDied, match="call die of MCP server office") as died:
        await play(environment, call_text("die"), "done")
    assert str(died.value.process) == "MCP server office"
    with pytest.raises(ProcessDied, match="call rest of MCP server office"):
        await resting
    after, _ = await said(environment, "process_id")
    assert after != before
    os.kill(int(after), signal.SIGKILL)
    await until(lambda: not is_alive(int(after)))
    with pytest.raises(ProcessDied, match="MCP server office"):
        await play(environment, call_text("add", a=1, b=2), "done")
    assert await said(environment, "add", a=1, b=2) == ("3", 0)


async def test_a_server_that_answers_nothing_any_more_is_started_again(started):
    environment = await started(with_server(by_command(), timeout_s=1))
    before, _ = await said(environment, "process_id")
    with pytest.raises(ProcessDied, match="neither hang nor the list of its tools was answered within 1 s"):
        await play(environment, call_text("hang", seconds=100), "done")
    assert (await said(environment, "process_id"))[0] != before
    assert not is_alive(int(before))


async def test_close_ends_the_process(started):
    environment = await started(with_server(by_command()))
    pid = int((await said(environment, "process_id"))[0])
    await environment.close()
    await until(lambda: not is_alive(pid), within_s=30)


async def test_a_server_gets_the_variables_that_the_recipe_names_and_no_others(started, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_RUN", "hunter2")
    monkeypatch.setenv("ASYNCRL_RUN", "run-7")
    environment = await started(with_server(by_command(env={"OFFICE": "open"})))
    assert await said(environment, "environment", variable="OFFICE") == ("open", 0)
    assert await said(environment, "environment", variable="SECRET_OF_THE_RUN") == ("(not set)", 0)
    assert await said(environment, "environment", variable="ASYNCRL_RUN") == ("run-7", 0), (
        "the janitor finds it by this"
    )


async def test_tools_over_http(started, http_server):
    recipe = with_server(json.dumps({"url": f"http://127.0.0.1:{http_server}/mcp", "tools": ["add", "rest", "die"]}))
    prompt = prompt_tools(recipe, tokenizer_with(QWEN))
    assert [schema["function"]["name"] for schema in prompt.schemas] == ["add", "die", "rest"]
    environment = await started(recipe)
    assert await said(environment, "add", a=20, b=3) == ("23", 0)
    assert (await said(environment, "hang", seconds=1))[0].startswith("Error: there is no tool 'hang'")
    with pytest.raises(ProcessDied, match="call die of MCP server office"):
        await play(environment, call_text("die"), "done")


def behind(port):
    settings = json.dumps({"url": f"http://127.0.0.1:{port}/mcp", "start_timeout_s": 40})
    return with_server(settings, timeout_s=1)


@pytest.mark.slow
async def test_a_server_over_http_that_hangs_is_left_and_the_next_one_behind_its_address_serves(started):
    with listening(sys.executable, SERVER) as (first, old), listening(sys.executable, SERVER) as (_, new):
        async with gateway_to(old) as (gateway, port):
            environment = await started(behind(port))
            assert await said(environment, "add", a=1, b=2) == ("3", 0)
            first.send_signal(signal.SIGSTOP)
            with pytest.raises(ProcessDied, match="neither add nor the list of its tools was answered within 1 s"):
                await play(environment, call_text("add", a=1, b=2), "done")
            async with asyncio.timeout(30):
                await gateway.asked_to_end.wait()  # the first one gets that, and does not answer
            gateway.target = new
            assert await said(environment, "add", a=1, b=2) == ("3", 0)


async def test_an_error_page_of_a_gateway_fails_the_attempt_and_is_no_result(started, http_server):
    async with gateway_to(http_server) as (gateway, port):
        environment = await started(behind(port))
        gateway.target = None
        gateway.cut()
        with pytest.raises(ProcessDied, match="call add of MCP server office"):
            await play(environment, call_text("add", a=1, b=2), "done")
        gateway.target = http_server
        assert await said(environment, "add", a=1, b=2) == ("3", 0)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"command": [sys.executable, "-c", "import sys; sys.exit(3)"]}, "Connection closed"),
        ({"command": ["/no/such/program"]}, "No such file"),
        ({"command": [sys.executable, SERVER], "tools": ["add", "mul"]}, "it has no tool mul; its tools are add, die"),
        ({"command": [sys.executable, "-c", "import time; time.sleep(60)"], "start_timeout_s": 1}, "no answer in time"),
        ({"url": "http://127.0.0.1:9/mcp", "start_timeout_s": 5}, r"ConnectError|no answer in time|Connection"),
    ],
)
async def test_a_server_that_cannot_be_used_is_refused_before_the_run(settings, found):
    recipe = with_server(json.dumps(settings))
    with pytest.raises(ConfigError, match=found) as refused:
        prompt_tools(recipe, tokenizer_with(QWEN))
    assert "asked: rollout.tool_use.mcp.office." in str(refused.value)
    environment = build_environment(recipe, chat_with())
    with pytest.raises(ConfigError, match=found):
        await environment.start()


async def test_two_tools_of_one_name_are_refused():
    recipe = with_server(by_command(), f"rollout.tool_use.mcp.second.command=['{sys.executable}', '{SERVER}']")
    with pytest.raises(ConfigError, match=r"2 are called add(?s:.)*rollout\.tool_use\.mcp\.NAME\.tools"):
        prompt_tools(recipe, tokenizer_with(QWEN))


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ("{}", "either started or asked at its address"),
        ('{command: [x], url: "http://x"}', "either started or asked at its address"),
        ("{url: 'x:80'}", "no address of a server"),
    ],
)
def test_settings_that_name_no_server_are_refused(settings, found):
    with pytest.raises(ConfigError, match=found):
        with_server(settings)
