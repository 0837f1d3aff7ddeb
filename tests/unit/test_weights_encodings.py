"""What a publish sends: manifests are checked where they are made, and adapters become the weights of a fresh merge."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from asyncrl.errors import WeightTransferError
from asyncrl.inference.torch_engine.parameter_sink import ParameterSink
from asyncrl.types import EncodedWeights
from asyncrl.weights.digest import slice_digest
from asyncrl.weights.encodings.base import BaseWeights, merged
from asyncrl.weights.encodings.decoder import Decoder
from asyncrl.weights.encodings.delta_encoder import DeltaEncoder
from asyncrl.weights.encodings.difference import apply, elements, encode
from asyncrl.weights.packing import byte_view, spec_of
from asyncrl.weights.plan import DTYPE_BYTES, make_manifest, make_spec

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
        self.decoder.receive(Transport(tensors.items()), manifest, scope, sink, 1.0)
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


# -- differences -------------------------------------------------------------------------------------------------------


WIDTHS = sorted(set(DTYPE_BYTES.values()))


def applied(old, new, width):
    """`old` with the difference to `new` applied, and the bytes of the difference."""
    data = encode(elements(old, width), elements(new, width))
    base = old.copy()
    apply(elements(base, width), data)
    return base, data


def noise(seed, nbytes):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@settings(max_examples=150, deadline=None)
@given(
    width=st.sampled_from(WIDTHS),
    count=st.integers(0, 700),
    share=st.sampled_from([0.0, 0.003, 0.05, 0.3, 0.35, 1.0]),
    small=st.booleans(),
    seed=st.integers(0, 99),
)
@example(width=1, count=1, share=1.0, small=True, seed=0)
@example(width=2, count=700, share=0.003, small=False, seed=1)
def test_a_difference_makes_any_bits_of_any_bits(width, count, share, small, seed):
    draw = np.random.default_rng(seed)
    old = noise(seed, count * width)
    new, other = old.copy(), noise(seed + 1, count * width)
    changed = draw.random(count) < share
    if small:
        elements(new, width)[changed] += draw.integers(-2, 3, changed.sum()).astype(f"<i{width}").view(f"<u{width}")
    else:
        elements(new, width)[changed] = elements(other, width)[changed]
    found, data = applied(old, new, width)
    assert np.array_equal(found, new)
    assert data.size <= new.size + 8
    assert data.size == 0 or not np.array_equal(old, new)


@settings(max_examples=60, deadline=None)
@given(old=st.binary(min_size=64, max_size=64), new=st.binary(min_size=64, max_size=64), width=st.sampled_from(WIDTHS))
def test_bytes_that_a_search_chooses(old, new, width):
    old, new = (np.frombuffer(data, np.uint8).copy() for data in (old, new))
    assert np.array_equal(applied(old, new, width)[0], new)


@pytest.mark.parametrize("where", [[0], [(1 << 20) - 1], [1 << 20], [0, (1 << 20) + 4], []])
def test_changes_at_the_ends_of_blocks(where):
    old = noise(3, (1 << 20) + 5)
    new = old.copy()
    new[where] ^= 255
    found, data = applied(old, new, 1)
    assert np.array_equal(found, new)
    assert data.size < 150
    assert (data.size == 0) == (not where)


def trained(count, lr, dtype, seed=0):
    """Weights of a usual size before and after a step of Adam: each moves by up to the learning rate."""
    draw = torch.Generator().manual_seed(seed)
    before = torch.randn(count, generator=draw) * 0.02
    after = before - lr * torch.randn(count, generator=draw).clamp(-1, 1)
    return before.to(dtype), after.to(dtype)


@pytest.mark.parametrize(("lr", "dtype", "limit"), [(1e-6, torch.bfloat16, 0.03), (1e-6, torch.float32, 0.45)])
def test_a_step_at_the_learning_rates_of_rl_is_small(lr, dtype, limit):
    old, new = (byte_view(t).numpy() for t in trained(1 << 18, lr, dtype))
    found, data = applied(old, new, dtype.itemsize)
    assert np.array_equal(found, new)
    assert data.size <= limit * new.size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_difference_that_is_cut_short_or_too_long_is_refused(dtype):
    old, new = (byte_view(t).numpy() for t in trained(2000, 1e-6, dtype))
    data = encode(elements(old, dtype.itemsize), elements(new, dtype.itemsize))
    assert 20 < data.size < new.size, "sparse, or planes"
    wrong = [data[:n] for n in range(1, data.size, 7)] + [np.append(data, np.uint8(0)), np.append(data, data)]
    for one in wrong:
        with pytest.raises(ValueError, match=r"."):
            apply(elements(old.copy(), dtype.itemsize), one)
    with pytest.raises(ValueError, match=r"."):
        apply(elements(old[: new.size // 2].copy(), dtype.itemsize), data)


@settings(max_examples=200, deadline=None)
@given(
    position=st.integers(0, 10_000), flip=st.integers(1, 255), dtype=st.sampled_from([torch.bfloat16, torch.float32])
)
def test_a_flipped_byte_is_refused_or_harmless_and_nothing_else(position, flip, dtype):
    old, new = (byte_view(t).numpy() for t in trained(2000, 1e-6, dtype))
    data = encode(elements(old, dtype.itemsize), elements(new, dtype.itemsize)).copy()
    position %= data.size
    data[position] ^= flip
    base = old.copy()
    try:
        apply(elements(base, dtype.itemsize), data)
    except ValueError:
        return
    assert position < 8 or np.array_equal(base, new), "only the header has bytes that no checksum covers"


def dense(seed, dtype=torch.bfloat16):
    """Names and tensors, with one that has no elements, one of integers and one without dimensions."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(64, 16, generator=draw).to(dtype),
        "empty": torch.empty(0, 3, dtype=dtype),
        "buffer": torch.randint(0, 9, (5,), generator=draw),
        "scale": torch.tensor(float(seed), dtype=dtype),
        "transposed.weight": torch.randn(8, 12, generator=draw).to(dtype).t(),
    }


