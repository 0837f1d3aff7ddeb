"""What of a model the backend can train, asked before any process starts. Pure; imports no torch.

`model.check_supported` asks it of the loaded model's config again, and what only the model shows.
"""

from __future__ import annotations

from asyncrl.types import ModelFacts
from asyncrl.weights.experts import MODEL_TYPES

_KINDS = {"full_attention", "sliding_attention"}


def unsupported(facts: ModelFacts) -> list[str]:
    """What of the model would train wrongly: layers that mix the sequences of a packed row, logits that are changed
    after the output layer, experts of which it is not known how they lie in one tensor."""
    problems = [f"layers of kind {kind}" for kind in sorted(facts.layer_kinds - _KINDS)]
    problems += [f"logits with {change}" for change in facts.changed_logits]
    problems += [f"other inputs than text ({key})" for key in facts.other_inputs]
    problems += ["an encoder beside the decoder"] * facts.is_encoder_decoder
    if facts.num_experts and facts.model_type not in MODEL_TYPES and not facts.has_custom_code:
        problems.append(f"the experts of {facts.model_type}")
    return problems
