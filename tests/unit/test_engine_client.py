"""The suites of engines begin a test again whose response ended before they could interrupt it."""

import pytest

from asyncrl_testing.engine_client import Client, TooLate, again_if_late, make_request, within
from asyncrl_testing.fake_engine import FakeEngine


@pytest.mark.parametrize(("late", "tries"), [(0, 1), (4, 5)])
async def test_a_test_that_came_too_late_begins_again_with_an_engine_that_runs(late, tries):
    engine, clients = FakeEngine(), []
    await engine.start()
    await _interrupt(engine=engine, late=late, clients=clients)
    assert [client.finish_reasons for client in clients] == [["length"]] * late + [["abort"]]
    assert len(clients) == tries
    await engine.stop()


async def test_a_test_that_always_comes_too_late_fails():
    engine, clients = FakeEngine(), []
    await engine.start()
    with pytest.raises(TooLate, match="all of the 4 tokens"):
        await _interrupt(engine=engine, late=100, clients=clients)
    assert len(clients) == 5
    await engine.stop()


@again_if_late
async def _interrupt(engine, late, clients):
    client = Client(engine, make_request(max_tokens=4 if len(clients) < late else 400))
    clients.append(client)
    await client.first_tokens()
    if len(clients) <= late:
        await within(client.done())
    await engine.pause("abort")
    (await client.done()).require_unfinished()
