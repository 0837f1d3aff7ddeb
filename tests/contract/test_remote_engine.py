"""Engine remote on a scripted server: its pauses and stamps, and what it does when a server is not what it was."""

import asyncio
import logging
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from asyncrl.config.model import ModelConfig
from asyncrl.config.remote_engine import RemoteEngineConfig
from asyncrl.config.rollout import RolloutConfig
from asyncrl.errors import BadRequest, ConfigError, GenerationError, WeightTransferError
from asyncrl.inference.remote.engine import RemoteEngine
from asyncrl.inference.remote.support import check_servers
from asyncrl.types import DiskSource, ModelFacts
from asyncrl.weights.plan import make_manifest
from asyncrl_testing.engine_client import Client, complete, make_request, settle, within
from asyncrl_testing.engine_pause_suite import PauseConformance
from asyncrl_testing.fake_engine import FakeScript
from asyncrl_testing.fake_fleet import SPECS
from asyncrl_testing.random_model import write_random_qwen3
from asyncrl_testing.scripted_server import ScriptedServer, facts_with

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

MODEL = ModelConfig(path="m")
SOURCE = DiskSource(endpoint="tcp://127.0.0.1:5", bucket_bytes=4096, num_receivers=1, epoch=1, directory="/nowhere")
MODEL_FACTS = ModelFacts("m", is_local=True, architecture="Qwen3ForCausalLM", vocab_size=10**9)


def make_engine(url, *, real=True, **settings):
    remote = RemoteEngineConfig(**({"urls": [url], "wait_s": 10.0, "lost_after_s": 5.0} | settings))
    return RemoteEngine(MODEL, remote, load_real_weights=real)


@asynccontextmanager
async def serving(*, real=True, script=None, **settings):
    """A server, and an engine that has started on it."""
    server = await ScriptedServer(script=script).start()
    engine = make_engine(server.url, real=real, **settings)
    await within(engine.start(), 20)
    try:
        yield server, engine
    finally:
        await within(engine.stop(), 20)
        await within(server.stop(), 20)


async def ends(engine, *, within_s=10.0):
    """Waits until the engine is dead; the reason."""
    async with asyncio.timeout(within_s):
        while engine.health().alive:
            await asyncio.sleep(0.01)
    return engine.health().detail


class TestPausesOfAServer(PauseConformance):
    @pytest_asyncio.fixture(loop_scope="module")
    async def engine(self):
        async with serving() as (_, engine):
            yield engine


# -- requests ----------------------------------------------------------------------------------------------------------


async def test_what_the_engine_or_its_server_refuses_is_the_fault_of_the_request():
    async with serving(script=FakeScript(max_model_len=64)) as (_, engine):
        with pytest.raises(GenerationError, match="token ids from"):
            await complete(engine, prompt=(2**31 - 1,))
        with pytest.raises(BadRequest, match="maximum context length"):
            await complete(engine, max_tokens=100)
        assert len((await complete(engine)).ids) == 24


async def test_an_error_in_the_middle_fails_one_request_only():
    async with serving() as (server, engine):
        other = Client(engine, make_request(max_tokens=400))
        await other.first_tokens()
        server.fail_next = "/inference/v1/generate"
        with pytest.raises(GenerationError, match="scripted failure"):
            await complete(engine)
        assert len((await other.done()).ids) == 400
        assert engine.health().alive


async def test_a_broken_connection_ends_its_requests_as_aborted_and_no_more():
    async with serving(script=FakeScript(tick_s=0.005)) as (server, engine):
        cut = Client(engine, make_request(max_tokens=400))
        await cut.first_tokens()
        server.break_connections()
        await cut.done()
        assert cut.finish_reasons == ["abort"]
        assert 0 < len(cut.ids) < 400
        assert engine.health().alive
        assert len((await complete(engine)).ids) == 24


