"""Where a conversation goes by the id of its earlier turn, and how many requests may be at the replicas."""

import asyncio

import pytest

from asyncrl.errors import GenerationError
from asyncrl.inference.external_places import PlaceQueue
from asyncrl.rollout.router import Affinity, Router
from asyncrl.serving.app import TurnTable, request_id_of
from tests.make import begun


def router(count=2, **limits):
    made = Router(**limits)
    for replica_id in range(count):
        made.put(replica_id)
    return made


def test_a_turn_is_found_by_its_id_and_by_the_id_of_its_body():
    turns = TurnTable()
    turns.served("abc", 1, now_s=0.0)
    assert [turns.replica_of(request_id_of(n), 1.0) for n in ("abc", "chatcmpl-abc", "cmpl-abc ")] == [1, 1, 1]
    assert turns.replica_of("abcd", 1.0) is None
    turns.served("abc", 0, now_s=2.0)
    assert turns.replica_of("abc", 3.0) == 0, "one conversation under one id: the last replica counts"


def test_turns_expire_and_are_bounded():
    turns = TurnTable(max_turns=3, expiry_s=10.0)
    for number in range(4):
        turns.served(f"t{number}", number, now_s=number)
    assert len(turns) == 3
    assert turns.replica_of("t0", 3.0) is None
    turns.served("t1", 1, now_s=9.0)
    assert turns.replica_of("t2", 12.0) == 2
    assert turns.replica_of("t2", 12.5) is None, "10 s after its last turn"
    turns.served("t9", 9, now_s=18.0)
    assert len(turns) == 2, "expired turns take no room"
    assert turns.replica_of("t1", 18.0) == 1, "used again later, so it is younger"


def test_the_replica_of_the_turn_before_is_preferred_until_it_is_overloaded():
    made = router(3, max_imbalance=2)
    assert [made.pick(near=1) for _ in range(3)] == [1, 1, 1]
    assert made.pick(near=1) != 1, "3 requests against 0"
    assert made.pick(near=7) in (0, 2), "one that is gone counts as none"


def test_a_session_comes_before_the_turn_and_the_turn_before_the_prefix():
    made = router()
    home = made.pick("a")
    assert made.pick("a", near=1 - home) == home
    blocks = [11, 12]
    first = made.pick(prefix=blocks)
    assert made.pick("", *Affinity(blocks, near=1 - first)) == 1 - first


def test_one_replica_alone_may_be_asked_for():
    made = router(2, max_imbalance=1)
    assert [made.pick(only=1) for _ in range(5)] == [1] * 5
    assert made.loads == {0: 0, 1: 5}
    with pytest.raises(GenerationError, match="replica 3 is not serving"):
        made.pick(only=3)


async def test_places_are_given_in_order_and_follow_the_replicas():
    places, order = PlaceQueue(), []
    leave = asyncio.Event()

    async def one(name):
        async with places:
            order.append(name)
            await leave.wait()

    tasks = [asyncio.create_task(one(i)) for i in range(4)]
    await asyncio.sleep(0)
    assert (order, places.taken, places.waiting) == ([], 0, 4), "no replica, no place"
    places.resize(2)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (order, places.taken, places.waiting) == ([0, 1], 2, 2)
    tasks[2].cancel()
    await asyncio.gather(tasks[2], return_exceptions=True)
    places.resize(1)
    leave.set()
    await asyncio.gather(tasks[0], tasks[1], tasks[3])
    assert (order, places.taken, places.waiting) == ([0, 1, 3], 0, 0)


async def test_a_place_that_was_given_to_a_cancelled_request_comes_back():
    places = PlaceQueue(1)

    async def enter():
        async with places:
            pass

    async with places:
        waiting = await begun(enter())
    waiting.cancel()  # the place was granted when the block above ended
    await asyncio.gather(waiting, return_exceptions=True)
    assert (places.taken, places.waiting) == (0, 0)
    async with asyncio.timeout(5), places:
        pass
