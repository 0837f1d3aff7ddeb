"""AdamW over the sharded parameters of a module."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from asyncrl.config.trainer import TrainerConfig
from asyncrl.trainer.backend import MOMENTS
from asyncrl.trainer.host_copies import HostState, Slot, local_part


class Update:
    """The optimizer of `module`: clips its gradients, steps, and drops them.

    With `host_state` the moments are in host memory between steps; no effect if the parameters are there too.
    """

    def __init__(self, module: nn.Module, config: TrainerConfig, *, max_grad_norm: float, host_state: bool) -> None:
        self.optimizer = build_optimizer(module, config)
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._max_grad_norm = max_grad_norm
        on_host = host_state and any(p.device.type != "cpu" for p in self._parameters)
        self._host_state = HostState(list(self._slots()) if on_host else [])

    def clip(self) -> float:
        """Scales gradients to at most `max_grad_norm` and returns their global norm before that, 0 without gradients;
        collective."""
        parameters = [p for p in self._parameters if p.grad is not None]
        if not parameters:
            return 0.0
        total = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = total.full_tensor() if isinstance(total, DTensor) else total
        if self._max_grad_norm > 0:
            nn.utils.clip_grads_with_norm_(parameters, self._max_grad_norm, norm)
        return float(norm)

    def step(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._host_state.to_device()
        self.optimizer.step()
        self._host_state.to_host()
        self.drop()

    def drop(self) -> None:
        """Drops the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def _slots(self) -> Iterator[Slot]:
        """Slots of the moments in the optimizer's state."""
        for state in self.optimizer.state.values():
            for name in MOMENTS:
                yield _slot(state, name)


def _slot(state: dict[str, torch.Tensor], name: str) -> Slot:
    """`state[name]`; for a DTensor its shard."""

    def write(values: torch.Tensor) -> None:
        tensor = state[name]
        if isinstance(tensor, DTensor):
            tensor._local_tensor = values
        else:
            state[name] = values

    return Slot(lambda: local_part(state[name]), write)


def build_optimizer(model: nn.Module, config: TrainerConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: norms and biases, whatever their shape, are not decayed.

    Its state is allocated here, not at the first step: too little memory fails before the first rollout, and a
    checkpoint written before the first step already has the state.
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
