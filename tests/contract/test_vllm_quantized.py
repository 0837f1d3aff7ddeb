"""vLLM quantises the weights that it serves: at its start, and again in every publish."""

import asyncio
from contextlib import closing

import numpy as np
import pytest
import torch

from asyncrl.config.load import load_recipe
from asyncrl.config.model import ModelConfig, ModelPoolConfig
from asyncrl.config.rollout import RolloutConfig, VllmEngineConfig
from asyncrl.errors import ConfigError, WeightTransferError
from asyncrl.inference.vllm.launch import engine_arguments
from asyncrl.inference.vllm.support import check_engine_args
from asyncrl.types import ModelFacts
from asyncrl.weights.packing import spec_of
from asyncrl.weights.plan import make_manifest
from asyncrl.weights.transports import build_sender
from asyncrl_testing.engine_client import complete
from asyncrl_testing.random_model import random_qwen3, write_random_qwen3
from tests.conftest import ROOT
from tests.engines import running, vllm_engine
from tests.make import require_vllm

SHAPE = {"tie_word_embeddings": False, "num_hidden_layers": 2}
BUCKET = 1 << 16
QUANTIZATION = "fp8_per_channel"
"""The only one that vLLM's build for any CPU has kernels for."""


def make_engine(path, *, real, quantization):
    sizes = {"max_model_len": 128, "max_num_seqs": 4, "kv_cache_memory_bytes": 32 << 20}
    return vllm_engine(path, real=real, dtype="bfloat16", quantization=quantization, **sizes)


async def scores(engine):
    prompts = [[(7 * j + i) % 128 for j in range(60)] for i in range(3)]
    return np.concatenate(
        [(await complete(engine, prompt=prompt, score_from=20, max_tokens=1)).logprobs for prompt in prompts]
    )


async def served(path, quantization):
    async with running(make_engine(path, real=True, quantization=quantization)) as engine:
        return await scores(engine)


async def publish(engine, sender, number, weights):
    source, manifest = sender.open(), make_manifest(1 + number, number, [spec_of(*w) for w in weights], BUCKET)
    await engine.pause("abort")
    sending = asyncio.create_task(asyncio.to_thread(sender.send, manifest, weights, 30.0))
    received, sent = await asyncio.gather(engine.load_weights(manifest, source, 30.0), sending, return_exceptions=True)
    if isinstance(received, BaseException):
        raise received
    assert received == sent
    await engine.commit(number)
    await engine.resume()


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_publish_is_quantised_as_the_files_of_the_same_weights_are(tmp_path):
    paths = [write_random_qwen3(tmp_path / str(seed), seed=seed, **SHAPE) for seed in (0, 1)]
    models = [
        [(name, p.to(torch.bfloat16)) for name, p in random_qwen3(seed=seed, **SHAPE).named_parameters()]
        for seed in (0, 1)
    ]
    whole, quantised = await served(paths[1], None), await served(paths[1], QUANTIZATION)
    assert 0.01 < np.abs(whole - quantised).max() < 1.0, "the weights were not quantised, or not as these"
    async with running(make_engine(paths[0], real=False, quantization=QUANTIZATION)) as engine:
        with closing(build_sender("ipc", BUCKET, 1)) as sender:
            await publish(engine, sender, 1, models[1])
            np.testing.assert_array_equal(await scores(engine), quantised)
            await publish(engine, sender, 2, models[0])
            assert np.abs(await scores(engine) - quantised).max() > 1.0
            lacking = [w for w in models[1] if w[0] != "model.layers.1.mlp.down_proj.weight"]
            with pytest.raises(WeightTransferError, match=r"layers\.1\.mlp\.down_proj\.weight"):
                await publish(engine, sender, 3, lacking)
            misshapen = [(n, w[:-1] if n.endswith("0.mlp.down_proj.weight") else w) for n, w in models[1]]
            with pytest.raises(WeightTransferError, match=r"0\.mlp\.down_proj\.weight.*\(127, 384\)"):
                await publish(engine, sender, 4, misshapen)
        with closing(build_sender("ipc", BUCKET, 1)) as sender:
            await publish(engine, sender, 5, models[1])
            np.testing.assert_array_equal(await scores(engine), quantised)


def test_layers_of_a_quantised_checkpoint_refuse_the_weights_of_a_trainer():
    require_vllm()
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod

    from asyncrl.inference.vllm.filled_layers import FilledLayers

    def model(method):
        layer = LinearBase.__new__(LinearBase)
        torch.nn.Module.__init__(layer)
        layer.quant_method = method.__new__(method)
        layer.quant_method.requantization_source = None
        layer.output_size, layer.input_size = 8, 4
        return torch.nn.ModuleDict({"q_proj": layer})

    FilledLayers(model(Fp8PtpcOnlineLinearMethod)).require_loadable()
    with pytest.raises(WeightTransferError, match=r"q_proj \(Fp8LinearMethod\)"):
        FilledLayers(model(Fp8LinearMethod)).require_loadable()


def test_what_cannot_be_quantised_is_refused_by_name(tmp_path):
    def arguments(quantization, dtype="bfloat16", *, on_cpu=False):
        model = ModelConfig(path=str(tmp_path), inference_dtype=dtype)
        settings = VllmEngineConfig(quantization=quantization)
        return engine_arguments(model, settings, load_real_weights=False, on_cpu=on_cpu)

    assert arguments("mxfp8")["quantization"] == "mxfp8"
    assert arguments(QUANTIZATION, on_cpu=True)["quantization"] == QUANTIZATION
    assert arguments(None, "float32")["quantization"] is None
    with pytest.raises(ConfigError, match="inference_dtype"):
        arguments("mxfp8", "float32")
    if not torch.cpu._is_amx_tile_supported():
        with pytest.raises(ConfigError, match=QUANTIZATION):
            arguments("fp8_per_tensor", on_cpu=True)
    of_experts = RolloutConfig(engine="vllm", vllm=VllmEngineConfig(quantization="nvfp4_per_token"))
    check_engine_args(of_experts, ModelFacts("m", is_local=True, num_experts=8))
    with pytest.raises(ConfigError, match="experts only"):
        check_engine_args(of_experts, ModelFacts("m", is_local=True))
    asked = ["rollout.engine=vllm", "rollout.vllm.quantization=fp8_per_channel"]
    with pytest.raises(ConfigError, match=r"set model\.inference_dtype=bfloat16"):
        load_recipe(ROOT / "recipes" / "quickstart_vllm.yaml", asked)
    with pytest.raises(ConfigError, match="16 bits only"):
        ModelPoolConfig(engine="vllm", vllm=VllmEngineConfig(quantization="fp8_per_channel"))
    with pytest.raises(ConfigError, match=r"engine_args\.quantization"):
        VllmEngineConfig(engine_args={"quantization": "fp8"})
