"""Layers of vLLM on a CPU, without an engine: what publishes leave in them."""

import random
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl.errors import WeightTransferError
from tests.make import require_vllm

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
        def __init__(self, load_norm):
            super().__init__()
            self.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
            self.embed = VocabParallelEmbedding(VOCABULARY, HIDDEN, prefix="embed")
            self.mlp: Any = torch.nn.Module()
            self.mlp.gate_up_proj = MergedColumnParallelLinear(
                HIDDEN, [INNER, INNER], bias=False, prefix="gate_up_proj"
            )
            self.mlp.down_proj = RowParallelLinear(INNER, HIDDEN, bias=True, prefix="down_proj")
            self.norm = torch.nn.LayerNorm(HIDDEN, bias=False)
            if load_norm is not None:
                self.norm.weight.weight_loader = load_norm
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

        def make(load_norm=None):
            model = Model(load_norm)
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


def publish(reload, weights, names=None):
    reload.start(names)
    reload.load(((name, tensor.clone()) for name, tensor in weights.items()), names)
    reload.finish()


@contextmanager
def refused(model, reload, match):
    with pytest.raises(WeightTransferError, match=match):
        yield
    reload.abandon()
    assert not any(parameter.is_meta for parameter in model.parameters()), "the layers are whole"


@pytest.fixture
def served(make_model):
    """A model, what loads it, and a check of what it computes."""
    return checked(make_model())


def checked(model):
    from asyncrl.inference.vllm.layerwise_reload import Reload

    config = SimpleNamespace(dtype=torch.float32, model="/absent", revision=None, trust_remote_code=False)
    ids = torch.tensor([3, 77, 1024])

    def serves(weights):
        with torch.no_grad():
            torch.testing.assert_close(model(ids)[:, :VOCABULARY], expected(weights, ids), rtol=1e-4, atol=1e-4)

    return model, Reload(model, config), serves


def test_every_publish_is_served_whatever_the_order_of_its_tensors(served):
    model, reload, serves = served
    embedding, loader = model.embed.weight.data_ptr(), model.embed.weight.weight_loader
    for seed in range(4):
        weights = drawn(seed)
        names = list(weights)
        random.Random(seed).shuffle(names)  # layers are complete late, and many at once
        publish(reload, {name: weights[name] for name in names})
        serves(weights)
        assert (model.embed.weight.data_ptr(), model.embed.weight.weight_loader) == (embedding, loader)
        assert model.lm_head.weight is model.embed.weight


def test_a_publish_of_some_tensors_leaves_the_others_and_reaches_tied_layers(served):
    """The output layer computes with a packed copy of the embeddings."""
    _, reload, serves = served
    now = drawn(0)
    publish(reload, now)
    parts = [["mlp.down_proj.weight", "mlp.down_proj.bias"], ["embed.weight"], ["norm.weight"], list(now)[1:3]]
    for seed, names in enumerate(parts, 1):
        weights = {name: drawn(seed)[name] for name in names}
        publish(reload, weights, names)
        now = now | weights
        serves(now)


@pytest.mark.parametrize("sent", [False, True], ids=["not sent", "passed over by the model"])
def test_a_layer_of_which_a_part_came_is_refused_and_computes_as_before(served, sent):
    model, reload, serves = served
    first, second = drawn(1), drawn(2)
    publish(reload, first)
    model.passes_over = "mlp.up_proj.weight" if sent else None
    with refused(model, reload, r"262144 of its entries"):
        publish(reload, {n: t for n, t in second.items() if sent or n != "mlp.up_proj.weight"})
    whole = ("mlp.down_proj.weight", "mlp.down_proj.bias", "norm.weight")  # the padded embeddings are only at the end
    serves(first | {name: second[name] for name in whole})
    model.passes_over = None
    publish(reload, second)
    serves(second)


def test_an_error_of_the_models_loader_leaves_whole_layers(served):
    model, reload, serves = served
    first, second = drawn(1), drawn(2)
    publish(reload, first)
    model.refuses = "mlp.up_proj.weight"
    with refused(model, reload, "no mlp.up_proj.weight today"):
        publish(reload, second)
    model.refuses = None
    serves(first)
    publish(reload, second)
    serves(second)


def test_an_error_while_packing_is_the_error_of_the_publish(served, monkeypatch):
    model, reload, serves = served
    method = type(model.mlp.down_proj.quant_method)
    real = method.process_weights_after_loading
    first = drawn(1)
    publish(reload, first)

    def pack(self, layer):
        if layer is model.mlp.gate_up_proj:
            raise RuntimeError("no memory")
        real(self, layer)

    with monkeypatch.context() as patched:
        patched.setattr(method, "process_weights_after_loading", pack)
        with refused(model, reload, "no memory"):
            publish(reload, drawn(2))
    serves(first)
    weights = drawn(3)
    publish(reload, weights)
    serves(weights)


