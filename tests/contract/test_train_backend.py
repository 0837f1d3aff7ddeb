"""Plain torch, FSDP2 and Megatron-core on one rank against the same suite."""

import datetime
from dataclasses import replace

import pytest

from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig
from asyncrl.config.model import ModelConfig
from asyncrl.config.trainer import LoraConfig, MegatronConfig, TrainerConfig
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl_testing.backend_suite import TrainBackendSuite, write_model
from tests.make import needs_megatron

pytestmark = pytest.mark.contract

PPO = AlgorithmConfig(advantage="gae", critic=CriticConfig(lr=1e-2))


def spec(path: str, algorithm: AlgorithmConfig | None = None, lora: LoraConfig | None = None) -> TrainerSpec:
    trainer = TrainerConfig(lr=1e-2, lora=lora or LoraConfig())
    return TrainerSpec(model=ModelConfig(path=path), trainer=trainer, algorithm=algorithm or AlgorithmConfig())


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    import torch

    torch.set_num_threads(1)
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def process_group():
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    yield
    dist.destroy_process_group()


def plain(spec):
    from asyncrl_testing.plain_backend import PlainBackend

    return PlainBackend(spec)


class TestPlainBackend(TrainBackendSuite):
    @pytest.fixture
    def make_backend(self, model_path):
        return lambda: plain(spec(model_path))


class TestPlainBackendWithCritic(TrainBackendSuite):
    @pytest.fixture
    def make_backend(self, model_path):
        return lambda: plain(spec(model_path, PPO))


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


def megatron(spec):
    import torch

    from asyncrl.trainer.megatron.backend import MegatronBackend

    return MegatronBackend(spec, rank=0, world_size=1, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def megatron_groups(process_group):
    """Megatron-core keeps its groups for as long as the process lives, and the process group ends before that."""
    yield
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


@needs_megatron
class TestMegatronBackend(TrainBackendSuite):
    @pytest.fixture
    def make_backend(self, model_path, megatron_groups):
        return lambda: megatron(spec(model_path))


@needs_megatron
class TestMegatronBackendWithCritic(TrainBackendSuite):
    @pytest.fixture
    def make_backend(self, model_path, megatron_groups):
        return lambda: megatron(spec(model_path, PPO))


@needs_megatron
class TestMegatronBackendInBfloat16(TrainBackendSuite):
    """With float32 masters, and a critic whose head is float32."""

    @pytest.fixture
    def make_backend(self, model_path, megatron_groups):
        asked = spec(model_path, PPO)
        in_bfloat16 = replace(asked.trainer, megatron=MegatronConfig(param_dtype="bfloat16"))
        return lambda: megatron(replace(asked, trainer=in_bfloat16))
