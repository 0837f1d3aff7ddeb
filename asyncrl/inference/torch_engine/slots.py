"""State of the decoding requests, one row each, dense: rows `[0, n)` are in use. numpy only.

Every per-token rule (budget, stop tokens, chunk boundaries) is a vector operation over the rows; Python touches a
single row only when it is added, emits a chunk or ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from asyncrl.inference.torch_engine.sampling import SamplingRows, stream_key, uniforms
from asyncrl.types import GenerationRequest

_NO_TOKEN = -1


@dataclass(frozen=True, slots=True, eq=False)
class Advance:
    """Rows that need attention after a step, ascending: `stopped` on a stop token, `exhausted` at their budget, `full`
    at a chunk boundary. Disjoint."""

    stopped: np.ndarray
    exhausted: np.ndarray
    full: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Rows `source` became rows `target`; all other per-row state must follow."""

    source: np.ndarray
    target: np.ndarray


class SlotTable:
    """Rows of running requests. A row's length is its number of tokens with cached keys and values; its token is the
    next input."""

    def __init__(self, num_slots: int, chunk_tokens: int, experts: tuple[int, int] | None = None) -> None:
        """`experts`: shape (L, k) of the recorded experts of one token; None: the model has no routers."""
        self.num_slots = num_slots
        self.n = 0
        self.request_ids: list[str] = []
        self._row_of: dict[str, int] = {}
        self._length = np.zeros(num_slots, np.int64)
        self._token = np.zeros(num_slots, np.int64)
        self._left = np.zeros(num_slots, np.int64)
        self._stoppable = np.zeros(num_slots, np.int64)
        self._guarding = False
        self._position = np.zeros(num_slots, np.int64)
        self._key = np.zeros(num_slots, np.uint64)
        self._temperature = np.zeros(num_slots, np.float32)
        self._top_p = np.zeros(num_slots, np.float32)
        self._top_k = np.zeros(num_slots, np.int64)
        self._stop = np.full((num_slots, 1), _NO_TOKEN, np.int64)
        self._buffered = np.zeros(num_slots, np.int64)
        self._ids = np.zeros((num_slots, chunk_tokens), np.int32)
        self._logprobs = np.zeros((num_slots, chunk_tokens), np.float32)
        self._experts = np.zeros((num_slots, chunk_tokens, *(experts or (0, 0))), np.int16)
        self._recorded = np.zeros(num_slots, np.bool_)
        self._kept = np.zeros((num_slots, chunk_tokens, 0), np.int32)
        self._keeps = np.zeros(num_slots, np.int64)
        """Per row: number of kept tokens to record at each position; 0: none."""
        self._rows = np.arange(num_slots)

    @property
    def tokens(self) -> np.ndarray:
        """[n] int64, a copy: the next input token of each row."""
        return self._token[: self.n].copy()

    @property
    def lengths(self) -> np.ndarray:
        """[n] int64, a copy: the position of the next input token, equal to the number of cached tokens."""
        return self._length[: self.n].copy()

    @property
    def records(self) -> bool:
        """True if any row records experts."""
        return bool(self._recorded[: self.n].any())

    @property
    def most_kept(self) -> int:
        """Largest number of kept tokens that a row records; 0: none does."""
        return int(self._keeps[: self.n].max(initial=0))

    def sampling(self) -> SamplingRows:
        n = self.n
        drawn = uniforms(self._key[:n], self._position[:n])
        barred = self._barred() if self._guarding else None
        return SamplingRows(self._temperature[:n], self._top_p[:n], self._top_k[:n], drawn, barred)

    def add(self, request: GenerationRequest) -> int:
        """Assigns the next row to a request whose prompt is cached except for its last token; returns the row."""
        row, sampling, stop = self.n, request.sampling, request.sampling.stop_token_ids
        assert row < self.num_slots, "no free slot"
        self._length[row] = len(request.prompt_ids) - 1
        self._token[row] = request.prompt_ids[-1]
        self._left[row] = sampling.max_tokens
        # A row may stop once `left <= stoppable`: one column counts for both max_tokens and min_tokens.
        self._stoppable[row] = sampling.max_tokens - (sampling.min_tokens if stop else 0)
        self._guarding |= bool(self._stoppable[row] < self._left[row])
        self._position[row] = request.first_position
        self._key[row] = stream_key(request.seed)
        self._temperature[row] = sampling.temperature
        self._top_p[row] = sampling.top_p
        self._top_k[row] = sampling.top_k
        if len(stop) > self._stop.shape[1]:
            # Columns grow to the longest list so far and never shrink.
            wider = ((0, 0), (0, len(stop) - self._stop.shape[1]))
            self._stop = np.pad(self._stop, wider, constant_values=_NO_TOKEN)
        self._stop[row] = _NO_TOKEN
        self._stop[row, : len(stop)] = stop
        self._buffered[row] = 0
        self._recorded[row] = sampling.experts
        self._keeps[row] = sampling.top_k if sampling.kept else 0
        if self._keeps[row] > self._kept.shape[2]:
            self._kept = np.pad(self._kept, ((0, 0), (0, 0), (0, int(self._keeps[row]) - self._kept.shape[2])))
        self.request_ids.append(request.request_id)
        self._row_of[request.request_id] = row
        self.n += 1
        return row

    def advance(
        self,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        experts: np.ndarray | None = None,
        kept: np.ndarray | None = None,
    ) -> Advance:
        """Appends one sampled token per row ([n] int64, [n] float32); returns the rows that need attention.

        Args:
            experts: [n, L, k] int16, recorded for rows that ask.
            kept: [n, most_kept] int32, likewise.
        """
        n = self.n
        buffered = self._buffered[:n]
        if experts is not None:
            self._experts[self._rows[:n], buffered] = experts
        if kept is not None:
            self._kept[self._rows[:n], buffered, : kept.shape[1]] = kept
        self._ids[self._rows[:n], buffered] = tokens
        self._logprobs[self._rows[:n], buffered] = logprobs
        self._token[:n] = tokens
        self._length[:n] += 1
        self._position[:n] += 1
        self._left[:n] -= 1
        buffered += 1
        # Disjoint: a stop token wins over the budget, and an ended row is emitted whole, full or not.
        stopped = (self._stop[:n] == tokens[:, None]).any(axis=1)
        exhausted = (self._left[:n] == 0) & ~stopped
        full = (buffered == self._ids.shape[1]) & ~stopped & ~exhausted
        return Advance(np.flatnonzero(stopped), np.flatnonzero(exhausted), np.flatnonzero(full))

    def extra(self, row: int) -> dict[str, np.ndarray]:
        """`TokenChunk.extra` of the buffered tokens. Call it before `take`."""
        k, kept, found = self._buffered[row], self._keeps[row], {}
        if k and self._recorded[row]:
            found["experts"] = self._experts[row, :k].copy()
        if k and kept:
            found["kept_ids"] = self._kept[row, :k, :kept].copy()
        return found

    def take(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Empties the row's buffer; returns its token ids [k] int32 and log-probabilities [k] float32."""
        k = self._buffered[row]
        self._buffered[row] = 0
        return self._ids[row, :k].copy(), self._logprobs[row, :k].copy()

    def buffered_rows(self) -> np.ndarray:
        return np.flatnonzero(self._buffered[: self.n])

    def rows_of(self, request_ids: list[str]) -> np.ndarray:
        """Rows of the running requests among `request_ids`, ascending and unique."""
        found = {self._row_of[i] for i in request_ids if i in self._row_of}
        return np.array(sorted(found), dtype=np.int64)

    def remove(self, rows: np.ndarray) -> Moves:
        """Frees `rows` and fills the gaps with the last remaining rows."""
        gone = np.zeros(self.n, bool)
        gone[rows] = True
        for row in rows:
            del self._row_of[self.request_ids[row]]
        n = self.n - int(gone.sum())
        # Gaps below the new end are filled by the survivors beyond it: both have the same count.
        target = np.flatnonzero(gone[:n])
        source = n + np.flatnonzero(~gone[n:])
        for column in self._columns():
            column[target] = column[source]
        for old, new in zip(source.tolist(), target.tolist(), strict=True):
            self.request_ids[new] = self.request_ids[old]
            self._row_of[self.request_ids[new]] = new
        del self.request_ids[n:]
        self.n = n
        return Moves(source, target)

    def _barred(self) -> np.ndarray | None:
        """[n, any] int64, stop tokens of rows that may not stop yet; None once every row may."""
        n = self.n
        early = self._left[:n] > self._stoppable[:n]
        self._guarding = bool(early.any())
        return np.where(early[:, None], self._stop[:n], _NO_TOKEN) if self._guarding else None

    def _columns(self) -> tuple[np.ndarray, ...]:
        return (
            self._length, self._token, self._left, self._stoppable, self._position, self._key, self._temperature,
            self._top_p, self._top_k, self._stop, self._buffered, self._ids, self._logprobs, self._experts,
            self._recorded, self._kept, self._keeps,
        )  # fmt: skip
