"""The policy in training: a Hugging Face causal language model that maps packed tokens to log-probabilities."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from asyncrl.trainer.fsdp.batch import PackedTokens
from asyncrl.trainer.fsdp.model import hidden_states
from asyncrl.trainer.fsdp.token_logprobs import token_logprobs


class Policy(nn.Module):
    """`causal_lm` is the model as Hugging Face builds it; its names are the names of the weights."""

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        super().__init__()
        self.causal_lm = causal_lm

    def forward(self, tokens: PackedTokens, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of each predicted token, [n] float32 each; see `token_logprobs`."""
        hidden = hidden_states(self.causal_lm, tokens)
        head: Any = self.causal_lm.get_output_embeddings()
        bias = getattr(head, "bias", None)
        return token_logprobs(hidden, head.weight, bias, tokens.targets, temperature=temperature)
