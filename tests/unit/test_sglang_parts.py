"""The parts of the SGLang adapter that need no SGLang, against what a real one has answered (`make record-sglang`)."""

import asyncio
import base64
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq
import zmq.asyncio

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import SglangEngineConfig
from asyncrl.errors import ConfigError, GenerationError
from asyncrl.inference.sglang.engine import SglangStream
from asyncrl.inference.sglang.host import all_read
from asyncrl.inference.sglang.host_process import engine_arguments
from asyncrl.inference.sglang.outputs import ExpertRows, output_of
from asyncrl.inference.sglang.sampling_params import asked
from asyncrl.inference.shared.stamped_stream import Output
from asyncrl_testing.engine_client import make_request

RECORDED = json.loads((Path(__file__).parents[1] / "data/sglang_responses.json").read_text())["responses"]


# -- responses ---------------------------------------------------------------------------------------------------------


def outputs(rid):
    """What the host makes of the recorded responses."""
    sent, made = 0, []
    for out in RECORDED[rid]:
        made.append(output_of(rid, out, sent, incremental=False))
        sent += len(made[-1].ids)
    return made


def entered(**request):
    stream = SglangStream(make_request(**request))
    stream.enter()
    return stream


def chunks(rid, version_of=lambda output: 3):
    stream = entered()
    return [chunk for output in outputs(rid) for chunk in stream.take(output, version_of(output))]


@pytest.mark.parametrize(
    ("rid", "reason", "tokens"),
    [("whole", "length", 24), ("greedy", "length", 24), ("filtered", "length", 8), ("stopped", "stop", 10)],
)
def test_every_token_of_a_response_comes_once(rid, reason, tokens):
    made = chunks(rid)
    last = RECORDED[rid][-1]
    assert [i for chunk in made for i in chunk.token_ids.tolist()] == last["output_ids"]
    logprobs = [entry[0] for entry in last["meta_info"]["output_token_logprobs"]]
    np.testing.assert_array_equal(np.concatenate([c.logprobs for c in made]), np.array(logprobs, np.float32))
    assert len(last["output_ids"]) == tokens
    assert [chunk.finish_reason for chunk in made if chunk.finish_reason] == [reason]
    assert made[-1].finish_reason == reason
    assert {chunk.version for chunk in made} == {3}
    assert len(made) > 1 or tokens < 5


@pytest.mark.parametrize("rid", ["aborted", "queued-0", "queued-39"])
def test_an_aborted_request_keeps_its_tokens(rid):
    """Also one that SGLang had not begun, whose last response repeats a token."""
    made = chunks(rid)
    assert made[-1].finish_reason == "abort"
    sent = max(out["meta_info"]["completion_tokens"] for out in RECORDED[rid])
    assert sum(len(chunk.token_ids) for chunk in made) == sent
    assert sent < 400


def test_a_commit_in_mid_response_is_stamped_where_sglang_has_it():
    spans = [(span["version"], span["start"]) for span in RECORDED["kept"][-1]["meta_info"]["weight_versions"]]
    assert [version for version, _ in spans] == ["3", "4"]
    boundary, before = spans[1][1], 0
    stream = entered()
    made = []
    for output in outputs("kept"):
        if before + len(output.ids) > boundary:
            stream.hold()  # four tokens are streamed together: the boundary lies inside of one output
        before += len(output.ids)
        made += stream.take(output, 3)
    versions = [chunk.version for chunk in made for _ in chunk.token_ids]
    assert versions == [3] * boundary + [4] * (60 - boundary)


def test_a_stamp_that_sglang_contradicts_is_an_error():
    with pytest.raises(GenerationError, match=r"stamped(?s:.)*SGLang has"):
        chunks("whole", lambda output: 4)


def test_tokens_under_two_versions_without_spans_are_refused():
    stream = entered()
    stream.hold()
    ids, logprobs = np.array([1], np.int32), np.array([-0.5], np.float32)
    with pytest.raises(GenerationError, match=r"abort_resume(?s:.)*0\.5\.19"):
        stream.take(Output("x", ids, logprobs, "length"), 3)


