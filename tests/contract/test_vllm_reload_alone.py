"""Layers of vLLM on a CPU, without an engine: what publishes leave in them, and in which memory."""

import gc
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl.errors import WeightTransferError
from tests.make import require_vllm

pytestmark = pytest.mark.contract

HIDDEN, INNER, VOCABULARY = 256, 1024, 1100


@pytest.fixture(scope="module")
def make_model(tmp_path_factory):
    require_vllm()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
            self.embed = VocabParallelEmbedding(VOCABULARY, HIDDEN, prefix="embed")
            self.mlp: Any = torch.nn.Module()
            self.mlp.gate_up_proj = MergedColumnParallelLinear(
                HIDDEN, [INNER, INNER], bias=False, prefix="gate_up_proj"
            )
            self.mlp.down_proj = RowParallelLinear(INNER, HIDDEN, bias=True, prefix="down_proj")
            self.norm = torch.nn.LayerNorm(HIDDEN, bias=False)
            self.lm_head = ParallelLMHead(VOCABULARY, HIDDEN, prefix="lm_head")
            self.lm_head.weight = self.embed.weight
            self.refuses = self.passes_over = None

        def load_weights(self, weights):
            parameters, loaded = dict(self.named_parameters()), set()
            for name, tensor in weights:
                if name == self.refuses:
                    raise ValueError(f"no {name} today")
                if name == self.passes_over:
                    continue
                shard = {"mlp.gate_proj.weight": (0,), "mlp.up_proj.weight": (1,)}.get(name, ())
                own = "mlp.gate_up_proj.weight" if shard else name
                parameter = parameters[own]
                load = getattr(parameter, "weight_loader", lambda p, t: p.data.copy_(t))
                load(parameter, tensor, *shard)
                loaded.add(own)
            return loaded

        def forward(self, ids):
            x = self.norm(self.embed(ids))
            gate, up = self.mlp.gate_up_proj(x)[0].chunk(2, -1)
            x = self.mlp.down_proj(gate * up)[0]
            return self.lm_head.quant_method.apply(self.lm_head, x)

    store = tmp_path_factory.mktemp("store") / "store"
    config = VllmConfig()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        initialize_model_parallel()

        def make():
            model = Model()
            record_metadata_for_reloading(model)
            modules: Any = model.modules()
            for module in modules:
                if hasattr(module, "quant_method"):
                    module.quant_method.process_weights_after_loading(module)
            return model

        yield make
    cleanup_dist_env_and_memory()


