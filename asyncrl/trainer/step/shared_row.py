"""Lays out the sequences of a micro-batch in one row, where sequences of a group may share their prompt.

Under a causal mask a prompt's keys, values and hidden states do not depend on the response, so they are computed once
for all responses. The prompt's gradient is the sum over the responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.types import Trajectory


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
