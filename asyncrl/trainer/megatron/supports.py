"""Models and layouts that the backend can train, checked before any process starts. Pure; imports no torch."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from asyncrl.config.trainer import TrainerConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.trainer.model_tensors import MODEL_TYPES
from asyncrl.types import ModelFacts

PACKAGES = ("megatron.core", "psutil")
INSTALL = "pip install 'asyncrl[megatron]'"
INSTALL_ENGINE = "pip install 'transformer-engine[pytorch]', or set trainer.megatron.layers=local"


def unsupported(facts: ModelFacts) -> list[str]:
    """Features of the model that would train wrongly, or not at all."""
    problems = [f"layers of kind {kind}" for kind in sorted(facts.layer_kinds - {"full_attention"})]
    problems += [f"logits with {change}" for change in facts.changed_logits]
    problems += [f"attention with {change}" for change in facts.changed_attention]
    problems += [f"other inputs than text ({key})" for key in facts.other_inputs]
    problems += ["an encoder beside the decoder"] * facts.is_encoder_decoder
    problems += ["a model with code of its own"] * facts.has_custom_code
    if facts.model_type is not None and facts.model_type not in MODEL_TYPES:
        problems.append(f"the architecture {facts.model_type}")
    return problems + list(facts.unusual)


def check_layout(trainer: TrainerConfig, facts: ModelFacts, key: str) -> None:
    """Checks that the layout divides the model and that the requested layers are installed. Unknown facts are not
    checked.

    Raises:
        ConfigError: a check fails. The message names the nearest sizes that pass.
    """
    megatron, sizes = trainer.megatron, facts.sizes
    if trainer.packing == "padded":
        do = "leave it out, or set trainer.backend=fsdp"
        raise ConfigError(explain("trainer.packing=padded", "Megatron-core has packed rows only", do))
    if megatron.layers == "transformer_engine":
        require_package(("transformer_engine",), "trainer.megatron.layers=transformer_engine", INSTALL_ENGINE)
    tensor, stages = megatron.tensor_parallel, megatron.pipeline_parallel * megatron.chunks_per_stage
    widths = ("attention heads", sizes.heads), ("feed-forward width", sizes.ffn)
    _require_divides("tensor_parallel", tensor, widths, key)
    if sizes.kv_heads and max(sizes.kv_heads, tensor) % min(sizes.kv_heads, tensor):
        found = f"the model at {key} has {sizes.kv_heads} key-value heads"
        do = f"set trainer.megatron.tensor_parallel to {_nearest(tensor, sizes.kv_heads)}"
        raise ConfigError(explain(f"trainer.megatron.tensor_parallel={tensor}", found, do))
    if sizes.layers and sizes.layers % stages:
        chunked = f" x chunks_per_stage={megatron.chunks_per_stage}" if megatron.chunks_per_stage > 1 else ""
        asked = f"trainer.megatron.pipeline_parallel={megatron.pipeline_parallel}{chunked}"
        do = f"make it {_nearest(stages, sizes.layers)}"
        raise ConfigError(explain(asked, f"the model at {key} has {sizes.layers} layers", do))
    if facts.is_local and facts.num_experts == 0 and megatron.expert_parallel > 1:
        found = f"the model at {key} has no experts"
        do = "set trainer.megatron.expert_parallel=1"
        raise ConfigError(explain(f"trainer.megatron.expert_parallel={megatron.expert_parallel}", found, do))
    if facts.num_experts == 0:
        return
    _require_divides("expert_parallel", megatron.expert_parallel, (("experts", facts.num_experts),), key)
    split = (("experts' width", sizes.expert_ffn), ("shared expert's width", sizes.shared_ffn))
    _require_divides("expert_tensor_parallel", megatron.experts_split_by, split[:1], key)
    _require_divides("tensor_parallel", tensor, split[1:], key)
    if tensor > 1 and not megatron.sequence_parallel:
        found = f"the model at {key} is a mixture of experts, which Megatron-core trains only with sequence parallelism"
        asked = f"trainer.megatron.sequence_parallel=false with trainer.megatron.tensor_parallel={tensor}"
        raise ConfigError(explain(asked, found, "set trainer.megatron.sequence_parallel=true"))


def require_package(
    packages: Sequence[str] = PACKAGES, asked: str = "trainer.backend=megatron", do: str = INSTALL
) -> None:
    """Raises ConfigError: Megatron-core or one of its requirements is not installed. Imports neither."""
    missing = [name for name in packages if not _is_installed(name)]
    if missing:
        found = f"the package {', '.join(missing)} is not installed"
        raise ConfigError(explain(asked, found, do))


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the parent package
        return False


def _require_divides(name: str, value: int, extents: tuple[tuple[str, int | None], ...], key: str) -> None:
    for what, extent in extents:
        if extent and extent % value:
            found = f"it does not divide {extent}, the {what} of the model at {key}"
            do = f"set trainer.megatron.{name} to {_nearest(value, extent)}"
            raise ConfigError(explain(f"trainer.megatron.{name}={value}", found, do))


def _nearest(value: int, extent: int) -> str:
    """The largest divisor of `extent` below `value`, and the smallest divisor above it."""
    divisors = [n for n in range(1, extent + 1) if extent % n == 0]
    below, above = [n for n in divisors if n < value][-1:], [n for n in divisors if n > value][:1]
    return " or ".join(str(n) for n in (*below, *above))


@contextmanager
def without_wandb() -> Iterator[None]:
    """Inside, W&B cannot be imported. Megatron-core's inference engine imports it if installed, and importing W&B
    creates temporary directories, which a killed rank would leave behind."""
    known = sys.modules.get("wandb")
    if known is None:
        sys.modules["wandb"] = None  # type: ignore[assignment] - Python's marker for "not to be found"
    try:
        yield
    finally:
        if known is None:
            del sys.modules["wandb"]
