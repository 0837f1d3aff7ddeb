"""Adapts models over Megatron-core's pipeline schedule to the training step's protocols: `FrozenModel` and `Model`,
with the heads after the last stage's hidden states: the output layer of a policy, the value head of a critic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from asyncrl.algorithms import by_lag
from asyncrl.algorithms.objective import LossStatistics
from asyncrl.trainer.megatron.model import DecoderChunk, Groups, gathered
from asyncrl.trainer.megatron.optimizer import DistributedUpdate
from asyncrl.trainer.megatron.routing import RoutingSums, RowRouting, WatchedRouters
from asyncrl.trainer.megatron.rows import on_predictors, packed_row
from asyncrl.trainer.step.batch import PackedLayout, PackedTokens
from asyncrl.trainer.step.model import LossFunction, Output, Part, TokenOutputs
from asyncrl.trainer.token_logprobs import LogitRules, SplitVocabulary, token_logprobs

Result = TypeVar("Result", covariant=True)
LOGITS = LogitRules(per_chunk=1 << 26)
"""Chunks of 256 MiB in float32."""


class Head(Protocol, Generic[Result]):
    rows: int
    """Number of results per predicted token."""

    def __call__(self, chunk: DecoderChunk, hidden: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
        """[rows, n] float32, the same on all tensor-parallel ranks; n may be 0. `hidden`: output of `chunk`, the last
        one."""
        ...

    def output(self, numbers: torch.Tensor, routing: RoutingSums | None = None) -> Result:
        """Packs [rows, n] and, if requested, the routing sums."""
        ...


class PolicyHead:
    rows = 2

    def __init__(self, vocab_size: int, group: dist.ProcessGroup) -> None:
        """`group`: the tensor-parallel ranks."""
        self._split = SplitVocabulary(group, vocab_size)

    def __call__(self, chunk: DecoderChunk, hidden: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
        """Log-probability and entropy of each predicted token."""
        weight = chunk.output_weight()
        rows = gathered(hidden, chunk.config, partial_gradients=True).index_select(0, tokens.predictors)
        logits = rows.to(weight.dtype), weight, None, tokens.targets
        found = token_logprobs(*logits, temperature=tokens.temperature, rules=LOGITS, split=self._split)
        return torch.stack(found)

    def output(self, numbers: torch.Tensor, routing: RoutingSums | None = None) -> TokenOutputs:
        sums = () if routing is None else (routing.chosen, routing.given)
        return TokenOutputs(*numbers, *sums)


class ValueHead:
    rows = 1

    def __call__(self, chunk: DecoderChunk, hidden: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
        """The value of the text before each predicted token, computed in float32 by every tensor-parallel rank."""
        rows = gathered(hidden, chunk.config, partial_gradients=False).index_select(0, tokens.predictors)
        return chunk.value_head(rows.float()).T

    def output(self, numbers: torch.Tensor, routing: RoutingSums | None = None) -> torch.Tensor:
        return numbers[0]


class PipelineFrozen(Generic[Output]):
    """The `FrozenModel` of the chunks of a model."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        config: TransformerConfig,
        head: Head[Output],
        groups: Groups,
        watched: WatchedRouters | None = None,
    ) -> None:
        """
        Args:
            chunks: of this rank; `DecoderChunk`s, possibly wrapped.
            watched: the routers, if they are hooked.
        """
        self._chunks, self._config, self._head, self._groups = list(chunks), config, head, groups
        self._watched = watched

    @torch.no_grad()
    def evaluate(self, batches: Sequence[PackedTokens]) -> list[Output]:
        """See `FrozenModel`."""
        if not batches:  # true on all ranks or on none
            return []
        found: dict[int, torch.Tensor] = {}

        def keep(at: int, numbers: torch.Tensor) -> torch.Tensor:
            found[at] = numbers
            return numbers.sum()

        routing = self._run(batches, keep, learns=False)
        counts = [tokens.targets.numel() for tokens in batches]
        ids = batches[0].input_ids
        whole = torch.empty(self._head.rows, sum(counts), dtype=torch.float32, device=ids.device)
        if self._groups.pipeline.rank() == self._groups.pipeline.size() - 1:
            whole = torch.cat([found[at] for at in range(len(batches))], 1).contiguous()
        self._from_last_stage(whole)
        return [self._head.output(*one) for one in zip(whole.split(counts, 1), routing, strict=True)]

    def _run(
        self, batches: Sequence[PackedTokens], use: Callable[[int, torch.Tensor], torch.Tensor], *, learns: bool
    ) -> Sequence[RoutingSums | None]:
        """Runs the schedule; returns the routing sums of each micro-batch, None without watched routers. On the last
        stage `use` gets the index of each micro-batch and the head's results for it, and returns the loss."""
        config, rows = self._config, list(batches)
        stages = self._groups.pipeline.size()
        if len(self._chunks) > 1:  # the interleaved schedule needs whole groups of micro-batches
            rows += [_nothing(rows[0])] * (-len(rows) % stages)
        routings: dict[int, RowRouting] = {}

        def forward(numbers: Iterator[int], chunk: nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
            at = next(numbers)
            ids, positions, row = packed_row(
                rows[at],
                self._groups.coordinates,
                self._groups.context,
                sequence_parallel=config.sequence_parallel,
                by_engine=config.transformer_impl == "transformer_engine",
                watched=self._watched,
            )
            if row.routing is not None:  # shared by all chunks: each adds its layers
                row.routing = routings.setdefault(at, row.routing)
            hidden = chunk(ids, positions, None, packed_seq_params=row)

            def loss(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
                result = on_predictors(
                    rows[at],
                    row,
                    self._groups.context,
                    lambda tokens: self._head(decoder_of(chunk), hidden, tokens),
                )
                # Padding micro-batches run through the head as well, with a loss of 0.
                value = use(at, result) if at < len(batches) else result.sum() * 0.0
                return value, torch.zeros((), dtype=torch.int, device=value.device), None

            return hidden, loss

        chunked = len(self._chunks) > 1
        # The schedule calls `forward` once per chunk and micro-batch, so each chunk counts its own calls.
        numbers = [iter(range(len(rows))) for _ in self._chunks]
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=numbers if chunked else numbers[0],
            model=self._chunks if chunked else self._chunks[0],
            num_microbatches=len(rows),
            seq_length=1,  # ignored: stages exchange the shapes
            micro_batch_size=1,
            forward_only=not learns,
        )
        if not routings:
            return [None] * len(batches)
        split = (self._groups.tensor, self._groups.context, self._groups.pipeline)
        return RoutingSums.of_all_ranks([routings[at] for at in range(len(batches))], split)

    def _from_last_stage(self, values: torch.Tensor) -> None:
        """Replaces `values` by the last stage's. Collective over the stages."""
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
        watched: WatchedRouters | None = None,
    ) -> None:
        """`chunks`: wrapped for `update`, their optimizer."""
        super().__init__(chunks, config, head, groups, watched)
        self.clip_gradients, self.update, self.drop_gradients = update.clip, update.step, update.drop

    def train(self, mode: bool) -> None:
        for chunk in self._chunks:
            chunk.train(mode)

    def forward_backward(
        self, batches: Sequence[PackedTokens], loss_function: LossFunction[Output], *, learns: Sequence[bool]
    ) -> list[Part]:
        """See `Model`."""
        found: dict[int, Part] = {}

        def use(at: int, numbers: torch.Tensor) -> torch.Tensor:
            part = loss_function(at, self._head.output(numbers))
            found[at] = part.detached()
            return part.loss

        with torch.set_grad_enabled(any(learns)):
            routing = self._run(batches, use, learns=any(learns))
        parts = self._of_all_stages([found[at] for at in sorted(found)], len(batches), batches[0].input_ids.device)
        return [_with_balance(*one) for one in zip(parts, batches, routing, strict=True)]

    def _of_all_stages(self, parts: list[Part], count: int, device: torch.device) -> list[Part]:
        """The last stage's parts on every stage. Collective over the stages."""
        group = self._groups.pipeline
        if group.size() == 1:
            return parts
        named: list[Any] = [[name for name, _ in parts[0].seen.sums] if parts else None]
        dist.broadcast_object_list(named, group=group, group_src=group.size() - 1, device=device)
        names: list[str] = named[0]
        scalars = 2 + len(names)
        values = torch.empty(count, scalars + math.prod(by_lag.SHAPE), dtype=torch.float64, device=device)
        for at, part in enumerate(parts):
            numbers = (part.loss, part.seen.ratio_max, *(value for _, value in part.seen.sums))
            values[at, :scalars] = torch.stack([number.double() for number in numbers])
            values[at, scalars:] = 0 if part.seen.by_lag is None else part.seen.by_lag.flatten()
        self._from_last_stage(values)
        found = []
        for row in values:
            sums = tuple(zip(names, row[2:scalars], strict=True))
            of_lags = row[scalars:].reshape(by_lag.SHAPE)
            found.append(Part(row[0].float(), LossStatistics(sums, row[1].float(), of_lags)))
        return found


def decoder_of(chunk: nn.Module) -> DecoderChunk:
    """The decoder inside an optimizer's wrapper, if there is one."""
    inner = chunk if isinstance(chunk, DecoderChunk) else chunk.module
    assert isinstance(inner, DecoderChunk), "chunks are decoders, wrapped at most once"
    return inner


def _with_balance(part: Part, tokens: PackedTokens, routing: RoutingSums | None) -> Part:
    if routing is None or tokens.balance is None:
        return part
    return replace(part, balance=(tokens.balance * routing.given).sum())


def _nothing(like: PackedTokens) -> PackedTokens:
    """A row of one token."""
    zero = torch.zeros(1, dtype=torch.int64, device=like.input_ids.device)
    layout = PackedLayout.of([1], zero.device)
    return PackedTokens(zero[None], zero[None], layout, zero, zero, like.temperature)