def test_a_publish_that_reaches_no_part_of_a_layer_is_refused(served):
    model, reload, serves = served
    first = drawn(1)
    publish(reload, first)
    with refused(model, reload, r"nothing came for 1 layers, the first is norm"):
        publish(reload, {name: tensor for name, tensor in drawn(2).items() if name != "norm.weight"})
    model.passes_over = "norm.weight"
    with refused(model, reload, r"vLLM ignores some of norm\.weight; norm\.weight stays as it was"):
        publish(reload, drawn(2))
    model.passes_over = None
    publish(reload, first)
    serves(first)


def test_tensors_that_the_model_copies_by_itself_reach_it(served, monkeypatch):
    """As gpt-oss copies its experts: the loaders of vLLM's reload see nothing of it."""
    model, reload, serves = served
    load_weights = model.load_weights

    def copies_some(weights):
        own = dict(model.named_parameters())
        for name, tensor in weights:
            if name in ("norm.weight", "mlp.down_proj.weight", "mlp.down_proj.bias"):
                own[name].data.copy_(tensor)
            else:
                load_weights([(name, tensor)])

    monkeypatch.setattr(model, "load_weights", copies_some)
    for seed in (1, 2):
        publish(reload, drawn(seed))
        serves(drawn(seed))


class LoadsAShard:
    def __call__(self, param, loaded_weight, part=slice(None)):
        param.data.copy_(loaded_weight[part])


@pytest.mark.parametrize("loader", [partial(LoadsAShard.__call__, None, part=slice(HIDDEN)), LoadsAShard()])
def test_a_loader_without_a_name_loads(make_model, loader):
    """As the norms of MiniMax-M2 have one."""
    _, reload, serves = checked(make_model(loader))
    for seed in (1, 2):
        publish(reload, drawn(seed))
        serves(drawn(seed))


EXPERTS, WIDE = 4, 128


@pytest.fixture
def experts_in_place(make_model, monkeypatch):
    """As on Hopper, where vLLM computes with experts as they are stored: a model and what loads it."""
    from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from asyncrl.inference.vllm import layerwise_reload

    class Mixture(torch.nn.Module):
        def __init__(self):
            super().__init__()
            shape = {"num_experts": EXPERTS, "top_k": 2, "hidden_size": HIDDEN, "intermediate_size": WIDE}
            self.experts = FusedMoEFactory(**shape, params_dtype=torch.float32, prefix="experts")
            self.norm = torch.nn.LayerNorm(HIDDEN, bias=False)

        def load_weights(self, weights):
            for name, tensor in weights:
                if name == "norm.weight":
                    getattr(self.norm.weight, "weight_loader", lambda p, t: p.data.copy_(t))(self.norm.weight, tensor)
                else:
                    list(self.experts.routed_experts.load_weights([(name.removeprefix("experts."), tensor)]))

    monkeypatch.setattr(layerwise_reload, "computes_as_stored", lambda layer: isinstance(layer, RoutedExperts))
    model = Mixture()
    record_metadata_for_reloading(model)
    config = SimpleNamespace(dtype=torch.float32, model="/absent", revision=None, trust_remote_code=False)
    return model, layerwise_reload.Reload(model, config)


def drawn_experts(seed):
    draw = torch.Generator().manual_seed(seed)
    shapes = {"gate_proj": (WIDE, HIDDEN), "up_proj": (WIDE, HIDDEN), "down_proj": (HIDDEN, WIDE)}
    made = {f"experts.{e}.{name}.weight": shape for e in range(EXPERTS) for name, shape in shapes.items()}
    return {name: torch.randn(shape, generator=draw) for name, shape in (made | {"norm.weight": (HIDDEN,)}).items()}


def test_experts_are_loaded_where_they_are_computed_with(experts_in_place):
    model, reload = experts_in_place
    layer = model.experts.routed_experts
    places = layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr()

    def serves(weights):
        for e in range(EXPERTS):
            gate, up, down = (weights[f"experts.{e}.{name}_proj.weight"] for name in ("gate", "up", "down"))
            assert torch.equal(layer.w13_weight[e], torch.cat([gate, up]))
            assert torch.equal(layer.w2_weight[e], down)
        assert torch.equal(model.norm.weight, weights["norm.weight"])
        assert (layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr()) == places

    now: dict[str, torch.Tensor] = {}
    for seed in (1, 2):
        publish(reload, now := drawn_experts(seed))
        serves(now)
    some = ["experts.1.up_proj.weight", "norm.weight"]
    assert sorted(reload.filled.layers_of(some)) == ["experts.routed_experts", "norm"]
    publish(reload, part := {name: drawn_experts(3)[name] for name in some}, some)
    serves(now | part)
    with refused(model, reload, r"nothing came for 1 layers, the first is experts\.routed_experts"):
        publish(reload, {"norm.weight": now["norm.weight"]})
    publish(reload, now)
    serves(now)
