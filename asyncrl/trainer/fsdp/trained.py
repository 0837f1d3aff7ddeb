"""Adapts sharded modules to the training step's protocols: `Model` and `FrozenModel`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Generic

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from asyncrl.config.trainer import FsdpConfig
from asyncrl.trainer.fsdp.optimizer import Update
from asyncrl.trainer.fsdp.policy import Policy
from asyncrl.trainer.step.batch import PackedTokens
from asyncrl.trainer.step.model import LossFunction, Output, Part, TokenOutputs


class Trained(Generic[Output]):
    """The `Model` of a module and its optimizer.

    Gradients are reduced after every micro-batch, unless `FsdpConfig.reduce_every_microbatch` is false. Reduced
    gradients accumulate as the rank's shard; unreduced ones take the memory of a whole model on every rank. Copies of
    the model average their gradients only after the last micro-batch, since that moves one shard.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[[PackedTokens], Output],
        update: Update,
        *,
        mesh: DeviceMesh,
        fsdp: FsdpConfig,
    ) -> None:
        """`forward`: a pass through `module`, which is sharded over `mesh`. `update`: its optimizer."""
        self._module, self._forward, self._num_ranks = module, forward, mesh.size()
        self._has_copies, self._reduces_each = mesh.ndim > 1, fsdp.reduce_every_microbatch
        self.clip_gradients, self.update, self.drop_gradients = update.clip, update.step, update.drop

    def train(self, mode: bool) -> None:
        self._module.train(mode)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[PackedTokens]) -> list[Output]:
        return [self._forward(tokens) for tokens in batches]

    def forward_backward(
        self, batches: Sequence[PackedTokens], loss_function: LossFunction[Output], *, learns: Sequence[bool]
    ) -> list[Part]:
        found = []
        for at, tokens in enumerate(batches):
            self._reduce(is_last=at == len(batches) - 1)
            found.append(self._part(at, tokens, loss_function, learns=learns[at]))
        return found

    def _reduce(self, *, is_last: bool) -> None:
        """Sets how the next backward pass reduces its gradients."""
        module = self._module
        assert isinstance(module, FSDPModule), "it was sharded"
        module.set_requires_gradient_sync(is_last or self._reduces_each)
        if self._has_copies:
            module.set_requires_all_reduce(is_last)

    def _part(self, at: int, tokens: PackedTokens, loss_function: LossFunction[Output], *, learns: bool) -> Part:
        with torch.set_grad_enabled(learns):
            output = self._forward(tokens)
            part = loss_function(at, output)
            if tokens.balance is not None:
                assert isinstance(output, TokenOutputs), "only a policy balances its routers"
                assert output.given is not None, "the policy was built with its routing"
                part = replace(part, balance=(tokens.balance * output.given).sum())
        if learns:
            (part.total * self._num_ranks).backward()  # FSDP averages gradients over ranks
        return part.detached()


class Reference:
    """The `FrozenModel` of the reference."""

    def __init__(self, opened: Callable[[], AbstractContextManager[Policy]]) -> None:
        """`opened`: yields the reference model, which may be the policy without its adapters."""
        self._opened = opened

    @torch.no_grad()
    def evaluate(self, batches: Sequence[PackedTokens]) -> list[TokenOutputs]:
        # A reference chooses its own experts and evaluates the sampled tokens only.
        own = [replace(tokens, experts=None, others=None) for tokens in batches]
        with self._opened() as reference:
            return [policy_outputs(reference, tokens) for tokens in own]


def policy_outputs(policy: Policy, tokens: PackedTokens, *, routing: bool = False) -> TokenOutputs:
    """`routing`: include the sums over a mixture's routers."""
    found, others = policy(tokens, tokens.temperature, routing=routing), None
    if tokens.others is not None:
        *found, others = found
    return TokenOutputs(*found, others=others)
