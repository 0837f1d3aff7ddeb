"""The policy in training: a Hugging Face causal language model that maps packed tokens to log-probabilities."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from asyncrl.algorithms.router_balance import routing_sums
from asyncrl.trainer.fsdp.model import packed_forward
from asyncrl.trainer.fsdp.router_replay import RouterReplay
from asyncrl.trainer.fsdp.token_logprobs import among_kept, logprobs_beside, token_logprobs
from asyncrl.trainer.step.batch import PackedTokens


class Policy(nn.Module):
    """`causal_lm` is the model as Hugging Face builds it; its names are the names of the weights."""

    def __init__(self, causal_lm: PreTrainedModel, *, replays: bool = False) -> None:
        """`replays`: the routers take the experts of the packed tokens. Raises ConfigError: the model has none."""
        super().__init__()
        self.causal_lm = causal_lm
        self._replay = RouterReplay(causal_lm) if replays else None

    def forward(self, tokens: PackedTokens, temperature: float, *, routing: bool = False) -> tuple[torch.Tensor, ...]:
        """Log-probability and entropy of each predicted token, [n] float32 each; see `token_logprobs`. With `routing`
        also what the routers of a mixture did with all tokens of the row; see `routing_sums`. Where other tokens are
        asked for, last their log-probabilities, [n, k] float32."""
        if self._replay is not None:
            self._replay.set(tokens.experts)
        hidden, router_logits = packed_forward(self.causal_lm, tokens, routing=routing)
        head: Any = self.causal_lm.get_output_embeddings()
        bias = getattr(head, "bias", None)
        of_targets = hidden, head.weight, bias, tokens.targets
        others: tuple[torch.Tensor, ...] = ()
        if tokens.kept is not None:  # never with other tokens: a teacher sees no filters
            kept = tokens.kept.clamp(min=0)
            found = among_kept(*logprobs_beside(*of_targets, kept, temperature=temperature), tokens.kept >= 0)
        elif tokens.others is not None:
            *found, of_others = logprobs_beside(*of_targets, tokens.others, temperature=temperature)
            others = (of_others,)
        else:
            found = token_logprobs(*of_targets, temperature=temperature)
        sums = routing_sums(router_logits, self.causal_lm.config.num_experts_per_tok) if routing else ()
        return *found, *sums, *others
