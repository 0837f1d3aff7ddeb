"""Packs planned sequences and fetched trajectories into the tensors of one micro-batch. Sequences of a group may share
their prompt in its row.

Under a causal mask a prompt's keys, values and hidden states do not depend on the response, so they are computed once
for all responses. The prompt's gradient is the sum over the responses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
import torch

from asyncrl.algorithms.loss import LossInputs
from asyncrl.trainer.length_classes import length_classes, spared_work
from asyncrl.types import Microbatch, Trajectory, TrajectoryKey
from asyncrl.types.trajectories import TOKEN_ARRAYS

Trajectories = Mapping[TrajectoryKey, Trajectory]


@dataclass(frozen=True, slots=True, eq=False)
class PaddedClass:
    """Sequences of similar length, padded by attention to the longest of them.

    Attributes:
        num_tokens: of all sequences. Classes are contiguous in the layout's order.
        num_sequences, max_length: shape of the padded batch.
        slots: [tokens] int64, place of each token in the flattened [num_sequences * max_length]. None: the sequences
            are equally long, and the padded batch is a view of the row.
    """

    num_tokens: int
    num_sequences: int
    max_length: int
    slots: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayout:
    """Positions of the sequences in a packed row, and the classes that attention pads; built by `of`.

    Legend: M tokens of all sequences, N tokens of the row. M > N where sequences share the tokens of a prompt.

    Attributes:
        max_length: tokens of the longest sequence.
        boundaries: [sequences + 1] int32, cumulative lengths from 0: sequence boundaries if no prompt is shared.
        class_boundaries: [sequences + 1] int32, the same in the order of `classes`.
        classes: hold every sequence once, longest first.
        order: [M] int64, for each place in the order of `classes` the index of its token in the row.
        places: [N] int64, for each token of the row a place in that order. Both None: the row is in that order.
    """

    max_length: int
    boundaries: torch.Tensor
    class_boundaries: torch.Tensor
    classes: tuple[PaddedClass, ...]
    order: torch.Tensor | None = None
    places: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        lengths: Sequence[int] | np.ndarray,
        device: torch.device,
        classes: Sequence[np.ndarray] | None = None,
        rows: np.ndarray | None = None,
    ) -> PackedLayout:
        """The layout of a row, with its tensors on `device`.

        Args:
            lengths: [S] tokens of each sequence, at least 1.
            classes: indices of the sequences of each class; None: as `length_classes` finds them for the device.
            rows: [M] int64, index in the row of each token of the first sequence, then of the second, and so on; every
                token of the row occurs. None: the sequences are contiguous.
        """
        sizes = np.asarray(lengths, np.int64)
        if classes is None:
            classes = length_classes(sizes, spared=spared_work(device.type))
        ends = sizes.cumsum()
        chosen = np.concatenate(classes)
        # `order`: for each token of the concatenated classes its place in the concatenated sequences, then in the row.
        starts = sizes[chosen].cumsum() - sizes[chosen]
        order = np.repeat((ends - sizes)[chosen] - starts, sizes[chosen]) + np.arange(ends[-1])
        place = partial(_place, device=device)
        is_ordered = rows is None and bool((np.diff(chosen) > 0).all())
        order = order if rows is None else rows[order]
        return cls(
            max_length=int(sizes.max()),
            boundaries=place(np.append(0, ends), dtype=torch.int32),
            class_boundaries=place(np.append(0, sizes[chosen].cumsum()), dtype=torch.int32),
            classes=tuple(_padded_classes([sizes[members] for members in classes], place)),
            order=None if is_ordered else place(order),
            places=None if is_ordered else place(np.unique(order, return_index=True)[1]),
        )


def _padded_classes(
    lengths: Sequence[np.ndarray], place: Callable[[np.ndarray], torch.Tensor]
) -> Iterator[PaddedClass]:
    """`lengths`: of the sequences of each class. `place`: makes a tensor of indices."""
    for sizes in lengths:
        longest, total = int(sizes.max()), int(sizes.sum())
        gaps = np.arange(len(sizes)) * longest - (sizes.cumsum() - sizes)
        is_dense = len(sizes) * longest == total
        yield PaddedClass(
            num_tokens=total,
            num_sequences=len(sizes),
            max_length=longest,
            slots=None if is_dense else place(np.repeat(gaps, sizes) + np.arange(total)),
        )


def _place(array: np.ndarray, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)


@dataclass(frozen=True, slots=True, eq=False)
class PackedTokens:
    """The input of a model: the sequences of a micro-batch in one row of N tokens, and n predictions. Sequences may
    share the tokens of their prompt, whose last token then predicts the first token of several responses.

    Attributes:
        input_ids, position_ids: [1, N] int64; positions are those in the sequences.
        predictors: [n] int64, index in the row of the token before each predicted one.
        targets: [n] int64, the predicted tokens.
        temperature: divisor of the logits.
        balance: [L, E] float32, weight in the loss of each router sum `given` (`TokenOutputs`); None without a
            load-balancing loss.
        others: [n, k] int64, further tokens at the positions of the targets whose log-probabilities are requested;
            tokens beyond the model's vocabulary have probability 0.
        experts: [N, layers, k] int64, experts that a mixture's routers take for each token; -1: the router chooses.
            None: the routers choose everywhere.
        kept: [n, k] int64, the tokens over which the probability of each target is normalised, padded with -1; a row of
            -1: the whole vocabulary. None: the whole vocabulary everywhere.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    layout: PackedLayout
    predictors: torch.Tensor
    targets: torch.Tensor
    temperature: float
    balance: torch.Tensor | None = None
    others: torch.Tensor | None = None
    experts: torch.Tensor | None = None
    kept: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """`tokens` and, for each predicted token, [n]: behaviour log-probability, advantage, share of the objective, number
    of its sequence in the micro-batch, lag in optimizer steps, and whether it counts; `extra` holds the requested
    arrays of `Trajectory.extra`, [n, ...] each, float32 or int64.

    A micro-batch without predictions still has one token with a False mask, so every rank runs the same forward and
    backward pass, and thus the same collectives. `num_tokens` counts the tokens of the sequences.
    """

    tokens: PackedTokens
    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    sequences: torch.Tensor
    lags: torch.Tensor
    mask: torch.Tensor
    num_tokens: int
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def inputs(self, logprobs: torch.Tensor, old_logprobs: torch.Tensor, entropy: torch.Tensor) -> LossInputs:
        """The input of losses and corrections, [n] each."""
        return LossInputs(
            logprobs=logprobs,
            old_logprobs=old_logprobs,
            behavior_logprobs=self.behavior_logprobs,
            advantages=self.advantages,
            mask=self.mask,
            weights=self.weights,
            sequences=self.sequences,
            lags=self.lags,
            entropy=entropy,
            teacher_logprobs=self.extra.get("teacher_logprobs"),
            teacher_top_logprobs=self.extra.get("top_logprobs"),
        )


