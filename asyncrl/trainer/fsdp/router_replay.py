"""Router replay: in training, a token goes through the experts that the engine chose for it when it sampled.

Engine and trainer round differently, and the trainer's weights may be newer: where two experts are nearly as likely,
the two choose different ones, and the log-probability of the token jumps. With the recorded experts the same function
is trained that has sampled. Their weights are those of the trainer's router, softmax over all experts, gathered at the
recorded ones and normalised over them where the model does so: the router's gradient flows through them. Which experts
a token takes has no gradient in either case.

Source: Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers (arXiv:2510.11370), whose R3
also replays the experts of prompts; here those are the trainer's own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from asyncrl.trainer.step.model import Routers, no_routers, taken
from asyncrl.weights.experts import routers_of


class RouterReplay:
    """Puts recorded experts in place of those that the routers of one model choose. Owns a hook on each router, and the
    experts of the row in progress: a layer that is computed again in the backward pass takes the same."""

    def __init__(self, model: Any) -> None:
        """Raises ConfigError: the model has no routers that are known here."""
        routers = routers_of(model)
        if not routers:
            raise no_routers(f"a {type(model).__name__}")
        config = model.config
        self._routers = Routers(len(routers), int(config.num_experts_per_tok), int(config.num_experts))
        self._experts: torch.Tensor | None = None
        for place, router in enumerate(routers):
            router.register_forward_hook(partial(self._replayed, place))

    def set(self, experts: torch.Tensor | None) -> None:
        """The experts of the tokens of the next forward pass, see `PackedTokens`; None: the routers choose.

        Raises ValueError: they are of another model.
        """
        if experts is not None:
            self._routers.require(experts)
        self._experts = experts

    def _replayed(
        self, place: int, router: Any, args: tuple[Any, ...], output: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...] | None:
        """What the router returns in place of its `output`: logits, weights of the experts, experts."""
        if self._experts is None:
            return None
        logits, weights, chosen = output
        through = taken(self._experts[:, place], chosen)
        found = logits.softmax(-1, dtype=torch.float32).gather(-1, through)
        if router.norm_topk_prob:
            found = found / found.sum(-1, keepdim=True)
        return logits, found.to(weights.dtype), through
