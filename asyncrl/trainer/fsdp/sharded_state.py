"""The sharded state of a rank: selects the published tensors, and writes and reads checkpoints.

A checkpoint holds weights and AdamW's state (two moments and a step count per tensor) of the policy (or of its adapters
alone) and of the critic, under Hugging Face names, and each rank's random state, in torch.distributed.checkpoint's
format: every rank writes its shards, and any number of ranks can read them. It is written from a copy in host memory,
in a thread concurrent with training.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from asyncrl.errors import ConfigError, StorageError, explain
from asyncrl.trainer.fsdp import lora
from asyncrl.trainer.fsdp.stored_state import StoredState, by_rank

logger = logging.getLogger(__name__)

TOTAL_STEPS = "run.total_steps"
"""Entry of a checkpoint: length of the run, [] int64; a falling learning rate depends on it."""


def published_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and (sharded) tensors of `model.state_dict()` in its order; a tied tensor once, under its first name. With
    adapters: the adapters only, under their published names, unscaled."""
    state, seen = model.state_dict(keep_vars=True), set[int]()
    adapters = {name.replace(f".{lora.ADAPTER}.", "."): tensor for name, tensor in state.items() if ".lora_" in name}
    for name, tensor in (adapters or state).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank; collective if sharded. If one rank has all of it, returns its own memory:
    DTensor's check for this takes longer than copying a small tensor."""
    if not isinstance(tensor, DTensor):
        return tensor
    mesh = tensor.device_mesh
    if all(placed.is_replicate() or mesh.size(dim) == 1 for dim, placed in enumerate(tensor.placements)):
        return tensor.to_local()
    return tensor.full_tensor()


def of_model(
    name: str, model: nn.Module, optimizer_name: str, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Flat names below `name` and `optimizer_name` -> live tensors; loading writes into them."""
    found: dict[str, torch.Tensor] = {}
    for key, tensor in published_tensors(model):
        found[f"{name}.{key}"] = tensor.detach()
        moments = optimizer.state.get(tensor, {})
        found.update((f"{optimizer_name}.{key}.{kind}", value) for kind, value in moments.items())
    return found


def with_random_state(live: dict[str, torch.Tensor], *, rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The entries of this rank's checkpoint: `live`, and its random state."""
    return live | {f"rng.{rank}": _random_state(device)}


def save(
    directory: Path,
    captured: dict[str, torch.Tensor],
    group: dist.ProcessGroup | None,
    planner: dcp.SavePlanner | None = None,
) -> None:
    """Writes copies of `with_random_state`'s result below `directory`; collective over `group`, a gloo group without
    other users.

    Args:
        planner: provides the tensors; default: those of `captured`.

    Raises:
        StorageError: a rank could not write. Raised on every rank.
    """
    # The store digests every file of a checkpoint; torch's own checksum costs twice as much as the rest of writing.
    torch.serialization.set_crc32_options(False)
    writer = dcp.FileSystemWriter(directory, per_thread_copy_ahead=0)  # 0: the copies lie on the host, no CUDA stream
    try:
        dcp.save(captured, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:  # not an Exception: it must not leave this process unconverted
        do = "make room there, or repair the directory; the state in training is not touched"
        raise StorageError(explain(f"write the trainer's state to {directory}", by_rank(error), do)) from error


def files_of(directory: Path, rank: int) -> tuple[str, ...]:
    """Names of the files that `rank` wrote in `save`."""
    own = sorted(path.name for path in directory.glob(f"__{rank}_*"))
    return (*own, ".metadata") if rank == 0 else tuple(own)


def load(directory: Path, wanted: dict[str, torch.Tensor], *, rank: int, device: torch.device) -> None:
    """Restores what `save` wrote into the tensors of `wanted` (`of_model`); collective.

    A rank keeps its present random state if the checkpoint has none for it (there are more ranks now), or has one of
    another kind of device.

    Raises:
        ConfigError: there is no checkpoint below `directory`, or it is of another model. Nothing was loaded.
    """
    asked = f"load the trainer's state from {directory}"
    written = StoredState(directory, asked)
    _check_same_state(wanted, written, asked)
    random_state, name = _random_state(device), f"rng.{rank}"
    known = name in written and written.shape(name) == tuple(random_state.shape)
    if name in written and not known:
        logger.warning("rank %d keeps its own random state: that in %s is of another kind of device", rank, directory)
    written.read_into(wanted | ({name: random_state} if known else {}))
    if known:
        _set_random_state(random_state, device)


def read_entries(directory: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The entries `names`, whole; collective. Raises ConfigError: no checkpoint there."""
    written = StoredState(directory, f"load the trainer's state from {directory}")
    found = {name: written.empty(name) for name in names if name in written}
    if found:
        written.read_into(found)
    return found


def _check_same_state(wanted: dict[str, torch.Tensor], written: StoredState, asked: str) -> None:
    """Raises ConfigError, naming the tensors that are missing, surplus or of another shape."""
    missing = [name for name in wanted if name not in written]
    surplus = [name for name in written.entries if name.startswith("model.") and name not in wanted]
    has_adapters = lora.SCALE in written
    wants_adapters = any(".lora_" in name for name in wanted)
    new = "or start a new run from what asyncrl-export makes of it"
    # Specific causes first, each with its own advice; then any difference in names, then in shapes.
    if has_adapters != wants_adapters:
        kinds = ("all weights", "adapters alone (trainer.lora)")
        found = f"it holds {kinds[has_adapters]}, and this run trains {kinds[wants_adapters]}"
        raise ConfigError(explain(asked, found, f"keep trainer.lora.rank, {new}"))
    if missing and all(name.startswith(("critic.", "critic_optimizer.")) for name in missing):
        found = f"it has no critic: {missing[0]} and {len(missing) - 1} more are not in it"
        raise ConfigError(explain(asked, found, f"keep algorithm.advantage, {new}"))
    keep = "trainer.lora.rank and trainer.lora.target_modules" if wants_adapters else "the model.path that was trained"
    if missing or surplus:
        what = f"has no {missing[0]}" if missing else f"also has {surplus[0]}"
        found = f"it {what} ({len(missing)} tensors missing, {len(surplus)} too many)"
        raise ConfigError(explain(asked, found, f"keep {keep}, {new}"))
    for name, tensor in wanted.items():
        shape = written.shape(name)
        if shape != tuple(tensor.shape):
            found = f"{name} has the shape {list(shape)} in it, {list(tensor.shape)} in this run"
            keep = "algorithm.critic.path" if name.startswith("critic") else keep
            raise ConfigError(explain(asked, found, f"keep {keep}, {new}"))


def _random_state(device: torch.device) -> torch.Tensor:
    """[bytes] uint8: the CPU's generator, then the device's."""
    parts = [torch.get_rng_state()]
    if device.type == "cuda":
        parts.append(torch.cuda.get_rng_state(device))
    return torch.cat(parts)


def _set_random_state(value: torch.Tensor, device: torch.device) -> None:
    size = torch.get_rng_state().numel()
    torch.set_rng_state(value[:size])
    if device.type == "cuda" and value.numel() > size:
        torch.cuda.set_rng_state(value[size:], device)
