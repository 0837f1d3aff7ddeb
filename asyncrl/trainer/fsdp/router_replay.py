"""Router replay: in training, a token takes the experts that the engine chose when it sampled the token.

Engine and trainer round differently, and the trainer's weights may be newer. Where two experts are nearly equally
likely, the two choose different experts, and the token's log-probability jumps. With the recorded experts the trainer
differentiates the function that sampled. The experts' weights are the trainer's: its router's softmax over all experts,
gathered at the recorded experts and normalised over them if the model does so. The router's gradient flows through
these weights; the choice of experts has no gradient in either case.

Source: Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers (arXiv:2510.11370), whose R3
also replays the experts of prompts; here prompts take the trainer's own experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from asyncrl.trainer.step.model import Routers, no_routers, taken
from asyncrl.types import routers_of


class RouterReplay:
    """Replaces the routers' choices of one model by recorded experts. Owns a hook on each router, and the experts of
    the row in progress: a layer recomputed in the backward pass takes the same experts."""

    def __init__(self, model: Any) -> None:
        """Raises ConfigError: the model has no known routers."""
        routers = routers_of(model)
        if not routers:
            raise no_routers(f"a {type(model).__name__}")
        config = model.config
        self._routers = Routers(len(routers), int(config.num_experts_per_tok), int(config.num_experts))
        self._experts: torch.Tensor | None = None
        for place, router in enumerate(routers):
            router.register_forward_hook(partial(self._replayed, place))

    def set(self, experts: torch.Tensor | None) -> None:
        """Sets the experts for the next forward pass, see `PackedTokens`; None: the routers choose.

        Raises ValueError: they are of another model.
        """
        if experts is not None:
            self._routers.require(experts)
        self._experts = experts

    def _replayed(
        self, place: int, router: Any, args: tuple[Any, ...], output: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...] | None:
        """Replacement for the router's `output`: logits, weights of the experts, experts."""
        if self._experts is None:
            return None
        logits, weights, chosen = output
        through = taken(self._experts[:, place], chosen)
        found = logits.softmax(-1, dtype=torch.float32).gather(-1, through)
        if router.norm_topk_prob:
            found = found / found.sum(-1, keepdim=True)
        return logits, found.to(weights.dtype), through
