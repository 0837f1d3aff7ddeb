"""Small engines on a CPU, how a test starts and ends one, and what the test classes of engines have in common."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import pytest_asyncio

from asyncrl.config.model import ModelConfig
from asyncrl.config.remote_engine import RemoteEngineConfig
from asyncrl.config.rollout import SglangEngineConfig, TorchEngineConfig, VllmEngineConfig
from asyncrl.errors import GenerationError
from asyncrl.inference.engine import InferenceEngine
from asyncrl.inference.remote.engine import RemoteEngine
from asyncrl_testing.engine_client import complete, within
from asyncrl_testing.engine_suite import EngineConformance
from asyncrl_testing.random_model import write_random_qwen3
from tests.make import require_sglang, require_vllm

START_S = 240.0


def torch_engine(path, *, real=False, dtype="float32", **settings):
    """`real`: with the weights of the model's files, not with placeholders."""
    from asyncrl.inference.torch_engine.engine import TorchEngine

    model = ModelConfig(path=str(path), inference_dtype=dtype)
    return TorchEngine(model, TorchEngineConfig(device="cpu", **settings), load_real_weights=real)


def vllm_engine(path, *, real=False, dtype="float32", **settings):
    require_vllm()
    from asyncrl.inference.vllm.engine import VllmEngine

    usual = {"max_model_len": 512, "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20, "enforce_eager": True}
    model = ModelConfig(path=str(path), inference_dtype=dtype)
    return VllmEngine(model, VllmEngineConfig(**usual | settings), load_real_weights=real)


def sglang_engine(path, *, real=False, **settings):
    require_sglang()
    from asyncrl.inference.sglang.engine import SglangEngine

    usual = {"max_model_len": 512, "max_running_requests": 8, "max_total_tokens": 1 << 13}
    return SglangEngine(ModelConfig(path=str(path)), SglangEngineConfig(**usual | settings), load_real_weights=real)


def remote_engine(server, path, *, real=False, **settings):
    usual = {"urls": [server.url], "max_model_len": 512, "max_num_seqs": 8}
    return RemoteEngine(ModelConfig(path=str(path)), RemoteEngineConfig(**usual | settings), load_real_weights=real)


async def started(engine):
    await within(engine.start(), START_S)
    return engine


@asynccontextmanager
async def running(engine):
    """From its start to its stop."""
    await started(engine)
    try:
        yield engine
    finally:
        await within(engine.stop(), 60.0)


async def assert_dead(engine: InferenceEngine, said: str) -> None:
    """It holds no request, and every call but an abort fails with this."""
    health = engine.health()
    assert (health.alive, health.running, health.waiting) == (False, 0, 0)
    for call in (engine.resume(), engine.commit(1), engine.pause("keep"), complete(engine)):
        with pytest.raises(GenerationError, match=said):
            await within(call)
    await within(engine.abort(None))  # nothing is left to abort: not an error


async def assert_cannot_start(make: Callable[[Path], InferenceEngine], place: Path, said: str) -> None:
    """On a model whose config.json says nothing."""
    model = place / "broken-model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    engine = make(model)
    with pytest.raises(GenerationError, match=said):
        await started(engine)
    assert not engine.health().alive
    await within(engine.stop())


class SharedEngine(EngineConformance):
    """One engine for all tests of a class, which is whole again after each; a test may make others."""

    build: ClassVar[Callable[..., InferenceEngine]]
    """Of a path, with the weights there."""

    @pytest.fixture(scope="class")
    @classmethod
    def make_engine(cls, tmp_path_factory):
        path = write_random_qwen3(tmp_path_factory.mktemp("model"))

        async def make():
            return await started(cls.build(path))

        return make

    @pytest_asyncio.fixture(loop_scope="module", scope="class")
    @classmethod
    async def shared_engine(cls, make_engine):
        engine = await make_engine()
        yield engine
        await within(engine.stop())

    @pytest_asyncio.fixture(loop_scope="module")
    async def engine(self, shared_engine):
        yield shared_engine
        await shared_engine.resume()
        await shared_engine.abort(None)
        await shared_engine.commit(0)


class EngineOfAServer(EngineConformance):
    """The server, a fixture of the module, has one engine at a time: each test starts its own, by `build`, which takes
    as long as a few calls."""

    deterministic = False
    scores = False
    build: ClassVar[Callable[..., InferenceEngine]]

    @pytest.fixture
    def make_engine(self, server):
        async def make():
            return await started(self.build(server))

        return make

    @pytest_asyncio.fixture(loop_scope="module")
    async def engine(self, make_engine) -> AsyncIterator[Any]:
        engine = await make_engine()
        yield engine
        await within(engine.stop())