def pack(
    microbatch: Microbatch,
    trajectories: Trajectories,
    *,
    predict: Literal["trained", "response"],
    device: torch.device,
    step: int = 0,
    temperature: float = 1.0,
    share_prompts: bool = False,
    extra: Sequence[str] = (),
) -> PackedBatch:
    """Packs in the order of `microbatch`.

    Args:
        predict: the tokens of `loss_mask`, or all of the response.
        step: `global_steps`, for lags.
        share_prompts: sequences of a group with the same prompt share its tokens in the row.
        extra: arrays of `Trajectory.extra` that every sequence with a response has. "experts" makes the routers take
            the recorded experts; prompts must not be shared then: a prompt's last token has different experts for each
            response.

    Raises:
        ValueError: a sequence is missing, differs from its planned lengths, or lacks an array.
    """
    chosen = [_checked(microbatch, i, trajectories) for i in range(len(microbatch))]
    row = SharedRow.of(chosen, [s.ordinal if share_prompts else i for i, s in enumerate(microbatch)])
    picks = [np.flatnonzero(t.loss_mask) if predict == "trained" else np.arange(len(t.response_ids)) for t in chosen]
    counts = [len(p) for p in picks]
    empty = not any(counts)
    behavior = np.concatenate([t.logprobs[p] for t, p in zip(chosen, picks, strict=True)] if not empty else [[0.0]])
    sequences = np.repeat(np.arange(len(counts)), counts) if not empty else np.zeros(1, np.int64)
    advantages = np.array([s.advantage for s in microbatch])[sequences] if not empty else np.zeros(1)
    weights = np.array([s.token_weight for s in microbatch])[sequences] if not empty else np.zeros(1)
    for s, t in zip(microbatch, chosen, strict=True):
        if len(t.response_ids) and (lacking := [name for name in extra if name not in t.extra]):
            raise ValueError(f"sequence {s.index} of group {s.ordinal} has no {lacking[0]}")
    further = {name: _gathered(name, chosen, picks) for name in extra if name != "experts"}
    experts = _experts(row, chosen) if "experts" in extra else None
    versions = [_versions(t)[p] for t, p in zip(chosen, picks, strict=True)] if not empty else [[step]]
    predictors, places = row.predictions(picks) if not empty else np.zeros((2, 1), np.int64)
    targets = row.input_ids[places] if not empty else np.zeros(1, np.int64)

    place = partial(_place, device=device)
    return PackedBatch(
        tokens=PackedTokens(
            input_ids=place(row.input_ids)[None],
            position_ids=place(row.positions)[None],
            layout=PackedLayout.of(row.lengths, device, rows=row.rows),
            predictors=place(predictors),
            targets=place(targets),
            temperature=temperature,
            others=place(further["top_ids"]) if "top_ids" in further else None,
            experts=None if experts is None else place(experts),
            kept=place(kept) if (kept := further.pop("kept_ids", None)) is not None else None,
        ),
        behavior_logprobs=place(behavior, dtype=torch.float32),
        advantages=place(advantages, dtype=torch.float32),
        weights=place(weights, dtype=torch.float32),
        sequences=place(sequences),
        lags=place(step - np.concatenate(versions), dtype=torch.float32),
        mask=torch.full((len(targets),), not empty, device=device),
        num_tokens=int(row.lengths.sum()) if microbatch else 0,
        extra={
            name: place(array, dtype=torch.float32 if np.issubdtype(array.dtype, np.floating) else torch.int64)
            for name, array in further.items()
        },
    )


