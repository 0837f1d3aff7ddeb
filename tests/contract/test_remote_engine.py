"""Engine remote on scripted servers: its pauses and stamps, and what it does when a server is not what it was."""

import asyncio
import json
import logging
from contextlib import asynccontextmanager

import numpy as np
import pytest
import pytest_asyncio

from asyncrl.config.model import ModelConfig
from asyncrl.config.remote_engine import RemoteEngineConfig
from asyncrl.config.rollout import RolloutConfig, SamplingConfig
from asyncrl.errors import BadRequest, ConfigError, GenerationError, WeightTransferError
from asyncrl.inference.remote.engine import RemoteEngine
from asyncrl.inference.remote.support import check_servers
from asyncrl.types import DiskSource, ModelFacts, SamplingParams
from asyncrl.weights.plan import make_manifest
from asyncrl_testing.engine_client import Client, complete, make_request, settle, within
from asyncrl_testing.engine_pause_suite import PauseConformance
from asyncrl_testing.fake_engine import FakeScript
from asyncrl_testing.fake_fleet import SPECS
from asyncrl_testing.publishing import Publisher
from asyncrl_testing.random_model import write_random_qwen3
from asyncrl_testing.scripted_sglang import ScriptedSglang
from asyncrl_testing.scripted_vllm import ScriptedVllm, facts_with
from tests.engines import running
from tests.unit.test_preflight import checked  # noqa: F401 - a fixture
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = ModelConfig(path="m")
PROMPT = np.array([5, 6], np.int32)
SOURCE = DiskSource(endpoint="tcp://127.0.0.1:5", bucket_bytes=4096, num_receivers=1, epoch=1, directory="/nowhere")
MODEL_FACTS = ModelFacts("m", is_local=True, architecture="Qwen3ForCausalLM", vocab_size=10**9)


KINDS = {"vllm": ScriptedVllm, "sglang": ScriptedSglang}
RESUMES = {"vllm": "/resume", "sglang": "/continue_generation"}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module", autouse=True)
def model_files(tmp_path_factory):
    """What a run knows of its model where the server does not say it: the vocabulary, and an end token."""
    directory = tmp_path_factory.mktemp("model")
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 10**9, "eos_token_id": 7}
    (directory / "config.json").write_text(json.dumps(config))
    MODELS["sglang"] = ModelConfig(path=str(directory))


MODELS = {"vllm": MODEL}


def make_engine(url, kind="vllm", *, real=True, **settings):
    weights = {"weights": "reload"} if kind == "sglang" else {}
    remote = RemoteEngineConfig(**({"urls": [url], "wait_s": 10.0, "lost_after_s": 5.0} | weights | settings))
    return RemoteEngine(MODELS[kind], remote, load_real_weights=real)


@asynccontextmanager
async def up(kind, **server):
    running = await KINDS[kind](**server).start()
    try:
        yield running
    finally:
        await within(running.stop(), 20)


@asynccontextmanager
async def serving(kind="vllm", *, real=True, script=None, server=None, **settings):
    """A server, and an engine that has started on it. `server`: arguments of the server."""
    async with (
        up(kind, script=script, **(server or {})) as made,
        running(make_engine(made.url, kind, real=real, **settings)) as engine,
    ):
        yield made, engine


async def refuses_to_start(engine, error, said):
    with pytest.raises(error, match=said):
        await within(engine.start(), 60)  # the first one imports transformers
    await within(engine.stop(), 20)


async def ends(engine):
    """Waits until the engine is dead; the reason."""
    await until(lambda: not engine.health().alive)
    return engine.health().detail


class TestPausesOfAServer(PauseConformance):
    kind = "vllm"

    @pytest_asyncio.fixture(loop_scope="module")
    async def engine(self):
        async with serving(self.kind) as (_, engine):
            yield engine


class TestPausesOfAServerOfSglang(TestPausesOfAServer):
    kind = "sglang"


# -- requests ----------------------------------------------------------------------------------------------------------


async def test_what_the_engine_or_its_server_refuses_is_the_fault_of_the_request(kind):
    async with serving(kind, script=FakeScript(max_model_len=64)) as (_, engine):
        with pytest.raises(GenerationError, match="token ids from"):
            await complete(engine, prompt=(2**31 - 1,))
        with pytest.raises(BadRequest, match="context length"):
            await complete(engine, max_tokens=100)
        assert len((await complete(engine)).ids) == 24


