"""The algorithm on one page, as a newcomer runs it: `python -m asyncrl.loop`."""

import asyncio
import logging
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from asyncrl.errors import GenerationError
from asyncrl.loop import GROUP_SIZE, GROUPS_PER_STEP, Loop, main
from tests.e2e.conftest import ROOT

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("inputs")]

NOT_NEEDED = ("ray", "vllm", "sglang", "megatron", "omegaconf", "asyncrl.config.recipe", "asyncrl.driver")


def loop(steps, max_lag=2):
    model, data = ROOT / "runs/tiny-qwen3", ROOT / "data/arithmetic_train.jsonl"
    return Loop(model=str(model), data=str(data), steps=steps, max_lag=max_lag, seed=0)


def check(made, leases, steps, max_lag=2):
    groups = [group for lease in leases for group in lease.groups]
    assert [lease.step for lease in leases] == list(range(steps))
    assert sorted(group.ordinal for group in groups) == list(range(steps * GROUPS_PER_STEP)), "each is trained once"
    assert all(len(group.rewards) == GROUP_SIZE for group in groups)
    assert all(0 <= group.lag_max <= max_lag for group in groups)
    counts = made.ledger.counts
    assert counts.admitted == counts.trained == steps * GROUPS_PER_STEP
    assert counts.active == 0
    assert made.ledger.version == made.ledger.step == steps, "the last version is served"


def test_it_is_one_page():
    assert len((ROOT / "asyncrl" / "loop.py").read_text().splitlines()) <= 200


async def test_it_is_asynchronous_within_the_bound_and_loses_nothing():
    made = loop(steps=5)
    leases = await made.run()
    check(made, leases, steps=5)
    assert [max(group.lag_max for group in lease.groups) for lease in leases[:3]] == [0, 1, 2], "it fills its slots"


async def test_without_lag_the_two_take_turns():
    made = loop(steps=2, max_lag=0)
    leases = await made.run()
    check(made, leases, steps=2, max_lag=0)
    assert sum(group.interrupted for lease in leases for group in lease.groups) == 0


async def test_an_engine_that_is_lost_ends_the_run_with_its_error():
    made = loop(steps=1000)
    running = asyncio.create_task(made.run())
    while made.ledger.step < 1:
        assert not running.done()
        await asyncio.sleep(0.01)
    await made.engines[1].stop()
    with pytest.raises(GenerationError, match="stopped"):
        await running


def test_a_missing_model_names_the_command_that_makes_it(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.INFO, "asyncrl"):
        assert main([]) == 2
    assert "python tools/make_tiny_model.py --out runs/tiny-qwen3" in caplog.text


def test_it_needs_no_ray_and_ends_by_ctrl_c():
    script = f"""
import sys
from asyncrl.loop import main
code = main(["--steps", "1000"])
print("loaded:", [name for name in {NOT_NEEDED} if name in sys.modules])
sys.exit(code)
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as run:
        told = []
        for line in run.stdout:
            told.append(line)
            if line.startswith("step   2 "):
                run.send_signal(signal.SIGINT)
        errors = run.stderr.read()
    assert run.returncode == 128 + signal.SIGINT, errors
    assert told[-2:] == ["ended by Ctrl-C\n", "loaded: []\n"]
    assert "Traceback" not in errors
    assert not list(Path("/dev/shm").glob(f"asyncrl-weights-{run.pid}-*"))


@pytest.mark.slow
async def test_the_reward_rises_while_responses_span_versions():
    made = loop(steps=30)
    leases = await made.run()
    check(made, leases, steps=30)
    rewards = [np.mean([group.rewards for group in lease.groups]) for lease in leases]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.3, rewards
    groups = [group for lease in leases for group in lease.groups]
    assert sum(group.interrupted for group in groups) > 0
    assert sum(group.continued_tokens for group in groups) > 0, "on the same replica, with new weights"
