"""The parts of the vLLM adapter that need no vLLM."""

import os
import tempfile
import threading
import time
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import OWN_ENGINE_ARGS, RolloutConfig, VllmEngineConfig
from asyncrl.errors import AsyncRLError, ConfigError, DeadlineExceeded, GenerationError, WeightTransferError
from asyncrl.inference.sglang import support as sglang_support
from asyncrl.inference.shared import package_probe, weight_update
from asyncrl.inference.shared.engine_queue import EngineQueue
from asyncrl.inference.shared.process_engine import last_logged_error
from asyncrl.inference.shared.publish_calls import agree
from asyncrl.inference.shared.request_checks import misfit
from asyncrl.inference.shared.streams import spans_of
from asyncrl.inference.shared.weight_update import Feed
from asyncrl.inference.vllm import support
from asyncrl.inference.vllm.compile_cache import complete_loaded_functions
from asyncrl.inference.vllm.launch import cpu_kv_cache_bytes, engine_arguments
from asyncrl.inference.vllm.sampling_params import stream_seed
from asyncrl.inference.vllm.streams import VllmStream
from asyncrl.types import ModelFacts
from asyncrl_testing.engine_client import make_request

# -- versions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("starts", "first", "count", "spans"),
    [
        ([], 0, 0, []),
        ([("3", 0)], 0, 4, [(3, 0, 4)]),
        ([("3", 0)], 7, 2, [(3, 0, 2)]),
        ([("3", 0), ("4", 5)], 3, 4, [(3, 0, 2), (4, 2, 4)]),
        ([("3", 0), ("4", 5)], 5, 1, [(4, 0, 1)]),
        ([("3", 0), ("4", 5)], 2, 3, [(3, 0, 3)]),
        ([("3", 0), ("4", 1), ("9", 2), ("10", 6)], 0, 8, [(3, 0, 1), (4, 1, 2), (9, 2, 6), (10, 6, 8)]),
    ],
)
def test_tokens_are_cut_where_the_version_changes(starts, first, count, spans):
    assert list(spans_of(starts, first, count)) == spans


def delta(ids, *, reason=None, versions=None, cached=0):
    # of each place first the token that was sampled, then, where vLLM names more, the likeliest
    logprobs = SimpleNamespace(start_indices=list(range(0, 2 * len(ids), 2)), logprobs=[])
    for i in ids:
        logprobs.logprobs += [-i / 10, -0.05]
    completion = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=reason, weight_versions=versions)
    return SimpleNamespace(outputs=[completion], finished=reason is not None, num_cached_tokens=cached)


def entered(starts, told=None, layers=()):
    """A stream; `told`: the experts of the steps so far, of which those of some layers are wanted."""
    stream = VllmStream(make_request(experts=told is not None), [*layers])
    state = None if starts is None else SimpleNamespace(weight_version_starts=starts, routed_experts_chunks=told)
    stream.enter(SimpleNamespace(request_id="x", output=None), state)
    return stream


def rows(*tokens):
    """As vLLM tells the experts of a step: a row per token, with all four layers of the model."""
    return np.array([[[t * 10 + layer, t * 10 + layer + 5] for layer in range(4)] for t in tokens], np.uint8)


def test_experts_go_with_their_tokens():
    """vLLM tells those of a step with its tokens; an output may hold fewer tokens than steps have been told."""
    told = [rows(1), rows(2)]
    stream = entered([("1", 0), ("2", 3)], told, [1, 3])
    told.append(rows(3))
    made = stream.take(delta([5, 6]), 1)
    told += [rows(4), rows(5)]
    made += stream.take(delta([7, 8, 9], reason="length"), 2)
    assert [(c.token_ids.tolist(), c.version) for c in made] == [([5, 6], 1), ([7], 1), ([8, 9], 2)]
    found = np.concatenate([chunk.extra["experts"] for chunk in made])
    np.testing.assert_array_equal(found, rows(1, 2, 3, 4, 5)[:, [1, 3]])
    assert found.dtype == np.int16


def test_an_end_without_tokens_needs_no_experts():
    (chunk,) = entered([], [], [1, 3]).take(delta([], reason="abort"), 4)
    assert (len(chunk.token_ids), chunk.finish_reason, chunk.extra) == (0, "abort", {})


