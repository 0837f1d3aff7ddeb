"""The event that is waited for with a limit, on a virtual clock."""

import asyncio

import pytest

from asyncrl.remote.tasks import Bell
from asyncrl_testing.virtual_time import run_virtual

pytestmark = pytest.mark.unit


async def waited_s(bell, limit_s):
    began = asyncio.get_running_loop().time()
    await bell.wait(limit_s)
    return asyncio.get_running_loop().time() - began


@pytest.mark.parametrize(("rings_at_s", "limit_s", "expected_s"), [(2, 5, 2), (5, 2, 2), (0, 0, 0), (2, 2, 2)])
def test_a_wait_ends_when_it_rings_or_at_its_limit(rings_at_s, limit_s, expected_s):
    async def run():
        bell = Bell()
        asyncio.get_running_loop().call_later(rings_at_s, bell.ring)
        assert await waited_s(bell, limit_s) == pytest.approx(expected_s)
        await asyncio.sleep(rings_at_s)
        assert bell.rung
        assert await waited_s(bell, limit_s) == 0

    run_virtual(run())


def test_it_is_waited_for_again_after_a_limit_and_after_a_cancellation():
    async def run():
        bell = Bell()
        await bell.wait(1)
        waiting = asyncio.create_task(bell.wait(100))
        await asyncio.sleep(1)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert not bell.rung
        asyncio.get_running_loop().call_later(3, bell.ring)
        assert await waited_s(bell, 100) == pytest.approx(3)
        bell.ring()

    run_virtual(run())
