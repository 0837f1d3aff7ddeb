"""Held-out sets on replicas that are lent: what they say, what fails over, what ends; and groups beside them."""

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from asyncrl.config.run import RayConfig
from asyncrl.driver.fleet.server_keeper import ServerKeeper
from asyncrl.driver.preflight import check_server
from asyncrl.environments.environment import SingleTurn
from asyncrl.errors import ConfigError, DeadlineExceeded, GenerationError, ProcessDied
from asyncrl.inference.external_places import ExternalLimits
from asyncrl.inference.replica import Replica
from asyncrl.remote.failure_policy import RestartBudget
from asyncrl.rollout import held_out
from asyncrl.rollout.generation import GenerationClient
from asyncrl.rollout.held_out import answer_held_out
from asyncrl.types import ReplicaTable, RunServerStats, SamplingParams, Ticket
from asyncrl_testing.fake_engine import FakeEngine, FakeScript
from asyncrl_testing.local import LocalActor, LocalReplicaChannel, Rows, publish
from tests.concurrency.test_generation import PROMPT, Fleet, check, whole
from tests.concurrency.test_replica import LONG, request
from tests.concurrency.test_rollouter import Queue, Rig
from tests.concurrency.test_rollouter import tokenizer as tokenizer
from tests.make import quickstart, trajectory
from tests.waiting import until


class Judged(SingleTurn):
    """Right in one response of prompt 0 and in all of prompt 1; prompt 2 raises, prompt 3 has a word for a reward."""

    async def run(self, task, session):
        trajectory = await super().run(task, session)
        if task.ordinal == 2:
            raise ValueError("no such prompt")
        if task.ordinal == 3:
            return replace(trajectory, reward="much", reward_parts=(("correct", 1.0),))
        right = task.ordinal == 1 or (task.ordinal == 0 and task.index == 0)
        return replace(trajectory, reward=2.0 * right - 0.5, reward_parts=(("correct", float(right)),))


@asynccontextmanager
async def evaluating(tmp_path, tokenizer, *overrides, lent=2, prompts=4, **script):
    """A rollouter whose groups go to replica 0 of version 7, and channels of `lent` others, which serve version 3."""
    keys = ["eval.samples=2", "eval.temperature=1", "eval.pass_at=[1,2]", *overrides]
    rig = Rig(tmp_path, tokenizer, f"rollout.environment={__name__}:Judged", *keys, **script)
    held_out = replace(rig.prompts, rows=rig.prompts.rows[:prompts], prompt_ids=rig.prompts.prompt_ids[:prompts])
    rig.spec = replace(rig.spec, held_out={"held_out": held_out})
    engines = [
        FakeEngine(FakeScript(start_version=None, chunk_tokens=1, **{"tick_s": 0.0, **script})) for _ in range(lent)
    ]
    replicas = [Replica(i, lambda e=engine: e, gate_timeout_s=5) for i, engine in enumerate(engines, start=1)]
    for one in replicas:
        await one.start()
        await publish(one, 1, 3)
    queue = Queue()
    async with rig.start(queue, version=7) as rollouter:
        rollouter.channels = {i: LocalReplicaChannel(one) for i, one in enumerate(replicas, start=1)}
        for i, channel in rollouter.channels.items():
            await rollouter.set_replicas(rollouter.rows.put(i, channel, "leased", 3))
        rollouter.engines, rollouter.queue, rollouter.rig = engines, queue, rig
        yield rollouter
    for one in replicas:
        await one.stop()


async def test_lent_replicas_answer_all_of_it_with_their_version(tmp_path, tokenizer):
    async with evaluating(tmp_path, tokenizer) as rollouter:
        result = await rollouter.evaluate("held_out", 0, 20, rollouter.rows.table)
        assert rollouter.rig.engine.health().generated_tokens == 0
    assert (result.versions, result.num_prompts, result.samples, result.num_failed) == ((3,), 4, 2, 4)
    assert result.pass_rates == (0.5, 1.0, 0.0, 0.0)
    assert (result.accuracy, result.pass_at) == (3 / 8, ((1, 3 / 8), (2, 0.5)))
    assert result.reward_mean == pytest.approx((3 * 1.5 - 0.5) / 4)


async def test_without_a_lease_the_replicas_that_serve_answer(tmp_path, tokenizer):
    async with evaluating(tmp_path, tokenizer) as rollouter:
        result = await rollouter.evaluate("held_out", 0, 20)
        assert not any(engine.health().generated_tokens for engine in rollouter.engines)
    assert result.versions == (7,)


async def test_groups_never_go_to_a_lent_replica(tmp_path, tokenizer):
    async with evaluating(tmp_path, tokenizer, tick_s=0.002) as rollouter:
        evaluation = asyncio.create_task(rollouter.evaluate("held_out", 0, 20, rollouter.rows.table))
        rollouter.queue.give(*(Ticket(i, 0, 7) for i in (0, 1, 3, 4)))
        await rollouter.queue.ends(4)
        assert (await evaluation).versions == (3,)
        groups = rollouter.queue.put_groups.values()
        assert {s.replica_id for g in groups for t in g.trajectories for s in t.segments} == {0}


