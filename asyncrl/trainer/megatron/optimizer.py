"""AdamW over a model's parameters by Megatron-core's distributed optimizer: each data-parallel rank holds float32
master weights and moments of its share of every parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from asyncrl.config.trainer import TrainerConfig
from asyncrl.trainer.backend import MOMENTS
from asyncrl.trainer.host_copies import HostState, Slot
from asyncrl.trainer.megatron.stored_state import MASTER


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """This rank's part of a parameter: entries `[start, stop)` of the flattened parameter, in float32.

    Attributes:
        master: [stop - start], owned by the optimizer.
        moments: of `MOMENTS`, and any other state that the optimizer keeps for `master`.
    """

    start: int
    stop: int
    master: torch.Tensor
    moments: dict[str, torch.Tensor]

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """`MASTER` and `MOMENTS` -> [stop - start] float32; live until the next step."""
        return {MASTER: self.master.detach()} | {kind: self.moments[kind] for kind in MOMENTS}


def wrap(chunks: Sequence[nn.Module], config: TransformerConfig) -> list[DistributedDataParallel]:
    """Wraps the chunks with gradient buffers, summed over data-parallel ranks in float32. Sets how `config`'s schedule
    finishes gradients."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False, overlap_param_gather=False
    )
    # Losses are parts of one sum: gradients are not divided by a number of tokens.
    config.finalize_model_grads_func = lambda model, num_tokens=None, **groups: finalize_model_grads(
        model, None, **groups
    )
    return [DistributedDataParallel(config, ddp, chunk) for chunk in chunks]


class DistributedUpdate:
    """The optimizer of a model: clips gradients, steps, and drops them. Owns the master weights and the moments."""

    def __init__(
        self, chunks: Sequence[DistributedDataParallel], config: TrainerConfig, *, max_grad_norm: float, bf16: bool
    ) -> None:
        """Collective. Allocates the moments, so that too little memory fails before the first rollout."""
        settings = OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            adam_eps=config.adam_eps,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=True,
            clip_grad=max_grad_norm,
        )
        self._chunks, self._max_grad_norm, self._weight_decay = chunks, max_grad_norm, config.weight_decay
        self._optimizer: Any = get_megatron_optimizer(
            settings,
            list(chunks),  # pyright: ignore[reportArgumentType] upstream wraps them so itself
            config_overrides=get_standard_config_overrides(settings),
            use_gloo_process_groups=False,
        )
        # Moments exist before the first step, so a checkpoint of step 0 has them too.
        for part in self._parts():
            for group in part.optimizer.param_groups:
                if isinstance(part.optimizer, torch.optim.AdamW):
                    group["fused"], group["foreach"] = True, False
                for parameter in group["params"]:
                    state = part.optimizer.state[parameter]
                    state.update({kind: torch.zeros_like(parameter.detach()) for kind in MOMENTS})
        self.set_steps(0)
        self._host_state = HostState(list(self._slots()) if config.megatron.offload_optimizer else [])

    def clip(self) -> float:
        """Scales gradients to at most the configured norm; returns their global norm before that. Collective."""
        self._host_state.to_device()  # before the master weights get their gradients
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        if self._max_grad_norm > 0 and math.isfinite(norm):
            for part in self._parts():
                nn.utils.clip_grads_with_norm_(part.get_parameters(), self._max_grad_norm, torch.tensor(norm))
        return norm

    def step(self, rate: float) -> None:
        """Call after `clip`. Collective: ranks gather the weights that others have updated."""
        for group in self._optimizer.param_groups:
            group["lr"], group["weight_decay"] = rate, self._weight_decay * group["wd_mult"]
        self._optimizer.step_with_ready_grads()
        self.drop()

    def drop(self) -> None:
        """Drops the gradients."""
        self._optimizer.zero_grad()
        self._host_state.to_host()
        for chunk in self._chunks:
            chunk.zero_grad_buffer()

    def shares(self) -> Iterator[tuple[nn.Parameter, Share]]:
        """This rank's share of each parameter of which it has a share."""
        for part in self._parts():
            # `model_param_group_index_map` is wrong for a group with parameters of both dtypes, so pair the groups by
            # order.
            models = (*part.model_float16_groups, *part.model_fp32_groups)
            masters = (*part.shard_fp32_from_float16_groups, *part.shard_fp32_groups)
            for model, master in zip(chain(*models), chain(*masters), strict=True):
                buffer, dtype, bucket = part.model_param_gbuf_map[model]
                place = part.gbuf_ranges[buffer][dtype][bucket]["param_map"][model]["param"]
                yield model, Share(place.start, place.end, master, part.optimizer.state[master])

    def _slots(self) -> Iterator[Slot]:
        """Slots of the moments, and of master weights that are separate from the weights."""
        for part in self._parts():
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    state = part.optimizer.state[parameter]
                    for kind in MOMENTS:
                        yield Slot(partial(state.__getitem__, kind), partial(state.__setitem__, kind))
            for master in chain(*part.shard_fp32_from_float16_groups):
                yield Slot(partial(getattr, master, "data"), partial(setattr, master, "data"))

    def steps(self) -> int:
        """Number of optimizer steps; AdamW corrects the bias of its moments by it."""
        return next((int(counter.get("step", 0)) for counter, _ in self._counters()), 0)

    def set_steps(self, steps: int) -> None:
        for counter, is_tensor in self._counters():
            if not is_tensor:
                counter["step"] = steps
                continue
            # On the device of the update, also while moments are in host memory.
            device = (counter["step"] if "step" in counter else counter[MOMENTS[0]]).device
            counter["step"] = torch.tensor(float(steps), device=device)

    def _counters(self) -> Iterator[tuple[dict[str, Any], bool]]:
        """(the dict that has "step", whether as a tensor): torch's Adam counts per tensor, TransformerEngine's and
        Apex's per group."""
        for part in self._parts():
            for group in part.optimizer.param_groups:
                if isinstance(part.optimizer, torch.optim.AdamW):
                    yield from ((part.optimizer.state[parameter], True) for parameter in group["params"])
                else:
                    yield group, False

    def _parts(self) -> list[Any]:
        """The optimizers of all parameters except experts, and of the experts."""
        return [part for part in self._optimizer.chained_optimizers if part.optimizer is not None]