def test_tokens_without_experts_that_were_asked_for_are_an_error():
    with pytest.raises(GenerationError, match="experts of 1 tokens for 2"):
        entered([("1", 0)], [rows(1)], [0]).take(delta([5, 6]), 1)


def test_a_delta_that_is_late_keeps_the_version_that_sampled_it():
    starts = [("1", 0)]
    stream = entered(starts)
    assert [c.version for c in stream.take(delta([5, 6]), 1)] == [1]
    starts.append(("2", 3))
    chunks = stream.take(delta([7, 8, 9], reason="length", cached=2), 2)
    assert [(c.version, c.token_ids.tolist(), c.finish_reason, c.cached_tokens) for c in chunks] == [
        (1, [7], None, 0),
        (2, [8, 9], "length", 2),
    ]
    np.testing.assert_allclose(chunks[1].logprobs, [-0.8, -0.9])


def test_tokens_without_their_log_probabilities_are_an_error():
    output = delta([5, 6])
    output.outputs[0].logprobs.start_indices.pop()
    with pytest.raises(GenerationError, match="log-probabilities of 1 tokens for 2"):
        entered([("1", 0)]).take(output, 1)


def test_the_likeliest_tokens_are_cut_from_what_vllm_names():
    """vLLM names the token that stands there as well, after the others where it is not among them."""
    stream = VllmStream(make_request(prompt=(5, 6, 7, 8), score_from=2, score_top=2))
    entries = [None, {}, {3: -0.1, 9: -0.5, 7: -4.0}, {8: -0.2, 1: -0.3}]
    named = [e and {token: SimpleNamespace(logprob=x) for token, x in e.items()} for e in entries]
    completion = SimpleNamespace(token_ids=[1], logprobs=[], finish_reason="length", weight_versions=None)
    output = SimpleNamespace(outputs=[completion], prompt_logprobs=named, finished=True, num_cached_tokens=0)
    (chunk,) = stream.take(output, 3)
    assert (chunk.token_ids.tolist(), chunk.finish_reason) == ([7, 8], "stop")
    np.testing.assert_allclose(chunk.logprobs, [-4.0, -0.2])
    assert chunk.extra["top_ids"].tolist() == [[3, 9], [8, 1]]
    np.testing.assert_allclose(chunk.extra["top_logprobs"], [[-0.1, -0.5], [-0.2, -0.3]])


def test_an_end_without_tokens_is_an_empty_chunk_of_the_version_of_the_day():
    stream = entered([("1", 0)])
    stream.take(delta([5]), 1)
    (chunk,) = stream.take(delta([], reason="abort"), 4)
    assert (chunk.token_ids.tolist(), chunk.version, chunk.finish_reason) == ([], 4, "abort")


def test_a_request_that_ended_before_it_was_looked_up_carries_its_own_tags():
    spans = [SimpleNamespace(version="6", start=0, end=1), SimpleNamespace(version="7", start=1, end=2)]
    chunks = entered(None).take(delta([3, 4], reason="stop", versions=spans), 7)
    assert [(c.version, c.finish_reason) for c in chunks] == [(6, None), (7, "stop")]


def test_an_end_by_error_is_an_error():
    with pytest.raises(GenerationError, match="'error'"):
        entered([("1", 0)]).take(delta([], reason="error"), 1)


# -- requests ----------------------------------------------------------------------------------------------------------


