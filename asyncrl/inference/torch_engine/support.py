"""Model features that the slot loop can run. Pure; imports no torch."""

from __future__ import annotations

from asyncrl.types import ModelFacts

_KINDS = {"full_attention", "sliding_attention"}


def unsupported(facts: ModelFacts, context_tokens: int) -> list[str]:
    """Features of the model that the engine cannot run with this context. The engine has a plain causal mask, keys and
    values as its only state, and token ids as its only input."""
    problems = [f"layers of kind {kind}" for kind in sorted(facts.layer_kinds - _KINDS)]
    if facts.sliding_window is not None and facts.sliding_window < context_tokens:
        problems.append(f"a sliding window of {facts.sliding_window} tokens, shorter than the context")
    problems += [f"attention with {change}" for change in facts.changed_attention]
    problems += [f"other inputs than text ({key})" for key in facts.other_inputs]
    problems += ["an encoder beside the decoder"] * facts.is_encoder_decoder
    return problems
