"""The value model of advantage gae: the policy's architecture with one output in place of the vocabulary."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from asyncrl.trainer.fsdp.context import ContextRanks
from asyncrl.trainer.fsdp.model import packed_forward
from asyncrl.trainer.step.batch import PackedTokens


class Critic(nn.Module):
    """`backbone` gives hidden states; `head` computes in float32 and starts at zero, so that every value does."""

    def __init__(self, backbone: PreTrainedModel, context: ContextRanks | None = None) -> None:
        """`context`: the ranks that share each row; None: this rank has whole rows."""
        super().__init__()
        self._context = context or ContextRanks()
        self.backbone = backbone
        self.head = nn.Linear(backbone.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: PackedTokens) -> torch.Tensor:
        """[n] float32: the value of the text before each predicted token; the same on all ranks that share the row."""
        part = self._context.part_of(tokens)
        values = self.head(packed_forward(self.backbone, part)[0].float())
        # a tensor of its own: FSDP attaches hooks to the returned one, and a view may lose them
        return part.of_row(values.squeeze(-1).clone())
