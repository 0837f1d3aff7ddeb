"""Peak memory of an FSDP2 rank, by torch's memory tracker over fake tensors: the project's own sharding, passes and
optimizer, for models of any size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from asyncrl.config.trainer import TrainerConfig
from asyncrl.trainer.fsdp.attention import PACKED_ROWS, register_packed_attention
from asyncrl.trainer.fsdp.context import ContextRanks, RowPart
from asyncrl.trainer.fsdp.model import recompute_layers, shard
from asyncrl.trainer.fsdp.models import Policy
from asyncrl.trainer.fsdp.optimizer import Update
from asyncrl.trainer.model_tensors import logits_per_chunk
from asyncrl.trainer.step.batch import PackedLayout, PackedTokens
from asyncrl.trainer.token_logprobs import LogitRules

SEQUENCES = 4
"""Of a micro-batch, equally long."""


def tracked_peak(config: Mapping[str, Any], trainer: TrainerConfig, tokens: int) -> int:
    """Bytes on the device of rank 0 at the peak of an update with two micro-batches of `tokens` tokens each, which are
    all predicted. The update itself, which is fused, holds no more. Makes a process group of its own, and ends it.

    Args:
        config: of the model, as in its config.json, with `model_type`.
        trainer: without adapters, whose package cannot build them over fake tensors.
    """
    register_packed_attention()
    fsdp = trainer.fsdp
    dist.init_process_group("fake", rank=0, world_size=trainer.num_ranks, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (trainer.num_ranks,))
        layout = PackedLayout.of([tokens // SEQUENCES] * SEQUENCES, torch.device("cpu"))
        indices = torch.arange(tokens)
        batch = PackedTokens(indices[None], indices[None], layout, indices, indices % config["vocab_size"], 1.0)
        part = ContextRanks(_first(fsdp.context_parallel)).part_of(
            batch
        )  # which predictions: not known of fake tensors
        with FakeTensorMode(allow_non_fake_inputs=True):
            with no_init_weights():
                model = AutoModelForCausalLM.from_config(
                    AutoConfig.for_model(**config), attn_implementation=PACKED_ROWS, dtype=torch.float32
                )
            model.tie_weights()
            recompute_layers(model, trainer.recompute)
            policy = Policy(model, context=_Known(part), logits=LogitRules(logits_per_chunk(trainer.device)))
            shard(policy, model, mesh, fsdp)
            policy.train()
            update = Update(model, trainer, max_grad_norm=0.0, host_state=False)
            tracker = FSDPMemTracker(policy, update.optimizer)
            with tracker:
                for _ in range(2):
                    logprobs, _ = policy(batch, 1.0)
                    logprobs.sum().backward()
                    tracker.reset_mod_stats()
            (found,) = tracker.get_tracker_snapshot("peak").values()
            return found["Total"]
    finally:
        dist.destroy_process_group()


def _first(ranks: int) -> dist.ProcessGroup | None:
    """The group of the first ranks; None for one."""
    if ranks == 1:
        return None
    group = dist.new_group(list(range(ranks)))
    assert isinstance(group, dist.ProcessGroup), "rank 0 is a member"
    return group


class _Known(ContextRanks):
    """Knows the part of the one row that there is."""

    def __init__(self, part: RowPart) -> None:
        super().__init__()
        self._part = part

    def part_of(self, tokens: PackedTokens) -> RowPart:
        return self._part
