"""What a publish sends: manifests are checked where they are made, and adapters become the weights of a fresh merge."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from asyncrl.errors import WeightTransferError
from asyncrl.inference.torch_engine.parameter_sink import ParameterSink
from asyncrl.weights.encodings.base import BaseWeights, merged
from asyncrl.weights.encodings.decoder import Decoder
from asyncrl.weights.packing import byte_view, spec_of
from asyncrl.weights.plan import make_manifest, make_spec

LAYERS = ("q_proj", "up_proj", "down_proj")
SHAPES = {"q_proj": (8, 16), "up_proj": (3000, 400), "down_proj": (16, 24)}
A, B = ".lora_A.weight", ".lora_B.weight"


def spec(name, shape=(4, 16), dtype="float32"):
    return make_spec(name, shape, dtype)


@pytest.mark.parametrize(
    ("encoding", "tensors", "found"),
    [
        ("full", [spec("q.weight"), spec("q" + A)], "q.lora_A.*encoding lora"),
        ("lora", [spec("q.weight")], "q.weight.*no factor"),
        ("lora", [spec("q" + A)], "lora_B None"),
        ("lora", [spec("q" + B)], "lora_A of q has shape None"),
        ("lora", [spec("q" + A), spec("q" + B, (8, 5))], r"\(4, 16\), lora_B \(8, 5\)"),
        ("lora", [spec("q" + A, dtype="bfloat16"), spec("q" + B, (8, 4))], "bfloat16"),
        ("lora", [spec("q" + A, (4,)), spec("q" + B, (8, 4))], r"\(4,\)"),
    ],
)
def test_a_manifest_of_tensors_that_are_none_of_its_encoding_is_refused(encoding, tensors, found):
    with pytest.raises(WeightTransferError, match=rf"(?s){found}"):
        make_manifest(1, 1, tensors, 4096, encoding=encoding)


def model(dtype, seed):
    draw = torch.Generator().manual_seed(seed)
    found = {f"{name}.weight": torch.randn(SHAPES[name], generator=draw).to(dtype) for name in LAYERS}
    return found | {"norm.weight": torch.randn(16, generator=draw).to(dtype), "q_proj.bias": torch.ones(8, dtype=dtype)}


def adapters(names, seed):
    draw, found = torch.Generator().manual_seed(seed), {}
    for name in names:
        rows, columns = SHAPES[name]
        found[name + A] = torch.randn(4, columns, generator=draw)
        found[name + B] = torch.randn(rows, 4, generator=draw)
    return found


def receiver_of(tensors):
    """Gives `tensors` to the sink as a transport does."""

    def receive(manifest, sink, timeout_s):
        for sent in manifest.tensors:
            sink.write(sent, 0, byte_view(tensors[sent.name]))

    return SimpleNamespace(receive=receive)


class Model:
    """A model that is served, and publishes to it as an engine receives them."""

    def __init__(self, path, dtype):
        self.targets = {name: torch.zeros_like(t, dtype=dtype) for name, t in model(torch.float32, 0).items()}
        self.decoder = Decoder(str(path), None, dtype)

    def publish(self, tensors, encoding, *, fails=False):
        """Returns whether all of the model was written."""
        specs = [spec_of(*item) for item in tensors.items()]
        manifest = make_manifest(1, 1, specs, 1 << 20, encoding=encoding)
        scope = self.decoder.scope(manifest)
        sink = ParameterSink(self.targets)
        self.decoder.receive(receiver_of(tensors), manifest, scope, sink, 1.0)
        sink.finish(scope.names)
        if fails:
            self.targets["norm.weight"].zero_()
        else:
            self.decoder.applied(manifest)
        return scope.whole


KINDS = st.sampled_from(["attention", "attention", "all", "full", "failed"])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds=st.lists(KINDS, max_size=8), stored=st.sampled_from(["float32", "bfloat16"]), served=st.booleans())
@example(
    kinds=["attention", "attention", "full", "attention", "failed", "attention", "all"], stored="bfloat16", served=True
)
def test_after_any_publishes_the_weights_are_bit_for_bit_those_of_a_fresh_merge(
    tmp_path_factory, kinds, stored, served
):
    path, dtype = tmp_path_factory.mktemp("model"), torch.float32 if served else torch.bfloat16
    base = model(getattr(torch, stored), 1)
    save_file(base, path / "model.safetensors")
    found, before = Model(path, dtype), None
    for seed, kind in enumerate(kinds):
        if kind == "full":
            found.publish(model(dtype, seed), "full")
        else:
            sent = adapters(LAYERS if kind == "all" else LAYERS[:1], seed)
            assert found.publish(sent, "lora", fails=kind == "failed") == (
                kind.replace("failed", "attention") != before
            )
            shutil.rmtree(path, ignore_errors=True)  # the files are read once
        before = kind if kind in ("attention", "all") else None
        if before is not None:
            for name, tensor in base.items():
                assert torch.equal(found.targets[name], merged(name, tensor, sent).to(dtype)), name


def test_adapters_of_a_tensor_that_the_model_does_not_have_are_refused(tmp_path):
    save_file(model(torch.float32, 1), tmp_path / "model.safetensors")
    strange = {"absent" + A: torch.zeros(4, 8), "absent" + B: torch.zeros(8, 4)}
    with pytest.raises(WeightTransferError, match=r"absent\.weight"):
        Model(tmp_path, torch.float32).publish(strange, "lora")


def test_a_model_without_safetensors_is_no_base(tmp_path):
    with pytest.raises(WeightTransferError, match="safetensors"):
        BaseWeights(str(tmp_path))