def test_seeds_of_requests_and_of_their_resumptions_are_all_different():
    seeds = [stream_seed(seed, position) for seed in range(-20, 200) for position in range(60)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    bits = np.array([[s >> b & 1 for b in range(63)] for s in seeds])
    assert np.abs(bits.mean(0) - 0.5).max() < 0.05


@pytest.mark.parametrize(
    ("request_", "names"),
    [
        (make_request(prompt=()), "prompt_ids"),
        (make_request(max_tokens=0), "max_tokens=0"),
        (make_request(max_tokens=97), "max_model_len=100"),
        (make_request(prompt=(3, 50)), "token ids from 3 to 50"),
        (make_request(min_tokens=25), "min_tokens=25"),
        (make_request(min_tokens=1, stop=tuple(range(50))), "every token"),
        (make_request(temperature=-1.0), "temperature"),
        (make_request(top_p=0.0), "top_p"),
        (make_request(temperature=1e-40), "temperature"),
        (make_request(temperature=float("nan")), "temperature"),
        (make_request(top_p=1e-300), "top_p"),
        (make_request(top_k=-1), "top_k"),
        (make_request(top_k=2**31), "top_k"),
    ],
)
def test_requests_that_do_not_fit_are_told_why(request_, names):
    found = misfit(request_, engine="vllm", max_model_len=100, vocab_size=50)
    assert any(names in part for part in found)
    assert misfit(make_request(max_tokens=96, stop=(10**6,)), engine="vllm", max_model_len=100, vocab_size=50) is None


# -- admission ---------------------------------------------------------------------------------------------------------


def test_admission_keeps_order_limit_and_gate():
    now, sent = [0.0], []
    admission = EngineQueue(2, sent.append, lambda: now[0])
    a, b, c, d = streams = [VllmStream(make_request()) for _ in range(4)]
    for stream in streams:
        admission.enter(stream)
    assert sent == []
    admission.set_open(True)
    assert (sent, list(admission.waiting)) == ([a, b], [c, d])
    now[0] = 2.0
    admission.leave(a)
    assert sent == [a, b, c]
    admission.set_open(False)
    admission.requeue(c)
    admission.leave(b)
    assert (admission.running, list(admission.waiting), sent) == ([], [c, d], [a, b, c])
    now[0] = 5.0
    assert admission.busy_s == 2.0
    admission.leave(d)
    admission.set_open(True)
    assert (sent[3:], admission.running) == ([c], [c])
    now[0] = 6.0
    assert admission.busy_s == 3.0


def test_resumed_streams_are_before_the_others_and_keep_their_order():
    sent = []
    admission = EngineQueue(1, sent.append, lambda: 0.0, is_resumed=lambda stream: stream.request.first_position > 0)
    a, b, c, d = [VllmStream(make_request(first_position=first)) for first in (0, 0, 9, 3)]
    for stream in (a, b, c, d):
        admission.enter(stream)
    assert list(admission.waiting) == [c, d, a, b]
    admission.set_open(True)
    admission.requeue(c)
    assert (sent, list(admission.waiting)) == ([c, c], [d, a, b])


# -- weights -----------------------------------------------------------------------------------------------------------


def test_digests_on_which_workers_differ_are_no_digest_of_a_sender():
    assert agree([["", "", [1, 2, 3]], ["", "", [1, 5, 3]]]) == (1, 0, 3)
    assert agree([["", "", [4]]]) == (4,)
    assert agree([["", "", None], ["", "", None]]) is None


def test_the_cause_is_reported_and_not_its_echo():
    echo, cause = ["TransferEnded", "the other end is gone", None], ["DeadlineExceeded", "too late", None]
    with pytest.raises(DeadlineExceeded, match="too late"):
        agree([["", "", [1]], echo, cause])
    with pytest.raises(WeightTransferError, match="KeyError: 'x'"):
        agree([["KeyError", "'x'", None]])


def in_thread(work):
    caught = []

    def run():
        try:
            work()
        except AsyncRLError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, caught


def test_the_feed_hands_over_in_order_and_the_last_offer_waits_for_the_loader():
    feed, names = Feed(5, 10.0), list("abcde")
    thread, caught = in_thread(lambda: [feed.offer(name, torch.zeros(1)) for name in names])
    assert [name for name, _ in feed] == names
    thread.join(0.05)
    assert thread.is_alive()
    feed.finish()
    thread.join(5.0)
    assert (thread.is_alive(), caught) == (False, [])


def test_the_feed_holds_few_bytes_whatever_the_tensors(monkeypatch):
    monkeypatch.setattr(weight_update, "AHEAD_BYTES", 100)
    feed, offered = Feed(12, 10.0), []

    def offer():
        for number in range(12):
            feed.offer(str(number), torch.zeros(10 if number < 8 else 60))  # 40 bytes, then 240
            offered.append(number)

    thread, caught = in_thread(offer)
    loaded = iter(feed)
    seen = []
    for _ in range(12):
        thread.join(0.05)
        waiting = len(offered) - len(seen)
        assert waiting <= 3 + 3, "those that wait, and those that the loader took together"
        seen.append(next(loaded)[0])
    assert seen == [str(number) for number in range(12)]
    feed.finish()
    thread.join(5.0)
    assert caught == []


def test_an_error_on_one_side_ends_the_other_at_once():
    for side in (lambda feed: [feed.offer(name, torch.zeros(1)) for name in "abcde"], list):
        feed = Feed(5, 60.0)
        thread, caught = in_thread(lambda feed=feed, side=side: side(feed))
        feed.fail(WeightTransferError("refused"))
        thread.join(5.0)
        assert [str(e) for e in caught] == ["refused"]


def test_the_feed_keeps_its_deadline_on_both_sides():
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="next tensor"):
        list(Feed(1, 0.05))
    with pytest.raises(DeadlineExceeded, match="last tensors"):
        Feed(1, 0.05).offer("a", torch.zeros(1))
    assert time.monotonic() - started < 2.0


