"""The parts of engine remote that need no server: orders, requests, labels, settings."""

import contextlib
import json
from dataclasses import replace

import pytest

from asyncrl.config.remote_engine import RemoteEngineConfig
from asyncrl.config.rollout import RolloutConfig
from asyncrl.driver.cluster.placement import Demand
from asyncrl.errors import ConfigError, GenerationError
from asyncrl.inference.remote.dialect import ForeignWeights, Labels
from asyncrl.inference.remote.orders import read_order, write_order
from asyncrl.inference.remote.publish_calls import require_reachable
from asyncrl.inference.remote.server_client import read_key
from asyncrl.inference.remote.vllm_dialect import VllmDialect, VllmReader
from asyncrl.inference.remote.vllm_facts import ServerFacts
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl.types import CollectiveSource, DiskSource, IpcSource, ModelFacts, PartsSource, TensorSpec
from asyncrl.weights.plan import make_manifest
from asyncrl_testing.engine_client import make_request
from tests.make import quickstart

COMMON = {"endpoint": "tcp://127.0.0.1:5", "bucket_bytes": 4096, "num_receivers": 2, "epoch": 2**62, "key": "k" * 40}
DISK = DiskSource(**COMMON, directory="/shared/publishes")
SOURCES = (
    DISK,
    CollectiveSource(**COMMON, store="10.0.0.1:99", digest="words"),
    IpcSource(**COMMON, path="/dev/shm/x", host="a", device_memory="ring", proof=b"\x00\xff"),
    replace(PartsSource.of([DISK, replace(DISK, endpoint="tcp://10.0.0.2:5")], [0, 7]), receiver=1),
)
TENSORS = [TensorSpec("a.weight", (3, 5), "float32", 60), TensorSpec("scale", (), "bfloat16", 2)]


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: type(s).__name__)
def test_an_order_says_everything_about_a_publish(source):
    manifest = make_manifest(3, 8, TENSORS, 4096)
    assert read_order(write_order(manifest, source, 12.5)) == (manifest, source, 12.5)
    assert read_order(write_order(manifest, source, 12.5))[1].key == source.key, "which equality may leave out"
    delta = replace(manifest, version=None, encoding="delta", base_digest=(2**64 - 1, 0), verify=False)
    assert read_order(write_order(delta, source, 1.0))[0] == delta


@pytest.mark.parametrize(
    "damage",
    [
        lambda order: [],
        lambda order: order | {"more": 1},
        lambda order: order | {"timeout_s": "soon"},
        lambda order: order | {"source": order["source"] | {"kind": "pickle"}},
        lambda order: order | {"source": order["source"] | {"receiver": "0"}},
        lambda order: order | {"source": order["source"] | {"kind": "parts", "parts": []}},
        lambda order: order | {"manifest": order["manifest"] | {"publish_id": None}},
    ],
)
def test_what_is_no_order_is_refused(damage):
    order = json.loads(write_order(make_manifest(3, 8, TENSORS, 4096), DISK, 1.0))
    read_order(json.dumps(order))
    with pytest.raises(ValueError, match=r"."):
        read_order(json.dumps(damage(order)))


def test_what_a_server_is_asked():
    request = make_request(prompt=(1, 2), max_tokens=7, min_tokens=2, stop=(5, 999, 5), temperature=0.5, top_k=3)
    sizes = {"max_model_len": 64, "world_size": 1, "vocab_size": 128}
    facts = ServerFacts(**sizes, logprobs_mode="", device="cpu", chunked_prefill=False, dummy=False)
    dialect = VllmDialect(facts)
    body = dialect.body_of(request, rid="r", cache_salt="4")
    assert (body["request_id"], body["token_ids"], body["cache_salt"], body["stream"]) == ("r", [1, 2], "4", True)
    sampling = body["sampling_params"]
    assert (sampling["max_tokens"], sampling["min_tokens"], sampling["stop_token_ids"]) == (7, 2, [5])
    assert (sampling["temperature"], sampling["top_k"], sampling["logprobs"]) == (0.5, 3, 0)
    assert sampling["ignore_eos"], "only the stop tokens of the request end it"
    later = dialect.body_of(replace(request, first_position=1), rid="r", cache_salt="4")
    assert later["sampling_params"]["seed"] != sampling["seed"], "a resumed request draws from a new stream"
    json.dumps(body)


def test_a_server_must_rotate_as_the_trainer_does():
    """vLLM takes longrope's factors by its own longest sequence."""
    settings = {"world_size": 1, "vocab_size": 128, "logprobs_mode": "processed_logprobs", "device": "cpu"}
    model = ModelFacts("m", is_local=True, vocab_size=128, unusual=("rotary positions of kind longrope",))
    remote = RemoteEngineConfig(urls=["http://a:1"], max_model_len=64, weights="reload")
    for length in (64, 128):
        facts = ServerFacts(max_model_len=length, **settings, chunked_prefill=False, dummy=False)
        with contextlib.nullcontext() if length == 64 else pytest.raises(ConfigError, match="--max-model-len 64"):
            VllmDialect(facts).require_usable("http://a:1", remote, model)


