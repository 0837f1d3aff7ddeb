"""Low-rank adapters through peft: the base weights are frozen, and only the adapters are trained, saved and published.

    W = W_0 + (alpha / rank) B A

Published and saved names leave out peft's name of the adapter: `model.layers.0.self_attn.q_proj.lora_A.weight`.
Source: LoRA (arXiv:2106.09685) eq. 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from asyncrl.config.trainer import LoraConfig
from asyncrl.errors import ConfigError, explain

ADAPTER = "default"
SCALE, BASE = "lora.scale", "lora.base"
"""Entries of a checkpoint: alpha / rank, [] float64; directory or hub name of the base weights, [bytes] uint8."""


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Freezes `model` and puts adapters into it, in place; they change nothing until they are trained.

    Raises:
        ConfigError: no module has such a name, or one that cannot be adapted.
    """
    import peft

    names = config.target_modules
    kind = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType] a float works
        lora_dropout=config.dropout,
        target_modules="all-linear" if names == ["all-linear"] else list(names),
        bias="none",
    )
    asked = f"trainer.lora.target_modules={list(names)}"
    try:
        peft.inject_adapter_in_model(kind, model, ADAPTER)
    except ValueError as error:
        raise ConfigError(explain(asked, str(error).splitlines()[0], "name linear layers, or all-linear")) from error
    ends = (model.get_output_embeddings(), model.get_input_embeddings())
    if any(isinstance(m, peft.tuners.lora.LoraLayer) for m in ends) or not all(
        isinstance(m.get_base_layer(), nn.Linear) for m in _layers(model)
    ):
        found = "an adapter on the embedding, the output layer, or something that is not linear"
        raise ConfigError(explain(asked, found, "name linear layers of the decoder, or all-linear"))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model as it was before it got adapters, inside; for passes without gradient."""
    layers = _layers(model)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def has_adapters(model: nn.Module) -> bool:
    return any(".lora_" in name for name, _ in model.named_parameters())


def adapter_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The (sharded) adapters by their published names, as they are trained: not scaled."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if ".lora_" in name:
            yield name.replace(f".{ADAPTER}.", "."), tensor


def scale_of(config: LoraConfig) -> float:
    return config.alpha / config.rank


def _layers(model: nn.Module) -> list[Any]:
    from peft.tuners.lora import LoraLayer

    return [m for m in model.modules() if isinstance(m, LoraLayer)]
