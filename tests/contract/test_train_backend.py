"""The fake and FSDP2 on one rank against the same suite."""

import datetime

import pytest

from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig
from asyncrl.config.model import ModelConfig
from asyncrl.config.trainer import LoraConfig, TrainerConfig
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl_testing.backend_suite import VOCAB_SIZE, TrainBackendSuite
from asyncrl_testing.fake_backend import FakeBackend

pytestmark = pytest.mark.contract


PPO = AlgorithmConfig(advantage="gae", critic=CriticConfig(lr=1e-2))


def spec(path: str, algorithm: AlgorithmConfig | None = None, lora: LoraConfig | None = None) -> TrainerSpec:
    trainer = TrainerConfig(lr=1e-2, lora=lora or LoraConfig())
    return TrainerSpec(model=ModelConfig(path=path), trainer=trainer, algorithm=algorithm or AlgorithmConfig())


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def process_group():
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    yield
    dist.destroy_process_group()


class TestFakeBackend(TrainBackendSuite):
    @pytest.fixture
    def make_backend(self):
        return lambda: FakeBackend(spec("none"), vocab_size=VOCAB_SIZE)


def fsdp(spec):
    import torch

    from asyncrl.trainer.fsdp.backend import FsdpBackend

    return FsdpBackend(spec, rank=0, world_size=1, device=torch.device("cpu"))


class TestFsdpBackend(TrainBackendSuite):
    @pytest.fixture
    def make_backend(self, model_path, process_group):
        return lambda: fsdp(spec(model_path))


class TestFsdpBackendWithCritic(TrainBackendSuite):
    @pytest.fixture
    def make_backend(self, model_path, process_group):
        return lambda: fsdp(spec(model_path, PPO))


class TestFsdpBackendWithAdapters(TrainBackendSuite):
    @pytest.fixture
    def make_backend(self, model_path, process_group):
        return lambda: fsdp(spec(model_path, lora=LoraConfig(rank=4)))