# -- launching ---------------------------------------------------------------------------------------------------------


def arguments(settings=None, *, on_cpu=True, real=False):
    settings = settings or VllmEngineConfig()
    return engine_arguments(ModelConfig(path="m"), settings, load_real_weights=real, on_cpu=on_cpu)


def test_what_vllm_is_started_with():
    assert arguments()["kv_cache_memory_bytes"] == 1 << 30
    assert arguments(on_cpu=False)["kv_cache_memory_bytes"] is None
    assert arguments(VllmEngineConfig(kv_cache_memory_bytes=7))["kv_cache_memory_bytes"] == 7
    assert (arguments()["load_format"], arguments(real=True)["load_format"]) == ("dummy", "auto")
    assert arguments(VllmEngineConfig(tensor_parallel_size=2))["distributed_executor_backend"] == "mp"
    assert arguments()["logprobs_mode"] == "processed_logprobs"
    assert arguments(VllmEngineConfig(max_logprobs=64))["max_logprobs"] == 64
    assert arguments()["gpu_memory_utilization"] == 0.85
    assert arguments(VllmEngineConfig(gpu_share=0.5))["gpu_memory_utilization"] == pytest.approx(0.425)


def test_on_a_cpu_the_kv_cache_has_room_for_twice_what_the_requests_need():
    """vLLM clears all of it at the start: 1 GiB took a small model two seconds."""
    asked = VllmEngineConfig(max_num_seqs=10)

    def room(max_model_len: int, *, is_hybrid: bool = False) -> int:
        model = SimpleNamespace(
            is_hybrid=is_hybrid, is_attention_free=False, max_model_len=max_model_len, dtype=torch.bfloat16,
            get_num_kv_heads=lambda parallel: 2, get_num_layers=lambda parallel: 3, get_head_size=lambda: 64,
        )  # fmt: skip
        cache = SimpleNamespace(block_size=128)
        return cpu_kv_cache_bytes(SimpleNamespace(model_config=model, parallel_config=None, cache_config=cache), asked)

    token_bytes = 2 * 2 * 3 * 64 * 2
    assert room(160) == 2 * 10 * (2 + 2) * 128 * token_bytes, "whole blocks, one unused and one for a sliding window"
    assert room(1 << 20) == 1 << 30
    assert room(160, is_hybrid=True) == 1 << 30, "not every layer has keys and values"


def test_a_stored_model_that_needs_no_finishing_is_loaded(monkeypatch):
    """vLLM calls a method of what it has loaded that only its own compiler's functions have."""
    finishing = SimpleNamespace(finalize_loading=lambda config: "finished")
    functions = [lambda: None, finishing]
    stored = [SimpleNamespace(_artifacts=SimpleNamespace(compiled_fn=function)) for function in functions]
    monkeypatch.setattr(torch.compiler, "load_compiled_function", lambda number: stored[number])
    complete_loaded_functions()
    completing: Any = torch.compiler.load_compiled_function
    complete_loaded_functions()
    assert torch.compiler.load_compiled_function is completing
    assert [completing(i)._artifacts.compiled_fn for i in (0, 1)] == functions
    assert [function.finalize_loading(None) for function in functions] == [None, "finished"]


def test_an_architecture_that_vllm_has_dropped_is_refused_unless_transformers_stands_in(monkeypatch):
    registry = '    "BambaForCausalLM": "0.23.0",\n    "Dots1ForCausalLM": "0.23.0",\n'
    monkeypatch.setattr(support, "_source", lambda name: registry)
    rollout = RolloutConfig(engine="vllm")
    hybrid = {"architectures": ["BambaForCausalLM"], "model_type": "bamba", "mamba_d_state": 16}
    with pytest.raises(ConfigError, match=r"no such architecture any more: it names 0\.23\.0"):
        support.check_engine_args(rollout, ModelFacts.of_config("m", hybrid))
    plain = {"architectures": ["Dots1ForCausalLM"], "model_type": "dots1"}
    support.check_engine_args(rollout, ModelFacts.of_config("m", plain))


