"""Model features that the backend can train, checked before any process starts. Pure; imports no torch.

`model.check_supported` repeats the check on the loaded model's config and adds checks of the model itself.
"""

from __future__ import annotations

from asyncrl.config.trainer import FsdpConfig, TrainerConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.types import ModelFacts

_BY_LENGTH = "rotary positions of kind dynamic"


def unsupported(facts: ModelFacts) -> list[str]:
    """Features that would train wrongly. All but this one are found on the loaded model (`proof.prove`)."""
    return ["an encoder beside the decoder"] * facts.is_encoder_decoder


def check_layout(trainer: TrainerConfig, facts: ModelFacts, key: str) -> None:
    """See `BackendSpec.layout`."""
    check_heads(trainer.fsdp, facts, key)
    ranks = trainer.fsdp.context_parallel
    if ranks > 1 and facts.changed_attention:
        found, do = f"attention with {facts.changed_attention[0]}", "set trainer.fsdp.context_parallel to 1"
        raise ConfigError(explain(f"trainer.fsdp.context_parallel={ranks}", f"the model at {key} has {found}", do))
    if ranks > 1 and (trainer.packing == "padded" or facts.padding):
        found = f"the model at {key} has {facts.padding}" if facts.padding else "trainer.packing=padded"
        do = "set trainer.fsdp.context_parallel to 1"
        raise ConfigError(explain(f"trainer.fsdp.context_parallel={ranks}", f"{found}: rows are padded", do))


def check_heads(fsdp: FsdpConfig, facts: ModelFacts, key: str) -> None:
    """Raises ConfigError: the ranks that share a row cannot share the attention heads of the model at `key`, or would
    rotate them differently. The message names the nearest number of ranks that can. Unknown facts are not checked."""
    if fsdp.context_parallel > 1 and _BY_LENGTH in facts.unusual:
        found = (
            f"the model at {key} has {_BY_LENGTH}: they follow the longest position that a rank sees, and ranks "
            "that share a row see parts of it"
        )
        do = "set trainer.fsdp.context_parallel to 1"
        raise ConfigError(explain(f"trainer.fsdp.context_parallel={fsdp.context_parallel}", found, do))
    ranks, heads, kv_heads = fsdp.context_parallel, facts.sizes.heads, facts.sizes.kv_heads
    if heads is None or _divides(ranks, heads, kv_heads or heads):
        return
    can = [n for n in range(1, heads + 1) if _divides(n, heads, kv_heads or heads)]
    nearest = [*[n for n in can if n < ranks][-1:], *[n for n in can if n > ranks][:1]]
    found = (
        f"the model at {key} has {heads} attention heads and {kv_heads or heads} key-value heads: it must divide "
        "the former, and divide the latter or be a multiple of them"
    )
    do = f"set it to {' or '.join(map(str, nearest))}"
    raise ConfigError(explain(f"trainer.fsdp.context_parallel={ranks}", found, do))


def _divides(ranks: int, heads: int, kv_heads: int) -> bool:
    return heads % ranks == 0 and max(kv_heads, ranks) % min(kv_heads, ranks) == 0
