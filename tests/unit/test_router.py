import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import GenerationError
from asyncrl.rollout.router import BLOCK_TOKENS, Router, prefix_blocks


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
