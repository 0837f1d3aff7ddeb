"""Rewards in processes: what hangs, crashes, prints or outlives its owner, with real processes."""

import asyncio
import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from asyncrl.config.rewards import RewardConfig
from asyncrl.data.rows import ChatMessage, PromptRow
from asyncrl.errors import ConfigError, DeadlineExceeded, ProcessDied
from asyncrl.rewards import RewardResult, build_reward
from asyncrl.rewards.reward_pool import RewardPool
from asyncrl.workers import worker_pool
from asyncrl.workers.worker_process import WorkerProcess
from tests.processes import ran
from tests.waiting import is_alive, until

pytestmark = pytest.mark.timeout(180)

ROW = PromptRow(
    (ChatMessage("user", "What is 3 + 4?"),), "7", "arithmetic", (("split", "train"),), "data/sums.jsonl:12"
)
SOON_S = 20.0
"""Beyond this a test has failed; none of them comes near."""

REWARDS = '''
import ctypes, os, re, signal, subprocess, sys, time
from pathlib import Path
from asyncrl.rewards import RewardResult

BROKEN = Path(__file__).with_name("broken")
if BROKEN.exists():
    os._exit(9)

class Picky(Exception):
    """Pickles, and cannot be made again from that."""
    def __init__(self, row, response):
        super().__init__("picky about " + response)

class Refused(Exception):
    pass

def length(response, row):
    return RewardResult(float(len(response)), (("length", float(len(response))),))

def noisy(response, row):
    print("a line")
    os.write(1, b"bytes")
    subprocess.run(["echo", "from a child"], check=True)
    ctypes.CDLL(None).puts(b"from C")
    return RewardResult(float(len(sys.stdin.read()) + len(response)))

def modules(response, row):
    return RewardResult(float(any(name in sys.modules for name in response.split())))

def number(response, row):
    import numpy
    return RewardResult(numpy.float32(0.5), [("half", numpy.float32(0.5))])

def verified(response, row):
    """math-verify's own limits are signals, which only a main thread gets."""
    from math_verify import parse, verify
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(0)
    return float(verify(parse(f"${row.ground_truth}$"), parse(response)))

async def verified_later(response, row):
    return verified(response, row)

async def waited(response, row):
    import asyncio
    await asyncio.sleep(float(response))
    return len(row.ground_truth)

def raising(response, row):
    if response == "sys.exit":
        sys.exit(3)
    if response == "picky":
        raise Picky(row, response)
    raise {"value": ValueError, "key": KeyError, "own": Refused, "timeout": TimeoutError}[response]("no " + response)

def troubled(response, row):
    """Does what the response says."""
    what, _, place = response.partition(" ")
    if what == "sleep":
        time.sleep(float(place or 1000))
    if what == "spin":
        while True:
            pass
    if what == "regex":  # never gives the interpreter's lock back
        re.match(r"(a+)+$", "a" * 60 + "b")
    if what == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    if what in ("child", "session"):
        child = subprocess.Popen(["sleep", "1000"], start_new_session=what == "session")
        Path(place).write_text(str(child.pid))
        child.wait()
    if what == "child+regex":
        Path(place).write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
        re.match(r"(a+)+$", "a" * 60 + "b")
    if what == "exit":
        os._exit(3)
    if what == "segfault":
        ctypes.string_at(0)
    if what == "oom":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "forked":  # its child holds the pipes
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(3)
    if what == "twin" and os.fork() == 0:
        return RewardResult(-1.0)  # from the child: nobody has asked it
    return RewardResult(float(len(response)))
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Name of a module of rewards that workers find by the `sys.path` of this process alone."""
    (tmp_path / "rewards_of_a_user.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    yield "rewards_of_a_user"
    sys.modules.pop("rewards_of_a_user", None)


@pytest.fixture
async def make():
    """Makes started pools, and sees that each leaves no process behind."""
    pools: list[RewardPool] = []

    async def started(name: str, num_workers: int = 1, timeout_s: float = SOON_S) -> RewardPool:
        pools.append(RewardPool(RewardConfig(function=name, workers=num_workers, timeout_s=timeout_s)))
        await pools[-1].start()
        return pools[-1]

    before = set(workers())
    yield started
    for pool in pools:
        await asyncio.wait_for(pool.close(), SOON_S)
    assert set(workers()) <= before


def workers(below: int | None = None) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(below).children(recursive=True):
        try:
            if "asyncrl.rewards.reward_worker" in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


# -- results -----------------------------------------------------------------------------------------------------------


async def test_every_call_gets_the_result_of_its_own_response(make, module):
    pool = await make(f"{module}:length", num_workers=2)
    texts = ["x" * n for n in range(50)] + ["y" * 300_000, "\ud800 a lone surrogate", ""]
    results = await asyncio.gather(*(pool.score(text, ROW) for text in texts))
    assert results == [RewardResult(float(len(t)), (("length", float(len(t))),)) for t in texts]
    assert (pool.answered, pool.killed, pool.died) == (len(texts), 0, 0)


async def test_built_in_rewards_answer_as_they_do_here(make):
    pool = await make("math")
    for response in ("so \\boxed{7}", "Answer: 8", "nothing"):
        assert await pool.score(response, ROW) == build_reward(RewardConfig())(response, ROW)


async def test_what_a_reward_prints_or_reads_does_not_reach_the_pipes(make, module):
    pool = await make(f"{module}:noisy")
    assert [(await pool.score(text, ROW)).reward for text in ("a", "bb", "ccc")] == [1.0, 2.0, 3.0]


async def test_numbers_of_other_libraries_come_back_plain(make, module):
    result = await (await make(f"{module}:number")).score("", ROW)
    assert result == RewardResult(0.5, (("half", 0.5),))
    assert type(result.reward) is float


@pytest.mark.parametrize("name", ["verified", "verified_later"])
async def test_a_reward_may_limit_itself_by_signals(make, module, name):
    pytest.importorskip("math_verify")
    pool = await make(f"{module}:{name}")
    assert [(await pool.score(text, ROW)).reward for text in ("$3+4$", "$8$")] == [1.0, 0.0]


async def test_a_worker_imports_nothing_heavy(make, module):
    heavy = "torch ray transformers vllm datasets asyncio numpy"
    assert (await (await make(f"{module}:modules")).score(heavy, ROW)).reward == 0.0


async def test_it_runs_below_uvloop_too(module):
    """Ray's actors have such a loop where the package is installed. It owns a pipe as soon as it begins to connect it:
    a start that is cancelled there must not close the pipe a second time."""
    pytest.importorskip("uvloop")
    script = f"""
import asyncio, sys, uvloop
sys.path[:] = {sys.path!r}
from asyncrl.errors import DeadlineExceeded, ProcessDied
from tests.contract.test_reward_pool import ROW, RewardConfig, RewardPool
async def main():
    pool = RewardPool(RewardConfig(function="{module}:troubled", workers=2, timeout_s=1.0))
    await pool.start()
    asked = [pool.score(what, ROW) for what in ("exit", "regex", "forked", "plain")]
    print([type(o).__name__ for o in await asyncio.gather(*asked, return_exceptions=True)])
    await pool.close()
    for number in range(6):
        pool = RewardPool(RewardConfig(function="{module}:length"))
        starting = asyncio.create_task(pool.start())
        for _ in range(number):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await pool.close()
uvloop.run(main())
"""
    done = await asyncio.to_thread(ran, "-c", script, timeout_s=40)
    assert done.stdout.strip() == "['ProcessDied', 'DeadlineExceeded', 'ProcessDied', 'RewardResult']", done.stderr


# -- rewards that raise ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "kind", "text"),
    [
        ("value", "ValueError", "no value"),
        ("key", "KeyError", "'no key'"),
        ("timeout", "TimeoutError", "no timeout"),
        ("own", "Refused", "no own"),
        ("picky", "RuntimeError", "rewards_of_a_user.Picky: picky about picky"),
        ("sys.exit", "RuntimeError", "SystemExit: 3"),
    ],
)
async def test_an_exception_of_a_reward_comes_back(make, module, response, kind, text):
    pool = await make(f"{module}:raising")
    with pytest.raises(Exception, match=re.escape(text)) as caught:
        await pool.score(response, ROW)
    assert (type(caught.value).__name__, str(caught.value)) == (kind, text)
    assert "rewards_of_a_user.py" in caught.value.__notes__[0]
    with pytest.raises(ValueError, match="no value"):
        await pool.score("value", ROW)
    assert (pool.answered, pool.killed, pool.died) == (0, 0, 0), "the worker had to be replaced"


# -- rewards that hang -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["sleep", "spin", "regex", "deaf", "child", "session", "child+regex"])
async def test_a_reward_that_hangs_is_killed_with_what_it_has_started(make, module, what, tmp_path):
    pool = await make(f"{module}:troubled", num_workers=2, timeout_s=1.0)
    place = tmp_path / "pid"
    before = workers()
    hung = asyncio.create_task(pool.score(f"{what} {place}" if "child" in what or what == "session" else what, ROW))
    others = await asyncio.gather(*(pool.score("plain", ROW) for _ in range(20)))
    assert not hung.done(), "the others waited for it"
    assert {o.reward for o in others} == {5.0}
    with pytest.raises(DeadlineExceeded, match=r"(?s)data/sums\.jsonl:12.*within 1 s") as caught:
        await hung
    assert str(caught.value.process) == "reward process"
    if place.exists():
        await until(lambda: not is_alive(int(place.read_text())), "what it had started was left")
    await until(lambda: len(workers()) == 2, "no new worker")
    assert len(set(workers()) & set(before)) == 1
    assert (pool.killed, pool.died, pool.answered) == (1, 0, 20)
    assert {(await pool.score("plain", ROW)).reward for _ in range(4)} == {5.0}


async def test_the_deadline_of_a_call_begins_with_its_work(make, module):
    """Six calls of 0.3 s in one worker: the last one waits longer than the deadline, and is served."""
    pool = await make(f"{module}:troubled", timeout_s=1.0)
    results = await asyncio.gather(*(pool.score("sleep 0.3", ROW) for _ in range(6)))
    assert {r.reward for r in results} == {9.0}


async def test_a_blocked_event_loop_is_not_the_fault_of_the_reward(make, module):
    pool = await make(f"{module}:troubled", timeout_s=0.3)
    call = asyncio.create_task(pool.score("plain", ROW))
    for _ in range(5):  # the request is on its way
        await asyncio.sleep(0)
    time.sleep(1.0)  # noqa: ASYNC251 - it stands for a loop that is busy
    assert (await call).reward == 5.0
    assert pool.killed == 0


async def test_a_caller_that_gives_up_leaves_no_trace(make, module, frames):
    pool = await make(f"{module}:troubled", timeout_s=SOON_S)
    pid = workers()[0].pid
    frames.clear()
    calls = [asyncio.create_task(pool.score(what, ROW)) for what in ("sleep 0.3", "sleep")]
    await until(lambda: frames, "the first one does not begin")
    for call in calls:
        call.cancel()
    assert (await pool.score("plain", ROW)).reward == 5.0, "the answer of another call"
    assert [w.pid for w in workers()] == [pid]
    assert pool.killed == 0


# -- quick calls are sent ahead ----------------------------------------------------------------------------------------


class Frames(list[int]):
    """How many calls were sent together, each time."""

    call_s: float | None = None
    """What each call is said to have taken, however slow this machine is."""


@pytest.fixture
def frames(monkeypatch):
    found, send, answer = Frames(), WorkerProcess.send, WorkerProcess.answer

    def counted(self, requests):
        found.append(len(requests))
        return send(self, requests)

    async def timed(self, sent, timeout_s):
        seconds, value = await answer(self, sent, timeout_s)
        return found.call_s or seconds, value

    monkeypatch.setattr(WorkerProcess, "send", counted)
    monkeypatch.setattr(WorkerProcess, "answer", timed)
    return found


async def test_quick_calls_are_sent_together_and_slow_ones_are_not(make, module, frames):
    pool = await make(f"{module}:troubled")
    frames.clear()
    frames.call_s = 1e-5
    await asyncio.gather(*(pool.score("plain", ROW) for _ in range(64)))
    assert frames == [1, 16, 16, 16, 15], "as many as may, once one has told how long it takes"
    frames.clear()
    frames.call_s = 0.2
    assert {r.reward for r in await asyncio.gather(*(pool.score("plain", ROW) for _ in range(16 + 6)))} == {5.0}
    assert frames == [16] + [1] * 6


async def test_two_workers_divide_the_calls(make, module, frames):
    frames.call_s = 0.001
    pool = await make(f"{module}:troubled", num_workers=2)
    await asyncio.gather(*(pool.score("plain", ROW) for _ in range(16)))
    frames.clear()
    await asyncio.gather(*(pool.score("plain", ROW) for _ in range(10)))
    assert max(frames) == 5


async def test_calls_that_hang_where_all_were_quick_are_divided_from_the_second_on(make, module, frames):
    pool = await make(f"{module}:troubled", num_workers=2, timeout_s=0.5)
    pool._call_s = 1e-5  # as if all had been quick, however slow this machine is
    found = await asyncio.gather(*(pool.score("sleep 60", ROW) for _ in range(5)), return_exceptions=True)
    assert {type(o) for o in found} == {DeadlineExceeded}
    sent = [n for n in frames if n != 1]  # a new process gets its settings alone, too
    assert sent == [5], "or the last one begins after all others"


async def test_calls_that_wait_are_not_spaced_while_workers_are_idle(make, module, frames, monkeypatch):
    frames.call_s = 0.003
    pool = await make(f"{module}:troubled", num_workers=4)
    await asyncio.gather(*(pool.score("plain", ROW) for _ in range(40)))
    monkeypatch.setattr(worker_pool, "_GATHER_S", 600.0)
    calls = [asyncio.create_task(pool.score("plain", ROW)) for _ in range(4)]
    await asyncio.wait_for(asyncio.gather(*calls[:3]), SOON_S)
    assert not calls[3].done(), "only the last one waits for more"
    calls[3].cancel()


async def test_quick_calls_that_come_one_by_one_are_gathered(make, module, frames, monkeypatch):
    """All come within the time for which calls are gathered, also on a machine that is busy."""
    frames.call_s = 1e-5
    pool = await make(f"{module}:length", num_workers=2)
    await asyncio.gather(*(pool.score("plain", ROW) for _ in range(32)))
    monkeypatch.setattr(worker_pool, "_GATHER_S", 1.0)
    pool._sent_at = -math.inf  # a pause
    frames.clear()
    calls = []
    for n in range(40):
        calls.append(asyncio.create_task(pool.score("x" * n, ROW)))
        await asyncio.sleep(0)
    assert [call.reward for call in await asyncio.gather(*calls)] == list(range(40))
    assert frames[0] == 1, "the first call after a pause waits for nothing"
    assert sum(frames) == 40
    assert len(frames) <= 16


@pytest.mark.parametrize(
    ("what", "error", "timeout_s"),
    [("spin", DeadlineExceeded, 1.0), ("exit", ProcessDied, SOON_S), ("oom", ProcessDied, SOON_S)],
)
async def test_calls_behind_one_that_ends_the_process_are_served_by_the_next(
    make, module, frames, what, error, timeout_s
):
    frames.call_s = 1e-5
    pool = await make(f"{module}:troubled", timeout_s=timeout_s)
    await asyncio.gather(*(pool.score("plain", ROW) for _ in range(16)))
    frames.clear()
    texts = ["plain", "plain", what, "x", "xx", what, "xxx"]
    outcomes = await asyncio.gather(*(pool.score(text, ROW) for text in texts), return_exceptions=True)
    assert max(frames) >= 6, "they were sent together"
    assert [type(o) if text == what else o.reward for text, o in zip(texts, outcomes, strict=True)] == [
        5.0, 5.0, error, 1.0, 2.0, error, 3.0,
    ]  # fmt: skip
    assert (pool.killed + pool.died, pool.answered) == (2, 16 + 5)


@pytest.mark.parametrize("idle", [True, False], ids=["while it was idle", "in a call"])
async def test_calls_behind_a_worker_that_cannot_be_replaced_are_served_by_another(make, module, tmp_path, idle):
    pool = await make(f"{module}:troubled", num_workers=2)
    await asyncio.gather(*(pool.score("plain", ROW) for _ in range(32)))
    (tmp_path / "broken").touch()
    if idle:
        (gone := workers()[0]).kill()
        await until(lambda: not is_alive(gone.pid), "it lives")
    texts = ["plain" if idle else "exit", *["plain"] * 31]
    outcomes = asyncio.gather(*(pool.score(text, ROW) for text in texts), return_exceptions=True)
    found = await asyncio.wait_for(outcomes, SOON_S)
    assert [type(o) for o in found[1:]] == [RewardResult] * 31


async def test_a_caller_that_gives_up_leaves_the_others_their_own_answers(make, module):
    pool = await make(f"{module}:length")
    await asyncio.gather(*(pool.score("plain", ROW) for _ in range(16)))
    calls = [asyncio.create_task(pool.score("x" * n, ROW)) for n in range(12)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for call in calls[::3]:
        call.cancel()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(o.reward == n for n, o in enumerate(outcomes) if n % 3)


async def test_close_ends_calls_that_were_sent_ahead(make, module, frames):
    frames.call_s = 1e-5
    pool = await make(f"{module}:troubled", timeout_s=60.0)
    await asyncio.gather(*(pool.score("plain", ROW) for _ in range(16)))
    frames.clear()
    calls = [asyncio.create_task(pool.score(what, ROW)) for what in ("spin", "plain", "plain")]
    await until(lambda: frames == [3], "they are not sent together")
    await pool.close()
    assert {type(o) for o in await asyncio.gather(*calls, return_exceptions=True)} == {ProcessDied}


# -- workers that die --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "how"),
    [("exit", "exit code 3"), ("segfault", "SIGSEGV"), ("oom", "SIGKILL"), ("forked", "exit code 3")],
)
async def test_a_worker_that_dies_fails_its_call_alone(make, module, what, how):
    pool = await make(f"{module}:troubled", num_workers=2)
    outcomes = await asyncio.gather(
        *(pool.score(text, ROW) for text in (what, "plain", "plain", what, "plain")), return_exceptions=True
    )
    assert [type(o) for o in outcomes] == [ProcessDied, RewardResult, RewardResult, ProcessDied, RewardResult]
    assert how in str(outcomes[0])
    assert "data/sums.jsonl:12" in str(outcomes[0])
    assert str(outcomes[0].process) == "reward process"
    assert (pool.died, pool.killed, pool.answered) == (2, 0, 3)
    assert (await pool.score("plain", ROW)).reward == 5.0


async def test_a_child_that_comes_back_from_the_reward_does_not_answer(make, module):
    pool = await make(f"{module}:troubled")
    assert {(await pool.score("twin", ROW)).reward for _ in range(5)} == {4.0}
    assert pool.died == 0


async def test_a_worker_that_died_idle_costs_no_call(make, module):
    pool = await make(f"{module}:length", num_workers=2)
    for worker in (gone := workers()):
        worker.kill()
    await until(lambda: not any(is_alive(w.pid) for w in gone), "they live")
    results = await asyncio.gather(*(pool.score("abc", ROW) for _ in range(6)))
    assert {r.reward for r in results} == {3.0}
    assert pool.died == 2


async def test_workers_that_cannot_be_started_any_more_end_the_calls(make, module, tmp_path):
    pool = await make(f"{module}:troubled", num_workers=2)
    (tmp_path / "broken").touch()
    outcomes = await asyncio.gather(*(pool.score("exit", ROW) for _ in range(8)), return_exceptions=True)
    assert {type(o) for o in outcomes} == {ProcessDied}
    assert any("in a row could not be started" in str(o) and "exit code 9" in str(o) for o in outcomes)
    with pytest.raises(ProcessDied, match="could not be started"):
        await pool.score("plain", ROW)
    await until(lambda: workers() == [], "one lives")


async def test_one_worker_that_serves_carries_the_others(make, module, tmp_path):
    pool = await make(f"{module}:troubled", num_workers=2)
    (tmp_path / "broken").touch()
    with pytest.raises(ProcessDied):
        await pool.score("exit", ROW)
    assert {(await pool.score("plain", ROW)).reward for _ in range(10)} == {5.0}
    (tmp_path / "broken").unlink()
    await until(lambda: len(workers()) == 2, "no second worker")


# -- start and end -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        ("raise RuntimeError('no licence')", ConfigError, "RuntimeError: no licence"),
        ("def reward(", ConfigError, "SyntaxError"),
        ("import sys; sys.exit(4)", ConfigError, "SystemExit: 4"),
        ("other = 1", ConfigError, "cannot import it"),
        ("import os; os._exit(4)", ProcessDied, "exit code 4"),
        ("while True: pass", DeadlineExceeded, "not ready within 0.5 s"),
    ],
)
async def test_a_reward_that_cannot_be_built_there_fails_the_start(tmp_path, monkeypatch, source, error, text):
    (tmp_path / "broken_reward.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    config = RewardConfig(function="broken_reward:reward", timeout_s=5.0)
    pool = RewardPool(config, start_timeout_s=0.5 if error is DeadlineExceeded else SOON_S)
    with pytest.raises(error, match=f"(?s)reward.function=broken_reward:reward.*{re.escape(text)}"):
        await asyncio.wait_for(pool.start(), SOON_S)
    assert workers() == []
    with pytest.raises(ProcessDied):
        await pool.score("", ROW)
    await pool.close()


async def test_close_ends_calls_and_processes_at_once(make, module, tmp_path):
    pool = await make(f"{module}:troubled", num_workers=2, timeout_s=60.0)
    place = tmp_path / "pid"
    calls = [asyncio.create_task(pool.score(what, ROW)) for what in ("regex", f"session {place}", "plain")]
    await until(lambda: place.exists() and place.read_text(), "it does not work")
    await asyncio.wait_for(asyncio.gather(pool.close(), pool.close()), SOON_S)
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(o) for o in outcomes} == {ProcessDied}
    assert workers() == []
    await until(lambda: not is_alive(int(place.read_text())), "what it had started was left")
    await pool.close()
    with pytest.raises(ProcessDied, match="were ended"):
        await pool.score("plain", ROW)


OWNER = """
import asyncio, os, sys
sys.path[:] = {path!r}
from tests.contract.test_reward_pool import ROW, RewardConfig, RewardPool
async def main():
    pool = RewardPool(RewardConfig(function="{module}:troubled", workers=3, timeout_s=600.0))
    await pool.start()
    calls = [asyncio.create_task(pool.score(what, ROW)) for what in {asked!r}]
    await asyncio.sleep(0)
    print("started", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    os._exit(0)
asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def owner_of(module: str, asked: list[str], mark: Path):
    """A process with a pool of three that works on `asked`; killed at the end, and waited for."""
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OWNER.format(path=sys.path, module=module, asked=asked)),
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "OWNED_BY": str(mark)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert owner.stdout is not None
    try:
        assert await asyncio.wait_for(owner.stdout.readline(), SOON_S) == b"started\n"
        yield owner
    finally:
        if owner.returncode is None:
            owner.kill()
        await asyncio.wait_for(owner.wait(), SOON_S)


@pytest.mark.parametrize("way", ["SIGKILL", "SIGTERM", "os._exit"])
async def test_nothing_outlives_its_owner(module, tmp_path, way):
    """Of an idle worker, one stuck in C with a child below it, and one that waits for its child."""
    places = [tmp_path / "first", tmp_path / "second"]
    async with owner_of(module, [f"child+regex {places[0]}", f"child {places[1]}"], tmp_path) as owner:
        await until(lambda: all(p.exists() and p.read_text() for p in places), "they do not work")
        left = [w.pid for w in workers(owner.pid)] + [int(p.read_text()) for p in places]
        assert len(left) == 5
        # A process that is just beginning its program has no environment to read.
        await until(lambda: set(left) < set(marked(tmp_path)), "the mark does not mark")
        if way == "os._exit":
            owner.stdin.write(b"\n")
            await asyncio.wait_for(owner.wait(), SOON_S)
        else:
            owner.send_signal(getattr(signal, way))
    await until(lambda: not any(is_alive(pid) for pid in left), "some of them live")
    await until(lambda: not any(marked(tmp_path)), "something else lives")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part of it is Linux's")
async def test_workers_end_with_their_owner_without_the_guard_too(module, tmp_path):
    async with owner_of(module, ["regex", "sleep"], tmp_path) as owner:
        left = workers(owner.pid)
        (guard,) = [pid for pid in marked(tmp_path) if "orphan_reaper.py" in psutil.Process(pid).cmdline()[-1]]
        os.kill(guard, signal.SIGKILL)
    assert len(left) == 3
    await until(lambda: not any(marked(tmp_path)), "a worker lives")


def marked(place: Path) -> Iterator[int]:
    """Processes whose environment has the mark of this test, whatever they are."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("OWNED_BY") == str(place) and process.status() != psutil.STATUS_ZOMBIE:
                yield process.pid
        except psutil.Error:
            continue
