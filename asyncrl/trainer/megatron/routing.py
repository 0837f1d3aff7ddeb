"""Hooks on the routers of Megatron-core's layers: the load-balancing loss of a mixture, and router replay.

Megatron-core's own loss balances each micro-batch separately. The loss of `algorithms/router_balance.py` is a sum over
tokens with weights known before the pass, so each rank adds the part of its layers and its tokens: under pipeline
parallelism no gradient comes from the last stage, under sequence parallelism a rank routes a part of the row.

Replay (explained in `fsdp/router_replay.py`) uses Megatron-core's hook in the choice of the largest logits. Its own
replay keeps the experts of all layers in one process-wide list in the order of the passes. Here they travel with the
row, so any schedule and any recomputation finds the right experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from asyncrl.trainer.step.model import Routers, taken


@dataclass(frozen=True, slots=True)
class WatchedRouters:
    """The routers of a model in training, and the hooks on them.

    Attributes:
        balances: fill the `routing` of rows.
        replays: take the `experts` of rows.
    """

    routers: Routers
    balances: bool
    replays: bool


@dataclass(slots=True, eq=False)
class RowRouting:
    """The decisions of this rank's routers for its tokens of one packed row.

    Attributes:
        real: [tokens of this rank] bool, False for padding.
        balance: [L, E] float32, see `PackedTokens`; None without a balance loss.
        chosen, given: [L, E] float32, as in `TokenOutputs`, without gradient; zero for layers of other stages.
    """

    real: torch.Tensor
    balance: torch.Tensor | None
    chosen: torch.Tensor
    given: torch.Tensor

    @classmethod
    def begin(cls, routers: Routers, real: torch.Tensor, balance: torch.Tensor | None) -> RowRouting:
        shape = (routers.layers, routers.experts)
        chosen, given = (torch.zeros(shape, dtype=torch.float32, device=real.device) for _ in range(2))
        return cls(real, balance, chosen, given)


@dataclass(frozen=True, slots=True, eq=False)
class RoutingSums:
    """Sums over one micro-batch and all ranks that share its plan; see `TokenOutputs`."""

    chosen: torch.Tensor
    given: torch.Tensor

    @staticmethod
    def of_all_ranks(rows: Sequence[RowRouting], groups: Sequence[dist.ProcessGroup]) -> list[RoutingSums]:
        """`groups`: the ranks over which the rows' tokens and layers are split. Collective over each group."""
        sums = torch.stack([torch.stack([row.chosen, row.given]) for row in rows])
        for group in groups:
            if group.size() > 1:
                dist.all_reduce(sums, group=group)
        return [RoutingSums(chosen, given) for chosen, given in sums]


class RouterHooks:
    """Makes one layer fill the `routing` of its row, and take its `experts` if it has them. A router sees hidden states
    only, so the layer's own hook keeps the row for it; a layer recomputed in the backward pass gets its row again."""

    def __init__(self, place: int, layer: Any) -> None:
        """`place`: among the model's layers with experts. `layer`: a TransformerLayer with experts."""
        self._place = place
        self._row: RowRouting | None = None
        self._experts: torch.Tensor | None = None
        self._own: torch.Tensor | None = None  # the router's own choice where replay overrides it
        layer.register_forward_pre_hook(self._enter, with_kwargs=True)
        layer.mlp.router.register_forward_hook(self._routed)
        layer.mlp.router.router_replay = self

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        row = kwargs["packed_seq_params"]
        self._row, self._experts = row.routing, row.experts

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Named by Megatron-core. Returns scores and indices of the experts that the tokens take, [n, k] each."""
        values, chosen = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self._own = None if self._experts is None else chosen
        if self._experts is None:
            return values, chosen
        through = taken(self._experts[:, self._place], chosen)
        return scores.gather(1, through), through

    def _routed(
        self, router: Any, args: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Replaces the router's result by an equal one whose gradient includes that of the balance."""
        row = self._row
        if row is None:
            return None
        probabilities, routes = output
        # The router returns the weights of the chosen experts only, so recompute all probabilities.
        logits = router.gating(args[0])
        given = (logits.flatten(0, -2).float().softmax(-1) * row.real[:, None]).sum(0)
        own = routes  # the router's own choice: balance must not count replayed experts
        if self._own is not None:
            own = torch.zeros_like(routes).scatter(1, self._own, True)
        row.chosen[self._place] = (own & row.real[:, None]).sum(0)
        row.given[self._place] = given.detach()
        if row.balance is None or not torch.is_grad_enabled():
            return None
        return _Beside.apply(probabilities, (row.balance[self._place] * given).sum()), routes  # pyright: ignore[reportReturnType]


class _Beside(torch.autograd.Function):
    """Returns the first argument; in the backward pass the second, a part of the loss, gets gradient 1."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.kind = (loss.dtype, loss.device)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, device = ctx.kind
        return grads[0], torch.ones((), dtype=dtype, device=device)