async def test_a_lent_replica_that_dies_leaves_its_requests_to_the_others(tmp_path, tokenizer):
    async with evaluating(tmp_path, tokenizer, tick_s=0.002) as rollouter:
        evaluation = asyncio.create_task(rollouter.evaluate("held_out", 0, 20, rollouter.rows.table))
        await until(lambda: all(e.health().generated_tokens > 8 for e in rollouter.engines), "both at work")
        rollouter.channels[1].die()
        result = await evaluation
    assert (result.num_failed, result.versions) == (4, (3,))


@pytest.mark.parametrize("how", ["dies", "is taken out"])
async def test_when_the_last_one_is_lost_there_is_no_result(tmp_path, tokenizer, how):
    async with evaluating(tmp_path, tokenizer, lent=1, tick_s=0.002) as rollouter:
        evaluation = asyncio.create_task(rollouter.evaluate("held_out", 0, 20, rollouter.rows.table))
        await until(lambda: rollouter.engines[0].health().generated_tokens > 8, "at work")
        if how == "dies":
            rollouter.channels[1].die()
        else:
            await rollouter.set_replicas(rollouter.rows.drop(1))
        with pytest.raises(GenerationError, match="last"):
            await asyncio.wait_for(evaluation, 20)
        rollouter.queue.give(Ticket(1, 0, 7))
        await rollouter.queue.ends(1)


async def test_an_evaluation_ends_at_its_deadline_and_leaves_nothing_on_the_replicas(tmp_path, tokenizer):
    async with evaluating(tmp_path, tokenizer, tick_s=0.02) as rollouter:
        with pytest.raises(DeadlineExceeded, match=r"(?s)held_out within 0.2 s.*eval.timeout_s"):
            await rollouter.evaluate("held_out", 0, 0.2, rollouter.rows.table)
        await until(lambda: not any(e.health().running for e in rollouter.engines), "the replicas are idle")


async def test_an_evaluation_of_which_nothing_came_is_no_result(tmp_path, tokenizer):
    async with evaluating(tmp_path, tokenizer) as rollouter:
        rollouter._maker.trajectory = _raises
        with pytest.raises(GenerationError, match=r"all 4 prompts failed.*no such"):
            await rollouter.evaluate("held_out", 0, 20, rollouter.rows.table)


async def test_at_the_deadline_the_answers_so_far_are_a_result_that_says_so(tmp_path, tokenizer, monkeypatch, caplog):
    prompts, done = Rig(tmp_path, tokenizer).prompts, asyncio.Event()
    count = len(prompts.rows)
    monkeypatch.setattr(held_out, "TELL_S", 0.01)

    async def attempt(index, number):
        if index == count - 1 and number:
            await done.wait()
        return trajectory(reward=float(index == 0))

    settings = {"samples": 2, "pass_at": [1], "timeout_s": 0.3}
    with caplog.at_level("INFO"):
        result = await answer_held_out("set", prompts, attempt, takes_part=True, **settings)
    assert (result.num_prompts, result.num_asked) == (count - 1, count)
    assert result.accuracy == pytest.approx(1 / (count - 1))
    assert f"{2 * count - 1} of {2 * count} responses, accuracy so far" in caplog.text
    with pytest.raises(DeadlineExceeded):
        await answer_held_out("set", prompts, attempt, **settings)
    done.set()
    assert (await answer_held_out("set", prompts, attempt, takes_part=True, **settings)).num_asked == 0


async def test_first_responses_are_shown_on_request(tmp_path, tokenizer):
    async with evaluating(tmp_path, tokenizer) as rollouter:
        result = await rollouter.evaluate("held_out", 0, 20, rollouter.rows.table, show=2)
        assert not (await rollouter.evaluate("held_out", 0, 20, show=0)).shown
    assert [prompt for prompt, _, _ in result.shown] == [r.messages[-1].content for r in rollouter.rig.prompts.rows[:2]]


async def _raises(task, session):
    raise ValueError("no such prompt")


async def test_a_withdrawn_replica_stops_working_and_no_token_that_came_is_lost():
    async with Fleet(tick_s=0.001, waits=True) as fleet:
        running = [asyncio.create_task(fleet.client.generate(PROMPT, SamplingParams(max_tokens=60))) for _ in range(8)]
        await fleet.sampled(40)
        before = fleet.replicas[0]._engine.health().generated_tokens
        fleet.client.set_replicas(fleet.rows.put(0, state="leased"))
        fleet.client.set_replicas(fleet.rows.table)
        assert sorted(fleet.client.loads) == [1]
        other = GenerationClient(
            "other",
            Rows({0: LocalReplicaChannel(fleet.replicas[0], "other")}).table,
            request_timeout_s=20,
            poll_interval_s=0.001,
        )
        check(await other.generate(PROMPT, SamplingParams(max_tokens=5)))
        generations = await whole(running, 60)
        assert {s.replica_id for g in generations for s in g.segments} == {0, 1}, "what it had sampled is kept"
        assert fleet.engines[0].health().generated_tokens < before + 60, "its requests were aborted"
        fleet.client.set_replicas(fleet.rows.put(0, fleet.channels[0], version=0))
        again = await asyncio.gather(*(fleet.client.generate(PROMPT, SamplingParams(max_tokens=5)) for _ in range(4)))
        assert {s.replica_id for g in again for s in g.segments} == {0, 1}
        await other.close()


