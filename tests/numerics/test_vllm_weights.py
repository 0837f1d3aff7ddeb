"""vLLM against the suite of published weights, and its own NCCL backend."""

import time
from contextlib import closing

import pytest
import torch
import zmq

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import VllmEngineConfig
from asyncrl.errors import WeightTransferError
from asyncrl.inference.vllm import VllmEngine
from asyncrl.types import VllmNcclSource
from asyncrl.weights.packing import spec_of
from asyncrl.weights.plan import make_manifest
from asyncrl.weights.transports import build_sender
from asyncrl_testing.engine_client import within
from asyncrl_testing.random_model import random_qwen3
from asyncrl_testing.served_weights_suite import (
    BUCKET_BYTES,
    ServedWeightsConformance,
    assert_serves,
    publish,
    publish_ids,
)
from tests.make import require_vllm

pytestmark = pytest.mark.numerics


class TestVllmServesWhatIsPublished(ServedWeightsConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def make_engine(cls):
        require_vllm()

        async def make(path):
            settings = VllmEngineConfig(
                max_model_len=512, max_num_seqs=16, kv_cache_memory_bytes=64 << 20, enforce_eager=True
            )
            engine = VllmEngine(ModelConfig(path=str(path)), settings, load_real_weights=False)
            await within(engine.start(), 240.0)
            return engine

        return make

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs a vLLM without CUDA")
    async def test_vllms_own_backend_without_cuda_is_refused_by_name(self, engine, link):
        """Whether or not somebody sends, before anything is received."""
        model = random_qwen3(seed=43)
        key = zmq.curve_keypair()[0].decode()
        common = {"bucket_bytes": BUCKET_BYTES, "num_receivers": 1, "epoch": 1, "key": key}
        source = VllmNcclSource(endpoint="tcp://127.0.0.1:9", host="127.0.0.1", **common)
        tensors = [spec_of(name, tensor) for name, tensor in model.named_parameters()]
        manifest = make_manifest(next(publish_ids), 80, tensors, BUCKET_BYTES, verify=False)
        await within(engine.pause("keep"))
        for _ in range(2):  # the second time it is still paused, or it would say that it samples
            started_s = time.monotonic()
            with pytest.raises(WeightTransferError, match=r"vllm_nccl into a vLLM worker on cpu(?s:.)*CUDA"):
                await within(engine.load_weights(manifest, source, 20.0))
            assert time.monotonic() - started_s < 5.0
        await publish(engine, link, model.named_parameters(), 81)
        await assert_serves(engine, model, 81)

    @pytest.mark.gpu
    @pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason="needs two CUDA devices: NCCL joins no two processes on one"
    )
    async def test_vllms_own_backend_between_two_gpus(self, engine):
        """vLLM takes the first GPU, the trainer of this test the second."""
        model = random_qwen3(seed=44)
        weights = [(name, tensor.detach().to("cuda:1")) for name, tensor in model.named_parameters()]
        with closing(build_sender("vllm_nccl", BUCKET_BYTES, 1, device="cuda:1")) as sender:
            link = sender, sender.open()
            for version in (90, 91):
                await publish(engine, link, weights, version, verify=False)
            await assert_serves(engine, model, 91)
            with pytest.raises(WeightTransferError, match="no tensor of that name"):
                await publish(engine, link, [*weights, ("extra", weights[0][1])], 92, verify=False)
            await publish(engine, link, weights, 93, verify=False)
            await assert_serves(engine, model, 93)


@pytest.mark.parametrize("own_copy", [True, False])
def test_a_tied_layer_is_packed_again_only_where_the_owner_of_its_weight_has_no_copy(own_copy):
    require_vllm()
    from asyncrl.inference.vllm.layerwise_reload import repack_tied

    class Packs:
        def process_weights_after_loading(self, layer):
            layer.cpu_linear = f"packed {int(layer.weight[0, 0])}"

    embeddings, output, other = (torch.nn.Linear(2, 2) for _ in range(3))
    output.weight = embeddings.weight
    model = torch.nn.ModuleList([embeddings, output, other])
    embeddings.weight.data.fill_(7)
    output.quant_method, other.quant_method = Packs(), Packs()
    output.cpu_linear = other.cpu_linear = "of the weights before"
    if own_copy:
        embeddings.quant_method, embeddings.cpu_linear = Packs(), "packed by the reload"
    repack_tied(model)
    assert output.cpu_linear == ("packed by the reload" if own_copy else "packed 7")
    assert other.cpu_linear == "of the weights before", "the reload has packed it"
