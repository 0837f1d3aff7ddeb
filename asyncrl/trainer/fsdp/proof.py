"""How rows of several sequences pass through a model, proven on its own weights: in one packed row, or padded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from asyncrl.errors import ConfigError, explain
from asyncrl.kernels.images import ROUNDING, ImageInputs
from asyncrl.kernels.routers import RouterChoice, RouterTaps
from asyncrl.trainer.fsdp.attention import PACKED_ROWS, PACKED_SDPA
from asyncrl.trainer.fsdp.context import RowPart
from asyncrl.trainer.step.batch import PackedLayout, PackedTokens
from asyncrl.types import decoder_of

logger = logging.getLogger(__name__)

Packing = Literal["auto", "packed", "padded"]
_LENGTHS = (21, 7, 37)
_PADDED = ("sdpa", "eager")
"""Attention of padded rows, the faster one first: not all models have it, and it leaves out the caps of scores, which
short random sequences may not reach."""


@dataclass(frozen=True, slots=True)
class Way:
    """`attention`: of transformers. `pads`: sequences are rows of a batch, filled up on the right, where causal layers
    never look. `scale`: the model's logits over those of its output layer. `cap`: of `LogitRules`."""

    attention: str = PACKED_SDPA
    pads: bool = False
    scale: float = 1.0
    cap: float = 0.0


def forward_row(
    model: PreTrainedModel,
    part: RowPart,
    way: Way,
    taps: RouterTaps | None = None,
    images: ImageInputs | None = None,
    *,
    routing: bool = False,
) -> tuple[torch.Tensor, list[RouterChoice]]:
    """[n, hidden size]: the last layer's output at the predictor of each predicted token of this rank's part. Routers
    take the experts of the tokens. With `routing` also what they choose by themselves, for the N tokens of the row.
    Collective over the ranks that share the row.

    Args:
        taps: of the model; None: tokens bring no experts, and `routing` is not requested.
        images: of the model; None: tokens have none.
    """
    tokens = part.tokens
    batch, places = _padded(tokens) if way.pads else (None, torch.arange(part.num_real, device=tokens.targets.device))
    if taps is not None:
        taps.experts = tokens.experts
        if batch is not None and tokens.experts is not None:  # what fills up chooses for itself
            filled = tokens.experts.new_full((batch.numel(), *tokens.experts.shape[1:]), -1)
            taps.experts = filled.index_copy_(0, places, tokens.experts)
    with nullcontext([]) if taps is None or not routing else taps.recorded() as seen:
        read = partial(decoder_of(model) if images is None else partial(images.read, model), use_cache=False)
        found = read(batch) if batch is not None else _packed(read, part)
    choices = [RouterChoice(of.scores.index_select(0, places), of.experts.index_select(0, places)) for of in seen]
    hidden = found.last_hidden_state.flatten(0, 1)
    predictors = tokens.predictors if batch is None else places.index_select(0, tokens.predictors)
    return hidden.index_select(0, predictors), choices


def _packed(read: Callable[..., Any], part: RowPart) -> Any:
    tokens, layout = part.tokens, part.tokens.layout
    return read(
        tokens.input_ids,
        position_ids=tokens.position_ids,
        packed_layout=layout,
        exchange=part.exchange,
        # flash attention reads these; the other implementations read the layout
        cu_seq_lens_q=layout.boundaries,
        cu_seq_lens_k=layout.boundaries,
        max_length_q=layout.max_length,
        max_length_k=layout.max_length,
    )


