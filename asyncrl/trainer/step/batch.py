"""From planned sequences and fetched trajectories to the tensors of one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from asyncrl.algorithms.loss import LossInputs
from asyncrl.types import Microbatch, Trajectory, TrajectoryKey

Trajectories = Mapping[TrajectoryKey, Trajectory]


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayout:
    """Where the sequences of one packed row lie.

    Attributes:
        num_sequences, max_length: shape of the padded batch.
        slots: [tokens] int64, place of each packed token in the flattened [num_sequences * max_length].
        boundaries: [num_sequences + 1] int32, cumulative lengths from 0.
    """

    num_sequences: int
    max_length: int
    slots: torch.Tensor
    boundaries: torch.Tensor

    @property
    def is_dense(self) -> bool:
        """All sequences are equally long: the padded batch is a view of the packed row."""
        return self.slots.numel() == self.num_sequences * self.max_length


@dataclass(frozen=True, slots=True, eq=False)
class PackedTokens:
    """The input of a model: the sequences of a micro-batch in one row of N tokens, n of which are predicted.

    Attributes:
        input_ids, position_ids: [1, N] int64; positions restart at 0 with every sequence.
        predictors: [n] int64, index in the row of the token before each predicted token.
        targets: [n] int64, the predicted tokens.
        temperature: divisor of the logits.
        balance: [L, E] float32, what each sum `given` of the routers (`TokenOutputs`) adds to the loss; None without a
            load-balancing loss.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    layout: PackedLayout
    predictors: torch.Tensor
    targets: torch.Tensor
    temperature: float
    balance: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """`tokens` and, for each predicted token, [n]: behaviour log-probability, advantage, share of the objective, number
    of its sequence in the micro-batch, lag in optimizer steps, and whether it counts.

    A micro-batch that predicts nothing still has one token with a False mask, so that every rank runs the same
    forward and backward pass, and with it the same collectives. `num_tokens` counts real tokens only.
    """

    tokens: PackedTokens
    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    sequences: torch.Tensor
    lags: torch.Tensor
    mask: torch.Tensor
    num_tokens: int

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
        )


def pack(
    microbatch: Microbatch,
    trajectories: Trajectories,
    *,
    predict: Literal["trained", "response"],
    device: torch.device,
    step: int = 0,
    temperature: float = 1.0,
) -> PackedBatch:
    """Packs in the order of `microbatch`; predicts the tokens of `loss_mask`, or all of the response. `step`:
    `global_steps`, for lags.

    Raises:
        ValueError: a trajectory is missing or differs from the lengths that it was planned with.
    """
    chosen = [_checked(microbatch, i, trajectories) for i in range(len(microbatch))]
    ids = [part for t in chosen for part in (t.prompt_ids, t.response_ids)] or [np.zeros(1, np.int32)]
    lengths = np.array([s.lengths.total for s in microbatch] or [1])
    starts = np.cumsum(lengths) - lengths
    rows = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(lengths.sum()) - starts[rows]
    picks = [np.flatnonzero(t.loss_mask) if predict == "trained" else np.arange(len(t.response_ids)) for t in chosen]
    counts = [len(p) for p in picks]
    empty = not any(counts)
    predictors = np.concatenate(
        [start + len(t.prompt_ids) - 1 + p for start, t, p in zip(starts, chosen, picks, strict=False)]
        if not empty
        else [np.zeros(1, np.int64)]
    )
    input_ids = np.concatenate(ids).astype(np.int64)
    behavior = np.concatenate([t.logprobs[p] for t, p in zip(chosen, picks, strict=True)] if not empty else [[0.0]])
    sequences = np.repeat(np.arange(len(counts)), counts) if not empty else np.zeros(1, np.int64)
    advantages = np.array([s.advantage for s in microbatch])[sequences] if not empty else np.zeros(1)
    weights = np.array([s.token_weight for s in microbatch])[sequences] if not empty else np.zeros(1)
    versions = [_versions(t)[p] for t, p in zip(chosen, picks, strict=True)] if not empty else [[step]]

    def place(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)

    longest = int(lengths.max())
    targets = input_ids[predictors + 1] if not empty else np.zeros(1, np.int64)
    return PackedBatch(
        tokens=PackedTokens(
            input_ids=place(input_ids, torch.int64)[None],
            position_ids=place(positions, torch.int64)[None],
            layout=PackedLayout(
                num_sequences=len(lengths),
                max_length=longest,
                slots=place(rows * longest + positions, torch.int64),
                boundaries=place(np.append(starts, lengths.sum()), torch.int32),
            ),
            predictors=place(predictors, torch.int64),
            targets=place(targets, torch.int64),
            temperature=temperature,
        ),
        behavior_logprobs=place(behavior, torch.float32),
        advantages=place(advantages, torch.float32),
        weights=place(weights, torch.float32),
        sequences=place(sequences, torch.int64),
        lags=place(step - np.concatenate(versions), torch.float32),
        mask=torch.full((len(targets),), not empty, device=device),
        num_tokens=int(lengths.sum()) if microbatch else 0,
    )


def _versions(trajectory: Trajectory) -> np.ndarray:
    """[T] int64: the version that each response token is stamped with."""
    segments = trajectory.segments
    return np.repeat([s.version for s in segments], [s.stop - s.start for s in segments]).astype(np.int64)


def _checked(microbatch: Microbatch, at: int, trajectories: Trajectories) -> Trajectory:
    sequence = microbatch[at]
    trajectory = trajectories.get((sequence.ordinal, sequence.index))
    if trajectory is None:
        raise ValueError(f"trajectory {sequence.index} of group {sequence.ordinal} is planned but was not fetched")
    found = (len(trajectory.prompt_ids), len(trajectory.response_ids), trajectory.num_trained_tokens)
    planned = (sequence.lengths.prompt, sequence.lengths.response, sequence.lengths.trained)
    if found != planned:
        raise ValueError(
            f"trajectory {sequence.index} of group {sequence.ordinal} has (prompt, response, trained) tokens {found}, "
            f"planned were {planned}"
        )
    return trajectory