LABELS = Labels("n")
READER = VllmReader(LABELS)
CHUNK = {
    "choices": [
        {
            "index": 0,
            "finish_reason": "abort",
            "token_ids": [7, 8],
            "logprobs": {"content": [{"token_id": 7, "logprob": -0.5}, {"token_id": 8, "logprob": -0.25}]},
            "weight_versions": [
                {"version": LABELS.of(3), "start": 0, "end": 1},
                {"version": LABELS.of(4), "start": 1, "end": 2},
            ],
        }
    ]
}


def test_what_a_line_of_an_answer_says():
    output = READER.take(f"data: {json.dumps(CHUNK)}")
    assert (output.ids.tolist(), output.logprobs.tolist(), output.reason) == ([7, 8], [-0.5, -0.25], "abort")
    assert output.spans == (("3", 0), ("4", 1))
    for nothing in ("", ": ping", "data: [DONE]", 'data: {"choices": []}'):
        assert READER.take(nothing) is None
    bare = {"choices": [{"index": 0, "finish_reason": "abort", "token_ids": None, "logprobs": None}]}
    last = READER.take(f"data: {json.dumps(bare)}")
    assert (len(last.ids), last.reason, last.spans) == (0, "abort", None)


def test_an_error_in_an_answer_and_tokens_without_log_probabilities_are_errors():
    with pytest.raises(GenerationError, match="out of memory"):
        READER.take('data: {"error": {"message": "out of memory"}}')
    short = {"choices": [CHUNK["choices"][0] | {"logprobs": None}]}
    with pytest.raises(ValueError, match="2 token ids with 0"):
        READER.take(f"data: {json.dumps(short)}")


@pytest.mark.parametrize("label", ["default", Labels("m").of(3), ""])
def test_labels_of_another_process_or_run_are_noticed(label):
    assert LABELS.version(LABELS.of(3)) == "3"
    with pytest.raises(ForeignWeights, match="restarted"):
        LABELS.version(label)


# -- settings ----------------------------------------------------------------------------------------------------------

REMOTE = ("rollout.engine=remote", "rollout.num_replicas=2", "rollout.remote.urls=[http://a:8000,https://b/vllm]")
BY_VLLM = (*REMOTE, "rollout.remote.weights=native", "trainer.device=cuda", "weights.transport=collective")
BY_VLLM = (*BY_VLLM, "weights.verify=off")


def test_each_replica_has_the_server_of_its_number():
    rollout = quickstart(*REMOTE, "weights.transport=collective", "rollout.max_replicas=2").rollout
    assert [rollout.of_replica(i).remote.urls for i in range(2)] == [["http://a:8000"], ["https://b/vllm"]]
    assert rollout.of_replica(1).max_model_len == rollout.max_model_len
    assert RolloutConfig().of_replica(1) == RolloutConfig()


def test_replicas_take_no_gpu_of_the_cluster():
    demand = Demand.of(quickstart(*REMOTE, "weights.transport=collective", "trainer.device=cuda"))
    assert (demand.replica_gpus, demand.rank_gpus, demand.num_gpus) == (0, 1, 1)


def test_vllms_own_sender_is_chosen_by_its_servers():
    recipe = quickstart(*BY_VLLM)
    assert TrainerSpec.of(recipe).is_native
    assert recipe.rollout.settings.num_workers == 1, "the replica stands for its server"
    assert not TrainerSpec.of(quickstart(*REMOTE, "weights.transport=collective")).is_native


@pytest.mark.parametrize(
    "url",
    ["a:8000", "http://", "ftp://a", "http://a?key=1", "http://a#b", "http://user:secret@a", " http://a", "http://a:x"],
)
def test_what_is_no_address_is_refused_and_no_secret_repeated(url):
    with pytest.raises(ConfigError, match=r"rollout\.remote\.urls") as raised:
        RemoteEngineConfig(urls=[url])
    assert "secret" not in str(raised.value)


def test_the_key_comes_from_its_variable(monkeypatch):
    assert read_key("") is None
    monkeypatch.setenv("SERVER_KEY", "k")
    assert read_key("SERVER_KEY") == "k"
    monkeypatch.setenv("SERVER_KEY", " k")
    with pytest.raises(ConfigError, match="SERVER_KEY"):
        read_key("SERVER_KEY")
    monkeypatch.delenv("SERVER_KEY")
    with pytest.raises(ConfigError, match="no such environment variable"):
        read_key("SERVER_KEY")


def test_a_trainer_on_loopback_reaches_servers_of_this_machine_only():
    require_reachable(DISK, "http://127.0.0.1:8000")
    require_reachable(DISK, "http://localhost:8000")
    require_reachable(replace(DISK, endpoint="tcp://10.0.0.1:5"), "http://192.0.2.7:8000")
    with pytest.raises(ConfigError, match=r"192\.0\.2\.7(?s:.)*ray\.address"):
        require_reachable(DISK, "http://192.0.2.7:8000")
