"""Checkpoints: every rank writes its own tensors to one safetensors file, whose header describes them.

A file holds this rank's shares of the master weights and of both moments, in float32, of policy and critic. For each
parameter the header has its shape, the range of the flattened parameter that this rank holds, and the blocks of Hugging
Face tensors that it consists of (`names.py`). Ranks of any other layout and `asyncrl-export` can therefore read weights
and optimizer state. Nothing in a file is executed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from asyncrl.errors import ConfigError, StorageError, explain
from asyncrl.trainer.megatron.names import Block, LocalTensor, order

FIRST_FILE = "rank00000.safetensors"
MASTER = "master"
"""Kind of a tensor: float32 weights."""
TOTAL_STEPS = "total_steps"
"""Number in a checkpoint: length of the run; a falling learning rate depends on it."""
_HEADER, _FORMAT, _RANDOM, _CONVERTED = "asyncrl", 1, "random", "converted"
_CACHED = 3
"""Parameters cached in memory while another layout reads them block by block."""


@dataclass(frozen=True, slots=True)
class _Range:
    """Entries `[start, stop)` of a flattened parameter, in a file."""

    file: Path
    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Stored:
    """A parameter of the writing ranks. Ranks that hold the same blocks hold the same values."""

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]


def header(
    rank: int,
    world_size: int,
    numbers: dict[str, int],
    parameters: Mapping[str, tuple[Sequence[int], int, int, LocalTensor]],
    *,
    converted: bool = False,
) -> str:
    """Args:
    numbers: of the run, by name.
    parameters: name in the file -> shape, range of the flattened parameter, contents.
    converted: the file is made from another backend's checkpoint and has no random state.
    """
    described = {
        name: {
            "shape": list(shape),
            "range": [start, stop],
            "blocks": [[b.name, b.dim, b.start, b.local, b.length] for b in contents.blocks],
        }
        for name, (shape, start, stop, contents) in parameters.items()
    }
    found = {"format": _FORMAT, "rank": rank, "world_size": world_size, "numbers": numbers, "parameters": described}
    return json.dumps(found | ({_CONVERTED: True} if converted else {}))


def write(directory: Path, described: str, tensors: dict[str, torch.Tensor], group: dist.ProcessGroup) -> None:
    """Writes the files of all ranks; collective over `group`, which has no other users.

    Raises:
        StorageError: a rank could not write. Raised on every rank.
    """
    failure = None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_file(file_of(directory, group.rank()), described, tensors)
    except (OSError, SafetensorError) as error:
        failure = f"{type(error).__name__}: {error}"
    # Every rank learns of every failure, so all ranks raise or none does.
    failures: list[str | None] = [None] * group.size()
    dist.all_gather_object(failures, failure, group=group)
    found = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None)
    if found:
        do = "make room there, or repair the directory; the state in training is not touched"
        raise StorageError(explain(f"write the trainer's state to {directory}", found, do))


def file_of(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank:05d}.safetensors"


def write_file(file: Path, described: str, tensors: dict[str, torch.Tensor]) -> None:
    """`described`: of `header`. Raises OSError, SafetensorError."""
    save_file(tensors, file, metadata={_HEADER: described})


class RankFiles:
    """The files that `write` left in one trainer directory; tensors are read on request.

    Attributes:
        world_size: number of ranks that wrote it.
        numbers: as given to `header` by the first rank.
    """

    def __init__(self, directory: Path, asked: str) -> None:
        """`asked`: the purpose of opening it, for messages.

        Raises:
            ConfigError: there is no checkpoint, or it cannot be read.
        """
        self._asked, self._directory = asked, directory
        if not (directory / FIRST_FILE).is_file():
            raise ConfigError(explain(asked, "no checkpoint there", "name the trainer directory of a checkpoint"))
        self._ranges: dict[str, dict[_Stored, list[_Range]]] = {}
        self._holders: dict[str, dict[str, list[tuple[_Stored, Block]]]] = {}
        self._lately = lru_cache(_CACHED)(self._assembled)
        try:
            first = self._add(directory / FIRST_FILE)
            self._has_random_state = not first.get(_CONVERTED, False)
            self.world_size, self.numbers = int(first["world_size"]), dict(first["numbers"])
            for rank in range(1, self.world_size):
                self._add(file_of(directory, rank))
        except (OSError, SafetensorError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise self.unfit(f"{type(error).__name__}: {error}") from error

    def names(self, model: str) -> list[str]:
        """The Hugging Face names of `model` in order."""
        return sorted(self._holders.get(model, {}), key=order)

    def whole(self, model: str, kind: str, name: str) -> torch.Tensor:
        """The whole tensor `name`, float32. Raises ConfigError."""
        held = self._holders.get(model, {}).get(name)
        if not held:
            raise self.unfit(f"it has no {name} of the {model}")
        shape, dim = _whole_shape(held), held[0][1].dim
        try:
            target = torch.empty(shape, dtype=torch.float32)
        except (RuntimeError, MemoryError) as error:  # a forged shape
            raise self.unfit(f"{name} would have the shape {list(shape)}: {error}") from error
        extent = LocalTensor((Block(name, dim, 0, 0, shape[dim]),), False, dim)
        self.read_into(target, extent, model, kind)
        return target

    def shapes(self, model: str) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole tensors of `model`, by name in order."""
        return {name: _whole_shape(self._holders[model][name]) for name in self.names(model)}

    def read_into(self, target: torch.Tensor, contents: LocalTensor, model: str, kind: str) -> None:
        """Fills `target`, [shape of a parameter] float32, according to `contents`; padding is 0.

        Args:
            kind: `MASTER` or a moment.

        Raises:
            ConfigError: an entry is missing, or has another shape.
        """
        # Same layout as the writer's: take the parameter whole. Otherwise block by block.
        same = _Stored(tuple(target.shape), contents.blocks)
        if same in self._ranges.get(model, {}) and contents.blocks:
            target.copy_(self._assembled(model, same, kind))
            return
        target.zero_()
        try:
            for block in contents.blocks:
                self._fill(target, block, model, kind)
        except (RuntimeError, IndexError) as error:  # blocks outside their tensors
            raise self.unfit(f"a header does not fit its tensors: {error}") from error

    def random_state(self, rank: int) -> torch.Tensor | None:
        """[bytes] uint8; None in a converted checkpoint. Raises ConfigError."""
        return self._tensor(file_of(self._directory, rank), _RANDOM) if self._has_random_state else None

    def unfit(
        self, found: str, do: str = "name another checkpoint, or its run directory for the newest intact one"
    ) -> ConfigError:
        return ConfigError(explain(self._asked, found, do))

    def _fill(self, target: torch.Tensor, block: Block, model: str, kind: str) -> None:
        """Copies the entries of `block` from all stored parameters that hold some."""
        missing = block.length
        done: set[int] = set()
        for stored, other in self._holders.get(model, {}).get(block.name, []):
            low, high = max(block.start, other.start), min(block.start + block.length, other.start + other.length)
            if low >= high or low in done:
                continue
            values = self._lately(model, stored, kind)
            part = values.narrow(other.dim, other.local + low - other.start, high - low)
            place = target.narrow(block.dim, block.local + low - block.start, high - low)
            if part.shape != place.shape:
                raise self.unfit(f"{block.name} has the shape {list(part.shape)} in it, {list(place.shape)} here")
            place.copy_(part)
            done.add(low)
            missing -= high - low
        if missing:
            raise self.unfit(f"it lacks {missing} of {block.length} entries of {block.name}")

    def _assembled(self, model: str, stored: _Stored, kind: str) -> torch.Tensor:
        """The whole parameter of the ranks that wrote it. Raises ConfigError."""
        parts, at = [], 0
        for held in sorted(self._ranges[model][stored], key=lambda r: (r.start, -r.stop)):
            if held.stop <= at:
                continue  # a copy: ranks of other stages or experts hold this range too
            values = self._tensor(held.file, f"{held.name}.{kind}")
            if values.shape != (held.stop - held.start,) or held.start > at:
                raise self.unfit(f"{held.name}.{kind} of {held.file.name} is not of the range that its header says")
            parts.append(values[at - held.start :].float())
            at = held.stop
        if at != torch.Size(stored.shape).numel():
            raise self.unfit(f"it has {at} entries of {list(stored.shape)} of {stored.blocks[0].name}")
        return torch.cat(parts).view(stored.shape)

    def _tensor(self, file: Path, name: str) -> torch.Tensor:
        try:
            with safe_open(file, framework="pt") as opened:
                return opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise self.unfit(f"{name} of {file.name} cannot be read: {error}") from error

    def _add(self, file: Path) -> dict[str, Any]:
        """Adds the parameters of one file; returns its header. Raises any error of reading it."""
        with safe_open(file, framework="pt") as opened:
            found = json.loads(opened.metadata()[_HEADER])
        if found["format"] != _FORMAT:
            raise ValueError(f"{file.name} has the format {found['format']}, known is {_FORMAT}")
        for name, parameter in found["parameters"].items():
            blocks = tuple(_block(fields) for fields in parameter["blocks"])
            stored = _Stored(tuple(_whole(n) for n in parameter["shape"]), blocks)
            start, stop = (_whole(n) for n in parameter["range"])
            model = name.partition(".")[0]
            ranges = self._ranges.setdefault(model, {})
            if stored not in ranges:
                for block in blocks:
                    self._holders.setdefault(model, {}).setdefault(block.name, []).append((stored, block))
            ranges.setdefault(stored, []).append(_Range(file, name, start, stop))
        return found


def _whole_shape(held: Sequence[tuple[_Stored, Block]]) -> tuple[int, ...]:
    """Shape of the tensor that the blocks form."""
    stored, block = held[0]
    shape = list(stored.shape)
    shape[block.dim] = sum({b.start: b.length for _, b in held}.values())
    return tuple(shape)


def with_random_state(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {_RANDOM: torch.get_rng_state()}


def _block(fields: Sequence[Any]) -> Block:
    name, *numbers = fields
    if not isinstance(name, str) or len(numbers) != 4:
        raise ValueError(f"{fields} is no block")
    return Block(name, *(_whole(n) for n in numbers))


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} where a whole number is due")
    return value
