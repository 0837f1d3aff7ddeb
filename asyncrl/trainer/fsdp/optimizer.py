"""AdamW over the sharded parameters."""

from __future__ import annotations

import torch
from torch import nn

from asyncrl.config.trainer import TrainerConfig


def build_optimizer(model: nn.Module, config: TrainerConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: norms and biases, whatever their shape, are not decayed.

    Its state is allocated here rather than at the first step, so that what does not fit fails before the first
    rollout, and a checkpoint written before the first step restores to one.
    """
    norms = {id(p) for name, m in model.named_modules() if "norm" in name.rsplit(".", 1)[-1] for p in m.parameters()}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    def decays(name: str, p: nn.Parameter) -> bool:
        return p.ndim >= 2 and not name.endswith("bias") and id(p) not in norms

    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in trained if decays(n, p)], "weight_decay": config.weight_decay},
            {"params": [p for n, p in trained if not decays(n, p)], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=True,
    )
    for _, p in trained:
        optimizer.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return optimizer
