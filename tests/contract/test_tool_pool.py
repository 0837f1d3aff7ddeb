"""Tools in processes: deadlines, deaths, what they leave behind."""

import asyncio
import os
import signal
import sys
import time

import psutil
import pytest
import pytest_asyncio

from asyncrl.config.environments import ToolUseConfig
from asyncrl.environments.toolbox import ToolPool
from asyncrl.errors import ConfigError, ProcessDied
from tests.environments import opened
from tests.waiting import is_alive, until


class Odd:
    """Does what a tool should not."""

    name = "odd"
    description = "Misbehaves."
    parameters = {"type": "object", "properties": {"how": {"type": "string"}}}  # noqa: RUF012

    def call(self, how):
        if how == "sleep":
            time.sleep(60)
        if how == "child":
            pid = os.fork()
            if pid == 0:
                os.setsid()
                time.sleep(60)
            sys.stdout.write("noise on standard output\n")
            return str(pid)
        if how == "child and sleep":
            if os.fork() == 0:
                os.setsid()
                time.sleep(60)
            time.sleep(60)
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            sys.exit(3)
        if how == "pid":
            return str(os.getpid())
        raise LookupError(f"no {how}")


class Refuses(Odd):
    def start(self):
        raise OSError("its index is gone")


def config(*tools, **changes):
    return ToolUseConfig(tools=list(tools), tool_workers=1, **{"tool_timeout_s": 1.0, **changes})


@pytest_asyncio.fixture
async def pool():
    made = ToolPool(config("calculator", f"{__name__}:Odd"))
    await made.start()
    yield made
    await made.close()


async def test_a_call_that_hangs_is_killed_at_its_deadline_and_the_next_one_is_served(pool):
    before = int((await pool.run("odd", {"how": "pid"})).text)
    result = await pool.run("odd", {"how": "child and sleep"})
    assert (result.failed, result.text) == (True, "Error: odd took more than 1 s")
    assert (await pool.run("calculator", {"expression": "6*7"})).text == "42"
    assert pool.killed == 1
    await until(lambda: not is_alive(before))
    below = psutil.Process().children(recursive=True)
    assert not [p for p in below if p.pid == before]


async def test_a_call_that_kills_its_process_is_an_error_and_the_next_one_is_served(pool):
    assert (await pool.run("odd", {"how": "die"})).text == "Error: odd ended without a result"
    assert (await pool.run("calculator", {"expression": "6*7"})).text == "42"
    assert pool.died == 1


async def test_what_a_tool_raises_or_exits_with_is_text_and_costs_nothing(pool):
    pid = (await pool.run("odd", {"how": "pid"})).text
    assert (await pool.run("odd", {"how": "x"})).text == "Error: LookupError: no x"
    assert (await pool.run("odd", {"how": "exit"})).text == "Error: SystemExit: 3"
    assert (await pool.run("nothing", {})).text.startswith("Error: there is no tool 'nothing'; the tools are")
    assert (await pool.run("odd", {})).text.startswith("Error: odd takes how")
    assert (await pool.run("odd", {"how": "pid"})).text == pid


async def test_closing_ends_what_runs_and_refuses_what_waits(pool):
    running = asyncio.create_task(pool.run("odd", {"how": "sleep"}))
    waiting = [asyncio.create_task(pool.run("odd", {"how": "pid"})) for _ in range(3)]
    await asyncio.sleep(0)
    pid = next(iter(pool._processes)).pid
    await pool.close()
    for call in (running, *waiting):
        with pytest.raises(ProcessDied):
            await asyncio.wait_for(call, 5)
    await until(lambda: not is_alive(pid))
    with pytest.raises(ProcessDied):
        await pool.run("calculator", {"expression": "1"})


async def test_a_caller_that_gives_up_costs_the_process_and_not_the_pool(pool):
    call = asyncio.create_task(pool.run("odd", {"how": "sleep"}))
    await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await pool.run("calculator", {"expression": "6*7"})).text == "42"


async def test_a_tool_that_cannot_start_is_a_config_error():
    pool = ToolPool(config(f"{__name__}:Refuses"))
    with pytest.raises(ConfigError, match="its index is gone"):
        await pool.start()
    assert not pool._processes


@pytest.mark.slow
async def test_python_prints_fails_and_is_stopped():
    async with opened(ToolPool(config("python", tool_timeout_s=15.0))) as pool:
        assert (await pool.run("python", {"code": "print(6 * 7)"})).text == "42"
        failed = await pool.run("python", {"code": "print('so far')\n1 / 0"})
        assert failed.failed
        assert "so far" in failed.text
        assert "ZeroDivisionError" in failed.text
        stuck = await pool.run("python", {"code": "print('begun', flush=True)\nwhile True: pass"})
        assert stuck.failed
        assert "limit of" in stuck.text
        assert "begun" in stuck.text
        assert pool.killed == 0, "the sandbox ends it before the deadline of the call"


async def test_search_over_a_corpus(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"title": "Moon", "text": "It circles the earth."}\n{"title": "Sun", "text": "It shines."}\n')
    async with opened(ToolPool(config("search", corpus=str(corpus)))) as pool:
        assert (await pool.run("search", {"query": "what circles the earth"})).text.startswith("1. Moon")