def nudged(tensors, seed):
    """A few elements of each have changed."""
    draw, found = torch.Generator().manual_seed(seed), {}
    for name, tensor in tensors.items():
        found[name] = tensor.clone()
        if tensor.numel() > 8:
            found[name].view(torch.int16).flatten()[torch.randint(0, tensor.numel(), (3,), generator=draw)] += 1
    return found


class Transport:
    """Gives tensors to the sink slice by slice; `damage` flips a bit of the first byte that comes after so many."""

    def __init__(self, tensors, damage=None):
        self._tensors, self._damage = tensors, damage

    def receive(self, manifest, sink, timeout_s):
        digest = []
        for (name, tensor), spec in zip(self._tensors, manifest.tensors, strict=True):
            assert name == spec.name
            data = byte_view(tensor).clone()
            if self._damage is not None and data.numel() > self._damage:
                data[self._damage] ^= 4
                self._damage = None
            for start in range(0, max(1, data.numel()), 64):
                sink.write(spec, start, data[start : start + 64])
            digest.append(slice_digest(data, 0, "xxh3"))
        return tuple(digest) if manifest.verify else None


class Served:
    """A replica's side: its parameters and its decoder."""

    def __init__(self, tensors):
        self.targets = {name: torch.zeros_like(t).contiguous() for name, t in tensors.items()}
        self.decoder = Decoder("/nowhere", None, torch.bfloat16)

    def take(self, tensors, manifest, *, damage=None, refuses=False):
        scope = self.decoder.scope(manifest)
        sink = ParameterSink({**self.targets, "scale": torch.zeros(3)} if refuses else self.targets)
        found = self.decoder.receive(Transport(tensors, damage), manifest, scope, sink, 1.0)
        sink.finish()
        self.decoder.applied(manifest)
        return found


def full(tensors, *, is_kept=True):
    manifest = make_manifest(1, 1, [spec_of(*item) for item in tensors.items()], 4096)
    return SimpleNamespace(tensors=list(tensors.items()), manifest=replace(manifest, is_kept=is_kept))


def delta(encoder, encoded):
    manifest = make_manifest(1, 1, encoded.tensors, 4096, encoding="delta", base_digest=encoded.base_digest)
    return SimpleNamespace(tensors=list(encoder.differences()), manifest=manifest)


def assert_serves(served, tensors):
    for name, tensor in tensors.items():
        assert torch.equal(byte_view(served.targets[name]), byte_view(tensor)), name


