"""Heads after the last stage's hidden states: the output layer of a policy, the value head of a critic."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from asyncrl.trainer.megatron.model import DecoderChunk, gathered
from asyncrl.trainer.megatron.routing import RoutingSums
from asyncrl.trainer.step.batch import PackedTokens
from asyncrl.trainer.step.model import TokenOutputs
from asyncrl.trainer.token_logprobs import LogitRules, SplitVocabulary, token_logprobs

Result = TypeVar("Result", covariant=True)
LOGITS = LogitRules(per_chunk=1 << 26)
"""Chunks of 256 MiB in float32."""


class Head(Protocol, Generic[Result]):
    rows: int
    """Number of results per predicted token."""

    def __call__(self, chunk: DecoderChunk, hidden: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
        """[rows, n] float32, the same on all tensor-parallel ranks; n may be 0. `hidden`: output of `chunk`, the last
        one."""
        ...

    def output(self, numbers: torch.Tensor, routing: RoutingSums | None = None) -> Result:
        """Packs [rows, n] and, if requested, the routing sums."""
        ...


class PolicyHead:
    rows = 2

    def __init__(self, vocab_size: int, group: dist.ProcessGroup) -> None:
        """`group`: the tensor-parallel ranks."""
        self._split = SplitVocabulary(group, vocab_size)

    def __call__(self, chunk: DecoderChunk, hidden: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
        """Log-probability and entropy of each predicted token."""
        weight = chunk.output_weight()
        rows = gathered(hidden, chunk.config, partial_gradients=True).index_select(0, tokens.predictors)
        logits = rows.to(weight.dtype), weight, None, tokens.targets
        found = token_logprobs(*logits, temperature=tokens.temperature, rules=LOGITS, split=self._split)
        return torch.stack(found)

    def output(self, numbers: torch.Tensor, routing: RoutingSums | None = None) -> TokenOutputs:
        sums = () if routing is None else (routing.chosen, routing.given)
        return TokenOutputs(*numbers, *sums)


class ValueHead:
    rows = 1

    def __call__(self, chunk: DecoderChunk, hidden: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
        """The value of the text before each predicted token, computed in float32 by every tensor-parallel rank."""
        rows = gathered(hidden, chunk.config, partial_gradients=False).index_select(0, tokens.predictors)
        return chunk.value_head(rows.float()).T

    def output(self, numbers: torch.Tensor, routing: RoutingSums | None = None) -> torch.Tensor:
        return numbers[0]
