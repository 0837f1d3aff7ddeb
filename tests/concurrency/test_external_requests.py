"""Requests from outside a run at a replica and in the server of the run: they come behind the run, and never hold a
publish up."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from asyncrl.config.run import RayConfig
from asyncrl.driver.fleet.server_keeper import ServerKeeper
from asyncrl.driver.preflight import check_server
from asyncrl.errors import ConfigError, GenerationError, ProcessDied
from asyncrl.inference.external_places import ExternalLimits
from asyncrl.inference.replica import Replica
from asyncrl.remote.failure_policy import RestartBudget
from asyncrl.types import ReplicaTable, RunServerStats
from asyncrl_testing.fake_engine import FakeEngine, FakeScript
from asyncrl_testing.local import LocalActor, publish
from tests.concurrency.test_replica import LONG, request
from tests.make import quickstart
from tests.waiting import until


@asynccontextmanager
async def serving(total=4, external=2, external_timeout_s=20.0, version=1):
    """A replica whose engine decodes `total` requests at once; yields it and its engine."""
    engine = FakeEngine(FakeScript(start_version=None, max_model_len=10 * LONG, num_slots=total))
    limits = ExternalLimits(total, external, external_timeout_s) if external else None
    replica = Replica(0, lambda: engine, gate_timeout_s=20.0, external=limits)
    await replica.start()
    await publish(replica, 1, version)
    try:
        yield replica, engine
    finally:
        await replica.stop()


async def ends(replica, client, count=1):
    """The last chunks of the next `count` requests of this client that end."""
    found = []
    async with asyncio.timeout(20):
        while len(found) < count:
            found += [c for c in await replica.collect(client, 1.0) if c.finish_reason]
    return found


def test_limits_are_a_share_of_the_places_and_at_least_one():
    assert ExternalLimits.of(128, 0.1) == ExternalLimits(128, 12)
    assert ExternalLimits.of(4, 0.1) == ExternalLimits(4, 1)
    assert ExternalLimits.of(4, 1.0) == ExternalLimits(4, 4)


async def test_external_requests_take_their_share_and_only_places_that_the_run_leaves():
    async with serving(total=4, external=2) as (replica, engine):
        await replica.submit("outside", [request(f"x{i}") for i in range(4)], True)
        await until(lambda: engine.health().running == 2)
        await asyncio.sleep(0.02)
        assert engine.health().running == 2, "the share"
        await replica.submit("run", [request(f"r{i}") for i in range(3)])
        await until(lambda: engine.health().running + engine.health().waiting == 5)
        await replica.abort(["x0", "x1"])
        await ends(replica, "outside", 2)
        await until(lambda: engine.health().running == 4)
        await asyncio.sleep(0.02)
        assert engine.health().running + engine.health().waiting == 4, "three of the run and one place left"
        await replica.submit("run", [request("r3")])
        await until(lambda: engine.health().running + engine.health().waiting == 5)
        await replica.abort(["x2"])
        (ended,) = await ends(replica, "outside")
        assert ended.request_id == "x2"
        await asyncio.sleep(0.02)
        assert (engine.health().running, engine.health().waiting) == (4, 0), "none for x3: the run has all places"
        await replica.abort(["r0", "x3"])
        (ended,) = await ends(replica, "outside")
        assert (ended.request_id, len(ended.token_ids)) == ("x3", 0)


async def test_a_drain_waits_for_the_run_alone():
    """A long request from outside is aborted and comes back; one of the run finishes first."""
    async with serving() as (replica, engine):
        await replica.submit("outside", [request("x0")], True)
        await replica.submit("run", [request("r0", 2000)])
        await until(lambda: engine.health().running == 2)
        async with asyncio.timeout(20):
            await publish(replica, 2, 2, "drain")
        (outside,) = await ends(replica, "outside")
        (inside,) = await ends(replica, "run")
        assert (outside.finish_reason, inside.finish_reason) == ("abort", "length")
        assert (outside.version, inside.version) == (1, 1)
        stats = await replica.stats()
        assert stats.health.generated_tokens == 2000 + stats.external_tokens, "tokens for clients are counted apart"


@pytest.mark.parametrize("mode", ["abort", "keep", "drain"])
async def test_what_waits_at_a_publish_starts_after_it(mode):
    async with serving(total=2, external=1) as (replica, engine):
        await replica.submit("outside", [request("x0"), request("x1", 8)], True)
        await until(lambda: engine.health().running == 1)
        await replica.pause(mode)
        await replica.submit("outside", [request("x2", 8)], True)
        await asyncio.sleep(0.02)
        await publish(replica, 2, 2, mode)
        await replica.abort(["x0"])
        chunks = {c.request_id: c for c in await ends(replica, "outside", 3)}
        assert {chunks[name].finish_reason for name in ("x1", "x2")} == {"length"}
        assert {chunks[name].version for name in ("x1", "x2")} == {2}
        assert (await replica.stats()).external_tokens >= 16


async def test_the_wait_for_a_place_has_a_deadline_and_says_why():
    async with serving(total=1, external=1, external_timeout_s=0.1) as (replica, engine):
        await replica.submit("run", [request("r0")])
        await until(lambda: engine.health().running == 1)
        await replica.submit("outside", [request("x0")], True)
        (ended,) = await ends(replica, "outside")
        assert "requests of the run take its places" in ended.error
        await replica.abort(["r0"])
        await ends(replica, "run")
        await replica.submit("outside", [request("x1", 4)], True)
        assert (await ends(replica, "outside"))[0].finish_reason == "length", "no place was lost"


async def test_a_replica_without_a_server_refuses_them():
    async with serving(external=0) as (replica, _):
        with pytest.raises(GenerationError, match=r"rollout\.serve\.enabled=true"):
            await replica.submit("outside", [request("x0")], True)


class ScriptedServer:
    """A server's process. `start_error`: raised by its start; `hangs`: it answers nothing more."""

    def __init__(self, client_id, log):
        self.client_id, self.log = client_id, log
        self.ended_with = asyncio.get_running_loop().create_future()
        self.start_error, self.hangs, self.tables = None, False, []
        self.refused, self.port = 0, None

    async def start(self, port):
        self.port = port
        if self.start_error is not None:
            raise self.start_error
        return self._stats()

    async def run(self):
        await asyncio.shield(self.ended_with)

    async def set_replicas(self, table):
        self.tables.append(table.generation)

    async def stats(self):
        if self.hangs:
            await asyncio.Event().wait()
        return self._stats()

    async def stop(self):
        self.ended_with.set_result(None)

    def kill(self):
        self.log.append(("killed", self.client_id))

    async def ended(self):
        pass

    def _stats(self):
        return RunServerStats(f"http://127.0.0.1:{self.port or 4711}", 1, 2, self.refused)


