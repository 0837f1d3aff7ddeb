import asyncio
import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import GenerationError
from asyncrl.inference.external_places import PlaceQueue
from asyncrl.rollout.router import BLOCK_TOKENS, Affinity, Router, prefix_blocks
from asyncrl.serving.app import TurnTable, request_id_of
from tests.make import begun


def router(*replicas, **options):
    made = Router(**options)
    for replica in replicas:
        made.put(replica)
    return made


def test_replicas_take_turns_also_when_each_request_ends_before_the_next():
    made = router(0, 1, 2)
    order = []
    for _ in range(300):
        order.append(made.pick())
        made.done(order[-1])
    assert order[:6] == [0, 1, 2, 0, 1, 2]
    assert {r: order.count(r) for r in range(3)} == {0: 100, 1: 100, 2: 100}


def test_a_session_stays_until_its_replica_is_overloaded_or_gone():
    made = router(0, 1, max_imbalance=3)
    home = made.pick("a")
    assert [made.pick("a") for _ in range(3)] == [home] * 3
    assert made.pick("a") != home, "4 requests against 0: the session moves"
    made.remove(home)
    assert made.pick("a") == 1 - home


def test_without_replicas_the_error_says_so():
    made = router(0)
    made.remove(0)
    with pytest.raises(GenerationError, match="no replica"):
        made.pick()


@given(st.lists(st.tuples(st.sampled_from(["pick", "done", "remove", "add"]), st.integers(0, 4)), max_size=200))
def test_a_pick_without_session_is_always_the_least_loaded(actions):
    made, loads = router(0), {0: 0}
    for action, replica in actions:
        if action == "add" and replica not in loads:
            made.put(replica)
            loads[replica] = 0
        elif action == "remove":
            made.remove(replica)
            loads.pop(replica, None)
        elif action == "done" and loads.get(replica, 0) > 0:
            made.done(replica)
            loads[replica] -= 1
        elif action == "pick" and loads:
            chosen = made.pick()
            assert loads[chosen] == min(loads.values())
            loads[chosen] += 1
        assert made.loads == loads


def prompt(*parts, seed=0):
    """Tokens of turns, each (name, length): equal names give equal tokens."""
    return np.concatenate(
        [np.random.default_rng([seed, name]).integers(0, 50_000, length) for name, length in parts]
    ).astype(np.int32)


def test_prefixes_share_the_blocks_up_to_where_they_part():
    long = prefix_blocks(prompt((1, 160), (2, 160)))
    other = prefix_blocks(prompt((1, 160), (3, 160)))
    assert len(long) == 320 // BLOCK_TOKENS
    assert long[:10] == other[:10]
    assert not set(long[10:]) & set(other[10:])
    assert prefix_blocks(prompt((1, BLOCK_TOKENS - 1))) == []
    assert prefix_blocks(prompt((1, BLOCK_TOKENS + 1))) == long[:1]