async def test_an_error_in_the_middle_fails_one_request_only(kind):
    async with serving(kind) as (server, engine):
        other = Client(engine, make_request(max_tokens=400))
        await other.first_tokens()
        server.fail_next = server.samples_path
        with pytest.raises(GenerationError, match="scripted failure"):
            await complete(engine)
        assert len((await other.done()).ids) == 400
        assert engine.health().alive


async def test_a_broken_connection_ends_its_requests_as_aborted_and_no_more(kind):
    async with serving(kind, script=FakeScript(tick_s=0.005)) as (server, engine):
        cut = Client(engine, make_request(max_tokens=400))
        await cut.first_tokens()
        server.break_connections()
        await cut.done()
        assert cut.finish_reasons == ["abort"]
        assert 0 < len(cut.ids) < 400
        assert engine.health().alive
        assert len((await complete(engine)).ids) == 24


async def test_requests_beyond_the_places_wait_here(kind):
    async with serving(kind, max_num_seqs=2) as (server, engine):
        clients = [Client(engine, make_request(max_tokens=40)) for _ in range(5)]
        await clients[0].first_tokens()
        assert (engine.health().running, engine.health().waiting) == (2, 3)
        assert server.engine.health().running + server.engine.health().waiting <= 2
        for client in clients:
            assert (await client.done()).finish_reasons == ["length"]


async def test_an_abort_frees_the_place_at_the_server(kind):
    async with serving(kind, script=FakeScript(tick_s=0.05)) as (server, engine):
        clients = [Client(engine, make_request(max_tokens=4000)) for _ in range(3)]  # 200 s
        for client in clients:
            await client.first_tokens()
        await within(engine.abort([clients[0].request.request_id]), 5)
        assert clients[0].task.done() or (await clients[0].done()).finish_reasons == ["abort"]
        await within(engine.abort(None), 5)
        await until(lambda: not server.engine.health().running)


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


async def publish(kind, engine, weights, version, mode):
    """SGLang's server reads files; that of vLLM is told of a source and takes nothing from it."""
    if kind == "sglang":
        publisher = Publisher(engine, "disk")
        try:
            await publisher.publish(weights, version, mode)
        finally:
            await publisher.close()
        return
    await within(engine.pause(mode))
    await within(engine.load_weights(make_manifest(1, version, SPECS, 4096), SOURCE, 5.0))
    await within(engine.commit(version))
    await within(engine.resume())


async def test_a_publish_that_the_server_refuses_is_an_error_of_the_publish(kind, weights):
    async def refuse(*_):
        raise WeightTransferError("no such tensor")

    async with serving(kind, script=FakeScript(load_hook=refuse)) as (server, engine):
        with pytest.raises(WeightTransferError, match="no such tensor"):
            await publish(kind, engine, weights, 1, "abort")
        server.fail_next = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}[kind]
        with pytest.raises(WeightTransferError, match="scripted failure"):
            await publish(kind, engine, weights, 2, "abort")
        assert engine.health().alive, "the next publish may succeed"
        assert engine.health().version == 0


@pytest.mark.slow
async def test_a_server_that_loads_for_long_is_not_lost():
    async def slow(*_):
        await asyncio.sleep(2.0)

    async with serving(script=FakeScript(load_hook=slow), lost_after_s=1.0) as (server, engine):
        await within(engine.pause("abort"))
        looks = server.looks
        async with server.busy, asyncio.timeout(10):  # the load begins while a look waits for its answer
            await until(lambda: server.looks > looks)
            loading = asyncio.create_task(
                engine.load_weights(make_manifest(1, 7, SPECS, 4096), SOURCE, 20.0), name="load"
            )
            await asyncio.sleep(1.5)
        await within(loading)
        await within(engine.commit(7))
        await within(engine.resume())
        assert set((await complete(engine)).versions) == {7}


@pytest.fixture
def weights():
    import torch

    return torch.nn.Linear(4, 4)


