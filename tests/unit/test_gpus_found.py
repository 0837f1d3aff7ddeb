"""GPUs as processes find them: what is there and cannot be used is an error, and engines load before ranks."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers.utils import import_utils

from asyncrl.config import checks
from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import TorchEngineConfig
from asyncrl.driver.actors import Actors
from asyncrl.errors import ConfigError
from asyncrl.inference.torch_engine.engine import TorchEngine
from asyncrl.trainer.fsdp.model import Kernels
from asyncrl.trainer.rank_device import resolve_device
from tests.make import needs_megatron, quickstart


@pytest.mark.parametrize(
    ("device", "hidden", "refused"),
    [
        ("nvidia0", None, True),
        ("nvidia3", "3", True),
        ("nvidia0", "", False),
        ("nvidia0", "-1", False),
        ("nvidia0", "NoDevFiles", False),
        ("nvidiactl", None, False),
    ],
)
def test_auto_is_no_cpu_beside_a_gpu_that_torch_cannot_use(tmp_path, monkeypatch, device, hidden, refused):
    (tmp_path / device).touch()
    monkeypatch.setattr(checks, "DEVICES", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    model = ModelConfig(path="/")
    if not refused:
        assert resolve_device("auto", 0) == torch.device("cpu")
        TorchEngine(model, TorchEngineConfig(), load_real_weights=False)
        return
    with pytest.raises(ConfigError, match=r"trainer\.device=cuda.*(?s:.*)sees no CUDA device here"):
        resolve_device("auto", 0)
    with pytest.raises(ConfigError, match=r"rollout\.torch\.device=cuda"):
        TorchEngine(model, TorchEngineConfig(), load_real_weights=False)


def test_flash_attention_4_alone_is_no_flash_attention_2(tmp_path, monkeypatch):
    """Both packages are called flash_attn."""
    monkeypatch.setattr(import_utils, "is_torch_cuda_available", lambda: True)
    import_utils.is_flash_attn_2_available.cache_clear()
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not Kernels.of(torch.device("cpu")).flash_attn
    import_utils.is_flash_attn_2_available.cache_clear()


@pytest.mark.parametrize(
    ("capability", "sizes", "activated"),
    [
        ((9, 0), {"head_dim": 128}, ["FA4"]),
        ((10, 0), {"hidden_size": 512, "num_attention_heads": 8}, ["FA4"]),
        ((9, 0), {"head_dim": 256}, []),  # it has no kernel for such heads
        ((8, 0), {"head_dim": 128}, []),
    ],
)
def test_flash_attention_4_becomes_the_kernel_where_it_has_one(tmp_path, monkeypatch, capability, sizes, activated):
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    taken = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", taken.append)
    kernels = Kernels.of(torch.device("cuda"))
    kernels.activate(SimpleNamespace(**sizes))
    assert taken == activated
    assert kernels.fa4 == (capability[0] > 8)


@needs_megatron
def test_routers_in_float32_run_without_transformer_engine():
    """In a process that has not taken the CPU's way to Megatron-core."""
    code = """
import torch
from asyncrl.trainer.megatron.backend import bind_gemm
bind_gemm()
from megatron.core.transformer.moe import moe_utils
x, w = (torch.randn(n, 8, dtype=torch.bfloat16) for n in (3, 2))
print(moe_utils.router_gating_linear(x, w, None, torch.float32).dtype)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.splitlines()[-1:] == ["torch.float32"], done.stderr


@pytest.mark.parametrize(
    ("engine", "shared", "begun"),
    [
        ("vllm", True, ["replicas", "training side without them"]),
        ("torch", True, ["training side with them"]),
        ("vllm", False, ["training side with them"]),
    ],
)
async def test_an_engine_that_measures_its_gpu_loads_before_the_rank_beside_it(engine, shared, begun):
    found = []

    async def start():
        found.append("replicas")

    async def training_side(*others):
        found.append(f"training side {'with' if len(others) == 2 else 'without'} them")
        for other in others:
            other.close()

    async def nothing():
        pass

    actors = object.__new__(Actors)
    actors.engines = actors.server = None
    actors._recipe = quickstart(f"rollout.engine={engine}")
    actors._placements = SimpleNamespace(placement=SimpleNamespace(shares_gpus=shared))
    actors.replicas, actors.pools = SimpleNamespace(start=start), SimpleNamespace(start=nothing)
    actors._start_training_side = training_side
    await actors.start()
    assert found == begun
