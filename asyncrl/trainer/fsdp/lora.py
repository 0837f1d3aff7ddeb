"""Low-rank adapters through peft: base weights are frozen; only adapters are trained, saved and published.

    W = W_0 + (alpha / rank) B A

Published and saved names leave out peft's name of the adapter: `model.layers.0.self_attn.q_proj.lora_A.weight`.
Source: LoRA (arXiv:2106.09685) eq. 3.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from asyncrl.config.trainer import LoraConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.types import ModelFacts

logger = logging.getLogger(__name__)

ADAPTER = "default"
EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj", "experts")
SCALE, BASE = "lora.scale", "lora.base"
"""Entries of a checkpoint. Scale: alpha / rank, [] float64. Base: directory or hub name of the base weights, [bytes]
uint8."""


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Freezes `model` and adds adapters to it, in place. Untrained adapters do not change its output.

    Raises:
        ConfigError: no module has such a name, or the named module cannot be adapted.
    """
    import peft

    names = config.target_modules
    asked = f"trainer.lora.target_modules={list(names)}"
    _refuse_experts(model, names, asked)
    kind = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType] a float works
        lora_dropout=config.dropout,
        target_modules=_linear_layers(model) if names == ["all-linear"] else list(names),
        bias="none",
    )
    try:
        peft.inject_adapter_in_model(kind, model, ADAPTER)
    except ValueError as error:
        raise ConfigError(explain(asked, str(error).splitlines()[0], "name linear layers, or all-linear")) from error
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()  # trained in float32, whatever the base weights' dtype
    # peft adapts other modules too if their names match; only linear layers of the decoder are supported.
    ends = (model.get_output_embeddings(), model.get_input_embeddings())
    if any(isinstance(m, peft.tuners.lora.LoraLayer) for m in ends) or not all(
        isinstance(m.get_base_layer(), nn.Linear) for m in _layers(model)
    ):
        found = "an adapter on the embedding, the output layer, or something that is not linear"
        raise ConfigError(explain(asked, found, "name linear layers of the decoder, or all-linear"))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes without its adapters. For passes without gradient."""
    layers = _layers(model)
    # peft's enable_adapters would also clear requires_grad of the adapters, and FSDP would keep the cleared flag on
    # parameters that it gathers inside.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def scale_of(config: LoraConfig) -> float:
    return config.alpha / config.rank


def check_same(facts: Mapping[str, torch.Tensor], written: Mapping[str, torch.Tensor]) -> None:
    """Checks that adapters of a checkpoint with entries `written` mean the same in a run with entries `facts`. Logs a
    warning if the base is in another directory.

    Raises:
        ConfigError: their scale differs, or their base is another model of the hub.
    """
    if SCALE in facts and SCALE in written and float(facts[SCALE]) != float(written[SCALE]):
        asked = f"resume with trainer.lora.alpha / trainer.lora.rank = {float(facts[SCALE]):g}"
        found = f"the adapters were trained at {float(written[SCALE]):g}: the model would be another one"
        raise ConfigError(explain(asked, found, "keep trainer.lora.rank and trainer.lora.alpha as they were"))
    if BASE not in facts or BASE not in written:
        return
    now, then = (bytes(found[BASE].tolist()).decode() for found in (facts, written))
    if now != then and not now.startswith("/") and not then.startswith("/"):
        found = f"the adapters were trained on {then}"
        raise ConfigError(explain(f"resume with model.path={now}", found, f"set model.path={then}"))
    if now != then:
        logger.warning("the adapters were trained on the weights of %s; they go on over those of %s", then, now)


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """Names of all linear layers. peft's own all-linear would include experts and routers, which are parameters, not
    layers. It refuses the output projection of Mamba's layers, whose kernels read the weight past the module."""
    output = model.get_output_embeddings()
    is_mamba = "mamba" in ModelFacts.of_config("", model.config.to_dict()).layer_kinds
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not output]
    return [name for name in linear if not (is_mamba and name.endswith(".out_proj"))]


def _refuse_experts(model: PreTrainedModel, names: list[str], asked: str) -> None:
    fused = sorted({n.rpartition(".")[2] for n, p in model.named_parameters() if ".experts." in n and p.ndim == 3})
    named = sorted(set(names) & {*EXPERT_NAMES, *fused})
    if fused and named:
        found = f"{', '.join(named)}: the experts of a layer are one tensor ({', '.join(fused)}), which gets no adapter"
        do = "name linear layers (q_proj, k_proj, v_proj, o_proj), or all-linear, which leaves experts out"
        raise ConfigError(explain(asked, found, do))


def _layers(model: nn.Module) -> list[Any]:
    from peft.tuners.lora import LoraLayer

    return [m for m in model.modules() if isinstance(m, LoraLayer)]
