"""Models over Megatron-core's pipeline schedule, as the training step sees them: `FrozenModel` and `Model`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from asyncrl.algorithms.objective import LossStatistics
from asyncrl.trainer.megatron.heads import Head
from asyncrl.trainer.megatron.model import DecoderChunk, Groups, packed_row
from asyncrl.trainer.megatron.optimizer import DistributedUpdate
from asyncrl.trainer.step.batch import PackedLayout, PackedTokens
from asyncrl.trainer.step.model import LossFunction, Output, Part


class PipelineFrozen(Generic[Output]):
    """The `FrozenModel` of the chunks of a model."""

    def __init__(
        self, chunks: Sequence[nn.Module], config: TransformerConfig, head: Head[Output], groups: Groups
    ) -> None:
        """`chunks`: of this rank; `DecoderChunk`s, maybe wrapped."""
        self._chunks, self._config, self._head, self._groups = list(chunks), config, head, groups

    @torch.no_grad()
    def evaluate(self, batches: Sequence[PackedTokens]) -> list[Output]:
        """See `FrozenModel`."""
        if not batches:  # on every rank
            return []
        found: dict[int, torch.Tensor] = {}

        def keep(at: int, numbers: torch.Tensor) -> torch.Tensor:
            found[at] = numbers
            return numbers.sum()

        self._run(batches, keep, learns=False)
        counts = [tokens.targets.numel() for tokens in batches]
        ids = batches[0].input_ids
        whole = torch.empty(self._head.rows, sum(counts), dtype=torch.float32, device=ids.device)
        if self._groups.is_last_stage:
            whole = torch.cat([found[at] for at in range(len(batches))], 1).contiguous()
        self._from_last_stage(whole)
        return [self._head.output(part) for part in whole.split(counts, 1)]

    def _run(
        self, batches: Sequence[PackedTokens], use: Callable[[int, torch.Tensor], torch.Tensor], *, learns: bool
    ) -> None:
        """Runs the schedule. On the last stage `use` gets the number of each micro-batch and the head's numbers for it,
        and returns the loss."""
        config, rows = self._config, list(batches)
        stages = self._groups.pipeline.size()
        if len(self._chunks) > 1:  # the interleaved schedule takes whole groups of micro-batches
            rows += [_nothing(rows[0])] * (-len(rows) % stages)
        multiple = self._groups.place.num_tensor if config.sequence_parallel else 1

        def forward(numbers: Iterator[int], chunk: nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
            at = next(numbers)
            ids, positions, row = packed_row(rows[at], multiple)
            hidden = chunk(ids, positions, None, packed_seq_params=row)

            def loss(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
                result = self._head(_decoder(chunk), hidden, rows[at])
                value = use(at, result) if at < len(batches) else result.sum() * 0.0
                return value, torch.zeros((), dtype=torch.int, device=value.device), None

            return hidden, loss

        chunked = len(self._chunks) > 1
        numbers = [iter(range(len(rows))) for _ in self._chunks]
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=numbers if chunked else numbers[0],
            model=self._chunks if chunked else self._chunks[0],
            num_microbatches=len(rows),
            seq_length=1,  # stages tell each other the shapes
            micro_batch_size=1,
            forward_only=not learns,
        )

    def _from_last_stage(self, values: torch.Tensor) -> None:
        """Replaces `values` by those of the last stage. Collective over the stages."""
        group = self._groups.pipeline
        if group.size() > 1:
            dist.broadcast(values, group=group, group_src=group.size() - 1)


class PipelineTrained(PipelineFrozen[Output]):
    """The `Model` of the chunks of a model and their optimizer."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        config: TransformerConfig,
        head: Head[Output],
        groups: Groups,
        update: DistributedUpdate,
    ) -> None:
        """`chunks`: wrapped for `update`, their optimizer."""
        super().__init__(chunks, config, head, groups)
        self.clip_gradients, self.update, self.drop_gradients = update.clip, update.step, update.drop

    def train(self, mode: bool) -> None:
        for chunk in self._chunks:
            chunk.train(mode)

    def forward_backward(
        self, batches: Sequence[PackedTokens], loss_function: LossFunction[Output], *, learns: bool
    ) -> list[Part]:
        """See `Model`."""
        found: dict[int, Part] = {}

        def use(at: int, numbers: torch.Tensor) -> torch.Tensor:
            part = loss_function(at, self._head.output(numbers))
            found[at] = part.detached()
            return part.loss

        with torch.set_grad_enabled(learns):
            self._run(batches, use, learns=learns)
        return self._of_all_stages([found[at] for at in sorted(found)], len(batches), batches[0].input_ids.device)

    def _of_all_stages(self, parts: list[Part], count: int, device: torch.device) -> list[Part]:
        """The parts of the last stage on every stage. Collective over the stages."""
        group = self._groups.pipeline
        if group.size() == 1:
            return parts
        named: list[Any] = [[name for name, _ in parts[0].seen.sums] if parts else None]
        dist.broadcast_object_list(named, group=group, group_src=group.size() - 1, device=device)
        names: list[str] = named[0]
        values = torch.empty(count, 2 + len(names), dtype=torch.float64, device=device)
        for at, part in enumerate(parts):
            numbers = (part.loss, part.seen.ratio_max, *(value for _, value in part.seen.sums))
            values[at] = torch.stack([number.double() for number in numbers])
        self._from_last_stage(values)
        return [
            Part(row[0].float(), LossStatistics(tuple(zip(names, row[2:], strict=True)), ratio_max=row[1].float()))
            for row in values
        ]


def _decoder(chunk: nn.Module) -> DecoderChunk:
    inner = chunk if isinstance(chunk, DecoderChunk) else chunk.module
    assert isinstance(inner, DecoderChunk), "chunks are decoders, wrapped at most once"
    return inner


def _nothing(like: PackedTokens) -> PackedTokens:
    """A row of one token."""
    zero = torch.zeros(1, dtype=torch.int64, device=like.input_ids.device)
    layout = PackedLayout(1, 1, zero, torch.tensor([0, 1], dtype=torch.int32, device=zero.device))
    return replace(like, input_ids=zero[None], position_ids=zero[None], layout=layout, predictors=zero, targets=zero)
