"""Plain torch, FSDP2 and Megatron-core on one rank against the same suite."""

import pytest
import torch

from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig
from asyncrl.config.trainer import LoraConfig, MegatronConfig
from asyncrl_testing.backend_suite import TrainBackendSuite, write_model
from tests.backends import fsdp_backend, megatron_backend, plain_backend, trainer_spec
from tests.make import needs_megatron
from tests.numerics.conftest import process_group as process_group


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    torch.set_num_threads(1)
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def megatron_groups(process_group):
    """Megatron-core keeps its groups for as long as the process lives, and the process group ends before that."""
    yield
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


GROUPS = {fsdp_backend: "process_group", megatron_backend: "megatron_groups"}
PPO = AlgorithmConfig(advantage="gae", critic=CriticConfig(lr=1e-2))
BFLOAT16 = {"megatron": MegatronConfig(param_dtype="bfloat16")}
CASES = [
    pytest.param((plain_backend, AlgorithmConfig(), {}), id="plain"),
    pytest.param((plain_backend, PPO, {}), id="plain with a critic"),
    pytest.param((fsdp_backend, AlgorithmConfig(), {}), id="FSDP2"),
    pytest.param((fsdp_backend, PPO, {}), id="FSDP2 with a critic"),
    pytest.param((fsdp_backend, AlgorithmConfig(), {"lora": LoraConfig(rank=4)}), id="FSDP2 with adapters"),
    pytest.param((megatron_backend, AlgorithmConfig(), {}), id="Megatron", marks=needs_megatron),
    pytest.param((megatron_backend, PPO, {}), id="Megatron with a critic", marks=needs_megatron),
    pytest.param((megatron_backend, PPO, BFLOAT16), id="Megatron in bfloat16", marks=needs_megatron),
]
"""The last one has float32 masters, and a critic whose head is float32."""


class TestTrainBackend(TrainBackendSuite):
    @pytest.fixture(scope="class", params=CASES)
    @classmethod
    def make_backend(cls, request, model_path):
        make, algorithm, trainer = request.param
        if make in GROUPS:
            request.getfixturevalue(GROUPS[make])
        return lambda: make(trainer_spec(model_path, algorithm, lr=1e-2, **trainer))