async def test_requests_beyond_the_places_wait_here():
    async with serving(max_num_seqs=2) as (server, engine):
        clients = [Client(engine, make_request(max_tokens=40)) for _ in range(5)]
        await clients[0].first_tokens()
        assert (engine.health().running, engine.health().waiting) == (2, 3)
        assert server.engine.health().running + server.engine.health().waiting <= 2
        for client in clients:
            assert (await client.done()).finish_reasons == ["length"]


async def test_an_abort_frees_the_place_at_the_server():
    async with serving(script=FakeScript(tick_s=0.005)) as (server, engine):
        clients = [Client(engine, make_request(max_tokens=400)) for _ in range(3)]
        for client in clients:
            await client.first_tokens()
        await within(engine.abort([clients[0].request.request_id]), 5)
        assert clients[0].task.done() or (await clients[0].done()).finish_reasons == ["abort"]
        await within(engine.abort(None), 5)
        async with asyncio.timeout(5):
            while server.engine.health().running:
                await asyncio.sleep(0.01)


# -- publishes ---------------------------------------------------------------------------------------------------------


async def test_a_publish_reaches_the_server_while_nothing_is_sampled():
    async with serving(real=False, script=FakeScript(tick_s=0.001)) as (server, engine):
        held = Client(engine, make_request(max_tokens=8))
        await settle()
        assert held.chunks == [], "placeholder weights sample nothing"
        manifest = make_manifest(1, 7, SPECS, 4096)
        with pytest.raises(WeightTransferError, match="is sampling"):
            await within(engine.load_weights(manifest, SOURCE, 5.0))
        await within(engine.pause("keep"))
        await within(engine.load_weights(manifest, SOURCE, 5.0))
        await within(engine.commit(7))
        await within(engine.resume())
        assert server.published == [manifest]
        assert (await held.done()).versions == [7] * 8
        order = [c for c in server.calls if c in ("/pause", "/collective_rpc", "/update_weight_version", "/resume")]
        assert order[-4:] == ["/pause", "/collective_rpc", "/update_weight_version", "/resume"]


async def test_a_publish_that_a_worker_refuses_is_an_error_of_the_publish():
    async def refuse(*_):
        raise WeightTransferError("no such tensor")

    async with serving(script=FakeScript(load_hook=refuse)) as (server, engine):
        await within(engine.pause("abort"))
        with pytest.raises(WeightTransferError, match="no such tensor"):
            await within(engine.load_weights(make_manifest(1, 7, SPECS, 4096), SOURCE, 5.0))
        server.fail_next = "/collective_rpc"
        with pytest.raises(WeightTransferError, match="scripted failure"):
            await within(engine.load_weights(make_manifest(2, 7, SPECS, 4096), SOURCE, 5.0))
        assert engine.health().alive, "the next publish may succeed"


async def test_a_server_that_loads_for_long_is_not_lost():
    async def slow(*_):
        await asyncio.sleep(2.0)

    async with serving(script=FakeScript(load_hook=slow), lost_after_s=1.0) as (server, engine):
        await within(engine.pause("abort"))
        looks = server.looks
        async with server.busy, asyncio.timeout(10):  # the load begins while a look waits for its answer
            while server.looks == looks:
                await asyncio.sleep(0.01)
            loading = asyncio.create_task(
                engine.load_weights(make_manifest(1, 7, SPECS, 4096), SOURCE, 20.0), name="load"
            )
            await asyncio.sleep(1.5)
        await within(loading)
        await within(engine.commit(7))
        await within(engine.resume())
        assert set((await complete(engine)).versions) == {7}


# -- servers that are not what they were -------------------------------------------------------------------------------


async def test_a_killed_server_ends_the_engine_and_its_requests_keep_their_tokens():
    async with serving(script=FakeScript(tick_s=0.005)) as (server, engine):
        client = Client(engine, make_request(max_tokens=400))
        await client.first_tokens()
        await server.kill()
        with pytest.raises(GenerationError, match="is lost"):
            await client.done()
        assert 0 < len(client.ids) < 400
        assert server.url in await ends(engine)
        with pytest.raises(GenerationError, match="is lost"):
            await within(engine.pause("abort"))


