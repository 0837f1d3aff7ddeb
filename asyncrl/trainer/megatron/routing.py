"""What is done at the routers of Megatron-core's layers: the load-balancing loss of a mixture, and router replay.

Megatron-core's own loss balances each micro-batch by itself. The one of `algorithms/router_balance.py` is a sum over
tokens with weights that are known before the pass, so each rank adds the part of its layers and of its tokens: under
pipeline parallelism no gradient comes from the last stage, under sequence parallelism a rank routes a part of the row.

Replay (`fsdp/router_replay.py` says what it is) takes the place that Megatron-core has for it in its choice of the
largest logits. Its own replay keeps the experts of all layers in one list of the process, in the order of the passes;
here they travel with the row, so any schedule and any recomputation finds its own.
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
    """The routers of a model in training, and what is done at them.

    Attributes:
        balances: they fill the `routing` of rows.
        replays: they take the `experts` of rows.
    """

    routers: Routers
    balances: bool
    replays: bool


@dataclass(slots=True, eq=False)
class RowRouting:
    """The decisions of this rank's routers for its tokens of one packed row.

    Attributes:
        real: [tokens of this rank] bool, False for tokens that fill up the row.
        balance: [L, E] float32, see `PackedTokens`; None where no loss is asked for.
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
    """Of one micro-batch, over all ranks that share its plan; see `TokenOutputs`."""

    chosen: torch.Tensor
    given: torch.Tensor

    @staticmethod
    def of_all_ranks(rows: Sequence[RowRouting], groups: Sequence[dist.ProcessGroup]) -> list[RoutingSums]:
        """`groups`: over which the rows' tokens and layers are split. Collective over each."""
        sums = torch.stack([torch.stack([row.chosen, row.given]) for row in rows])
        for group in groups:
            if group.size() > 1:
                dist.all_reduce(sums, group=group)
        return [RoutingSums(chosen, given) for chosen, given in sums]


def watch_routers(layers: Sequence[tuple[int, Any]]) -> None:
    """Makes the layers fill the `routing` of the row that they get, and take its `experts`, where it has them.

    Args:
        layers: (place among the model's layers with experts, a TransformerLayer with experts).
    """
    for place, layer in layers:
        _Watch(place, layer)


class _Watch:
    """Hooks of one layer. A router sees hidden states alone, so the layer's own hook keeps the row for it; a layer that
    is computed again in the backward pass gets its row again."""

    def __init__(self, place: int, layer: Any) -> None:
        self._place = place
        self._row: RowRouting | None = None
        self._experts: torch.Tensor | None = None
        self._own: torch.Tensor | None = None  # what the router chose where it takes others
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
        """Megatron-core's name for it: the scores, [n, k], of the experts that the tokens take, and these, [n, k]."""
        values, chosen = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self._own = None if self._experts is None else chosen
        if self._experts is None:
            return values, chosen
        through = taken(self._experts[:, self._place], chosen)
        return scores.gather(1, through), through

    def _routed(
        self, router: Any, args: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """In place of what the router returned: the same, whose gradient includes that of the balance."""
        row = self._row
        if row is None:
            return None
        probabilities, routes = output
        # the router returns the weights of the chosen experts alone
        logits = router.gating(args[0])
        given = (logits.flatten(0, -2).float().softmax(-1) * row.real[:, None]).sum(0)
        own = routes  # by the router itself: balance is about what it would do
        if self._own is not None:
            own = torch.zeros_like(routes).scatter(1, self._own, True)
        row.chosen[self._place] = (own & row.real[:, None]).sum(0)
        row.given[self._place] = given.detach()
        if row.balance is None or not torch.is_grad_enabled():
            return None
        return _Beside.apply(probabilities, (row.balance[self._place] * given).sum()), routes  # pyright: ignore[reportReturnType]


class _Beside(torch.autograd.Function):
    """The first argument as it is; in the backward pass the second, a part of the loss, gets the gradient 1."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.kind = (loss.dtype, loss.device)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, device = ctx.kind
        return grads[0], torch.ones((), dtype=dtype, device=device)