def _experts(row: SharedRow, chosen: Sequence[Trajectory]) -> np.ndarray | None:
    """[N, layers, k] int16: the recorded experts of each token of the row; None without a response."""
    whole = [np.arange(len(t.response_ids)) for t in chosen]
    if not any(map(len, whole)):
        return None
    recorded = _gathered("experts", chosen, whole)
    assert row.rows is None, "tokens of a shared prompt have experts of several responses"
    found = np.full((len(row.input_ids), *recorded.shape[1:]), TOKEN_ARRAYS["experts"].absent, recorded.dtype)
    found[row.predictions(whole)[0]] = recorded
    return found


def _gathered(name: str, chosen: Sequence[Trajectory], picks: Sequence[np.ndarray]) -> np.ndarray:
    """[n, ...]: the picked rows of each trajectory's array; one empty row if none is picked.

    Raises ValueError: rows differ in shape.
    """
    declared = TOKEN_ARRAYS[name]
    if not any(map(len, picks)):
        return np.full((1,) * (1 + len(declared.dims)), declared.absent or 0, declared.dtype)
    rows = [t.extra[name][p] for t, p in zip(chosen, picks, strict=True) if len(p)]
    if len(shapes := {array.shape[1:] for array in rows}) > 1:
        raise ValueError(f"{name} of the trajectories of a micro-batch have rows of the shapes {sorted(shapes)}")
    return np.concatenate(rows)


