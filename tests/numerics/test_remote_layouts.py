"""`vllm serve` with several engines, and with experts that its workers share: every worker gets every publish, and all
serve it."""

from contextlib import closing

import pytest

from asyncrl.config.model import ModelConfig
from asyncrl.config.remote_engine import RemoteEngineConfig
from asyncrl.errors import WeightTransferError
from asyncrl.inference.remote.engine import RemoteEngine
from asyncrl.weights.transports import build_sender
from asyncrl_testing.engine_client import within
from asyncrl_testing.random_model import random_qwen3, random_qwen3_moe
from asyncrl_testing.served_weights_suite import BUCKET_BYTES, assert_serves, publish, weights_in_training
from tests.make import require_vllm
from tests.vllm_server import VllmServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("process_group"), ]  # fmt: skip

TWO = ["--tensor-parallel-size", "2"]
LAYOUTS = {
    "two engines": (random_qwen3, ["--data-parallel-size", "2"], {"data_parallel_size": 2}),
    "two workers": (random_qwen3_moe, TWO, {"tensor_parallel_size": 2}),
    "two workers that share experts": (
        random_qwen3_moe, [*TWO, "--enable-expert-parallel"], {"tensor_parallel_size": 2},
    ),
}  # fmt: skip
SILENT = ("two workers that share experts",)
"""On a CPU vLLM's kernel for experts of which a worker lacks some does not return."""


@pytest.mark.parametrize("layout", list(LAYOUTS))
async def test_every_worker_serves_what_is_published(tmp_path, layout):
    require_vllm()
    random_model, flags, sizes = LAYOUTS[layout]
    models = [random_model(seed=seed) for seed in range(2)]
    paths = [tmp_path / str(seed) for seed in range(2)]
    for model, path in zip(models, paths, strict=True):
        model.save_pretrained(path)
    trained = [weights_in_training(path) for path in paths]
    server = VllmServer(paths[0], tmp_path / "log", "--skip-tokenizer-init", "--max-model-len", "512", *flags)
    settings = RemoteEngineConfig(urls=[server.url], max_model_len=512, max_num_seqs=16, **sizes)
    engine = RemoteEngine(ModelConfig(path=str(paths[0])), settings, load_real_weights=False)
    try:
        server.start()
        await within(engine.start(), 60.0)
        with closing(build_sender("collective", BUCKET_BYTES, settings.num_workers)) as sender:
            link = (sender, sender.open())
            for version in (1, 2, 3):
                sent, received = await publish(engine, link, trained[version % 2], version)
                assert sent == received is not None
                if layout not in SILENT:
                    await assert_serves(engine, models[version % 2], version)
            with pytest.raises(WeightTransferError):
                await publish(engine, link, trained[0][1:], 4)
            await publish(engine, link, trained[0], 5)
            if layout not in SILENT:
                await assert_serves(engine, models[0], 5)
        await within(engine.stop())
    finally:
        server.kill()
