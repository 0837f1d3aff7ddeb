"""A tiny model with random weights in Hugging Face format, made in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def random_qwen3(*, seed: int = 0, **overrides: Any) -> Any:
    """A Qwen3ForCausalLM of 0.8M parameters (unless `overrides` of its config change that), float32.

    Its matrices have a spread of 0.1: sharp enough that the choice of token depends on the context.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config: dict[str, Any] = {
        "vocab_size": 128, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32,
        "num_key_value_heads": 2, "intermediate_size": 384, "tie_word_embeddings": True,
        "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    model = Qwen3ForCausalLM(Qwen3Config(**(config | overrides)))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return model.eval().requires_grad_(False)


def random_qwen3_moe(*, seed: int = 0, **overrides: Any) -> Any:
    """A Qwen3MoeForCausalLM of two layers with eight experts each (unless `overrides` change that), float32."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config: dict[str, Any] = {
        "vocab_size": 128, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
        "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "norm_topk_prob": True, "initializer_range": 0.2, "max_position_embeddings": 512,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**(config | overrides))).eval().requires_grad_(False)


_OTHER_SAMPLING = {
    "do_sample": True, "repetition_penalty": 5.0, "temperature": 0.1, "top_k": 2, "top_p": 0.1, "min_p": 0.9,
}  # fmt: skip


def write_random_qwen3(directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Saves `random_qwen3` with its config below `directory`; returns that directory. Its generation_config.json asks
    for a sampling that no request asks for: an engine that follows it is found by its log-probabilities."""
    random_qwen3(seed=seed, **overrides).save_pretrained(directory)
    file = directory / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | _OTHER_SAMPLING))
    return directory


def greedy_continuation(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Hugging Face's greedy response to `prompt`."""
    import torch

    ids = torch.tensor([[int(i) for i in prompt]])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
    return out[0, ids.shape[1] :].tolist()