def test_a_refused_request_says_why():
    out = {"output_ids": [], "meta_info": {"completion_tokens": 0, "output_token_logprobs": []}}
    out["meta_info"]["finish_reason"] = {"type": "abort", "message": "too long", "status_code": 400}
    with pytest.raises(GenerationError, match="too long"):
        entered().take(output_of("x", out, 0, incremental=False), 3)


EXPERTS = np.arange(24, dtype=np.int32).reshape(3, 4, 2)
"""Of three tokens, in the four layers of a model, as SGLang tells them."""


def recording(last, *, experts=EXPERTS):
    """Two outputs of a request whose experts are wanted: two tokens, and `last`."""
    stream = entered(experts=True)
    first = Output("x", np.array([4, 5], np.int32), np.array([-1, -2], np.float32))
    assert (stream.take(first, 3), stream.num_tokens, stream.num_sampled) == ([], 0, 2)
    ids = np.array([6], np.int32)
    return stream.take(Output("x", ids, np.array([-3], np.float32), last, (("3", 0), ("4", 1)), experts=experts), 4)


def test_experts_come_at_the_end_and_go_with_their_tokens():
    text = base64.b64encode(EXPERTS.tobytes()).decode()
    chunks = recording("stop", experts=ExpertRows(4, [1, 2]).of(text, 3))
    assert [(c.version, c.token_ids.tolist(), c.finish_reason) for c in chunks] == [
        (3, [4], None),
        (4, [5, 6], "stop"),
    ]
    found = np.concatenate([chunk.extra["experts"] for chunk in chunks])
    np.testing.assert_array_equal(found, EXPERTS[:, 1:3])
    assert found.dtype == np.int16


def test_tokens_whose_experts_sglang_had_no_time_to_tell_count_as_never_sampled():
    (chunk,) = recording("abort", experts=None)
    assert (len(chunk.token_ids), chunk.finish_reason, chunk.extra) == (0, "abort", {})


@pytest.mark.parametrize("experts", [None, EXPERTS[:2]], ids=["none", "too few"])
def test_a_whole_response_without_all_its_experts_is_an_error(experts):
    with pytest.raises(GenerationError, match="for 3"):
        recording("length", experts=experts)


@pytest.mark.parametrize("incremental", [False, True])
def test_a_last_response_that_repeats_tokens_adds_none(incremental):
    last = {"type": "abort", "message": "Abort in waiting queue"}
    meta = {"completion_tokens": 3, "finish_reason": last, "output_token_logprobs": [[-1, 7], [-2, 8], [-3, 9]]}
    out = {"output_ids": [9] if incremental else [7, 8, 9], "meta_info": meta}
    assert len(output_of("x", out, 3, incremental=incremental).ids) == 0


def test_tokens_without_log_probabilities_are_an_error():
    out = {"output_ids": [7, 8], "meta_info": {"completion_tokens": 2, "output_token_logprobs": [[-1, 7]]}}
    with pytest.raises(RuntimeError, match="2 ids and 1"):
        output_of("x", out, 0, incremental=False)


# -- requests ----------------------------------------------------------------------------------------------------------


def ask(eos=(), **settings):
    return asked(make_request(**settings), rid="r", extra_key="0", vocab_size=128, eos=eos)


def test_what_sglang_is_asked():
    plain = ask(max_tokens=7, temperature=0.7, seed=2**70)
    assert plain.filters is None
    assert plain.sampling_params["ignore_eos"]
    assert plain.sampling_params["temperature"] == 0.7
    assert plain.sampling_params["max_new_tokens"] == 7
    assert 0 <= plain.sampling_params["sampling_seed"] < 2**63
    assert ask(temperature=0.0, top_p=0.5, top_k=3).filters is None  # greedy as it is
    assert ask(temperature=0.7, top_p=0.5).filters == {"top_p": 0.5, "temperature": 0.7}
    assert ask(temperature=1.0, top_k=10**6).filters == {"top_k": 128, "temperature": 1.0}
    barred = ask(temperature=0.0, min_tokens=2, stop=(5, 999)).filters
    assert barred == {"barred": [5], "min_tokens": 2, "temperature": 1.0}