@given(st.integers(0, 20_000), st.integers(0, 20_000))
def test_a_shorter_prompt_has_the_first_numbers_of_a_longer_one_and_few_are_enough(one, two):
    tokens = np.arange(max(one, two), dtype=np.int32)
    short, long = sorted((prefix_blocks(tokens[:one]), prefix_blocks(tokens[:two])), key=len)
    assert long[: len(short)] == short
    assert len(long) <= 32 + 16 * 10
    known = sum(min(BLOCK_TOKENS * 2 ** max(0, (i - 16) // 16), len(tokens)) for i in range(len(long)))
    assert known > 0.93 * len(tokens) - BLOCK_TOKENS, "what is not covered is small"


def test_the_longest_prefix_decides_and_among_equals_the_latest_replica():
    made = router(0, 1, max_prefix_imbalance=0)
    first = made.pick(prefix=prefix_blocks(prompt((1, 64), (2, 64))))
    second = made.pick(prefix=prefix_blocks(prompt((1, 64), (3, 64))))
    assert first != second, "the first one was overloaded"
    made.done(first)
    made.done(second)
    for turns, home in (((1, 2, 4), first), ((1, 3, 5), second), ((1, 2), first), ((1, 6), first)):
        assert made.pick(prefix=prefix_blocks(prompt(*((t, 64) for t in turns)))) == home
        made.done(home)


def test_a_session_goes_before_a_prefix_and_a_new_session_follows_the_prefix():
    made = router(0, 1)
    home = made.pick("a", prefix_blocks(prompt((1, 64))))
    other = made.pick("b", prefix_blocks(prompt((2, 64))))
    assert home != other
    assert made.pick("b", prefix_blocks(prompt((1, 64), (3, 64)))) == other
    assert made.pick("c", prefix_blocks(prompt((1, 64)))) == other, "it served that prefix last"


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["pick", "done", "remove", "add"]),
        st.integers(0, 4),
        st.sampled_from(["", "a", "b"]),
        st.lists(st.integers(0, 2), max_size=3),
    ),
    max_size=120,
)


@given(ACTIONS)
def test_stickiness_never_costs_more_than_its_imbalance_or_memory(actions):
    made = router(0, 1, max_imbalance=6, max_prefix_imbalance=3, max_sessions=1, max_blocks=5)
    for action, replica, session, turns in actions:
        if action == "add" and replica not in made.loads:
            made.put(replica)
        elif action == "remove":
            made.remove(replica)
        elif action == "done" and made.loads.get(replica, 0) > 0:
            made.done(replica)
        elif action == "pick" and made.loads:
            before = made.loads
            blocks = prefix_blocks(prompt(*((t, BLOCK_TOKENS) for t in turns))) if turns else ()
            chosen = made.pick(session, blocks)
            limit = 6 if session else 3 if blocks else 0
            assert before[chosen] - min(before.values()) <= limit
            assert made.loads == {**before, chosen: before[chosen] + 1}
        assert len(made._sessions) <= 1
        assert len(made._blocks) <= 5
        assert {*made._sessions.values(), *made._blocks.values()} <= set(made.loads)


class CacheModel:
    """What replicas with room for `capacity` blocks each find in their prefix caches."""

    def __init__(self, replicas, capacity):
        self.held = {r: {} for r in range(replicas)}
        self.capacity = capacity
        self.hits = self.asked = 0

    def serve(self, replica, blocks):
        held = self.held[replica]
        self.asked += len(blocks)
        for block in blocks:
            if block not in held:
                break
            self.hits += 1
        for block in reversed(blocks):
            held.pop(block, None)
            held[block] = True
        while len(held) > self.capacity:
            del held[next(iter(held))]

    @property
    def hit_rate(self):
        return self.hits / self.asked