@pytest.fixture
def supervised(tmp_path):
    """make(max_restarts, *start_errors) -> (keeper, servers, log, discovery file)."""

    def make(max_restarts=3, *start_errors):
        servers, log, errors = [], [], list(start_errors)

        def spawn(client_id):
            servers.append(ScriptedServer(client_id, log))
            servers[-1].start_error = errors.pop(0) if errors else None
            return LocalActor(servers[-1])

        async def forget(client_id):
            log.append(("forgotten", client_id))

        file = tmp_path / "serving.json"
        file.write_text("of a run that was killed")
        keeper = ServerKeeper(
            spawn,
            forget,
            port=0,
            budget=RestartBudget(max_restarts, 60.0),
            times=RayConfig(start_timeout_s=5, health_interval_s=0.01, health_timeout_s=0.05),
            discovery_file=file,
            restart_delay_s=0.0,
        )
        return keeper, servers, log, file

    return make


@pytest.mark.parametrize("how", ["died", "hangs", "ended", "broken"])
async def test_a_lost_server_is_replaced_under_its_port_and_its_requests_are_dropped(supervised, how):
    keeper, servers, log, file = supervised()
    keeper.start()
    assert not file.exists(), "left by a killed run"
    keeper.set_replicas(ReplicaTable(5))
    await until(lambda: servers and servers[0].tables == [5] and keeper.report.up)
    servers[0].refused = 7
    await until(lambda: keeper.report.refused == 7)
    assert (keeper.report.running, keeper.report.waiting) == (1, 2)
    if how == "hangs":
        servers[0].hangs = True
    elif how == "ended":
        servers[0].ended_with.set_result(None)
    else:
        error = ProcessDied("gone") if how == "died" else KeyError("a defect")
        servers[0].ended_with.set_exception(error)
    await until(lambda: len(servers) == 2 and servers[1].tables == [5] and keeper.report.up)
    assert servers[1].port == 4711, "of the first one"
    assert servers[0].client_id != servers[1].client_id
    assert log == [("killed", servers[0].client_id), ("forgotten", servers[0].client_id)]
    report = keeper.report
    assert (report.up, report.refused, report.restarts) == (True, 7, 1)
    await keeper.stop(5)
    assert ("killed", servers[1].client_id) in log
    assert len(servers) == 2


async def test_a_server_that_never_starts_costs_the_run_nothing_but_a_line_in_the_log(supervised, caplog):
    keeper, servers, _, _ = supervised(1, ConfigError("the port is taken"), ConfigError("the port is taken"))
    keeper.start()
    keeper.set_replicas(ReplicaTable(1))
    await until(lambda: "stays down" in caplog.text)
    assert len(servers) == 2
    assert not keeper.report.up
    keeper.set_replicas(ReplicaTable(2))
    began = time.monotonic()
    await keeper.stop(5)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("settings", "key", "message"),
    [
        (["host=0.0.0.0"], None, "ASYNCRL_API_KEY is not set"),
        (["host=192.0.2.1"], "k", "rollout.serve.host=192.0.2.1"),
        ([], "", "the key is empty"),
        ([], "schlüssel", "not ASCII"),
    ],
)
def test_an_address_that_cannot_be_served_is_named_before_anything_starts(settings, key, message):
    words = [f"rollout.serve.{setting}" for setting in ("enabled=true", *settings)]
    serve = quickstart(*words).rollout.serve
    with pytest.raises(ConfigError, match=message) as raised:
        check_server(serve, key)
    assert "do:" in str(raised.value)


def test_an_address_for_others_is_fine_with_a_key():
    recipe = quickstart("rollout.serve.enabled=true", "rollout.serve.host=0.0.0.0")
    check_server(recipe.rollout.serve, "a key")


@pytest.mark.parametrize("setting", ["share=0", "share=1.5", "port=70000", "wait_timeout_s=0", "wait_timeout_s=700"])
def test_settings_out_of_range_are_refused_by_name(setting):
    with pytest.raises(ConfigError, match=rf"rollout\.serve\.{setting.partition('=')[0]}"):
        quickstart(f"rollout.serve.{setting}")