@pytest.mark.parametrize(
    ("stop", "eos", "native"), [((5,), (), True), ((5, 6), (6,), True), ((5,), (6,), False), ((), (6,), False)]
)
def test_only_the_stop_tokens_of_the_request_end_it(stop, eos, native):
    """SGLang looks at its model's end tokens wherever it looks at stop tokens."""
    request = ask(stop=stop, eos=eos)
    assert request.sampling_params["ignore_eos"] != native
    assert request.sampling_params.get("stop_token_ids", []) == (list(stop) if native else [])
    assert request.stops == (frozenset() if native else frozenset(stop))


# -- settings ----------------------------------------------------------------------------------------------------------


def arguments(settings, *, real=False, on_cpu=False):
    return engine_arguments(ModelConfig(path="org/m"), settings, load_real_weights=real, on_cpu=on_cpu)


def test_the_arguments_of_sglang():
    settings = SglangEngineConfig(tensor_parallel_size=2, server_args={"ep_size": 2})
    made = arguments(settings)
    assert (made["tp_size"], made["load_format"], made["ep_size"]) == (2, "dummy", 2)
    assert not made["disable_overlap_schedule"]
    assert made["mem_fraction_static"] is None
    assert arguments(SglangEngineConfig(gpu_share=0.5))["mem_fraction_static"] == pytest.approx(0.425), (
        "the rest is the trainer rank's"
    )
    recording = arguments(replace(settings, record_experts=True))
    assert recording == made | {"enable_return_routed_experts": True}, "older versions do not know it"
    on_cpu = arguments(settings, real=True, on_cpu=True)
    assert (on_cpu["device"], on_cpu["load_format"], on_cpu["disable_overlap_schedule"]) == ("cpu", "auto", True)


# -- barriers and marks ------------------------------------------------------------------------------------------------


async def test_a_pause_returns_after_all_outputs_that_had_queued_up():
    context, address, read = zmq.asyncio.Context(), "inproc://outputs", []
    with context.socket(zmq.PULL) as receiver, context.socket(zmq.PUSH) as sender:
        receiver.bind(address)
        sender.connect(address)
        for number in range(40):
            await sender.send_pyobj(number)

        async def reader():  # as SGLang's: what it reads takes some turns
            while True:
                read.append(await receiver.recv_pyobj())
                for _ in range(3):
                    await asyncio.sleep(0)

        reading = asyncio.create_task(reader())
        await asyncio.wait_for(all_read(receiver, 8), 20.0)
        assert read == list(range(40))
        reading.cancel()
    context.term()


def test_parameters_that_a_publish_does_not_reach_are_found_and_keep_their_values():
    from asyncrl.inference.sglang.weight_loader import _Probes

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 3), torch.nn.LayerNorm(3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    probes = _Probes(model)
    with torch.no_grad():
        model[0].weight.copy_(before["0.weight"])
        model[1].weight[:2].copy_(before["1.weight"][:2])  # in part, as with padded rows
        for name in ("0.bias", "2.weight"):
            model.get_parameter(name).copy_(before[name])
    assert probes.untouched() == ["1.bias", "2.bias"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_marks_of_large_parameters_lie_inside():
    """Beyond 2^24 not every position is a float32."""
    from asyncrl.inference.sglang.weight_loader import _Probes

    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros((1 << 24) + 4, dtype=torch.bfloat16))
    assert _Probes(model).untouched() == ["weight"]


def test_arguments_leave_room_for_a_request_as_long_as_the_context():
    """SGLang takes prompts up to 7 tokens below its context, and responses up to 2 below it."""
    assert arguments(SglangEngineConfig(max_model_len=512), real=True, on_cpu=True)["context_length"] == 518


@pytest.mark.parametrize("name", ["tp_size", "speculative_algorithm", "allow_auto_truncate", "enable_mixed_chunk"])
def test_arguments_that_asyncrl_sets_or_that_would_break_a_promise_are_refused(name):
    with pytest.raises(ConfigError, match=rf"rollout\.sglang\.server_args\.{name}"):
        SglangEngineConfig(server_args={name: True})
