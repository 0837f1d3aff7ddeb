"""The policy in training: a Hugging Face causal language model that maps packed tokens to log-probabilities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from asyncrl.algorithms.router_balance import routing_sums
from asyncrl.kernels.images import ImageInputs
from asyncrl.kernels.routers import RouterTaps
from asyncrl.trainer.fsdp.context import ContextRanks
from asyncrl.trainer.fsdp.proof import Way, forward_row
from asyncrl.trainer.step.batch import PackedTokens
from asyncrl.trainer.step.model import Routers
from asyncrl.trainer.token_logprobs import LogitRules, among_kept, logprobs_beside, token_logprobs


class Policy(nn.Module):
    """`causal_lm` is the Hugging Face model; its names are the names of the weights."""

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        *,
        context: ContextRanks | None = None,
        logits: LogitRules | None = None,
        taps: RouterTaps | None = None,
        way: Way | None = None,
        images: ImageInputs | None = None,
    ) -> None:
        """
        Args:
            images: of the tokens; None: they have none.
            way: how rows pass through the model; None: packed.
            context: the ranks that share each row; None: this rank has whole rows.
            logits: how logits are formed; None: the default.
            taps: of `causal_lm`, for router replay and a load-balancing loss; None: neither is requested.
        """
        super().__init__()
        self.causal_lm = causal_lm
        self._context, self._way = context or ContextRanks(), way or Way()
        self._logits = replace(logits or LogitRules(), cap=self._way.cap)
        self._taps, self._images = taps, images
        self._routers = None if taps is None else Routers(len(taps.layers), taps.per_token, taps.num_experts)

    def forward(self, tokens: PackedTokens, temperature: float, *, routing: bool = False) -> tuple[torch.Tensor, ...]:
        """Log-probability and entropy of each predicted token, [n] float32 each; see `token_logprobs`. With `routing`
        also the sums of `routing_sums` over all tokens of the row. If `PackedTokens.others` are requested, their
        log-probabilities, [n, k] float32, come last. The same on all ranks that share the row."""
        part = self._context.part_of(tokens)
        tokens = part.tokens
        if self._images is not None:  # environments may have written images, which nothing predicts
            tokens = replace(tokens, targets=self._images.plain(tokens.targets))
        if self._routers is not None and tokens.experts is not None:
            self._routers.require(tokens.experts)
        hidden, choices = forward_row(self.causal_lm, part, self._way, self._taps, self._images, routing=routing)
        temperature = temperature / self._way.scale
        # Three ways to the log-probabilities: over the kept tokens, with further tokens, or of the targets alone.
        head: Any = self.causal_lm.get_output_embeddings()
        bias = getattr(head, "bias", None)
        of_targets, rules = (hidden, head.weight, bias, tokens.targets), self._logits
        others: tuple[torch.Tensor, ...] = ()
        if tokens.kept is not None:  # never with other tokens: a teacher sees no filters
            kept = tokens.kept.clamp(min=0)
            found = among_kept(
                *logprobs_beside(*of_targets, kept, temperature=temperature, rules=rules), tokens.kept >= 0
            )
        elif tokens.others is not None:
            *found, of_others = logprobs_beside(*of_targets, tokens.others, temperature=temperature, rules=rules)
            others = (of_others,)
        else:
            found = token_logprobs(*of_targets, temperature=temperature, rules=rules)
        # Combine the results of the ranks that share the row.
        sums = routing_sums(choices) if routing else ()
        of_row = tuple(part.of_row(values) for values in (*found, *others))
        return *of_row[:2], *(part.summed(values) for values in sums), *of_row[2:]