async def test_an_idle_engine_notices_that_its_server_is_gone():
    async with serving() as (server, engine):
        await server.kill()
        assert "is lost" in await ends(engine)


async def test_a_dead_engine_behind_a_server_that_answers_is_noticed():
    async with serving() as (server, engine):
        server.engine.crash("out of memory")
        assert "503" in await ends(engine)


async def test_a_server_that_has_restarted_serves_only_after_a_publish():
    """Another process at the same address, without the weights of the last publish."""
    async with serving() as (server, engine):
        await server.kill()
        other = await ScriptedServer(port=server.port).start()
        try:
            assert "restarted" in await ends(engine) or "is lost" in engine.health().detail
            again = make_engine(other.url, real=False)
            await within(again.start(), 20)
            held = Client(again, make_request(max_tokens=4))
            await settle()
            assert held.chunks == []
            await within(again.pause("keep"))
            await within(again.load_weights(make_manifest(1, 3, SPECS, 4096), SOURCE, 5.0))
            await within(again.commit(3))
            await within(again.resume())
            assert (await held.done()).versions == [3] * 4
            await within(again.stop())
        finally:
            await within(other.stop())


async def test_weights_that_another_run_has_changed_are_noticed():
    async with serving() as (server, engine):
        thief = make_engine(server.url)
        await within(thief.start(), 20)
        assert "another user" in await ends(engine)
        assert thief.health().alive
        await within(thief.stop())


async def test_tokens_of_other_weights_end_the_engine_at_the_end_of_their_response():
    """Faster than any look: the label changes back in between."""
    async with serving(script=FakeScript(tick_s=0.002)) as (server, engine):
        client = Client(engine, make_request(max_tokens=60))
        await client.first_tokens()
        await server.swap_weights()
        with pytest.raises(GenerationError, match="another user"):
            await client.done()
        assert "another user" in await ends(engine)


async def test_a_server_that_is_not_up_is_waited_for():
    server = ScriptedServer()
    async with serving() as (placeholder, _):
        port = placeholder.port
    engine = make_engine(f"http://127.0.0.1:{port}")
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(1.5)
    assert not starting.done()
    server = await ScriptedServer(port=port).start()
    try:
        await within(starting, 20)
        assert len((await complete(engine)).ids) == 24
    finally:
        await within(engine.stop())
        await within(server.stop())
    late = make_engine(f"http://127.0.0.1:{port}", wait_s=1.5)
    with pytest.raises(GenerationError, match=r"wait_s=1\.5(?s:.)*not up"):
        await within(late.start(), 20)
    await within(late.stop())


async def test_what_a_replica_before_left_behind_is_ended_at_the_start():
    server = await ScriptedServer(script=FakeScript(tick_s=0.005)).start()
    try:
        before = make_engine(server.url)
        await within(before.start(), 20)
        left = Client(before, make_request(max_tokens=400))
        await left.first_tokens()
        await within(before.pause("keep"))
        after = make_engine(server.url)
        await within(after.start(), 20)
        assert server.engine.health().running == 0
        assert len((await complete(after)).ids) == 24, "it is paused no longer"
        await within(after.stop())
        await within(before.stop())
        left.task.cancel()
    finally:
        await within(server.stop())


async def test_a_server_is_left_unpaused():
    async with serving() as (server, engine):
        await within(engine.pause("abort"))
        await within(engine.stop())
        assert server.calls[-1] == "/resume"


# -- before a run ------------------------------------------------------------------------------------------------------


async def check(server, *, facts=MODEL_FACTS, **settings):
    remote = RemoteEngineConfig(**({"urls": [server.url]} | settings))
    rollout = RolloutConfig(engine="remote", num_replicas=1, remote=remote)
    await within(asyncio.to_thread(check_servers, rollout, facts), 20)


RELOAD = {"weights": "reload", "max_model_len": 512}