def test_the_last_exception_of_the_log_is_found_and_a_pipe_is_not_read():
    kept, (_, end) = os.dup(2), os.pipe()
    try:
        with tempfile.TemporaryFile() as log:
            os.dup2(log.fileno(), 2)
            os.write(2, b"(E) x] NotImplementedError: only for CUDA\nRuntimeError: See root cause above\n")
            assert last_logged_error() == "NotImplementedError: only for CUDA"
        os.dup2(end, 2)
        assert last_logged_error() == ""
    finally:
        os.dup2(kept, 2)


def test_other_arguments_of_vllm_are_passed_on_and_asyncrls_own_are_refused():
    assert arguments(VllmEngineConfig(engine_args={"kv_cache_dtype": "fp8"}))["kv_cache_dtype"] == "fp8"
    for name in ("max_model_len", "additional_config", "data_parallel_size", "speculative_config"):
        with pytest.raises(ConfigError, match=rf"engine_args\.{name}(.|\n)*remove it"):
            VllmEngineConfig(engine_args={name: 1})
    assert arguments().keys() - {"compilation_config"} <= OWN_ENGINE_ARGS, "none of them can be set twice"
    own = {"compilation_config": {"custom_ops": ["none"]}}
    assert arguments(VllmEngineConfig(engine_args=own))["compilation_config"] == own["compilation_config"]
    assert "-rotary_embedding" in arguments()["compilation_config"]["custom_ops"], "vLLM's kernel for CPUs is wrong"


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_arguments_that_vllm_does_not_know_are_named_before_anything_starts():
    def check(**given):
        rollout = RolloutConfig(engine="vllm", vllm=VllmEngineConfig(engine_args=given))
        support.check_engine_args(rollout, ModelFacts("m", is_local=False))

    check(kv_cache_dtype="fp8", enable_expert_parallel=True)
    with pytest.raises(ConfigError, match=r"engine_args\.kv_cache_dtyp(.|\n)*one of these was meant: kv_cache_dtype"):
        check(kv_cache_dtyp="fp8")


def test_nothing_that_differs_from_start_to_start_is_among_the_arguments():
    """They are the key of vLLM's compile cache: a process id would make every start compile again."""
    assert str(os.getpid()) not in str(arguments())
    assert not {"additional_config", "compilation_config"} & arguments(on_cpu=False).keys()


def test_a_model_that_was_compiled_for_other_vectors_is_not_loaded(monkeypatch):
    """The key of vLLM's compile cache says nothing of the CPU, and a shared one is read by many."""
    keys = []
    for capability in ("AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        keys.append(arguments()["additional_config"])
    assert keys[0] != keys[1]


def test_a_missing_vllm_is_named_without_an_import(monkeypatch):
    monkeypatch.setattr(package_probe, "find_spec", lambda name: None)
    monkeypatch.setattr(package_probe, "import_module", lambda name: pytest.fail(f"imported {name}"))
    with pytest.raises(ConfigError, match=r"not installed(.|\n)*>=0\.32,<0\.33"):
        support.check_vllm()


def test_what_an_installed_vllm_lacks_is_named(monkeypatch):
    needed = {"json:JSONDecoder.decode": ("s", "weight_version"), "json:Pause": (), "vllm.no_such_module:x": ()}
    monkeypatch.setattr(support, "NEEDED", needed)
    monkeypatch.setattr(package_probe, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=r"lacks JSONDecoder.decode\(weight_version\), json.Pause, vllm.no_such_mod"):
        support.check_vllm()


def test_the_torchvision_of_another_torch_is_recognised(monkeypatch):
    def broken(name):
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(package_probe, "find_spec", lambda name: object())
    monkeypatch.setattr(package_probe, "import_module", broken)
    with pytest.raises(ConfigError, match="pip uninstall torchvision"):
        support.check_vllm()
    with pytest.raises(ConfigError, match="do:    install torchvision in the version and the build of the installed"):
        sglang_support.check_sglang()