STEPS = st.lists(st.sampled_from(["step", "same", "new", "damaged", "refused", "not kept", "late"]), max_size=12)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
@example(
    steps=["step", "step", "damaged", "step", "refused", "step", "late", "step", "not kept", "step", "same", "new"]
)
def test_after_any_publishes_the_weights_are_bit_for_bit_the_trainers(steps):
    """As a checkpoint engine sends them: differences to who has committed their base, all weights to all others."""
    encoder, tensors = DeltaEncoder(), dense(0)
    served, has = Served(tensors), None
    for seed, step in enumerate(["step", *steps]):
        tensors = {"same": lambda t: t, "new": lambda _, s=seed: dense(s)}.get(step, lambda t, s=seed: nudged(t, s))(
            tensors
        )
        encoded = encoder.encode(iter(tensors.items()))
        if step == "late":  # the replica misses this one
            continue
        fits = has is not None and has == encoded.base_digest
        publish = delta(encoder, encoded) if fits else full(tensors, is_kept=step != "not kept")
        if step in ("damaged", "refused"):
            sent = {"damage": 9} if step == "damaged" and fits else {"refuses": True}
            with pytest.raises(WeightTransferError):
                served.take(publish.tensors, publish.manifest, **sent)
            has = None
            continue
        digest = served.take(publish.tensors, publish.manifest)
        assert_serves(served, tensors)
        assert not fits or digest == encoded.digest
        has = encoded.digest if fits or step != "not kept" else None


def test_the_first_encoding_has_no_base_and_one_of_other_tensors_neither():
    encoder, tensors = DeltaEncoder(), dense(0)
    first = encoder.encode(iter(tensors.items()))
    assert (first.base_digest, first.tensors, list(encoder.differences())) == (None, (), [])
    second = encoder.encode(iter(nudged(tensors, 1).items()))
    assert second.base_digest == first.digest != second.digest
    assert [spec.name for spec in second.tensors] == [f"{name}.delta" for name in tensors]
    assert [spec.nbytes for spec in second.tensors][1:4] == [0, 0, 0], "what has not changed sends nothing"
    for other in (
        {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()},
        {name: t for name, t in tensors.items() if name != "scale"},
        tensors | {"one.more": torch.zeros(3)},
    ):
        encoder.encode(iter(tensors.items()))
        assert encoder.encode(iter(other.items())).base_digest is None
        assert encoder.encode(iter(other.items())).base_digest is not None


def test_an_encoding_that_fails_leaves_no_base():
    def broken():
        yield from list(dense(0).items())[:2]
        raise ZeroDivisionError("a rank was lost")

    encoder = DeltaEncoder()
    encoder.encode(iter(dense(0).items()))
    with pytest.raises(ZeroDivisionError):
        encoder.encode(broken())
    assert encoder.encode(iter(dense(0).items())).base_digest is None


def test_the_trainers_own_memory_is_copied():
    live = {"w": torch.zeros(1000)}
    encoder = DeltaEncoder()
    encoder.encode(iter(live.items()))
    live["w"][3] = 1.0
    encoded = encoder.encode(iter(live.items()))
    assert 0 < encoded.tensors[0].nbytes < 100


def test_parts_of_several_ranks_join_in_their_order_and_need_all_bases():
    one, two = EncodedWeights((1, 2), (3, 4), (make_spec("a.delta", (1,), "uint8"),)), EncodedWeights((5,), (6,), ())
    joined = EncodedWeights.joined([one, two])
    assert (joined.digest, joined.base_digest, joined.tensors) == ((1, 2, 5), (3, 4, 6), one.tensors)
    joined = EncodedWeights.joined([one, EncodedWeights((5,), None, ())])
    assert (joined.digest, joined.base_digest, joined.tensors) == ((1, 2, 5), None, ())


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("never had any", "no whole copy"),
        ("another", "other bytes in embed.weight"),
        ("other tensors", "other tensors"),
    ],
)
def test_a_replica_with_another_base_refuses_differences_and_says_why(change, found):
    encoder, tensors = DeltaEncoder(), dense(0)
    served = Served(tensors)
    encoder.encode(iter(tensors.items()))
    publish = delta(encoder, encoder.encode(iter(nudged(tensors, 1).items())))
    if change == "another":
        other = full({**tensors, "embed.weight": tensors["embed.weight"] + 1})
        served.take(other.tensors, other.manifest)
    elif change == "other tensors":
        served.targets = {"other": torch.zeros(3)}
        other = full({"other": torch.ones(3)})
        served.take(other.tensors, other.manifest)
    with pytest.raises(WeightTransferError, match=found):
        served.take(publish.tensors, publish.manifest)


def test_tensors_that_are_no_differences_are_refused_where_the_manifest_is_made():
    for spec in (
        make_spec("q", (4,), "uint8"),
        make_spec("q.delta", (4,), "float32"),
        make_spec("q.delta", (2, 2), "uint8"),
    ):
        with pytest.raises(WeightTransferError, match="as a difference"):
            make_manifest(1, 1, [spec], 4096, encoding="delta")
