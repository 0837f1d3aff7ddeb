"""The TrainBackend of FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel

from asyncrl.config.trainer import TrainerConfig
from asyncrl.trainer.fsdp import lora, sharded_state
from asyncrl.trainer.fsdp.context import ContextRanks
from asyncrl.trainer.fsdp.model import FLASH_ATTENTION, Kernels, choose_attention
from asyncrl.trainer.fsdp.models import Models
from asyncrl.trainer.host_copies import Captures
from asyncrl.trainer.step.loop import TrainingStep
from asyncrl.trainer.step.model import Peers
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl.types import SendingRank, TensorSpec
from asyncrl.weights.encodings.lora import LORA_B
from asyncrl.weights.plan import make_spec
from asyncrl.weights.stored_layout import StoredLayout, StoredPart


def _mesh(device: torch.device, rank: int, world_size: int, trainer: TrainerConfig) -> DeviceMesh:
    """[ranks], or [copies, ranks of a copy]: consecutive ranks, which share a node, hold one copy. Collective."""
    shards = trainer.fsdp.shard_ranks
    if shards in (None, world_size):
        return init_device_mesh(device.type, (world_size,))
    numbers = torch.arange(world_size).view(-1, shards)
    own = [_own_group(parts, rank, trainer) for parts in (numbers.T.tolist(), numbers.tolist())]
    return DeviceMesh.from_group(own, device.type, numbers, mesh_dim_names=("copies", "shards"))


def _shares(rank: int, world_size: int, trainer: TrainerConfig) -> tuple[ContextRanks, Peers]:
    """The ranks that share this rank's rows (consecutive ranks), and one rank of each row. Collective."""
    if trainer.fsdp.context_parallel == 1:
        return ContextRanks(), Peers(dist.group.WORLD)
    numbers = torch.arange(world_size).view(-1, trainer.fsdp.context_parallel)
    context, peers = (_own_group(parts, rank, trainer) for parts in (numbers.tolist(), numbers.T.tolist()))
    return ContextRanks(context), Peers(peers)


def _own_group(parts: list[list[int]], rank: int, trainer: TrainerConfig) -> dist.ProcessGroup:
    """The group of `parts` that contains this rank. Collective."""
    timeout = timedelta(seconds=trainer.collective_timeout_s)  # groups that a mesh makes itself have torch's own
    made = [(ranks, dist.new_group(ranks, timeout=timeout)) for ranks in parts]
    own = next(group for ranks, group in made if rank in ranks)
    assert isinstance(own, dist.ProcessGroup), "this rank is a member"
    return own


class FsdpBackend:
    """One rank. Needs torch.distributed's default group, whose timeout bounds every collective here. Owns the models,
    their optimizers and the captured copy of their state; `TrainingStep` makes the step."""

    def __init__(self, spec: TrainerSpec, *, rank: int, world_size: int, device: torch.device) -> None:
        """Loads and shards the models; collective. Raises ConfigError: a model cannot be read or trained."""
        # Phase 1: models. Every rank draws the same initial weights, then switches to its own seed.
        self._spec, self._rank, self._device = spec, rank, device
        torch.manual_seed(spec.seed)  # random initial weights (adapters) are the same on any number of ranks
        context, peers = _shares(rank, world_size, spec.trainer)
        self._models = Models(spec, _mesh(device, rank, world_size, spec.trainer), context)
        torch.manual_seed(spec.seed + rank)  # dropout, where a model has it, differs between ranks
        # Phase 2: the step and the publication over these models.
        self._policy = self._models.policy
        fsdp = spec.trainer.fsdp
        step = TrainingStep(
            spec,
            self._models.of_step(),
            peers=peers,
            device=device,
            share_prompts=fsdp.share_prompts
            and spec.trainer.packing != "padded"
            and choose_attention(fsdp, Kernels.of(device)) != FLASH_ATTENTION,
        )
        self.train_step, self.logprobs, self.reference_kl = step.train_step, step.logprobs, step.reference_kl
        publication = Publication(self._policy.causal_lm, self._models.layout, spec, device)
        self.weight_specs, self.named_weights = publication.specs, publication.tensors
        self._captures = Captures()

    def sending_ranks(self) -> tuple[SendingRank, ...]:
        return (SendingRank(0, 0),)

    def capture(self) -> None:
        live = self._live_state() | self._facts()
        self._captures.take(sharded_state.with_random_state(live, rank=self._rank, device=self._device))

    def save(self, directory: Path) -> tuple[str, ...]:
        """See `TrainBackend`. Raises StorageError: it cannot be written there."""
        self._captures.write(lambda _, tensors, group: sharded_state.save(directory, tensors, group))
        return sharded_state.files_of(directory, self._rank)

    def load(self, directory: Path) -> None:
        """Raises ConfigError: there is no checkpoint below `directory`, or it is of another model."""
        facts = self._facts()
        written = sharded_state.read_entries(directory, facts)
        lora.check_same(facts, written)
        total_steps = written.get(sharded_state.TOTAL_STEPS)
        if self._rank == 0 and total_steps is not None:
            self._spec.warn_of_another_length(int(total_steps))
        sharded_state.load(directory, self._live_state(), rank=self._rank, device=self._device)

    def _live_state(self) -> dict[str, torch.Tensor]:
        models = self._models
        found = sharded_state.of_model("model", self._policy.causal_lm, "optimizer", models.update.optimizer)
        if models.critic is not None and models.critic_update is not None:
            found |= sharded_state.of_model("critic", models.critic, "critic_optimizer", models.critic_update.optimizer)
        return found

    def _facts(self) -> dict[str, torch.Tensor]:
        """Entries of a checkpoint that are checked, not loaded."""
        total = torch.tensor(self._spec.total_steps, dtype=torch.int64)
        return self._models.lora_facts() | {sharded_state.TOTAL_STEPS: total}


# The tensors of a publish: the whole policy in the replicas' dtype, experts separate as in a checkpoint, or only its
# adapters.


class Publication:
    def __init__(self, model: PreTrainedModel, layout: StoredLayout, spec: TrainerSpec, device: torch.device) -> None:
        self._model, self._layout, self._device = model, layout, device
        self._scale = lora.scale_of(spec.trainer.lora) if spec.trainer.lora.rank else None
        self._dtype = "float32" if self._scale is not None else spec.model.inference_dtype

    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            make_spec(part.name, part.shape, self._dtype_of(own))
            for own, tensor in sharded_state.published_tensors(self._model)
            for part in self._parts(own, tensor)
        )

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Collective: every rank must exhaust the iterator. Tensors are on the trainer's device. A tensor that needed
        neither gathering nor a cast shares memory with the master weights: read it before the next step."""
        for name, tensor in sharded_state.published_tensors(self._model):
            # cast before gathering: half the bytes for 16-bit replicas. Gathered on the device: its group is NCCL's.
            whole = sharded_state.full(tensor.to(self._device, getattr(torch, self._dtype_of(name)))).detach()
            if self._scale is not None and name.endswith(LORA_B):
                whole = whole * self._scale
            for part in self._parts(name, tensor):
                yield part.name, part.of(whole.contiguous()).contiguous()

    def _parts(self, name: str, tensor: torch.Tensor) -> tuple[StoredPart, ...]:
        stored = name if self._scale is None else self._layout.of_factor(name)
        return self._layout.parts_of(stored, tuple(tensor.shape))

    def _dtype_of(self, name: str) -> str:
        exact = any(part.name in self._layout.exact for part in self._layout.parts.get(name, ()))
        return "float32" if exact else self._dtype
