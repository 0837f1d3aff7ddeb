"""The server of a run over scripted replicas, with OpenAI's own client: versions of every token over publishes, places
that the run takes, and what clients are told. `tests/e2e/test_serve_while_training.py` has the real run."""

import asyncio
import json
import os
from contextlib import asynccontextmanager

import httpx
import numpy as np
import openai
import pytest

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import RolloutConfig, TorchEngineConfig
from asyncrl.config.serving import ServeSection
from asyncrl.inference.external_places import ExternalLimits
from asyncrl.inference.replica import Replica
from asyncrl.serving.model_text import ModelText
from asyncrl.serving.run_server import RunServer, RunServerSpec
from asyncrl.types import GenerationRequest, SamplingParams
from asyncrl_testing.fake_engine import FakeEngine, FakeScript
from asyncrl_testing.local import LocalReplicaChannel, Rows, publish
from tests.serving import byte_tokenizer
from tests.waiting import until

SLOTS, SHARE = 10, 0.2
FIRST_LETTER = 65


class Stamped(FakeEngine):
    """Writes the letter of its version: A for 0, B for 1."""

    def _sample(self, stream):
        stream.ids.append(FIRST_LETTER + self._version)
        stream.produced += 1
        return "length" if stream.produced == stream.request.sampling.max_tokens else None


class Beside:
    """The server and the replicas of a run that this process plays."""

    def __init__(self, replicas, engines, server, rows, address, file):
        self.replicas, self.engines, self.server, self.rows = replicas, engines, server, rows
        self.address, self.file, self.version = address, file, 0

    def client(self, key="secret", **options):
        options = {"max_retries": 0, "timeout": 60, **options}
        return openai.AsyncOpenAI(base_url=self.address + "/v1", api_key=key, **options)

    async def publish(self, mode):
        """One publish to all replicas at once."""
        self.version += 1
        await asyncio.gather(*(publish(replica, self.version, self.version, mode) for replica in self.replicas))

    async def fill(self, replica_id, count):
        """The run takes `count` places of a replica; returns what gives them back."""
        ask = SamplingParams(max_tokens=10**6)
        requests = [GenerationRequest(f"run-{replica_id}-{i}", np.array([7], np.int32), ask) for i in range(count)]
        await self.replicas[replica_id].submit("run", requests)
        return lambda: self.replicas[replica_id].abort([request.request_id for request in requests])

    def asked(self, **options):
        """A task that asks once, by OpenAI's client."""
        create = self.client().completions.create
        return asyncio.create_task(create(**{"model": "policy", "prompt": "x", "max_tokens": 4} | options))


@asynccontextmanager
async def beside(tmp_path, count=2, *, publish_first=True, tick_s=0.001, **settings):
    settings = {"enabled": True, "share": SHARE, "model_name": "policy", "wait_timeout_s": 20.0, **settings}
    rollout = RolloutConfig(
        torch=TorchEngineConfig(num_slots=SLOTS, max_model_len=4000),
        poll_interval_s=0.002,
        serve=ServeSection(**settings),
    )
    limits = ExternalLimits.of(SLOTS, SHARE)
    script = FakeScript(start_version=None, num_slots=SLOTS, max_model_len=10**7, tick_s=tick_s, chunk_tokens=3)
    engines = [Stamped(script) for _ in range(count)]
    replicas = [Replica(i, lambda e=e: e, gate_timeout_s=30, external=limits) for i, e in enumerate(engines)]
    for replica in replicas:
        await replica.start()
    model = ModelConfig(path=str(tmp_path))

    def text(spec):
        return ModelText(byte_tokenizer(), model, None, max_model_len=spec.rollout.max_model_len)

    file = tmp_path / "serving.json"
    spec = RunServerSpec(model, rollout, 3, file, "secret")
    server = RunServer(spec, "server", read_text=text, niceness=0)
    started = await server.start(0)
    running = asyncio.create_task(server.run())
    rows = Rows({i: LocalReplicaChannel(replica, "server", external=True) for i, replica in enumerate(replicas)})
    made = Beside(replicas, engines, server, rows, started.address, file)
    if publish_first:
        await made.publish("abort")
    await server.set_replicas(rows.table)
    try:
        yield made
    finally:
        await server.stop()
        async with asyncio.timeout(20):
            await running
        for replica in replicas:
            await replica.stop()


