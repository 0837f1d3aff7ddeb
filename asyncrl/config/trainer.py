from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from asyncrl.config.checks import require, require_at_least, require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpConfig:
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype of forward and backward; the sharded master weights and the optimizer stay float32."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are reduced."""
    reshard_after_forward: bool = True
    """Free the gathered parameters after the forward pass and gather them again for the backward pass."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass."""
    attention: Literal["auto", "packed_sdpa", "flash_attention_2"] = "auto"
    """How packed sequences attend only to themselves; auto takes flash_attention_2 where it is installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    num_ranks: int = 1
    """Data-parallel ranks, one process each."""
    backend: Literal["fsdp"] = "fsdp"
    """fsdp: FSDP2 over torch.distributed."""
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    """Settings of backend fsdp."""
    device: str = "auto"
    """auto takes cuda where there is one."""
    lr: float = 1e-6
    """Learning rate of AdamW after the warm-up."""
    warmup_steps: int = 0
    """The learning rate rises linearly over these steps, then stays."""
    weight_decay: float = 0.0
    """On matrices only: norms and biases are not decayed."""
    adam_beta1: float = 0.9
    """Decay of the running mean of gradients, in [0, 1)."""
    adam_beta2: float = 0.95
    """Decay of the running mean of squared gradients, in [0, 1)."""
    adam_eps: float = 1e-8
    """Added to the denominator of the update."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 switches clipping off."""
    max_tokens_per_microbatch: int = 8192
    """Token budget (prompt and response) of one forward pass on one rank."""
    step_timeout_s: float = 3600.0
    """Longest that one optimizer step may take, and reading the trainer's part of a checkpoint."""
    collective_timeout_s: float = 600.0
    """Longest that one torch.distributed operation may wait for a peer."""

    def __post_init__(self) -> None:
        require_at_least("trainer.num_ranks", self.num_ranks, 1)
        require_positive("trainer.lr", self.lr)
        require_at_least("trainer.warmup_steps", self.warmup_steps, 0)
        require_at_least("trainer.weight_decay", self.weight_decay, 0)
        require_at_least("trainer.max_grad_norm", self.max_grad_norm, 0)
        require_at_least("trainer.max_tokens_per_microbatch", self.max_tokens_per_microbatch, 1)
        require_positive("trainer.step_timeout_s", self.step_timeout_s)
        require_positive("trainer.adam_eps", self.adam_eps)
        require_positive("trainer.collective_timeout_s", self.collective_timeout_s)
        for name, beta in (("adam_beta1", self.adam_beta1), ("adam_beta2", self.adam_beta2)):
            require(
                0 <= beta < 1,
                asked=f"trainer.{name}={beta}",
                found="an Adam coefficient lies in [0, 1)",
                do=f"set trainer.{name} below 1",
            )