def _padded(tokens: PackedTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """[sequences, longest] token ids, and [N] int64: the place of each token of the row among them. One batch for all
    lengths: ranks must make equally many passes."""
    layout = tokens.layout
    lengths = layout.class_boundaries.diff().long()
    count, longest = len(lengths), layout.max_length
    starts = layout.class_boundaries[:-1].long()
    gaps = torch.arange(count, device=lengths.device) * longest - starts
    slots = torch.arange(int(lengths.sum()), device=lengths.device) + gaps.repeat_interleave(lengths)
    ids = tokens.input_ids[0] if layout.order is None else tokens.input_ids[0].index_select(0, layout.order)
    batch = ids.new_zeros(count * longest).index_copy_(0, slots, ids).view(count, longest)
    places = slots if layout.places is None else slots.index_select(0, layout.places)
    return batch, places


def of_first_rank(ranks: dist.ProcessGroup, find: Callable[[], Any], asked: str) -> Any:
    """What `find` returns on the first rank, which has the weights, on all ranks, which wait for it as long as `ranks`
    lets them. Collective. Raises ConfigError on every rank if it raises there; `asked`: what it does, in words."""
    said: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            said = [find()]
        except ConfigError as error:
            said = [error]
        except Exception as error:  # noqa: BLE001 - the other ranks wait for the outcome
            said = [ConfigError(explain(asked, f"{type(error).__name__}: {error}", "train another model"))]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(said, src=0, group=ranks)
    if isinstance(said[0], ConfigError):
        raise said[0]
    return said[0]


def agreed(model: PreTrainedModel, ranks: dist.ProcessGroup, attention: str, packing: Packing, *, head: bool) -> Way:
    """`prove` on the first rank; all ranks get its outcome. Collective."""
    asked = f"pass three short sequences through a {type(model).__name__} on the CPU"
    way: Way = of_first_rank(ranks, partial(prove, model, attention, packing, head=head), asked)
    if way.pads and packing == "auto":
        text = (
            "rows of a %s are padded: set trainer.packing=padded, so that micro-batches are planned as they are padded"
        )
        logger.warning(text, type(model).__name__)
    model.set_attn_implementation(PACKED_ROWS if way.attention == PACKED_SDPA else way.attention)
    return way


@torch.no_grad()
def prove(model: PreTrainedModel, attention: str, packing: Packing = "auto", *, head: bool = True) -> Way:
    """The first way in which sequences of a row give what the model gives for each alone. The model's attention is then
    another one: set that of the way.

    Args:
        attention: of packed rows. A kernel of a GPU is proven in `require_isolation`, when the weights are there; here
            packed_sdpa stands for it.
        head: the model has an output layer, whose logits are compared.

    Raises:
        ConfigError: no way does, a value is not finite, the logits are no multiple of the output layer's, or two passes
            in training differ.
    """
    bound = ROUNDING[model.dtype]
    sequences = _drawn(_vocabulary(model))
    with _evaluated(model):
        model.set_attn_implementation("eager")
        alone = [decoder_of(model)(input_ids=ids[None], use_cache=False).last_hidden_state[0] for ids in sequences]
        if not all(bool(hidden.isfinite().all()) for hidden in alone):
            found = "hidden states that are not finite: its weights hold NaN or infinity, or its activations overflow"
            do = "save the weights again; float16 overflows where bfloat16 does not"
            raise ConfigError(explain(f"train a {type(model).__name__}", found, do))
        scale, cap = _head_of(model, sequences[0], alone[0], bound) if head else (1.0, 0.0)
        tried = [Way(attention, scale=scale, cap=cap)] if packing != "padded" else []
        caps = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
        names = _PADDED[1:] if caps else _PADDED
        tried += [Way(name, pads=True, scale=scale, cap=cap) for name in names] if packing != "packed" else []
        why: list[str] = []
        for way in tried:
            found = _apart(model, way, sequences, alone)
            if isinstance(found, float) and found <= bound:
                told = "padded" if way.pads else "packed"
                text = "%s: rows are %s (%s; apart by %.1e of %.1e), logits are %.6g times the output layer's%s"
                last = f"; {'; '.join(why)}" if why else ""
                logger.info(text, type(model).__name__, told, way.attention, found, bound, scale, last)
                _require_the_same_twice(model, way, sequences)
                return way
            name = f"{'padded' if way.pads else 'packed'} with {way.attention}"
            why.append(f"{name}: " + (found if isinstance(found, str) else f"a sequence is changed by {found:.2g}"))
    do = "set trainer.packing=auto" if packing != "auto" else "train another model"
    asked = f"train a {type(model).__name__} with trainer.packing={packing}"
    raise ConfigError(explain(asked, f"{'; '.join(why)} (of its largest value; {bound:g} is rounding)", do))


def _apart(model: PreTrainedModel, way: Way, sequences: list[torch.Tensor], alone: list[torch.Tensor]) -> float | str:
    """Largest difference of a sequence among others from itself alone, of the largest value; or why it cannot run."""
    orders = (0, 1), (2, 1, 0), (1, 0, 2, 2)
    try:
        model.set_attn_implementation(way.attention if way.pads else PACKED_ROWS)
        apart = torch.Tensor.amax if model.dtype == torch.float32 else torch.Tensor.mean
        gaps = [
            float(apart((found - alone[number]).abs().amax(-1).float())) / float(alone[number].abs().max())
            for order in orders
            for number, found in zip(order, _hidden(model, way, [sequences[n] for n in order]), strict=True)
        ]
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError, NotImplementedError, IndexError) as error:
        return f"it cannot run ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    return float(max(gaps)) if np.isfinite(gaps).all() else "values that are not finite"


