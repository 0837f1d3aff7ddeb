"""Inference engines by name."""

from __future__ import annotations

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import RolloutConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.inference.engine import InferenceEngine


def build_engine(rollout: RolloutConfig, model: ModelConfig, *, load_real_weights: bool) -> InferenceEngine:
    """The engine that `rollout.engine` chooses, not started. Call it in the process that will run it.

    Raises ConfigError: the engine is not part of this version.
    """
    if rollout.engine == "torch":
        from asyncrl.inference.torch_engine import TorchEngine

        return TorchEngine(model, rollout.torch, load_real_weights=load_real_weights)
    raise ConfigError(
        explain(
            f"rollout.engine={rollout.engine}",
            "the vLLM adapter is not part of this version; its recipes can be checked with --dry-run",
            "set rollout.engine=torch",
        )
    )