@pytest.mark.parametrize(
    ("server", "settings", "said"),
    [
        ({"lacks": ("/version",)}, {}, r"as a vLLM server(?s:.)*/version"),
        ({"lacks": ("/weight_info",)}, {}, r"/weight_info(?s:.)*vLLM 0\.32\.0(?s:.)*VLLM_SERVER_DEV_MODE=1"),
        ({"lacks": ("/inference/v1/generate",)}, {}, "--enable-scale-out"),
        ({"facts": None}, {}, r"asyncrl_describe(?s:.)*--worker-extension-cls asyncrl\S*ServeExtension"),
        ({"facts": facts_with(world_size=2)}, {}, r"2 worker(?s:.)*tensor_parallel_size=2"),
        ({"facts": facts_with(max_model_len=512)}, {}, r"512 tokens(?s:.)*--max-model-len 4096"),
        ({"facts": facts_with(logprobs_mode="raw_logprobs")}, {}, "--logprobs-mode processed_logprobs"),
        ({"facts": facts_with(device="cpu")}, {}, "--no-enable-chunked-prefill"),
        ({"facts": facts_with(vocab_size=128)}, {}, r"vocabulary 128, m has 1000000000"),
        ({"facts": facts_with(architecture="LlamaForCausalLM")}, {}, "architecture LlamaForCausalLM"),
        ({"facts": facts_with(dummy=True)}, RELOAD, "--load-format dummy"),
        ({"lacks": ("/server_info",)}, RELOAD, "/server_info"),
    ],
)
async def test_a_server_that_cannot_be_a_replica_is_named(server, settings, said):
    running = await ScriptedServer(**server).start()
    try:
        with pytest.raises(ConfigError, match=said) as raised:
            await check(running, **settings)
        assert running.url in str(raised.value)
        assert all(f"{part}:" in str(raised.value) for part in ("asked", "found", "do"))
    finally:
        await within(running.stop())
    assert not {"/pause", "/resume", "/update_weight_version"} & set(running.calls), "a check changes nothing"


async def test_a_reload_that_vllm_does_wrong_on_a_cpu_is_refused_at_the_start(tmp_path):
    """Only the model's own files say that its embeddings are tied: a server without the extension does not."""
    for tied in (True, False):
        model = ModelConfig(path=str(write_random_qwen3(tmp_path / str(tied), tie_word_embeddings=tied)))
        server = await ScriptedServer(facts=facts_with(device="cpu", chunked_prefill=False)).start()
        remote = RemoteEngineConfig(urls=[server.url], wait_s=10.0, **RELOAD)
        engine = RemoteEngine(model, remote, load_real_weights=True)
        try:
            if tied:
                with pytest.raises(ConfigError, match="tied embeddings"):
                    await within(engine.start(), 20)
            else:
                await within(engine.start(), 20)
                with pytest.raises(GenerationError, match="the model has 128"):
                    await complete(engine, prompt=(128,))
        finally:
            await within(engine.stop(), 20)
            await within(server.stop(), 20)


async def test_servers_that_can_be_replicas_pass():
    running = await ScriptedServer().start()
    try:
        await check(running)
        await check(running, **RELOAD)
    finally:
        await within(running.stop())
    with pytest.raises(ConfigError, match="start the server first"):
        await check(running)


async def test_the_key_reaches_the_server_and_no_log(monkeypatch, caplog):
    monkeypatch.setenv("SERVER_KEY", "hush-hush")
    running = await ScriptedServer(key="hush-hush").start()
    try:
        with caplog.at_level(logging.DEBUG):
            with pytest.raises(ConfigError, match=r"refuses the key(?s:.)*api_key_env"):
                await check(running)
            await check(running, api_key_env="SERVER_KEY")
            engine = make_engine(running.url, api_key_env="SERVER_KEY")
            await within(engine.start(), 20)
            assert len((await complete(engine)).ids) == 24
            await within(engine.stop())
        assert "hush-hush" not in caplog.text + repr(vars(engine))
    finally:
        await within(running.stop())