@pytest.mark.parametrize("mode", ["abort", "keep", "drain"])
async def test_over_publishes_every_token_has_its_version_and_no_publish_waits_for_clients(tmp_path, mode):
    async with beside(tmp_path) as run:
        client, answers = run.client(), []

        async def ask():
            body = {"ignore_eos": True, "return_token_ids": True}
            answers.append(await client.completions.create(model="policy", prompt="x", max_tokens=400, extra_body=body))

        asking = [asyncio.create_task(ask()) for _ in range(6)]  # two places a replica: some of them wait
        for _ in range(5):
            tokens = sum(engine.health().generated_tokens for engine in run.engines)
            await until(
                lambda n=tokens: (
                    sum(e.health().generated_tokens for e in run.engines) > n + 60
                    or not any(not task.done() for task in asking)
                ),
                "nothing is generated",
            )
            await run.publish(mode)
        await asyncio.gather(*asking)
        crossed = 0
        for answer in answers:
            (choice,) = answer.choices
            spans = choice.weight_versions
            assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
            written = [FIRST_LETTER + span["version"] for span in spans for _ in range(span["start"], span["end"])]
            assert choice.token_ids == written
            assert len(written) == 400
            assert answer.weight_version == spans[-1]["version"]
            crossed += len(spans) > 1
        assert crossed >= 4, "no publish waits for the answer of a client"
        external = [(await replica.stats()).external_tokens for replica in run.replicas]
        assert sum(external) >= 6 * 400


async def test_clients_wait_while_the_run_has_all_places_and_are_then_told_to_come_back(tmp_path):
    async with beside(tmp_path, count=1, wait_timeout_s=1.0) as run:
        release = await run.fill(0, SLOTS)
        await until(lambda: run.engines[0].health().running == SLOTS, "the run does not start")
        raw = run.client().completions.with_raw_response
        with pytest.raises(openai.InternalServerError) as refused:
            await raw.create(model="policy", prompt="x", max_tokens=4)
        assert refused.value.status_code == 503
        assert refused.value.body["code"] == "no_place"
        assert int(refused.value.response.headers["retry-after"]) >= 1
        stats = await run.server.stats()
        assert (stats.waiting, stats.refused) == (0, 1)
        waiting = asyncio.create_task(run.client(max_retries=5).completions.create(model="policy", prompt="x"))
        await until(lambda: run.server._metrics.refused == 2, "it does not ask")
        await release()
        assert (await waiting).choices[0].text == "B" * 16, "OpenAI's client has come back by itself"


async def test_one_client_never_has_more_than_its_share(tmp_path):
    async with beside(tmp_path, count=2) as run:
        many = run.asked(n=20, max_tokens=200, extra_body={"ignore_eos": True})
        most = 0
        while not many.done():
            at_engines = [engine.health() for engine in run.engines]
            most = max(most, *(health.running + health.waiting for health in at_engines))
            await asyncio.sleep(0.002)
        assert len((await many).choices) == 20
        assert most == SLOTS * SHARE


async def test_the_file_names_the_server_and_the_key_is_asked_for(tmp_path):
    async with beside(tmp_path) as run:
        await until(run.file.exists, "no discovery file")
        found = json.loads(run.file.read_text())
        assert (found["address"], found["model"], found["pid"]) == (run.address, "policy", os.getpid())
        for key, status in (("secret", 200), ("wrong", 401), (None, 401)):
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            async with httpx.AsyncClient(base_url=run.address, headers=headers) as http:
                assert (await http.get("/v1/models")).status_code == status
        await run.server._fleet.refresh()
        rows = json.loads(run.file.read_text())["replicas"]
        assert [(r["id"], r["address"], r["version"]) for r in rows] == [
            (i, f"{run.address}/replicas/{i}", 1) for i in range(2)
        ]


async def test_more_requests_than_the_limit_are_sent_away_at_once(tmp_path):
    async with beside(tmp_path, publish_first=False, max_requests=3) as run:
        waiting = [run.asked() for _ in range(3)]
        stats = run.server._metrics
        await until(lambda: stats.in_flight == 3, "they do not arrive")
        with pytest.raises(openai.RateLimitError):
            await run.asked()
        await run.publish("abort")
        assert {answer.weight_version for answer in await asyncio.gather(*waiting)} == {1}
        assert (await run.server.stats()).refused == 1