@pytest.mark.parametrize("mode", ["abort", "drain", "keep"])
async def test_sglang_loads_the_files_of_a_publish_while_nothing_is_sampled(weights, mode):
    async with serving("sglang", real=False, script=FakeScript(tick_s=0.001)) as (server, engine):
        publisher = Publisher(engine, "disk")
        held = Client(engine, make_request(max_tokens=8))
        await settle()
        assert held.chunks == [], "placeholder weights sample nothing"
        await publisher.publish(weights, 1, mode)
        assert (await held.done()).versions == [1] * (8 if mode != "abort" else 0)
        client = publisher.client()
        running = asyncio.create_task(client.generate(PROMPT, SamplingParams(max_tokens=200), seed=0))
        await publisher.sampled(30)
        await publisher.publish(weights, 2, mode)
        generation = await within(running)
        await client.close()
        versions = [(s.version, s.start) for s in generation.segments]
        assert versions[0] == (1, 0)
        assert [v for v, _ in versions] == ([1] if mode == "drain" else [1, 2])
        for segment in generation.segments:
            sampled = generation.token_ids[segment.start : segment.stop]
            labels = {server._labels[int(token) // 10**6].rpartition(":")[2] for token in sampled}
            assert labels == {str(segment.version)}, "the server sampled them under this label"
        assert [directory.rpartition("/")[2] for directory in server.directories] == ["publish-1", "publish-2"]
        await publisher.close()


@pytest.mark.slow
async def test_a_server_of_sglang_that_loads_for_long_is_not_lost_and_one_that_hangs_is(weights):
    """What samples answers nothing in both cases."""

    async def slow(*_):
        await asyncio.sleep(3.0)

    async with serving("sglang", script=FakeScript(load_hook=slow), lost_after_s=1.0) as (server, engine):
        await publish("sglang", engine, weights, 1, "abort")
        assert set((await complete(engine)).versions) == {1}
        async with server.busy:
            assert "/server_info: no answer" in await ends(engine)


async def test_sglang_keeps_no_request_whose_connection_is_gone():
    """A request that has no token yet, and one whose consumer leaves: both are aborted by name."""
    async with serving("sglang", script=FakeScript(tick_s=0.05, num_slots=1)) as (server, engine):
        first, second = (Client(engine, make_request(max_tokens=4000)) for _ in range(2))  # 200 s each
        await first.first_tokens()
        await until(lambda: server.engine.health().waiting)
        for client in (second, first):
            client.task.cancel()
        await until(lambda: not (server.engine.health().running or server.engine.health().waiting))


@pytest.mark.parametrize("incremental", [True, False])
async def test_a_stop_token_that_sglang_does_not_look_at_ends_the_response_and_frees_the_place(incremental):
    """The model of this test ends its texts with token 7, which is not among the stop tokens."""
    info = {"incremental_streaming_output": incremental}
    script = FakeScript(tick_s=0.005, max_model_len=4096)
    async with serving("sglang", script=script, server={"info": info}) as (server, engine):
        free = (await complete(engine, max_tokens=30)).ids
        stopped = Client(engine, make_request(max_tokens=400, stop=(free[9],)))
        await stopped.done()
        assert (stopped.ids, stopped.finish_reasons) == (free[:10], ["stop"])
        assert "stop_token_ids" not in server.asked[-1]["sampling_params"]
        assert server.engine.health().running == 0
        assert server.engine.health().generated_tokens < 400, "it was aborted there"
        both = Client(engine, make_request(max_tokens=400, stop=(free[9], 7)))
        await both.done()
        assert (both.ids, both.finish_reasons) == (free[:10], ["stop"])
        assert server.asked[-1]["sampling_params"]["stop_token_ids"] == [free[9], 7], "SGLang looks at both"


@pytest.mark.parametrize("raw", [False, True])
async def test_weights_that_show_nothing_at_the_start_are_looked_at_after_the_first_publish(weights, raw):
    async with up("sglang", raw=raw) as server:
        server.flat = True
        async with running(make_engine(server.url, "sglang", real=False)) as engine:
            server.flat = False
            if raw:
                with pytest.raises(GenerationError, match="before temperature"):
                    await publish("sglang", engine, weights, 1, "abort")
            else:
                await publish("sglang", engine, weights, 1, "abort")
                assert set((await complete(engine)).versions) == {1}


async def test_no_replica_uses_the_cache_of_one_before_it():
    async with serving("sglang") as (server, engine):
        await complete(engine)
        async with running(make_engine(server.url, "sglang")) as after:
            await complete(after)
        keys = [body["extra_key"] for body in server.asked]
        assert len(set(keys)) == len(keys) == 2


async def test_filters_need_a_server_that_has_them():
    async with serving("sglang", server={"info": {"enable_custom_logit_processor": False}}) as (server, engine):
        for filters in ({"top_p": 0.9}, {"top_k": 3}, {"min_tokens": 2, "stop": (1,)}):
            with pytest.raises(GenerationError, match="--enable-custom-logit-processor"):
                await complete(engine, **filters)
        assert len((await complete(engine, temperature=0.0, top_k=3)).ids) == 24, "greedy filters nothing"
    async with serving("sglang") as (server, engine):
        await complete(engine, top_k=3)
        assert server.asked[-1]["sampling_params"]["custom_params"] == {"top_k": 3, "temperature": 1.0}
        assert "custom_logit_processor" in server.asked[-1]


@pytest.mark.parametrize(
    ("server", "said"),
    [({"raw": True}, "before temperature"), ({"vocab_size": 128}, "from 128 tokens, the model has 1000000000")],
)
async def test_log_probabilities_of_another_distribution_are_noticed_at_the_start(server, said):
    async with up("sglang", **server) as made:
        await refuses_to_start(make_engine(made.url, "sglang"), ConfigError, said)


# -- servers that are not what they were -------------------------------------------------------------------------------


async def test_a_killed_server_ends_the_engine_and_its_requests_keep_their_tokens(kind):
    async with serving(kind, script=FakeScript(tick_s=0.005)) as (server, engine):
        client = Client(engine, make_request(max_tokens=400))
        await client.first_tokens()
        await server.kill()
        with pytest.raises(GenerationError, match="is lost"):
            await client.done()
        assert 0 < len(client.ids) < 400
        assert server.url in await ends(engine)
        with pytest.raises(GenerationError, match="is lost"):
            await within(engine.pause("abort"))


async def test_an_idle_engine_notices_that_its_server_is_gone(kind):
    async with serving(kind) as (server, engine):
        await server.kill()
        assert "is lost" in await ends(engine)


async def test_a_dead_engine_behind_a_server_that_answers_is_noticed(kind):
    async with serving(kind) as (server, engine):
        server.engine.crash("out of memory")
        assert "503" in await ends(engine)


async def test_a_server_that_has_restarted_serves_only_after_a_publish(kind, weights):
    """Another process at the same address, without the weights of the last publish."""
    async with serving(kind) as (server, engine):
        await server.kill()
        async with up(kind, port=server.port) as other:
            assert "restarted" in await ends(engine) or "is lost" in engine.health().detail
            again = make_engine(other.url, kind, real=False)
            await within(again.start(), 20)
            held = Client(again, make_request(max_tokens=4))
            await settle()
            assert held.chunks == []
            await publish(kind, again, weights, 3, "keep")
            assert (await held.done()).versions == [3] * 4
            await within(again.stop())


@pytest.mark.slow
async def test_weights_that_another_run_has_changed_are_noticed(kind):
    async with serving(kind) as (server, engine), running(make_engine(server.url, kind)) as thief:
        assert "another user" in await ends(engine)
        assert thief.health().alive


async def test_tokens_of_other_weights_end_the_engine_at_the_end_of_their_response(kind):
    """Faster than any look: the label changes back in between."""
    async with serving(kind, script=FakeScript(tick_s=0.002)) as (server, engine):
        client = Client(engine, make_request(max_tokens=60))
        await client.first_tokens()
        await server.swap_weights()
        with pytest.raises(GenerationError, match="another user"):
            await client.done()
        assert "another user" in await ends(engine)


@pytest.mark.slow
async def test_a_server_that_is_not_up_is_waited_for(kind):
    async with up(kind) as placeholder:
        port = placeholder.port
    engine = make_engine(f"http://127.0.0.1:{port}", kind)
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(1.5)
    assert not starting.done()
    async with up(kind, port=port):
        await within(starting, 20)
        assert len((await complete(engine)).ids) == 24
        await within(engine.stop())
    late = make_engine(f"http://127.0.0.1:{port}", kind, wait_s=1.5)
    await refuses_to_start(late, GenerationError, r"wait_s=1\.5(?s:.)*not up")


async def test_what_a_replica_before_left_behind_is_ended_at_the_start(kind):
    async with serving(kind, script=FakeScript(tick_s=0.005)) as (server, before):
        left = Client(before, make_request(max_tokens=400))
        await left.first_tokens()
        await within(before.pause("keep"))
        known = len(server.calls)
        async with running(make_engine(server.url, kind)) as after:
            begun = [
                path for path in server.calls[known:] if path not in ("/version", "/v1/models", server.samples_path)
            ]
            if kind == "sglang":
                order = ["/update_weight_version", "/continue_generation"]
                assert begun[:2] == order, "what is set free has a label of its own"
            assert server.engine.health().running == 0
            assert len((await complete(after)).ids) == 24, "it is paused no longer"
        left.task.cancel()


async def test_a_server_is_left_unpaused(kind):
    async with serving(kind) as (server, engine):
        await within(engine.pause("abort"))
        await within(engine.stop())
        assert server.calls[-1] == RESUMES[kind]


# -- before a run ------------------------------------------------------------------------------------------------------


async def check(server, *, facts=MODEL_FACTS, sampling=None, **settings):
    remote = RemoteEngineConfig(**({"urls": [server.url]} | settings))
    rollout = RolloutConfig(engine="remote", num_replicas=1, remote=remote, sampling=sampling or SamplingConfig())
    await within(asyncio.to_thread(check_servers, rollout, facts), 20)


async def refused(kind, server, settings, said):
    """What a server was asked that is refused in these words."""
    async with up(kind, **server) as running:
        with pytest.raises(ConfigError, match=said) as raised:
            await check(running, **settings)
        assert running.url in str(raised.value)
        assert all(f"{part}:" in str(raised.value) for part in ("asked", "found", "do"))
    return set(running.calls)


RELOAD = {"weights": "reload", "max_model_len": 512}
BY_VLLM = {"weights": "native"}


@pytest.mark.parametrize(
    ("server", "settings", "said"),
    [
        ({"lacks": ("/version",)}, {}, r"as a server of vLLM or SGLang(?s:.)*/version(?s:.)*/model_info"),
        ({"lacks": ("/weight_info",)}, {}, r"/weight_info(?s:.)*vLLM 0\.32\.0(?s:.)*VLLM_SERVER_DEV_MODE=1"),
        ({"lacks": ("/inference/v1/generate",)}, {}, "--enable-scale-out"),
        ({"facts": None}, {}, r"asyncrl_describe(?s:.)*--worker-extension-cls asyncrl\S*ServeExtension"),
        ({"facts": facts_with(world_size=2)}, {}, r"2 worker(?s:.)*tensor_parallel_size=2"),
        ({"facts": facts_with(data_parallel=2)}, {}, r"2 engine(?s:.)*data_parallel_size=2"),
        ({}, {"data_parallel_size": 2}, r"1 engine(?s:.)*data_parallel_size=1"),
        ({"facts": facts_with(world_size=2, pipeline_parallel=2)}, {"tensor_parallel_size": 2}, "2 pipeline stages"),
        ({"facts": facts_with(max_model_len=512)}, {}, r"512 tokens(?s:.)*--max-model-len 4096"),
        ({"facts": facts_with(logprobs_mode="raw_logprobs")}, {}, "--logprobs-mode processed_logprobs"),
        ({"facts": facts_with(device="cpu")}, {}, "--no-enable-chunked-prefill"),
        ({"facts": facts_with(vocab_size=128)}, {}, r"vocabulary 128, m has 1000000000"),
        ({"facts": facts_with(architecture="LlamaForCausalLM")}, {}, "architecture LlamaForCausalLM"),
        ({"facts": facts_with(dummy=True)}, RELOAD, "--load-format dummy"),
        ({"lacks": ("/server_info",)}, RELOAD, "/server_info"),
        ({}, BY_VLLM, r"is not set(?s:.)*--weight-transfer-config '{\"backend\": \"nccl\"}'"),
        ({"facts": facts_with(transfer="ipc")}, BY_VLLM, "config is ipc"),
        ({"facts": facts_with(transfer="nccl", world_size=2)}, BY_VLLM, r"2 worker(?s:.)*tensor_parallel_size=2"),
        ({"facts": facts_with(transfer="nccl", device="cpu", chunked_prefill=False)}, BY_VLLM, "runs on a CPU"),
    ],
)
async def test_a_server_that_cannot_be_a_replica_is_named(server, settings, said):
    calls = await refused("vllm", server, settings, said)
    assert not {"/pause", "/resume", "/update_weight_version"} & calls, "a check changes nothing"


@pytest.mark.parametrize(
    ("server", "settings", "said"),
    [
        ({"lacks": ("/server_info",)}, {}, r"/server_info(?s:.)*0\.5\.19"),
        ({"lacks": ("/model_info",)}, {}, r"as a server of vLLM or SGLang(?s:.)*/version(?s:.)*/model_info"),
        ({"info": {"version": "0.5.18.post2"}}, {}, r"0\.5\.18\.post2(?s:.)*since 0\.5\.19"),
        ({}, {"weights": "extension"}, r"weights=extension(?s:.)*weights=reload(?s:.)*transport=disk"),
        ({"info": {"tp_size": 2}}, {}, r"--tp-size 2(?s:.)*tensor_parallel_size=2"),
        ({"info": {"dp_size": 2}}, {}, "--dp-size 2"),
        ({}, BY_VLLM, r"weights=native(?s:.)*weights=reload"),
        ({}, {"data_parallel_size": 2}, r"data_parallel_size=2(?s:.)*--dp-size 1"),
        ({"info": {"pp_size": 2}}, {}, "--pp-size 2"),
        ({"info": {"tokenizer_worker_num": 4}}, {}, "--tokenizer-worker-num 4"),
        ({"info": {"speculative_algorithm": "EAGLE"}}, {}, "--speculative-algorithm EAGLE"),
        ({"info": {"disaggregation_mode": "prefill"}}, {}, "--disaggregation-mode prefill"),
        ({"info": {"max_req_input_len": 505}}, {}, r"505 tokens(?s:.)*--context-length 518"),
        ({"info": {"max_req_input_len": None}}, {}, "another form"),
        ({"architecture": "LlamaForCausalLM"}, {}, "architecture LlamaForCausalLM"),
        ({"preferred": {"top_p": 0.9}}, {}, r"--preferred-sampling-params \{'top_p': 0\.9\}"),
        ({"info": {"enable_custom_logit_processor": False}}, {"sampling": SamplingConfig(top_p=0.9)}, "top_p=0.9"),
    ],
)
async def test_a_server_of_sglang_that_cannot_be_a_replica_is_named(server, settings, said):
    calls = await refused("sglang", server, RELOAD | settings, said)
    assert calls <= {"/version"}, "a check changes nothing, and samples nothing"


async def test_a_reload_that_vllm_does_wrong_on_a_cpu_is_refused_at_the_start(tmp_path):
    """Only the model's own files say that its embeddings are tied: a server without the extension does not."""
    for tied in (True, False):
        model = ModelConfig(path=str(write_random_qwen3(tmp_path / str(tied), tie_word_embeddings=tied)))
        async with up("vllm", facts=facts_with(device="cpu", chunked_prefill=False)) as server:
            remote = RemoteEngineConfig(urls=[server.url], wait_s=10.0, **RELOAD)
            engine = RemoteEngine(model, remote, load_real_weights=True)
            if tied:
                await refuses_to_start(engine, ConfigError, "tied embeddings")
                continue
            async with running(engine):
                with pytest.raises(GenerationError, match="the model has 128"):
                    await complete(engine, prompt=(128,))


async def test_servers_that_can_be_replicas_pass(kind):
    async with up(kind) as running:
        if kind == "vllm":
            await check(running)
        await check(running, **RELOAD)
    with pytest.raises(ConfigError, match="start the server first"):
        await check(running)


async def test_the_key_reaches_the_server_and_no_log(kind, monkeypatch, caplog):
    settings = {} if kind == "vllm" else RELOAD
    monkeypatch.setenv("SERVER_KEY", "hush-hush")
    async with up(kind, key="hush-hush") as server:
        with caplog.at_level(logging.DEBUG):
            with pytest.raises(ConfigError, match=r"refuses the key(?s:.)*api_key_env"):
                await check(server, **settings)
            await check(server, api_key_env="SERVER_KEY", **settings)
            async with running(make_engine(server.url, kind, api_key_env="SERVER_KEY")) as engine:
                assert len((await complete(engine)).ids) == 24
        assert "hush-hush" not in caplog.text + repr(vars(engine))


async def test_a_dry_run_says_what_publishes_by_vllms_own_sender_do_not_promise(checked):  # noqa: F811
    facts = facts_with(transfer="nccl", architecture=None, vocab_size=None)
    async with up("vllm", facts=facts) as server:
        remote = ("rollout.engine=remote", "rollout.num_replicas=1", f"rollout.remote.urls=[{server.url}]")
        native = ("rollout.remote.weights=native", "weights.transport=collective", "weights.verify=off")
        lines = await asyncio.to_thread(checked, *remote, *native, "trainer.device=cuda")
    assert any("no server digests its weights; staleness.parity judges every step" in line for line in lines)