def _versions(trajectory: Trajectory) -> np.ndarray:
    """[T] int64: policy version of each response token."""
    segments = trajectory.segments
    return np.repeat([s.version for s in segments], [s.stop - s.start for s in segments]).astype(np.int64)


def _checked(microbatch: Microbatch, at: int, trajectories: Trajectories) -> Trajectory:
    sequence = microbatch[at]
    trajectory = trajectories.get((sequence.ordinal, sequence.index))
    if trajectory is None:
        raise ValueError(f"sequence {sequence.index} of group {sequence.ordinal} is planned but was not fetched")
    found = (len(trajectory.prompt_ids), len(trajectory.response_ids), trajectory.num_trained_tokens)
    planned = (sequence.lengths.prompt, sequence.lengths.response, sequence.lengths.trained)
    if found != planned:
        raise ValueError(
            f"sequence {sequence.index} of group {sequence.ordinal} has (prompt, response, trained) tokens {found}, "
            f"planned were {planned}"
        )
    return trajectory


@dataclass(frozen=True, slots=True, eq=False)
class SharedRow:
    """S sequences in a row of N tokens. Without sequences the row has one token, so that a model can read it.

    Attributes:
        input_ids, positions: [N] int64; positions are those in the sequences.
        lengths: [S] int64, tokens of each sequence, its prompt included.
        prompt_ends, responses: [S] int64, index in the row of the last token of each prompt, and of the first token of
            each response, if any.
        rows: [sum of lengths] int64, index in the row of each token of the sequences. None if they are contiguous.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    lengths: np.ndarray
    prompt_ends: np.ndarray
    responses: np.ndarray
    rows: np.ndarray | None

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], families: Sequence[int]) -> SharedRow:
        """Sequences of one family share equal prompts; `families`: [S]."""
        ids, positions, rows = [], [], []
        prompt_ends, responses = [], []
        known: dict[tuple[int, bytes], np.ndarray] = {}
        end = 0
        for trajectory, family in zip(trajectories, families, strict=True):
            prompt, response = trajectory.prompt_ids, trajectory.response_ids
            key = family, prompt.tobytes()
            # The first sequence with this prompt lays it out; later ones refer to its rows.
            if (its_rows := known.get(key, _NONE)) is _NONE:
                its_rows = known[key] = np.arange(end, end + len(prompt))
                ids.append(prompt)
                positions.append(np.arange(len(prompt)))
                end += len(prompt)
            ids.append(response)
            positions.append(np.arange(len(prompt), len(prompt) + len(response)))
            rows += [its_rows, np.arange(end, end + len(response))]
            prompt_ends.append(its_rows[-1])
            responses.append(end)
            end += len(response)
        lengths = np.array([len(t.prompt_ids) + len(t.response_ids) for t in trajectories] or [1], np.int64)
        return cls(
            input_ids=np.concatenate(ids or [np.zeros(1)]).astype(np.int64),
            positions=np.concatenate(positions or [np.zeros(1, np.int64)]),
            lengths=lengths,
            prompt_ends=np.array(prompt_ends, np.int64),
            responses=np.array(responses, np.int64),
            rows=np.concatenate(rows) if trajectories and end < lengths.sum() else None,
        )

    def predictions(self, picks: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Index in the row of the token before each picked token, and of the token itself; [n] int64 each.

        Args:
            picks: for each sequence the positions of the tokens in its response, ascending.
        """
        places = np.concatenate([begin + p for begin, p in zip(self.responses, picks, strict=True)])
        ends = np.repeat(self.prompt_ends, [len(p) for p in picks])
        return np.where(np.concatenate(picks) == 0, ends, places - 1), places


_NONE = np.zeros(0, np.int64)