def drawn(seed):
    draw = torch.Generator().manual_seed(seed)
    shapes = {
        "embed.weight": (VOCABULARY, HIDDEN),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        "mlp.down_proj.bias": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    return {name: torch.randn(shape, generator=draw) * 0.1 for name, shape in shapes.items()}


def expected(weights, ids):
    x = torch.nn.functional.layer_norm(weights["embed.weight"][ids], (HIDDEN,), weights["norm.weight"])
    x = (x @ weights["mlp.gate_proj.weight"].T) * (x @ weights["mlp.up_proj.weight"].T)
    return (x @ weights["mlp.down_proj.weight"].T + weights["mlp.down_proj.bias"]) @ weights["embed.weight"].T


class Receiver:
    """Brings tensors as a publish does: in memory that the loader gives."""

    def __init__(self, reload, model):
        self.reload = reload
        self.model = model
        self.addresses = []

    def tensors(self, weights):
        from asyncrl.weights.packing import spec_of

        for name, tensor in weights.items():
            memory = self.reload.take(spec_of(name, tensor))
            self.addresses.append(memory.data_ptr())
            memory.view(torch.float32).copy_(tensor.flatten())
            yield name, memory.view(torch.float32).view(tensor.shape)
            del memory

    def publish(self, weights):
        self.addresses = []
        self.reload.start(None)
        self.reload.load(self.tensors(weights), None)
        self.reload.finish()


@contextmanager
def refused(receiver, match):
    with pytest.raises(WeightTransferError, match=match):
        yield
    receiver.reload.abandon()
    assert not any(parameter.is_meta for parameter in receiver.model.parameters()), "the layers are whole"


@pytest.fixture
def served(make_model):
    from asyncrl.inference.vllm.layerwise_reload import Reload

    model = make_model()
    ids = torch.tensor([3, 77, 1024])
    receiver = Receiver(Reload(model, SimpleNamespace(dtype=torch.float32)), model)

    def serves(weights):
        with torch.no_grad():
            torch.testing.assert_close(model(ids)[:, :VOCABULARY], expected(weights, ids), rtol=1e-4, atol=1e-4)

    return model, receiver, serves


def test_later_publishes_take_the_memory_of_the_first_ones(served):
    model, receiver, serves = served
    seen, embedding, loader = set(), model.embed.weight.data_ptr(), model.embed.weight.weight_loader
    for seed in range(4):
        weights = drawn(seed)
        receiver.publish(weights)
        serves(weights)
        large = [a for a, t in zip(receiver.addresses, weights.values(), strict=True) if t.nbytes >= 1 << 20]
        assert len(large) == 4
        assert seed < 2 or set(large) <= seen, "weights that wait to be packed take turns with tensors of their size"
        seen.update(large)
        assert (model.embed.weight.data_ptr(), model.embed.weight.weight_loader) == (embedding, loader)
        assert model.lm_head.cpu_linear is model.embed.cpu_linear
        assert model.mlp.gate_up_proj.weight.numel() == model.mlp.down_proj.weight.numel() == 0, (
            "the packed copy is enough"
        )
        gc.collect()


@pytest.mark.parametrize("sent", [False, True], ids=["not sent", "passed over by the model"])
def test_a_weight_of_which_a_part_came_is_refused_and_the_layer_computes_as_before(served, sent):
    model, receiver, serves = served
    first, second = drawn(1), drawn(2)
    receiver.publish(first)
    model.passes_over = "mlp.up_proj.weight" if sent else None
    with refused(receiver, r"262144 of its entries" if sent else r"mlp\.up_proj"):
        receiver.publish({n: t for n, t in second.items() if sent or n != "mlp.up_proj.weight"})
    serves(second | {n: t for n, t in first.items() if n in ("mlp.gate_proj.weight", "mlp.up_proj.weight")})
    model.passes_over = None
    receiver.publish(second)
    serves(second)


def test_an_error_of_the_models_loader_leaves_whole_layers(served):
    model, receiver, serves = served
    first, second = drawn(1), drawn(2)
    receiver.publish(first)
    model.refuses = "mlp.up_proj.weight"
    with refused(receiver, "no mlp.up_proj.weight today"):
        receiver.publish(second)
    model.refuses = None
    serves(first | {"embed.weight": second["embed.weight"]})
    receiver.publish(second)
    serves(second)


def test_an_error_while_packing_is_the_error_of_the_publish(served, monkeypatch):
    model, receiver, serves = served
    method, packed = model.mlp.down_proj.quant_method, []
    real = type(method).process_weights_after_loading

    def pack(self, layer):
        packed.append(layer)
        if layer is model.mlp.gate_up_proj:
            raise RuntimeError("no memory")
        real(self, layer)

    with monkeypatch.context() as patched:
        patched.setattr(type(method), "process_weights_after_loading", pack)
        with refused(receiver, "no memory"):
            receiver.publish(drawn(1))
    assert packed == [model.mlp.gate_up_proj], "nothing is packed after it"
    weights = drawn(2)
    receiver.publish(weights)
    serves(weights)


def test_a_model_that_gathers_tensors_before_it_loads_them_finds_each_untouched(served, monkeypatch):
    model, receiver, serves = served
    load = model.load_weights
    monkeypatch.setattr(type(model), "load_weights", lambda self, weights: load(list(weights)))
    for seed in (1, 2):
        weights = drawn(seed)
        receiver.publish(weights)
        serves(weights)


@pytest.fixture
def beside(make_model):
    """The served model, what publishes beside it, and a check of what it computes."""
    from asyncrl.inference.vllm.reload_beside import ReloadBeside

    model = make_model()
    ids = torch.tensor([3, 77, 1024])
    reload = ReloadBeside(model, SimpleNamespace(dtype=torch.float32))

    def serves(weights):
        with torch.no_grad():
            torch.testing.assert_close(model(ids)[:, :VOCABULARY], expected(weights, ids), rtol=1e-4, atol=1e-4)

    return model, Receiver(reload, reload._model), serves


def test_what_is_loaded_beside_a_model_is_served_once_it_is_exchanged(beside):
    model, receiver, serves = beside
    now, embeddings, parameters = None, [], list(model.parameters())
    for seed in range(5):
        weights = drawn(seed)
        receiver.publish(weights)
        if now is not None:
            serves(now)
        receiver.reload.exchange()
        serves(now := weights)
        embeddings.append(model.embed.weight.data_ptr())
        assert model.lm_head.weight is model.embed.weight
        assert model.lm_head.cpu_linear is model.embed.cpu_linear
        assert [id(p) for p in model.parameters()] == [id(p) for p in parameters], "a compiled model may hold them"
        gc.collect()
    assert embeddings[0] == embeddings[2] == embeddings[4] != embeddings[1] == embeddings[3]


def test_of_a_publish_of_some_tensors_only_their_layers_are_exchanged(beside):
    _, receiver, serves = beside
    now = drawn(0)
    receiver.publish(now)
    receiver.reload.exchange()
    parts = [["mlp.down_proj.weight", "mlp.down_proj.bias"], ["embed.weight"], ["norm.weight"], list(now)[1:3]]
    for seed, names in enumerate(parts, 1):
        weights = {name: drawn(seed)[name] for name in names}
        receiver.reload.start(names)
        receiver.reload.load(receiver.tensors(weights), names)
        receiver.reload.finish()
        serves(now)
        receiver.reload.exchange()
        now = now | weights
        serves(now)
    receiver.publish(drawn(9))
    receiver.reload.exchange()
    serves(drawn(9))


def test_what_fails_beside_a_model_leaves_it_as_it_is(beside):
    _, receiver, serves = beside
    first, second = drawn(1), drawn(2)
    receiver.publish(first)
    receiver.reload.exchange()
    with refused(receiver, r"mlp\.up_proj"):
        receiver.publish({n: t for n, t in second.items() if n != "mlp.up_proj.weight"})
    serves(first)
    receiver.publish(drawn(3))  # and is never served
    serves(first)
    receiver.publish(second)
    receiver.reload.exchange()
    serves(second)


@pytest.mark.parametrize("name", list(drawn(0)))
def test_what_the_model_passes_over_is_refused_beside_it(beside, name):
    """A twin has no weights of its own at first, and later those from before the last ones."""
    _, receiver, _ = beside
    receiver.model.passes_over = name
    is_packed = name.startswith("mlp") and name.endswith("weight")
    with refused(receiver, "of its entries did not come" if is_packed else name):
        receiver.publish(drawn(1))


def test_freed_memory_is_given_back_after_a_whole_publish(beside, monkeypatch):
    from asyncrl.inference.vllm import reload_beside

    _, receiver, _ = beside
    released = []
    monkeypatch.setattr(reload_beside, "release_freed_memory", lambda: released.append(None))
    receiver.publish(drawn(1))
    assert len(released) == 1
    receiver.reload.start(["norm.weight"])
    receiver.reload.load(receiver.tensors({"norm.weight": drawn(2)["norm.weight"]}), ["norm.weight"])
    receiver.reload.finish()
    assert len(released) == 1


def test_a_model_that_computes_with_more_than_its_weights_is_not_loaded_beside(make_model):
    from asyncrl.inference.vllm.layerwise_reload import Reload
    from asyncrl.inference.vllm.reload_beside import fits

    def changed(change, *, quantises=False):
        change(model := make_model())
        reload = Reload(model, SimpleNamespace(dtype=torch.float32))
        reload.expected.quantises = quantises
        return fits(model, reload)

    def derived(model):
        model.norm.process_weights_after_loading = lambda dtype: None

    def table(model):
        model.norm.scales = torch.nn.Parameter(torch.ones(2, 2))

    def unknown(model):
        model.packed_modules_mapping = {"gate_up_proj": ["one"]}

    def not_packed(model):
        model.mlp.down_proj._cpu_skip_gemm_dispatch = True

    assert changed(lambda model: None)
    assert [changed(change) for change in (derived, table, unknown, not_packed)] == [False] * 4
    assert not changed(lambda model: None, quantises=True)