@torch.no_grad()
def prove_choices(model: PreTrainedModel, way: Way, taps: RouterTaps) -> None:
    """Raises ConfigError: a router's choice is not found, or replayed it gives something else."""
    part = _row(_drawn(_vocabulary(model))[1:])
    try:
        first, choices = forward_row(model, part, way, taps, routing=True)
    except ValueError as error:
        do = "set trainer.router_replay=off and algorithm.router_aux_coefficient=0"
        raise ConfigError(explain(f"read the experts of a {type(model).__name__}", str(error), do)) from None
    again = replace(part, tokens=replace(part.tokens, experts=torch.stack([c.experts for c in choices], 1)))
    apart = float((forward_row(model, again, way, taps)[0] - first).abs().max() / first.abs().max())
    taps.experts = None
    if not apart <= ROUNDING[model.dtype]:
        found, do = f"through the experts of its own choice it differs by {apart:.2g}", "set trainer.router_replay=off"
        raise ConfigError(explain(f"replay the experts of a {type(model).__name__}", found, do))


@torch.no_grad()
def prove_images(model: PreTrainedModel, way: Way, images: ImageInputs) -> None:
    """Raises ConfigError: the rows of the trainer make something else of an image than the model's own class does."""
    proven = way.attention if way.pads else PACKED_ROWS  # as in `_apart`: kernels of a GPU have no weights yet
    chosen = PACKED_ROWS if way.attention == PACKED_SDPA else way.attention
    with _evaluated(model):
        images.prove(model, lambda ids: forward_row(model, _row([ids]), way, images=images)[0], proven, chosen)


def _hidden(model: PreTrainedModel, way: Way, rows: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return forward_row(model, _row(rows), way)[0].split([len(ids) for ids in rows])


def _row(rows: list[torch.Tensor]) -> RowPart:
    """Of these sequences, each of whose tokens predicts."""
    lengths = [len(ids) for ids in rows]
    every = torch.arange(sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    layout = PackedLayout.of(lengths, torch.device("cpu"))
    tokens = PackedTokens(torch.cat(rows)[None], positions[None], layout, every, every, 1.0)
    return RowPart(tokens, len(every), len(every))


def _vocabulary(model: PreTrainedModel) -> int:
    embedding: Any = model.get_input_embeddings()
    return embedding.weight.shape[0]


def _drawn(vocabulary: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocabulary, (n,), generator=draw) for n in _LENGTHS]


def _head_of(model: PreTrainedModel, ids: torch.Tensor, hidden: torch.Tensor, bound: float) -> tuple[float, float]:
    """Factor and cap between the output layer and the model's logits. Raises ConfigError: they differ otherwise."""
    head: Any = model.get_output_embeddings()
    plain = torch.nn.functional.linear(hidden, head.weight, getattr(head, "bias", None)).double()
    logits = model(input_ids=ids[None], use_cache=False).logits[0].double()
    scale = float((plain * logits).sum() / plain.square().sum())
    cap = float(getattr(model.config.get_text_config(), "final_logit_softcapping", None) or 0.0)
    found = cap * (plain / cap).tanh() if cap else plain * scale
    apart = float((found - logits).abs().max() / logits.abs().max())
    if not apart <= bound:
        rule = f"the output layer's with the cap {cap:g}" if cap else "every multiple of the output layer's"
        text = f"its logits differ by {apart:.2g} of the largest from {rule}"
        raise ConfigError(explain(f"train a {type(model).__name__}", text, "train another model"))
    return 1.0 if cap or abs(scale - 1) <= bound else scale, cap


def _require_the_same_twice(model: PreTrainedModel, way: Way, sequences: list[torch.Tensor]) -> None:
    """Raises ConfigError: two passes in training differ: something is dropped at random."""
    model.train()
    first, second = (torch.cat(_hidden(model, way, sequences)) for _ in range(2))
    if not torch.equal(first, second):
        found = f"two passes in training differ by {float((first - second).abs().max()):.2g}"
        do = "switch off what it drops at random, in its config.json"
        raise ConfigError(explain(f"train a {type(model).__name__}", found, do))


@contextmanager
def _evaluated(model: PreTrainedModel) -> Iterator[None]:
    """In evaluation mode; the mode is as before afterwards."""
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)
