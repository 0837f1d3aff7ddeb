"""Blocking work beside an event loop."""

import asyncio
import subprocess
import sys
import threading
import time
import weakref

import pytest

from asyncrl.weights.transports.blocking import BlockingCalls


async def test_one_after_the_other_in_one_thread_while_the_loop_goes_on():
    thread, order = BlockingCalls("test"), []

    def work(number):
        time.sleep(0.02)
        order.append((number, threading.get_ident()))
        return number

    calls = [asyncio.create_task(thread.do(work, n)) for n in range(5)]
    turns = 0
    while not all(call.done() for call in calls):
        turns += 1
        await asyncio.sleep(0.001)
    assert [call.result() for call in calls] == [n for n, _ in order] == list(range(5))
    assert len({ident for _, ident in order}) == 1
    assert turns > 10


@pytest.mark.parametrize("error", [ValueError("a"), StopIteration(1), SystemExit(2), KeyboardInterrupt()])
async def test_whatever_is_raised_reaches_the_caller_and_the_thread_goes_on(error):
    def fail():
        raise error

    thread = BlockingCalls("test")
    with pytest.raises(type(error) if isinstance(error, ValueError) else RuntimeError) as raised:
        await asyncio.wait_for(thread.do(fail), 5)
    assert error in (raised.value, raised.value.__cause__)
    assert await asyncio.wait_for(thread.do(lambda: 5), 5) == 5


async def test_a_caller_that_gives_up_leaves_the_work_and_the_others_alone():
    thread, go, seen = BlockingCalls("test"), threading.Event(), []
    first = asyncio.create_task(thread.do(lambda: (go.wait(5), seen.append(1))))
    unbegun = asyncio.create_task(thread.do(lambda: seen.append(0)))
    second = asyncio.create_task(thread.do(lambda: seen.append(2) or 7))
    await asyncio.sleep(0.01)
    first.cancel()
    unbegun.cancel()
    await asyncio.sleep(0)
    go.set()
    assert await asyncio.wait_for(second, 5) == 7
    assert seen == [1, 2]


def test_what_a_call_held_is_freed_before_its_caller_goes_on():
    """A process group that is freed in this thread while the interpreter ends aborts the process."""

    class Rank:
        def stop(self):
            pass

    rank, go, freed = Rank(), threading.Event(), []
    held, thread = weakref.ref(rank), BlockingCalls("test")
    thread.submit(go.wait)
    future = thread.submit(rank.stop)
    future.add_done_callback(lambda _: freed.append(held() is None))
    del rank
    go.set()
    future.result(5)
    assert freed == [True]


def test_work_that_does_not_end_keeps_no_process_alive():
    code = (
        "import asyncio, time; from asyncrl.weights.transports.blocking import BlockingCalls\n"
        "async def main():\n"
        "    task = asyncio.ensure_future(BlockingCalls('hangs').do(time.sleep, 600))\n"
        "    await asyncio.sleep(0.1); task.cancel()\n"
        "asyncio.run(main())"
    )
    began = time.monotonic()
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
    assert time.monotonic() - began < 50
