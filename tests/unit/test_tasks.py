"""The event that is waited for with a limit, on a virtual clock."""

import asyncio

import pytest

from asyncrl.remote.tasks import LimitedEvent
from asyncrl_testing.virtual_time import run_virtual


async def waited_s(event, limit_s):
    began = asyncio.get_running_loop().time()
    await event.wait(limit_s)
    return asyncio.get_running_loop().time() - began


@pytest.mark.parametrize(("set_at_s", "limit_s", "expected_s"), [(2, 5, 2), (5, 2, 2), (0, 0, 0), (2, 2, 2)])
def test_a_wait_ends_when_the_event_is_set_or_at_its_limit(set_at_s, limit_s, expected_s):
    async def run():
        event = LimitedEvent()
        asyncio.get_running_loop().call_later(set_at_s, event.set)
        assert await waited_s(event, limit_s) == pytest.approx(expected_s)
        await asyncio.sleep(set_at_s)
        assert event.is_set
        assert await waited_s(event, limit_s) == 0

    run_virtual(run())


def test_it_is_waited_for_again_after_a_limit_and_after_a_cancellation():
    async def run():
        event = LimitedEvent()
        await event.wait(1)
        waiting = asyncio.create_task(event.wait(100))
        await asyncio.sleep(1)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert not event.is_set
        asyncio.get_running_loop().call_later(3, event.set)
        assert await waited_s(event, 100) == pytest.approx(3)
        event.set()

    run_virtual(run())
