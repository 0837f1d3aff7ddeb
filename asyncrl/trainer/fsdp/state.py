"""The sharded state of a rank: which tensors are published, and how a checkpoint is written and read.

A checkpoint holds the weights and AdamW's two moments under Hugging Face names, in torch.distributed.checkpoint's
format: every rank writes its shards, and any number of ranks reads them back into theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from asyncrl.errors import ConfigError, explain


def published_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and (sharded) tensors of `model.state_dict()` in its order; a tied tensor once, under its first name."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank; collective when it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save(
    directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, rank: int, device: torch.device
) -> None:
    """Writes weights, moments and this rank's random state below `directory`; collective."""
    dcp.save(_state(model, optimizer) | {f"rng.{rank}": _random_state(device)}, checkpoint_id=directory)


def load(
    directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, rank: int, device: torch.device
) -> None:
    """Restores what `save` wrote into the tensors of `model` and `optimizer`; collective.

    A rank that the checkpoint does not know (there are more ranks now) keeps the random state that it has.

    Raises:
        ConfigError: there is no checkpoint below `directory`, or it is of another model.
    """
    asked = f"load the trainer's state from {directory}"
    try:
        written = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    except FileNotFoundError as error:
        raise ConfigError(
            explain(asked, "no checkpoint there", "name the trainer directory of a checkpoint")
        ) from error
    wanted = _state(model, optimizer)
    random_state = _random_state(device)
    known = f"rng.{rank}" in written
    try:
        dcp.load(wanted | ({f"rng.{rank}": random_state} if known else {}), checkpoint_id=directory)
    except CheckpointException as error:
        raise ConfigError(explain(asked, str(error), "set model.path to the model that was trained")) from error
    if known:
        _set_random_state(random_state, device)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Flat names to live tensors; loading writes into them."""
    found: dict[str, Any] = {}
    for name, tensor in published_tensors(model):
        found[f"model.{name}"] = tensor.detach()
        moments = optimizer.state.get(tensor, {})
        found.update((f"optimizer.{name}.{key}", value) for key, value in moments.items())
    return found


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