@pytest.mark.parametrize("how", ["leased", "leaving", "another client's"])
async def test_a_withdrawn_replica_hands_over_the_tokens_that_its_outbox_gathers(how):
    """The last: when the replicas of one of several rollouters are back, and it had worked with those of the others."""
    async with Fleet(tick_s=0.002, chunk_tokens=1, waits=True, poll_interval_s=0.05) as fleet:
        running = [asyncio.create_task(fleet.client.generate(PROMPT, SamplingParams(max_tokens=200))) for _ in range(8)]
        await fleet.sampled(80)
        assert not any(p.draft.num_tokens for p in fleet.client._pending.values()), "all are still at the replicas"
        if how == "another client's":
            fleet.client.set_replicas(fleet.rows.table.only({1}), fleet.rows.table)
        else:
            fleet.client.set_replicas(fleet.rows.put(0, state=how))
        late = asyncio.create_task(fleet.client.generate(PROMPT, SamplingParams(max_tokens=5)))
        await fleet.client.handed_over()
        assert not fleet.engines[0].health().running, "they were aborted"
        sampled = fleet.engines[0].health().generated_tokens
        generations = [*await whole(running, 200), *await whole([late], 5)]
        kept = sum(s.stop - s.start for g in generations for s in g.segments if s.replica_id == 0)
        assert kept == sampled == fleet.engines[0].health().generated_tokens > 20
        assert sorted(fleet.client.loads) == [1]


async def test_the_rollouter_answers_when_a_leased_replica_has_handed_over(tmp_path, tokenizer):
    async with evaluating(tmp_path, tokenizer, "rollout.poll_interval_s=0.05", tick_s=0.002) as rollouter:
        rollouter.queue.give(Ticket(1, 0, 7))
        await until(lambda: rollouter.rig.engine.health().generated_tokens > 20, "at work")
        await rollouter.set_replicas(rollouter.rows.put(0, state="leased"))
        assert not rollouter.rig.engine.health().running
        assert not rollouter.client.in_flight or all(p.link.lost for p in rollouter.client._pending.values())
        await rollouter.set_replicas(rollouter.rows.put(0, state="serving"))
        await rollouter.queue.ends(1)


async def test_requests_that_a_withdrawn_replica_never_got_go_elsewhere():
    async with Fleet(waits=True, poll_interval_s=0.05) as fleet:
        running = [asyncio.create_task(fleet.client.generate(PROMPT, SamplingParams(max_tokens=5))) for _ in range(8)]
        while not fleet.client.in_flight:
            await asyncio.sleep(0)
        fleet.client.set_replicas(fleet.rows.put(0, state="leased"))
        await asyncio.wait_for(fleet.client.handed_over(), 1.5)
        generations = await asyncio.gather(*running)
        assert {s.replica_id for g in generations for s in g.segments} == {1}


async def test_a_withdrawn_replica_that_does_not_answer_is_waited_for_only_so_long(monkeypatch):
    monkeypatch.setattr("asyncrl.rollout.replica_link.HAND_OVER_S", 0.1)
    async with Fleet(tick_s=0.002, waits=True) as fleet:
        running = [asyncio.create_task(fleet.client.generate(PROMPT, SamplingParams(max_tokens=60))) for _ in range(8)]
        await fleet.sampled(40)
        fleet.channels[0].abort = lambda request_ids: asyncio.Event().wait()
        fleet.client.set_replicas(fleet.rows.put(0, state="leased"))
        await asyncio.wait_for(fleet.client.handed_over(), 5)
        await whole(running, 60)


async def test_forgetting_a_client_forgets_its_evaluations():
    engine = FakeEngine(FakeScript(start_version=None, tick_s=0.001))
    served = Replica(0, lambda: engine, gate_timeout_s=5)
    await served.start()
    await publish(served, 1, 0)
    channel = LocalReplicaChannel(served, "rollouter-1/evaluation-0")
    client = GenerationClient("c", Rows({0: channel}).table, request_timeout_s=20, poll_interval_s=0.001)
    running = asyncio.create_task(client.generate(np.array([1], np.int32), SamplingParams(max_tokens=4000)))
    await until(lambda: engine.health().generated_tokens, "at work")
    await served.forget_client("rollouter-1")
    await until(lambda: not engine.health().running, "idle")
    with pytest.raises(GenerationError, match="counts as dead"):
        await served.collect("rollouter-1/evaluation-1", 0.1)
    await served.collect("rollouter-10/evaluation-0", 0.01)
    running.cancel()
    await client.close()
    await served.stop()


# -- requests from outside a run: they come behind the run, and never hold a publish up --------------------------------


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
