"""A plain `vllm serve --weight-transfer-config` on a CPU, which runs none of our code: what its endpoints take, up to
the wire, and what a run says of it."""

import asyncio
import threading
from contextlib import closing

import pytest

from asyncrl.config.remote_engine import RemoteEngineConfig
from asyncrl.config.rollout import RolloutConfig
from asyncrl.errors import ConfigError, WeightTransferError
from asyncrl.inference.remote.server_client import Call, Refused, ServerClient
from asyncrl.inference.remote.support import check_servers
from asyncrl.types import ModelFacts
from asyncrl.weights.transports.collective import NativeSender, join_vllm
from asyncrl_testing.engine_client import Client, make_request, within
from asyncrl_testing.random_model import random_qwen3, write_random_qwen3
from asyncrl_testing.served_weights_suite import BUCKET_BYTES, publish
from tests.engines import remote_engine, running
from tests.make import require_vllm
from tests.server_process import free_port
from tests.vllm_server import NATIVE, VllmServer

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

ANSWER_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    require_vllm()
    directory = tmp_path_factory.mktemp("server")
    path = write_random_qwen3(directory / "model", tie_word_embeddings=False)
    flags = ("--skip-tokenizer-init", "--max-model-len", "512", *NATIVE)
    server = VllmServer(path, directory / "log", *flags, extension=False).start()
    server.model = path
    yield server
    server.kill()


async def test_a_run_with_a_server_on_a_cpu_is_refused_before_it_starts(server):
    remote = RemoteEngineConfig(urls=[server.url], max_model_len=512, weights="native")
    rollout = RolloutConfig(engine="remote", num_replicas=1, remote=remote)
    facts = ModelFacts("m", is_local=True, architecture="Qwen3ForCausalLM", vocab_size=128)
    with pytest.raises(ConfigError, match="runs on a CPU, where vLLM's backend nccl receives nothing"):
        await asyncio.to_thread(check_servers, rollout, facts)


async def test_its_endpoints_keep_the_session_that_the_replica_relies_on(server):
    """Without a tensor: those would come by NCCL."""
    client = ServerClient(server.url, None)

    async def call(path, body=None, **params):
        return await client.send(Call(path, body, params or None), ANSWER_S)

    assert await client.get("/get_world_size", timeout_s=ANSWER_S) == {"world_size": 1}
    await call("/pause", mode="keep", clear_cache="false")
    await call("/shutdown_weight_transfer_engine")
    await call("/start_weight_update")
    for path in ("/start_weight_update", "/shutdown_weight_transfer_engine"):
        with pytest.raises(Refused, match=r"(?i)during a weight update|already active"):
            await call(path)
    with pytest.raises(Refused, match="not initialized"):
        await call("/update_weights", {"update_info": {"names": [], "dtype_names": [], "shapes": []}})
    with pytest.raises(Refused, match="without a matching start_weight_update"):
        await call("/finish_weight_update")
    await call("/start_weight_update")
    await call("/finish_weight_update", {"weight_version": "run:1"})
    assert await client.get("/weight_info", timeout_s=ANSWER_S) == {"weight_version": "run:1"}
    await call("/resume")
    await client.close()


def _never(*_):
    threading.Event().wait(5.0)
    raise TimeoutError("nobody has joined")


async def test_a_publish_fails_at_the_wire_and_the_replica_lives(server):
    """Versions, pauses and requests of the replica do not depend on the way in which weights come."""
    weights = list(random_qwen3(tie_word_embeddings=False).named_parameters())
    sender = NativeSender(BUCKET_BYTES, 1, device="cpu", host="127.0.0.1", join=_never)
    async with running(remote_engine(server, server.model, real=True, weights="native")) as engine:
        with closing(sender), pytest.raises(WeightTransferError, match="Cannot access accelerator device"):
            await publish(engine, (sender, sender.open()), weights, 1, verify=False)
        await within(engine.resume())
        client = await Client(engine, make_request(max_tokens=20)).done()
        assert len(client.ids) == 20
        assert engine.health().alive


async def test_vllms_sender_takes_what_it_is_given_up_to_its_gpu():
    require_vllm()
    with pytest.raises(RuntimeError, match="accelerator"):
        join_vllm("127.0.0.1", free_port(), 3, BUCKET_BYTES, object())
