"""Inference engines by name."""

from __future__ import annotations

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import RolloutConfig
from asyncrl.inference.engine import InferenceEngine


def build_engine(rollout: RolloutConfig, model: ModelConfig, *, load_real_weights: bool) -> InferenceEngine:
    """The engine that `rollout.engine` chooses, not started. Call it in the process that will run it."""
    if rollout.engine == "torch":
        from asyncrl.inference.torch_engine import TorchEngine

        return TorchEngine(model, rollout.torch, load_real_weights=load_real_weights)
    from asyncrl.inference.vllm import VllmEngine

    return VllmEngine(model, rollout.vllm, load_real_weights=load_real_weights)