def conversations(pick, *, replicas=8, users=64, turns=6):
    """Users whose every turn repeats all turns before it, interleaved; the hit rate of their prompts."""
    rng = random.Random(0)
    cache = CacheModel(replicas, capacity=users * turns * 8 // replicas * 2)
    order = [user for user in range(users) for _ in range(turns)]
    rng.shuffle(order)
    said = [0] * users
    for user in order:
        said[user] += 1
        blocks = prefix_blocks(prompt((0, 32), *((1 + user * turns + t, 80) for t in range(said[user]))))
        cache.serve(pick(user, blocks), blocks)
    return cache.hit_rate


def test_sticky_routing_finds_what_random_routing_has_to_compute_again():
    rng = random.Random(1)
    at_random = conversations(lambda user, blocks: rng.randrange(8))

    def balanced(made):
        def pick(user, blocks):
            chosen = made(user, blocks)
            routers[-1].done(chosen)
            return chosen

        return pick

    routers = [router(*range(8))]
    by_prefix = conversations(balanced(lambda user, blocks: routers[-1].pick(prefix=blocks)))
    routers.append(router(*range(8)))
    by_session = conversations(balanced(lambda user, blocks: routers[-1].pick(f"user {user}")))
    assert by_session > at_random + 0.2
    assert by_prefix > at_random + 0.2


@pytest.mark.parametrize("kind", ["plain", "session", "prefix"])
def test_a_pick_stays_cheap_with_many_replicas(kind):
    """Not a timed claim: only that a pick does not scan all replicas, sessions or blocks."""
    made = router(*range(1000))
    prompts = [prefix_blocks(prompt((i, 512))) for i in range(50)] if kind == "prefix" else [()] * 50
    started = time.process_time()
    for i in range(2000):
        made.done(made.pick(f"s{i % 50}" if kind == "session" else "", prompts[i % 50]))
    assert (time.process_time() - started) / 2000 < 1e-3


@pytest.mark.parametrize("words", [("a", ()), ("", (1, 2, 3))], ids=["session", "prefix"])
def test_sessions_and_prefixes_leave_a_held_replica_and_an_older_version(words):
    made = router(0, 1)
    home = made.pick(*words)
    made.put(home, held=True)
    other = made.pick(*words)
    assert other != home
    made.put(home, 1)
    assert made.pick(*words) == home, "the newest version comes before the cache"
    assert made.pick(*words) == home, "and keeps it"


def test_a_replica_added_without_a_version_counts_as_one_of_the_newest():
    made = router(0)
    made.put(0, 5)
    made.put(1)
    made.put(2, 4)
    assert sorted(made.pick() for _ in range(2)) == [0, 1]
    made.remove(0)
    made.remove(1)
    assert made.pick() == 2


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["pick", "pick", "pick", "done", "hold", "release", "remove", "add"]),
            st.integers(0, 4),
            st.integers(0, 3),
            st.sampled_from(["", "a", "b"]),
        ),
        max_size=200,
    )
)
def test_no_order_of_holds_and_releases_breaks_the_rule_of_versions(actions):
    made, versions, held = router(0), {0: -1}, set()
    for action, replica, version, session in actions:
        if action == "add" and replica not in versions:
            made.put(replica, version)
            versions[replica] = version
        elif action == "remove":
            made.remove(replica)
            versions.pop(replica, None)
            held.discard(replica)
        elif action == "hold":
            if replica in versions:
                made.put(replica, held=True)
                held.add(replica)
        elif action == "release" and replica in versions:
            made.put(replica, version)
            versions[replica] = version
            held.discard(replica)
        elif action == "done" and made.loads.get(replica, 0) > 0:
            made.done(replica)
        elif action == "pick" and versions:
            loads = made.loads
            chosen = made.pick(session)
            free = [i for i in versions if i not in held]
            newest = [i for i in free if versions[i] == max(versions[j] for j in free)]
            older = [i for i in free if i not in newest]
            limit = 2 * min((loads[i] for i in older), default=10**6) + 1
            fit = [i for i in newest if loads[i] <= limit]
            tier = fit or older or list(versions)
            assert chosen in tier
            assert session or loads[chosen] == min(loads[i] for i in tier)


# -- the turn before, and places at the replicas -----------------------------------------------------------------------


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
    made = router(0, 1, 2, max_imbalance=2)
    assert [made.pick(near=1) for _ in range(3)] == [1, 1, 1]
    assert made.pick(near=1) != 1, "3 requests against 0"
    assert made.pick(near=7) in (0, 2), "one that is gone counts as none"


def test_a_session_comes_before_the_turn_and_the_turn_before_the_prefix():
    made = router(0, 1)
    home = made.pick("a")
    assert made.pick("a", near=1 - home) == home
    blocks = [11, 12]
    first = made.pick(prefix=blocks)
    assert made.pick("", *Affinity(blocks, near=1 - first)) == 1 - first


def test_one_replica_alone_may_be_asked_for():
    made = router(0, 1, max_imbalance=1)
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
