"""SGLang's processes: a dead scheduler, and none that is left behind. One test runs this file as a program: an owner
that starts an engine, says so, and waits to be killed."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import psutil
import pytest

from asyncrl.config.rollout import RolloutConfig, SglangEngineConfig
from asyncrl.errors import ConfigError, GenerationError
from asyncrl.types import ModelFacts
from asyncrl_testing.engine_client import Client, complete, make_request, within
from tests.engines import assert_cannot_start, assert_dead, running, sglang_engine, started
from tests.make import require_sglang
from tests.processes import ROOT, assert_gone, killed
from tests.waiting import wait_until

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module", autouse=True)
def sglang_is_there():
    require_sglang()


@pytest.fixture(autouse=True)
def nothing_is_left():
    def left():
        return {*Path("/dev/shm").glob("sgl*"), *Path(tempfile.gettempdir()).glob("asyncrl-sglang-*")}

    before = left()
    yield
    wait_until(lambda: not left() - before, within_s=20)
    assert left() == before


make_engine = partial(sglang_engine, real=True)


async def test_a_dead_scheduler_is_noticed_and_costs_no_token_that_had_arrived(model_path):
    async with running(make_engine(model_path)) as engine:
        client = Client(engine, make_request(max_tokens=400))
        await client.first_tokens()
        below = psutil.Process().children(recursive=True)
        scheduler = next(p for p in below if "scheduler" in p.name() or "scheduler" in " ".join(p.cmdline()))
        os.kill(scheduler.pid, signal.SIGKILL)
        with pytest.raises(GenerationError, match="SGLang's process ended"):
            await within(client.task, 20.0)
        assert client.ids
        await assert_dead(engine, "SGLang's process ended")
    assert_gone(below, 10.0)


async def test_a_scheduler_that_fails_leaves_nothing(model_path):
    """It says so by SIGQUIT to the process that started it, where SGLang's own handler kills everything at once."""
    async with running(make_engine(model_path)):
        below = psutil.Process().children(recursive=True)
        (host,) = [p for p in psutil.Process().children() if "asyncrl.inference.sglang.host" in " ".join(p.cmdline())]
        host.send_signal(signal.SIGQUIT)
        assert_gone(below, 20.0)


async def test_an_engine_that_is_stopped_while_it_starts_leaves_nothing(model_path):
    engine = make_engine(model_path)
    starting = asyncio.create_task(engine.start())
    while len(psutil.Process().children(recursive=True)) < 3:  # the scheduler too
        await asyncio.sleep(0.05)
        assert not starting.done()
    below = psutil.Process().children(recursive=True)
    await within(engine.stop(), 30.0)
    with pytest.raises(GenerationError, match="stopped"):
        await within(starting)
    assert_gone(below, 20.0)


async def test_a_cache_smaller_than_the_longest_request_is_refused_at_the_start(model_path):
    engine = make_engine(model_path, max_total_tokens=256)
    with pytest.raises(ConfigError, match="max_total_tokens"):
        await started(engine)
    await within(engine.stop())


@pytest.mark.timeout(400)
def test_nothing_outlives_an_owner_that_is_killed(model_path):
    command = [sys.executable, "-m", "tests.contract.test_sglang_processes", str(model_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner, killed(owner):
        assert next(line for line in owner.stdout if line.startswith("started"))
        below = psutil.Process(owner.pid).children(recursive=True)
        assert len(below) >= 2
    assert_gone(below, 20.0)


async def test_an_engine_that_cannot_start_says_why(tmp_path):
    await assert_cannot_start(make_engine, tmp_path, "SGLang")


def test_arguments_that_sglang_does_not_know_are_named_before_anything_starts(model_path):
    from asyncrl.inference.sglang.support import check_installed

    def settings(**server_args):
        return RolloutConfig(
            engine="sglang", interrupt="keep", sglang=SglangEngineConfig(stream_interval=1, server_args=server_args)
        )

    facts = ModelFacts(str(model_path), is_local=True, architecture="Qwen3ForCausalLM")
    check_installed(settings(attention_backend="torch_native"), facts)
    with pytest.raises(ConfigError, match=r"server_args\.atention_backend(?s:.)*attention_backend"):
        check_installed(settings(atention_backend="torch_native"), facts)


def test_models_that_sglang_cannot_load_are_named(monkeypatch, tmp_path):
    from asyncrl.inference.sglang.support import check_architecture

    check_architecture("Qwen3ForCausalLM")
    check_architecture("HeliumForCausalLM")  # by way of transformers
    with pytest.raises(ConfigError, match="has no model of that name"):
        check_architecture("ReformerModelWithLMHead")
    package = tmp_path / "models_without_kernels"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "odd.py").write_text("class OddForCausalLM: ...\nraise RuntimeError('no kernel')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="odd cannot be imported: RuntimeError: no kernel"):
        check_architecture("OddForCausalLM", package.name)


def test_a_dry_run_probes_the_installed_sglang(model_path, capsys):
    from asyncrl.commands.train import main

    unknown = "rollout.engine=sglang", "rollout.sglang.server_args.atention_backend=x"
    assert main([str(ROOT / "recipes" / "dapo_qwen.yaml"), *unknown, "--dry-run"]) == 2
    assert "no argument of that name" in capsys.readouterr().err


async def _own(path):
    engine = await started(make_engine(path))
    await complete(engine, max_tokens=4)
    sys.stdout.write("started\n")
    sys.stdout.flush()
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(_own(sys.argv[1]))
